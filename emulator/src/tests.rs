//! Kernels in PTX, written by hand: what they must compute, and the faults that must be found.

use crate::gpu::{Functions, Gpu, KINDS};
use crate::machine::block::Launch;
use std::sync::Arc;

/// A kernel `k` that takes two addresses, in `%in` and `%out`; `%t` is the number of its thread, and `%to` the thread's
/// place in the output.
fn kernel(body: &str) -> String {
    format!(
        ".version 8.0 .target sm_80 .address_size 64
        .func (.param .b32 r) twice(.param .b32 v) {{ .reg .b32 %r<3>; ld.param.u32 %r1, [v];
        add.s32 %r2, %r1, %r1; st.param.b32 [r+0], %r2; ret; }}
        .visible .entry k(.param .u64 k_0, .param .u64 k_1) .maxntid 256, 1, 1 {{
        .reg .pred %p<9>; .reg .f32 %f<9>; .reg .b32 %r<40>; .reg .b32 %t; .reg .b64 %rd<20>; .reg .b64 %in, %out, %to;
        .shared .align 16 .b8 s[1024]; .local .align 8 .b8 l[16];
        ld.param.u64 %in, [k_0]; ld.param.u64 %out, [k_1]; mov.u32 %t, %tid.x;
        mul.wide.u32 %to, %t, 4; add.s64 %to, %out, %to; {body} ret; }} "
    )
}

/// Runs a kernel of one block on words, and gives back as many words as it has threads.
fn run(body: &str, n_threads: usize, input: &[u32]) -> Result<Vec<u32>, String> {
    let gpu = Gpu::new(KINDS[0], 1);
    let bytes: Vec<u8> = input.iter().flat_map(|v| v.to_le_bytes()).collect();
    let (from, to) = (gpu.allocate(bytes.len().max(4)).unwrap(), gpu.allocate(4 * n_threads).unwrap());
    gpu.write(from, &bytes).unwrap();
    let functions: Arc<Functions> = gpu.load(&kernel(body)).map_err(|e| e.1)?;
    let parameters = [from, to].iter().flat_map(|v| v.to_le_bytes()).collect();
    let launch = Launch { grid: [1; 3], block: [n_threads, 1, 1], shared_bytes: 0, parameters };
    functions["k"].launch(launch).and_then(|work| gpu.run(&work)).map_err(|e| e.1)?;
    let mut out = vec![0; 4 * n_threads];
    gpu.read(to, &mut out).unwrap();
    Ok(out.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
}

/// The fault of a kernel on one word of input.
fn fault(body: &str, n_threads: usize) -> String {
    run(body, n_threads, &[1]).expect_err("a fault")
}

#[test]
fn lanes_that_branch_apart_meet_again() {
    // Each lane loops as often as its number says; even lanes then take another way. All lanes exchange afterwards.
    let body = "mov.u32 %r1, 0; mov.u32 %r2, 0;
        $L_loop: setp.ge.u32 %p1, %r1, %t; @%p1 bra $L_done;
        add.s32 %r2, %r2, %r1; add.s32 %r1, %r1, 1; bra.uni $L_loop;
        $L_done: and.b32 %r3, %t, 1; setp.eq.s32 %p2, %r3, 0; @%p2 bra $L_even; add.s32 %r2, %r2, 1000; bra.uni $L_end;
        $L_even: add.s32 %r2, %r2, 2000;
        $L_end: shfl.sync.bfly.b32 %r4|%p3, %r2, 1, 31, -1; st.global.u32 [%to], %r4;";
    let of = |lane: u32| (0..lane).sum::<u32>() + [2000, 1000][lane as usize % 2];
    assert_eq!(run(body, 40, &[]).unwrap()[..32], (0..32).map(|lane| of(lane ^ 1)).collect::<Vec<_>>());
}

#[test]
fn a_register_with_the_address_of_a_parameter_stands_for_it() {
    let body = "mov.b64 %rd1, k_1; ld.param.u64 %rd2, [%rd1]; mul.wide.u32 %rd3, %t, 4; add.s64 %rd2, %rd2, %rd3;
        st.global.u32 [%rd2], 7;";
    assert_eq!(run(body, 2, &[]).unwrap(), [7, 7]);
    let fault = fault("mov.b64 %rd1, k_1; ld.global.u64 %rd2, [%rd1];", 1);
    assert!(fault.contains("global"), "{fault}");
    let twice = self::fault("mov.b64 %rd1, k_0; mov.b64 %rd1, k_1;", 1);
    assert!(twice.contains("%rd1 stands for k_0 already"), "{twice}");
}

#[test]
fn an_address_of_any_space_is_one_of_global_memory() {
    let body = "ld.u32 %r1, [%in]; ld.volatile.v2.u32 {%r2, %r3}, [%in]; add.s32 %r1, %r1, %r3; st.u32 [%to], %r1;";
    assert_eq!(run(body, 1, &[40, 2]).unwrap(), [42]);
    for wrong in ["mov.u64 %rd1, s; ld.u32 %r1, [%rd1];", "mov.u64 %rd1, l; st.u32 [%rd1], %t;"] {
        let found = fault(wrong, 1);
        assert!(found.contains("no address of global memory"), "{wrong} {found}");
    }
    assert!(fault("ld.const.u32 %r1, [%in];", 1).contains("there is no memory const"));
}

#[test]
fn warps_exchange_across_a_barrier_and_not_without_one() {
    let exchange = |barrier: &str| {
        format!(
            "shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.s32 %r3, %r2, %r1; st.shared.u32 [%r3], %t; {barrier}
            sub.s32 %r4, %r2, %r1; ld.shared.u32 %r5, [%r4+508]; st.global.u32 [%to], %r5;"
        )
    };
    assert_eq!(run(&exchange("bar.sync 0;"), 128, &[]).unwrap(), (0..128).rev().collect::<Vec<_>>());
    let found = fault(&exchange(""), 128);
    assert!(found.contains("kernel k, block [0, 0, 0], thread [0, 0, 0]"), "{found}");
    assert!(found.contains("nobody has written") && found.contains("ld.shared.u32 %r5"), "{found}");
    // Warp 1 writes what warp 0 has read.
    let race =
        "mov.u32 %r1, s; st.shared.u32 [%r1], %t; bar.sync 0; ld.shared.u32 %r2, [%r1]; st.shared.u32 [%r1], %r2;";
    assert!(fault(race, 64).contains("race"));
    assert!(fault("mov.u32 %r1, s; st.shared.u32 [%r1], %t;", 64).contains("race"));
}

#[test]
fn a_barrier_reduces_and_waits_for_those_who_are_left() {
    let body = "setp.ge.u32 %p1, %t, 32; setp.ge.u32 %p5, %t, 64; @%p5 ret;
        bar.red.or.pred %p2, 0, %p1; selp.b32 %r1, 7, 8, %p2;
        mov.pred %p3, 0; bar.red.or.pred %p4, 0, %p3; selp.b32 %r2, 10, 20, %p4; add.s32 %r1, %r1, %r2;
        st.global.u32 [%to], %r1;";
    let found = run(body, 96, &[]).unwrap();
    assert_eq!((&found[..64], &found[64..]), (&[27; 64][..], &[0; 32][..]));
}

#[test]
fn calls_votes_and_local_memory() {
    let body = "{ .param .b32 a0; st.param.b32 [a0+0], %t; .param .b32 r0; call.uni (r0), twice, (a0);
        ld.param.b32 %r1, [r0+0]; }
        mov.u64 %rd1, l; st.local.v2.u32 [%rd1], {%r1, %t}; ld.local.s32 %rd2, [%rd1+4]; ld.local.u32 %r2, [%rd1];
        cvt.u32.u64 %r3, %rd2; add.s32 %r2, %r2, %r3; setp.lt.u32 %p1, %t, 3; vote.sync.ballot.b32 %r4, %p1, -1;
        add.s32 %r2, %r2, %r4; st.global.u32 [%to], %r2;";
    assert_eq!(run(body, 32, &[]).unwrap(), (0..32).map(|lane| 3 * lane + 7).collect::<Vec<_>>());
}

#[test]
fn copies_arrive_when_they_are_waited_for() {
    let copy = |wait: &str| {
        format!(
            "mov.u32 %r1, s; mov.u32 %r2, 0; st.shared.u32 [%r1+16], %t; cp.async.ca.shared.global [%r1], [%in], 4;
            cp.async.commit_group; cp.async.ca.shared.global [%r1+4], [%in], 4, %r2; cp.async.commit_group; {wait}
            ld.shared.u32 %r3, [%r1]; st.global.u32 [%to], %r3;"
        )
    };
    assert_eq!(run(&copy("cp.async.wait_group 1;"), 1, &[9]).unwrap(), [9]);
    assert_eq!(run(&copy("cp.async.wait_all;"), 1, &[9]).unwrap(), [9]);
    assert!(fault(&copy("cp.async.wait_group 2;"), 1).contains("waited"));
    let zeros = copy("cp.async.wait_all;").replace("ld.shared.u32 %r3, [%r1]", "ld.shared.u32 %r3, [%r1+4]");
    assert_eq!(run(&zeros, 1, &[9]).unwrap(), [0], "what is not copied becomes zeros");
}

#[test]
fn wrong_accesses_are_found() {
    for (body, what) in [
        ("ld.global.u32 %r1, [%in+4];", "at 4 of an allocation of 4 bytes"),
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%in];", "at 0 of an allocation of 4 bytes"),
        ("st.global.u32 [%to+2], %t;", "not aligned"),
        ("mov.u64 %rd1, 64; ld.global.u32 %r1, [%rd1];", "no address"),
        ("st.global.u32 [%out+-4], %t;", "4 before an allocation"),
        ("mov.u32 %r1, s; st.shared.u32 [%r1+1024], %t;", "outside the 1024 bytes"),
        ("mov.u64 %rd1, l; st.local.u32 [%rd1+16], %t;", "local memory"),
        ("setp.eq.s32 %p1, %t, 3; @%p1 shfl.sync.idx.b32 %r1|%p2, %t, 0, 31, -1;", "do not come here"),
        ("setp.eq.s32 %p1, %t, 3; @%p1 bar.sync 0;", "do not come here"),
        ("shfl.sync.idx.b32 %r1|%p2, %t, 40, 8223, -1; mov.u32 %r2, %clock;", "what is %clock"),
        ("frobnicate.b32 %r1, %t;", "`frobnicate.b32 %r1, %t`: the emulator does not know"),
    ] {
        let found = fault(body, 32);
        assert!(found.contains(what), "{body} {found}");
    }
}

#[test]
fn numbers_are_rounded_as_the_machine_does() {
    let one = |op: &str, a: u32| {
        run(&format!("ld.global.u32 %r1, [%in]; {op} st.global.u32 [%to], %r9;"), 1, &[a]).unwrap()[0]
    };
    // Ties go away from zero; NaN stays NaN.
    let tf32 = "mov.b32 %f1, %r1; cvt.rna.tf32.f32 %r9, %f1;";
    assert_eq!([0x3f80_0fff, 0x3f80_1000, 0xbf80_1000].map(|v| one(tf32, v)), [0x3f80_0000, 0x3f80_2000, 0xbf80_2000]);
    assert_eq!(one(tf32, 0x7fff_ffff), 0x7fff_ffff);
    // Ties go to even.
    let bf16 = "mov.b32 %f1, %r1; cvt.rn.bf16x2.f32 %r9, %f1, %f1;";
    assert_eq!([0x3f80_8000, 0x3f81_8000].map(|v| one(bf16, v)), [0x3f80_3f80, 0x3f82_3f82]);
    // 1 − 2⁻⁴⁶, rounded down.
    let down = "mov.b32 %f1, %r1; fma.rm.f32 %f2, %f1, 0fB5800000, 0f3F800000; mov.b32 %r9, %f2;";
    assert_eq!(one(down, 0x3280_0000), 0x3f7f_ffff);
    assert_eq!(one("div.s32 %r9, -7, %r1;", 2), -3i32 as u32);
    assert_eq!(one("div.u32 %r9, 7, %r1;", 0), u32::MAX);
    assert_eq!(one("bfi.b32 %r9, %r1, -1, 4, 8;", 0x12), 0xffff_f12f);
    assert_eq!(one("prmt.b32 %r9, %r1, 0, 33040;", 0x80), 0xff00_0080, "a byte's sign, a zero, and the byte");
    assert_eq!(one("shr.u32 %r9, %r1, 32;", 5), 0);
    assert_eq!(one("shr.s32 %r9, %r1, 40;", 0x8000_0000), u32::MAX);
    let nan = "mov.b32 %f1, %r1; setp.neu.f32 %p1, %f1, %f1; setp.ne.f32 %p2, %f1, %f1;
        selp.b32 %r2, 1, 0, %p1; selp.b32 %r3, 2, 0, %p2; or.b32 %r9, %r2, %r3;";
    assert_eq!(one(nan, 0x7fc0_0000), 1);
}

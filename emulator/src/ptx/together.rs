//! What the lanes of a warp do together: exchanges, votes, and the products of the tensor cores.

use super::decode::Decoder;
use super::memory::Address;
use crate::machine::code::{Fault, Step, fault};
use crate::machine::registers::{LANES, Row, Value, lanes};
use crate::machine::warp::Access;
use crate::tensor;

type Decoded = Result<Option<Step>, String>;

/// Decodes an instruction by its name.
pub fn decode(d: &mut Decoder, name: &str) -> Decoded {
    let step = match name {
        "bar.warp.sync" => Step::Together(Some(d.input::<u32>(0)?), Box::new(|_, _| Ok(()))),
        _ if name.starts_with("shfl.sync.") => shuffle(d, &name[10..])?,
        _ if name.starts_with("vote.sync.") => vote(d, &name[10..])?,
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16" => load_matrices(d)?,
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" => multiply(d, tensor::multiply_tf32)?,
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => multiply(d, tensor::multiply_bf16)?,
        _ if name.starts_with("wgmma.mma_async.sync.aligned.") => multiply_group(d, &name[29..])?,
        // Products are computed at once. What they read may not change before they are waited for; that is not checked.
        "wgmma.fence.sync.aligned" | "wgmma.commit_group.sync.aligned" | "wgmma.wait_group.sync.aligned" => {
            Step::Together(None, Box::new(|_, _| Ok(())))
        }
        _ => return Ok(None),
    };
    Ok(Some(step))
}

/// The lane that each lane reads, and whether it is within its segment.
fn source(kind: &str, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (segment, clamp) = (c >> 8 & 31, c & 31);
    let last = lane & segment | clamp & !segment;
    let from = match kind {
        "up" => lane.wrapping_sub(b & 31),
        "down" => lane + (b & 31),
        "bfly" => lane ^ b & 31,
        _ => lane & segment | b & 31 & !segment,
    };
    let within = if kind == "up" { from as i32 >= last as i32 } else { from <= last };
    (if within { from } else { lane }, within)
}

fn shuffle(d: &mut Decoder, kind: &str) -> Result<Step, String> {
    let kind = match kind {
        "up.b32" => "up",
        "down.b32" => "down",
        "bfly.b32" => "bfly",
        "idx.b32" => "idx",
        _ => return Err("there is no such shuffle".into()),
    };
    let (to, found) = d.operand(0)?.split_once('|').map_or((d.operand(0)?, None), |(to, p)| (to, Some(p)));
    let (to, found) = (d.row_of::<u32>(to)?, found.map(|p| d.predicate_of(p)).transpose()?);
    let (a, b, c) = (d.input::<u32>(1)?, d.input::<u32>(2)?, d.input::<u32>(3)?);
    let members = d.input::<u32>(4)?;
    let run = move |access: &mut Access<'_>, mask: u32| {
        let r = &mut access.warp.registers;
        let (a, b, c) = (u32::read(r, a), u32::read(r, b), u32::read(r, c));
        let (mut row, mut all_within) = ([0; LANES], 0);
        for lane in lanes(mask) {
            let (from, within) = source(kind, lane as u32, b[lane], c[lane]);
            if mask >> from & 1 == 0 {
                return Err(Fault { lane, what: format!("it reads lane {from}, which does not take part") });
            }
            row[lane] = a[from as usize];
            all_within |= u32::from(within) << lane;
        }
        u32::write(r, to, &row, mask);
        if let Some(found) = found {
            r.set_predicate(found, all_within, mask);
        }
        Ok(())
    };
    Ok(Step::Together(Some(members), Box::new(run)))
}

fn vote(d: &mut Decoder, kind: &str) -> Result<Step, String> {
    let (p, members) = (d.predicate(1)?, d.input::<u32>(2)?);
    if kind == "ballot.b32" {
        let to = d.output::<u32>(0)?;
        let run = move |access: &mut Access<'_>, mask: u32| {
            let r = &mut access.warp.registers;
            let votes = r.predicates[p as usize] & mask;
            u32::write(r, to, &[votes; LANES], mask);
            Ok(())
        };
        return Ok(Step::Together(Some(members), Box::new(run)));
    }
    let decide: fn(u32, u32) -> bool = match kind {
        "any.pred" => |votes, _| votes != 0,
        "all.pred" => |votes, mask| votes == mask,
        _ => return Err("there is no such vote".into()),
    };
    let to = d.predicate(0)?;
    let run = move |access: &mut Access<'_>, mask: u32| {
        let r = &mut access.warp.registers;
        let result = decide(r.predicates[p as usize] & mask, mask);
        r.set_predicate(to, if result { !0 } else { 0 }, mask);
        Ok(())
    };
    Ok(Step::Together(Some(members), Box::new(run)))
}

/// Matrices of eight rows of 16 bytes. Eight lanes name the rows of each; lane i gets word i % 4 of row i / 4.
fn load_matrices(d: &mut Decoder) -> Result<Step, String> {
    let to = rows_of::<u32>(d, 0)?;
    let address = Address::new(d, d.operand(1)?)?;
    let run = move |access: &mut Access<'_>, _: u32| {
        let at = address.row(&access.warp.registers);
        for (matrix, to) in to.iter().enumerate() {
            let mut row: Row<u32> = [0; LANES];
            for line in 0..8 {
                let lane = 8 * matrix + line;
                let bytes = access.shared.read(at[lane], 16, access.warp.number).or_else(fault(lane))?;
                for (word, bytes) in row[4 * line..4 * line + 4].iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(*bytes);
                }
            }
            access.warp.registers.narrow[*to as usize] = row;
        }
        Ok(())
    };
    Ok(Step::Together(None, Box::new(run)))
}

/// The rows of the registers in braces.
fn rows_of<T: Value>(d: &Decoder, i: usize) -> Result<Vec<u32>, String> {
    d.parts(i)?.iter().map(|name| d.row_of::<T>(name)).collect()
}

type Product = fn(&[Row<u32>; 4], &[Row<u32>; 2], &mut [Row<f32>; 4]);

/// A product of the warp: d = a·b + c.
fn multiply(d: &mut Decoder, product: Product) -> Result<Step, String> {
    fn four<const N: usize>(rows: Vec<u32>) -> Result<[u32; N], String> {
        rows.try_into().map_err(|_| "the number of registers is wrong".into())
    }
    let (to, a) = (four::<4>(rows_of::<f32>(d, 0)?)?, four::<4>(rows_of::<u32>(d, 1)?)?);
    let (b, c) = (four::<2>(rows_of::<u32>(d, 2)?)?, four::<4>(rows_of::<f32>(d, 3)?)?);
    let run = move |access: &mut Access<'_>, mask: u32| {
        let r = &mut access.warp.registers;
        let (a, b) = (a.map(|row| u32::read(r, row)), b.map(|row| u32::read(r, row)));
        let mut sums = c.map(|row| f32::read(r, row));
        product(&a, &b, &mut sums);
        for (to, sum) in to.iter().zip(&sums) {
            f32::write(r, *to, sum, mask);
        }
        Ok(())
    };
    Ok(Step::Together(None, Box::new(run)))
}

/// A product of four warps, of which each computes 16 rows of the 64 by itself: d += a·b.
fn multiply_group(d: &mut Decoder, shape: &str) -> Result<Step, String> {
    let n = match shape {
        "m64n64k8.f32.tf32.tf32" => 64,
        "m64n128k8.f32.tf32.tf32" => 128,
        _ => return Err("there is no such product".into()),
    };
    let to = rows_of::<f32>(d, 0)?;
    if to.len() != n / 2 {
        return Err("the number of registers is wrong".into());
    }
    let from_registers = d.operand(1)?.starts_with('{');
    let a_rows = if from_registers { rows_of::<u32>(d, 1)? } else { vec![d.input::<u64>(1)?] };
    let b = d.input::<u64>(2)?;
    let (adds, scales) = (d.predicate(3)?, [d.operand(4)?.to_owned(), d.operand(5)?.to_owned()]);
    if scales != ["1", "1"] {
        return Err("factors must be 1".into());
    }
    let run = move |access: &mut Access<'_>, mask: u32| {
        let number = access.warp.number;
        let warp = &mut *access.warp;
        let descriptor = |row: u32| warp.registers.wide[row as usize][0];
        let b = tensor::matrix(access.shared, descriptor(b), n, 0, number).or_else(fault(0))?;
        let a = if from_registers {
            tensor::fragments(&std::array::from_fn(|i| u32::read(&warp.registers, a_rows[i])))
        } else {
            tensor::matrix(access.shared, descriptor(a_rows[0]), 16, 16 * (number as usize % 4), number)
                .or_else(fault(0))?
        };
        let keeps = warp.registers.predicates[adds as usize] & 1 == 1;
        tensor::multiply_rows(&a, &b, |i, row: &mut Row<f32>, update| {
            let at = to[i];
            *row = if keeps { f32::read(&warp.registers, at) } else { [0.0; LANES] };
            update(row);
            f32::write(&mut warp.registers, at, row, mask);
        });
        Ok(())
    };
    Ok(Step::Together(None, Box::new(run)))
}

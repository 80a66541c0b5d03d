//! Instructions that compute in registers.

use super::decode::Decoder;
use crate::machine::code::Step;
use crate::machine::registers::Value;

type Decoded = Result<Option<Step>, String>;

/// Decodes an instruction by its name.
pub fn decode(d: &mut Decoder, name: &str) -> Decoded {
    if let Some(rest) = name.strip_prefix("setp.") {
        return compare(d, rest).transpose();
    }
    for family in [integer, products, bits, float, double, convert, moves, predicates] {
        if let Some(step) = family(d, name) {
            return step.map(Some);
        }
    }
    Ok(None)
}

type Found = Option<Result<Step, String>>;

/// x / y as the machine has it: all ones for a division by zero.
macro_rules! divided {
    ($ty:ty, $op:ident) => {
        |x: $ty, y: $ty| if y == 0 { !0 } else { x.$op(y) }
    };
}

fn integer(d: &mut Decoder, name: &str) -> Found {
    Some(match name {
        "add.s16" | "add.u16" => d.two(u16::wrapping_add),
        "add.s32" | "add.u32" => d.two(u32::wrapping_add),
        "add.s64" | "add.u64" => d.two(u64::wrapping_add),
        "sub.s16" | "sub.u16" => d.two(u16::wrapping_sub),
        "sub.s32" | "sub.u32" => d.two(u32::wrapping_sub),
        "sub.s64" | "sub.u64" => d.two(u64::wrapping_sub),
        "div.s32" => d.two(divided!(i32, wrapping_div)),
        "div.u32" => d.two(divided!(u32, wrapping_div)),
        "div.s64" => d.two(divided!(i64, wrapping_div)),
        "div.u64" => d.two(divided!(u64, wrapping_div)),
        "rem.s32" => d.two(divided!(i32, wrapping_rem)),
        "rem.u32" => d.two(divided!(u32, wrapping_rem)),
        "rem.s64" => d.two(divided!(i64, wrapping_rem)),
        "rem.u64" => d.two(divided!(u64, wrapping_rem)),
        "min.s16" => d.two(|a: i16, b: i16| a.min(b)),
        "min.u16" => d.two(|a: u16, b: u16| a.min(b)),
        "min.s32" => d.two(|a: i32, b: i32| a.min(b)),
        "min.u32" => d.two(|a: u32, b: u32| a.min(b)),
        "min.s64" => d.two(|a: i64, b: i64| a.min(b)),
        "min.u64" => d.two(|a: u64, b: u64| a.min(b)),
        "max.s16" => d.two(|a: i16, b: i16| a.max(b)),
        "max.u16" => d.two(|a: u16, b: u16| a.max(b)),
        "max.s32" => d.two(|a: i32, b: i32| a.max(b)),
        "max.u32" => d.two(|a: u32, b: u32| a.max(b)),
        "max.s64" => d.two(|a: i64, b: i64| a.max(b)),
        "max.u64" => d.two(|a: u64, b: u64| a.max(b)),
        "neg.s16" => d.one(u16::wrapping_neg),
        "neg.s32" => d.one(u32::wrapping_neg),
        "neg.s64" => d.one(u64::wrapping_neg),
        "abs.s32" => d.one(i32::wrapping_abs),
        "abs.s64" => d.one(i64::wrapping_abs),
        _ => return None,
    })
}

fn products(d: &mut Decoder, name: &str) -> Found {
    Some(match name {
        "mul.lo.s16" | "mul.lo.u16" => d.two(u16::wrapping_mul),
        "mul.lo.s32" | "mul.lo.u32" => d.two(u32::wrapping_mul),
        "mul.lo.s64" | "mul.lo.u64" => d.two(u64::wrapping_mul),
        "mul.hi.s32" => d.two(|a: i32, b: i32| ((i64::from(a) * i64::from(b)) >> 32) as i32),
        "mul.hi.u32" => d.two(|a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "mul.hi.s64" => d.two(|a: i64, b: i64| ((i128::from(a) * i128::from(b)) >> 64) as i64),
        "mul.hi.u64" => d.two(|a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        "mul.wide.s16" => d.two(|a: i16, b: i16| i32::from(a) * i32::from(b)),
        "mul.wide.u16" => d.two(|a: u16, b: u16| u32::from(a) * u32::from(b)),
        "mul.wide.s32" => d.two(|a: i32, b: i32| i64::from(a) * i64::from(b)),
        "mul.wide.u32" => d.two(|a: u32, b: u32| u64::from(a) * u64::from(b)),
        "mad.lo.s16" | "mad.lo.u16" => d.three(|a: u16, b: u16, c: u16| a.wrapping_mul(b).wrapping_add(c)),
        "mad.lo.s32" | "mad.lo.u32" => d.three(|a: u32, b: u32, c: u32| a.wrapping_mul(b).wrapping_add(c)),
        "mad.lo.s64" | "mad.lo.u64" => d.three(|a: u64, b: u64, c: u64| a.wrapping_mul(b).wrapping_add(c)),
        "mad.wide.s32" => d.three(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c)),
        "mad.wide.u32" => d.three(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c)),
        _ => return None,
    })
}

/// `len` bits of `b` from place `at`, replaced by the lowest of `a`.
fn inserted(a: u64, b: u64, at: u32, len: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    let field = if len >= 64 { !0 } else { (1 << len) - 1 };
    let shifted = |value: u64| value.checked_shl(at).unwrap_or(0);
    b & !shifted(field) | shifted(a & field)
}

/// `len` bits of `a` from place `at`.
fn extracted(a: u32, at: u32, len: u32) -> u32 {
    let (at, len) = (at & 0xff, len & 0xff);
    let field = if len >= 32 { !0 } else { (1 << len) - 1 };
    a.checked_shr(at).unwrap_or(0) & field
}

/// Bytes of a and b in the order that four digits of `order` name.
fn permuted(a: u32, b: u32, order: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    let byte = |i: u32| {
        let digit = order >> (4 * i) & 15;
        let byte = bytes[digit as usize & 7];
        if digit & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    };
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

fn bits(d: &mut Decoder, name: &str) -> Found {
    Some(match name {
        "and.b16" => d.two(|a: u16, b: u16| a & b),
        "and.b32" => d.two(|a: u32, b: u32| a & b),
        "and.b64" => d.two(|a: u64, b: u64| a & b),
        "or.b16" => d.two(|a: u16, b: u16| a | b),
        "or.b32" => d.two(|a: u32, b: u32| a | b),
        "or.b64" => d.two(|a: u64, b: u64| a | b),
        "xor.b16" => d.two(|a: u16, b: u16| a ^ b),
        "xor.b32" => d.two(|a: u32, b: u32| a ^ b),
        "xor.b64" => d.two(|a: u64, b: u64| a ^ b),
        "not.b16" => d.one(|a: u16| !a),
        "not.b32" => d.one(|a: u32| !a),
        "not.b64" => d.one(|a: u64| !a),
        "shl.b16" => d.two(|a: u16, n: u32| a.checked_shl(n).unwrap_or(0)),
        "shl.b32" => d.two(|a: u32, n: u32| if n < 32 { a << (n & 31) } else { 0 }),
        "shl.b64" => d.two(|a: u64, n: u32| if n < 64 { a << (n & 63) } else { 0 }),
        "shr.u16" | "shr.b16" => d.two(|a: u16, n: u32| a.checked_shr(n).unwrap_or(0)),
        "shr.u32" | "shr.b32" => d.two(|a: u32, n: u32| if n < 32 { a >> (n & 31) } else { 0 }),
        "shr.u64" | "shr.b64" => d.two(|a: u64, n: u32| if n < 64 { a >> (n & 63) } else { 0 }),
        "shr.s16" => d.two(|a: i16, n: u32| a >> n.min(15)),
        "shr.s32" => d.two(|a: i32, n: u32| a >> n.min(31)),
        "shr.s64" => d.two(|a: i64, n: u32| a >> n.min(63)),
        "popc.b32" => d.one(u32::count_ones),
        "popc.b64" => d.one(|a: u64| a.count_ones()),
        "clz.b32" => d.one(u32::leading_zeros),
        "brev.b32" => d.one(u32::reverse_bits),
        "bfe.u32" => d.three(extracted),
        "bfi.b32" => four(d, |a: u32, b: u32, at, len| inserted(a.into(), b.into(), at, len) as u32),
        "bfi.b64" => four(d, inserted),
        "prmt.b32" => d.three(permuted),
        _ => return None,
    })
}

/// d = f(a, b, c, d)
fn four<T: Value>(d: &mut Decoder, f: impl Fn(T, T, u32, u32) -> T + Send + Sync + 'static) -> Result<Step, String> {
    let (to, a, b) = (d.output::<T>(0)?, d.input::<T>(1)?, d.input::<T>(2)?);
    let (at, len) = (d.input::<u32>(3)?, d.input::<u32>(4)?);
    Ok(Step::Compute(Box::new(move |r, mask| {
        let (a, b, at, len) = (T::read(r, a), T::read(r, b), u32::read(r, at), u32::read(r, len));
        let row = std::array::from_fn(|i| f(a[i], b[i], at[i], len[i]));
        T::write(r, to, &row, mask);
    })))
}

/// a·b + c, rounded down.
fn fused_down(a: f32, b: f32, c: f32) -> f32 {
    // The product is exact in double precision, and so is what the sum of two doubles loses (Knuth's two-sum).
    let (p, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = p + c;
    let back = sum - p;
    let lost = (p - (sum - back)) + (c - back);
    let nearest = sum as f32;
    let is_above = f64::from(nearest) > sum || f64::from(nearest) == sum && lost < 0.0;
    if is_above { nearest.next_down() } else { nearest }
}

/// Subnormal numbers are zeros.
fn flushed(v: f32) -> f32 {
    if v.is_subnormal() { 0f32.copysign(v) } else { v }
}

/// The greater one, NaN only if both are.
fn greater(a: f32, b: f32) -> f32 {
    if a.is_nan() || b > a { b } else { a }
}

fn lesser(a: f32, b: f32) -> f32 {
    if a.is_nan() || b < a { b } else { a }
}

fn float(d: &mut Decoder, name: &str) -> Found {
    Some(match name.replace(".ftz", "").as_str() {
        "add.f32" | "add.rn.f32" => d.two(|a: f32, b: f32| a + b),
        "sub.f32" | "sub.rn.f32" => d.two(|a: f32, b: f32| a - b),
        "mul.f32" | "mul.rn.f32" => d.two(|a: f32, b: f32| a * b),
        "fma.rn.f32" => d.three(f32::mul_add),
        "fma.rm.f32" => d.three(fused_down),
        "div.rn.f32" | "div.full.f32" | "div.approx.f32" => d.two(|a: f32, b: f32| a / b),
        "rcp.rn.f32" => d.one(|a: f32| 1.0 / a),
        "rcp.approx.f32" => d.one(|a: f32| flushed(1.0 / flushed(a))),
        "sqrt.rn.f32" | "sqrt.approx.f32" => d.one(f32::sqrt),
        "rsqrt.approx.f32" => d.one(|a: f32| 1.0 / a.sqrt()),
        "ex2.approx.f32" => d.one(|a: f32| flushed(flushed(a).exp2())),
        "lg2.approx.f32" => d.one(|a: f32| flushed(a).log2()),
        "sin.approx.f32" => d.one(f32::sin),
        "cos.approx.f32" => d.one(f32::cos),
        "tanh.approx.f32" => d.one(f32::tanh),
        "abs.f32" => d.one(f32::abs),
        "neg.f32" => d.one(|a: f32| -a),
        "max.f32" => d.two(greater),
        "min.f32" => d.two(lesser),
        "max.NaN.f32" => d.two(|a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { greater(a, b) }),
        "min.NaN.f32" => d.two(|a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { lesser(a, b) }),
        "copysign.f32" => d.two(|sign: f32, value: f32| value.copysign(sign)),
        _ => return None,
    })
}

fn double(d: &mut Decoder, name: &str) -> Found {
    Some(match name {
        "add.f64" | "add.rn.f64" => d.two(|a: f64, b: f64| a + b),
        "sub.f64" | "sub.rn.f64" => d.two(|a: f64, b: f64| a - b),
        "mul.f64" | "mul.rn.f64" => d.two(|a: f64, b: f64| a * b),
        "fma.rn.f64" => d.three(f64::mul_add),
        "div.rn.f64" => d.two(|a: f64, b: f64| a / b),
        "rcp.rn.f64" => d.one(|a: f64| 1.0 / a),
        // Only the upper half of the number is defined.
        "rcp.approx.ftz.f64" => d.one(|a: f64| f64::from_bits((1.0 / a).to_bits() >> 32 << 32)),
        "rsqrt.approx.ftz.f64" => d.one(|a: f64| f64::from_bits((1.0 / a.sqrt()).to_bits() >> 32 << 32)),
        "sqrt.rn.f64" => d.one(f64::sqrt),
        "abs.f64" => d.one(f64::abs),
        "neg.f64" => d.one(|a: f64| -a),
        "max.f64" => d.two(f64::max),
        "min.f64" => d.two(f64::min),
        "copysign.f64" => d.two(|sign: f64, value: f64| value.copysign(sign)),
        _ => return None,
    })
}

/// Rounded to 10 bits, ties away from zero.
fn to_tf32(v: f32) -> u32 {
    if v.is_nan() { 0x7fff_ffff } else { v.to_bits().wrapping_add(0x1000) & !0x1fff }
}

/// Rounded to 7 bits, ties to even.
fn to_bf16(v: f32) -> u32 {
    let bits = v.to_bits();
    if v.is_nan() { 0x7fff } else { bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16 }
}

fn convert(d: &mut Decoder, name: &str) -> Found {
    Some(match name.strip_prefix("cvt.")? {
        "f64.f32" => d.one(|a: f32| f64::from(a)),
        "rn.f32.f64" => d.one(|a: f64| a as f32),
        "rn.f32.s32" => d.one(|a: i32| a as f32),
        "rn.f32.u32" => d.one(|a: u32| a as f32),
        "rn.f32.s64" => d.one(|a: i64| a as f32),
        "rn.f32.u64" => d.one(|a: u64| a as f32),
        "rn.f64.s32" => d.one(|a: i32| f64::from(a)),
        "rn.f64.u32" => d.one(|a: u32| f64::from(a)),
        "rn.f64.s64" => d.one(|a: i64| a as f64),
        "rn.f64.u64" => d.one(|a: u64| a as f64),
        "rni.f32.f32" => d.one(f32::round_ties_even),
        "rmi.f32.f32" => d.one(f32::floor),
        "rzi.f32.f32" => d.one(f32::trunc),
        "rmi.f64.f64" => d.one(f64::floor),
        "rzi.f64.f64" => d.one(f64::trunc),
        // As in Rust, what does not fit becomes the nearest number that does, and NaN 0.
        "rzi.s32.f32" => d.one(|a: f32| a as i32),
        "rzi.u32.f32" => d.one(|a: f32| a as u32),
        "rzi.s32.f64" => d.one(|a: f64| a as i32),
        "rzi.u32.f64" => d.one(|a: f64| a as u32),
        "rzi.s64.f64" => d.one(|a: f64| a as i64),
        "rzi.s64.f32" => d.one(|a: f32| a as i64),
        "rni.s32.f32" => d.one(|a: f32| a.round_ties_even() as i32),
        "rmi.s32.f32" => d.one(|a: f32| a.floor() as i32),
        "sat.f32.f32" => d.one(|a: f32| if a > 0.0 { a.min(1.0) } else { 0.0 }),
        "rna.tf32.f32" => d.one(to_tf32),
        "rn.bf16x2.f32" => d.two(|high: f32, low: f32| to_bf16(high) << 16 | to_bf16(low)),
        "s64.s32" | "u64.s32" => d.one(|a: i32| i64::from(a)),
        "u64.u32" | "s64.u32" => d.one(|a: u32| u64::from(a)),
        "s64.s16" => d.one(|a: i16| i64::from(a)),
        "u64.u16" => d.one(|a: u16| u64::from(a)),
        "u32.u64" | "s32.s64" | "u32.s64" | "s32.u64" => d.one(|a: u64| a as u32),
        "u16.u32" | "s16.s32" | "u16.s32" | "s16.u32" => d.one(|a: u32| a as u16),
        "u16.u64" => d.one(|a: u64| a as u16),
        "u32.u16" | "s32.u16" => d.one(|a: u16| u32::from(a)),
        "s32.s16" | "u32.s16" => d.one(|a: i16| i32::from(a)),
        _ => return None,
    })
}

fn moves(d: &mut Decoder, name: &str) -> Found {
    let is_wide = |name: &str| name.ends_with("64");
    Some(match name {
        "mov.b64" if d.operand(0).is_ok_and(|o| o.starts_with('{')) => unpack(d),
        "mov.b64" if d.operand(1).is_ok_and(|o| o.starts_with('{')) => pack(d),
        "mov.u64" | "mov.s64" | "mov.b64" | "mov.f64" => d.one(|a: u64| a),
        "mov.u32" | "mov.s32" | "mov.b32" | "mov.f32" => d.one(|a: u32| a),
        "mov.u16" | "mov.s16" | "mov.b16" => d.one(|a: u16| a),
        // One space of addresses each: an address is the same whether it is generic or not.
        "cvta.to.global.u64" | "cvta.global.u64" | "cvta.to.shared.u64" => d.one(|a: u64| a),
        _ if name.starts_with("selp.") && is_wide(name) => select::<u64>(d),
        _ if name.starts_with("selp.") => select::<u32>(d),
        _ => return None,
    })
}

fn select<T: Value>(d: &mut Decoder) -> Result<Step, String> {
    let (to, a, b, p) = (d.output::<T>(0)?, d.input::<T>(1)?, d.input::<T>(2)?, d.predicate(3)?);
    Ok(Step::Compute(Box::new(move |r, mask| {
        let (a, b, p) = (T::read(r, a), T::read(r, b), r.predicates[p as usize]);
        let mut row = b;
        for (lane, value) in row.iter_mut().enumerate() {
            *value = if p >> lane & 1 == 1 { a[lane] } else { *value };
        }
        T::write(r, to, &row, mask);
    })))
}

/// Two halves of a wide register; `_` takes one that nobody needs.
fn unpack(d: &mut Decoder) -> Result<Step, String> {
    let parts = d.parts(0)?;
    let [low, high] = &parts[..] else { return Err("two halves are needed".into()) };
    let to = |name: &str| if name == "_" { Ok(None) } else { d.row_of::<u32>(name).map(Some) };
    let (low, high) = (to(low)?, to(high)?);
    let from = d.input::<u64>(1)?;
    Ok(Step::Compute(Box::new(move |r, mask| {
        let row = u64::read(r, from);
        for (to, shift) in [(low, 0), (high, 32)] {
            if let Some(to) = to {
                u32::write(r, to, &row.map(|v| (v >> shift) as u32), mask);
            }
        }
    })))
}

fn pack(d: &mut Decoder) -> Result<Step, String> {
    let (to, parts) = (d.output::<u64>(0)?, d.parts(1)?);
    let [low, high] = &parts[..] else { return Err("two halves are needed".into()) };
    let (low, high) = (d.source::<u32>(low)?, d.source::<u32>(high)?);
    Ok(Step::Compute(Box::new(move |r, mask| {
        let (low, high) = (u32::read(r, low), u32::read(r, high));
        let row = std::array::from_fn(|i| u64::from(high[i]) << 32 | u64::from(low[i]));
        u64::write(r, to, &row, mask);
    })))
}

fn predicates(d: &mut Decoder, name: &str) -> Found {
    let f: fn(u32, u32) -> u32 = match name {
        "and.pred" => |a, b| a & b,
        "or.pred" => |a, b| a | b,
        "xor.pred" => |a, b| a ^ b,
        "not.pred" => |a, _| !a,
        "mov.pred" => |a, _| a,
        _ => return None,
    };
    let is_unary = name.starts_with("not") || name.starts_with("mov");
    let mut decode = || {
        let (to, a, b) = (d.predicate(0)?, d.predicate(1)?, d.predicate(if is_unary { 1 } else { 2 })?);
        Ok(Step::Compute(Box::new(move |r, mask| {
            let value = f(r.predicates[a as usize], r.predicates[b as usize]);
            r.set_predicate(to, value, mask);
        })))
    };
    Some(decode())
}

/// `lt.s32` and the like.
fn compare(d: &mut Decoder, name: &str) -> Found {
    let (relation, ty) = name.split_once('.')?;
    match ty.trim_start_matches("ftz.") {
        "s16" => compare_as::<i16>(d, relation),
        "u16" | "b16" => compare_as::<u16>(d, relation),
        "s32" => compare_as::<i32>(d, relation),
        "u32" | "b32" => compare_as::<u32>(d, relation),
        "s64" => compare_as::<i64>(d, relation),
        "u64" | "b64" => compare_as::<u64>(d, relation),
        "f32" => compare_as::<f32>(d, relation),
        "f64" => compare_as::<f64>(d, relation),
        _ => None,
    }
}

/// Relations; those that end in `u` also hold if a number is NaN.
fn compare_as<T: Value>(d: &mut Decoder, relation: &str) -> Found {
    Some(match relation {
        "eq" => d.compare(|a: T, b: T| a == b),
        "ne" => d.compare(|a: T, b: T| a < b || a > b),
        "lt" | "lo" => d.compare(|a: T, b: T| a < b),
        "le" | "ls" => d.compare(|a: T, b: T| a <= b),
        "gt" | "hi" => d.compare(|a: T, b: T| a > b),
        "ge" | "hs" => d.compare(|a: T, b: T| a >= b),
        "equ" => d.compare(|a: T, b: T| !(a < b || a > b)),
        "neu" => d.compare(|a: T, b: T| a != b),
        "ltu" => d.compare(|a: T, b: T| !(a >= b)),
        "leu" => d.compare(|a: T, b: T| !(a > b)),
        "gtu" => d.compare(|a: T, b: T| !(a <= b)),
        "geu" => d.compare(|a: T, b: T| !(a < b)),
        "num" => d.compare(|a: T, b: T| a.partial_cmp(&b).is_some()),
        "nan" => d.compare(|a: T, b: T| a.partial_cmp(&b).is_none()),
        _ => return None,
    })
}

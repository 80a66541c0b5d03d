//! Loads, stores and asynchronous copies. Each access is checked.

use super::decode::{Decoder, Place};
use super::parse::type_bytes;
use crate::machine::code::{Fault, Step, fault};
use crate::machine::registers::{LANES, Registers, Row, Value, lanes};
use crate::machine::warp::{Access, Copy};

type Decoded = Result<Option<Step>, String>;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Global,
    Shared,
    Local,
}

/// A register, if there is one, plus an offset.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    base: Option<(bool, u32)>,
    offset: u64,
}

impl Address {
    /// Reads `[%rd1+16]`, `[name]` and the like.
    pub fn new(d: &Decoder, text: &str) -> Result<Self, String> {
        let text = text.trim_matches(['[', ']']).trim();
        let (name, offset) = text.split_once('+').unwrap_or((text, "0"));
        let offset = super::decode::number(offset).ok_or("the offset is no number")?;
        match (d.place(name), d.symbol(name)) {
            (Some(Place::Narrow(row)), _) => Ok(Self { base: Some((false, row)), offset }),
            (Some(Place::Wide(row)), _) => Ok(Self { base: Some((true, row)), offset }),
            (_, Some(symbol)) => Ok(Self { base: None, offset: symbol.wrapping_add(offset) }),
            _ => Err(format!("what is {name}?")),
        }
    }

    /// The address of each lane.
    pub fn row(&self, registers: &Registers) -> Row<u64> {
        match self.base {
            None => [self.offset; LANES],
            Some((true, row)) => registers.wide[row as usize].map(|v| v.wrapping_add(self.offset)),
            Some((false, row)) => {
                let offset = self.offset as u32;
                registers.narrow[row as usize].map(|v| u64::from(v.wrapping_add(offset)))
            }
        }
    }
}

/// Decodes an instruction by its name.
pub fn decode(d: &mut Decoder, name: &str) -> Decoded {
    let words: Vec<&str> = name.split('.').collect();
    match words[0] {
        // Nothing to compute: who loads from it reads the parameter. Its row stays 0, where no memory is.
        "mov" if words[1] == "b64" && names_parameter(d)? => Ok(Some(Step::Compute(Box::new(|_, _| {})))),
        "ld" if words[1] == "param" => load_parameter(d, &words[2..]).map(Some),
        "ld" => load(d, &words[1..]).map(Some),
        "st" if words[1] == "param" => store_parameter(d, words[2]).map(Some),
        "st" => store(d, &words[1..]).map(Some),
        "cp" if words[1] == "async" => copy(d, &words[2..]).map(Some),
        "fence" | "membar" => Ok(Some(Step::Compute(Box::new(|_, _| {})))),
        _ => Ok(None),
    }
}

/// Whether this moves the address of a parameter to a register, which then stands for it.
fn names_parameter(d: &mut Decoder) -> Result<bool, String> {
    let (to, from) = (d.operand(0)?.to_owned(), d.operand(1)?.to_owned());
    d.name_parameter(&to, &from)
}

/// The registers that operand i names, one or several.
fn registers_of(d: &Decoder, i: usize) -> Result<Vec<Place>, String> {
    let place = |name: &String| match d.place(name) {
        Some(Place::Predicate(_)) | None => Err(format!("{name} is no register")),
        Some(place) => Ok(place),
    };
    d.parts(i)?.iter().map(place).collect()
}

/// Parameters are rows, and so are those of calls.
fn load_parameter(d: &mut Decoder, words: &[&str]) -> Result<Step, String> {
    let ty = words.last().ok_or("no type")?;
    let bytes = type_bytes(ty).ok_or("no such type")?;
    let text = d.operand(1)?.trim_matches(['[', ']']).to_owned();
    let (name, offset) = text.split_once('+').unwrap_or((&text, "0"));
    let offset: usize = offset.parse().map_err(|_| "the offset is no number")?;
    let mut pairs = Vec::new();
    for (i, to) in registers_of(d, 0)?.into_iter().enumerate() {
        let wide = matches!(to, Place::Wide(_));
        if ty.starts_with('s') && wide && bytes < 8 {
            return Err("a parameter is not extended".into());
        }
        let from = d.parameter(name, offset + i * bytes, bytes, wide)?;
        let own = if wide { d.row_of::<u64>(name) } else { d.row_of::<u32>(name) };
        pairs.push((to, from.or(own.ok()).ok_or_else(|| format!("there is no parameter {name}"))?));
    }
    Ok(Step::Compute(Box::new(move |r, mask| {
        for (to, from) in &pairs {
            match to {
                Place::Wide(to) => u64::write(r, *to, &u64::read(r, *from), mask),
                Place::Narrow(to) | Place::Predicate(to) => u32::write(r, *to, &u32::read(r, *from), mask),
            }
        }
    })))
}

fn store_parameter(d: &mut Decoder, ty: &str) -> Result<Step, String> {
    let text = d.operand(0)?.trim_matches(['[', ']']).to_owned();
    let name = text.strip_suffix("+0").unwrap_or(&text);
    if type_bytes(ty) == Some(8) {
        let (to, from) = (d.row_of::<u64>(name)?, d.input::<u64>(1)?);
        return Ok(d.copy::<u64>(to, from));
    }
    let (to, from) = (d.row_of::<u32>(name)?, d.input::<u32>(1)?);
    Ok(d.copy::<u32>(to, from))
}

/// What only hints at caches, or at order among threads.
const HINTS: [&str; 12] = ["nc", "volatile", "relaxed", "weak", "cta", "gpu", "v2", "v4", "ca", "cg", "cs", "lu"];

/// The space and the type of an access. Hints change nothing here.
fn access_of(words: &[&str]) -> Result<(Space, usize, bool), String> {
    let first = words.first().copied().unwrap_or("");
    let (space, words) = match first {
        "global" => (Space::Global, &words[1..]),
        "shared" | "shared::cta" => (Space::Shared, &words[1..]),
        "local" => (Space::Local, &words[1..]),
        // An address of any space. Only those of global memory become one here, since `cvta.shared` is not known; the others
        // are outside it.
        other if type_bytes(other).is_some() || HINTS.contains(&other) => (Space::Global, words),
        other => return Err(format!("there is no memory {other}")),
    };
    let (ty, hints) = words.split_last().ok_or("no type")?;
    if let Some(hint) = hints.iter().find(|hint| !HINTS.contains(hint)) {
        return Err(format!("what is .{hint}?"));
    }
    Ok((space, type_bytes(ty).ok_or("no such type")?, ty.starts_with('s')))
}

/// The bytes of an access.
#[inline(always)]
fn bytes_at(
    access: &mut Access<'_>,
    space: Space,
    at: u64,
    len: usize,
    lane: usize,
    writes: bool,
) -> Result<*mut u8, String> {
    match space {
        Space::Global => access.memory.access(at, len),
        Space::Shared if writes => Ok(access.shared.write(at, len, access.warp.number)?.as_mut_ptr()),
        Space::Shared => Ok(access.shared.read(at, len, access.warp.number)?.as_ptr().cast_mut()),
        Space::Local => {
            let room = access.warp.local.len() / LANES;
            if at & (len as u64 - 1) != 0 || at.checked_add(len as u64).is_none_or(|end| end > room as u64) {
                return Err(format!("{len} bytes at {at} of {room} bytes of local memory"));
            }
            Ok(access.warp.local[lane * room + at as usize..].as_mut_ptr())
        }
    }
}

fn load(d: &mut Decoder, words: &[&str]) -> Result<Step, String> {
    let (space, bytes, signed) = access_of(words)?;
    let (to, address) = (registers_of(d, 0)?, Address::new(d, d.operand(1)?)?);
    let narrow = |to: &Place| if let Place::Narrow(row) = to { Some(*row) } else { None };
    let words: Option<Vec<u32>> = to.iter().map(narrow).collect();
    // Most loads are of words.
    Ok(match (words.as_deref(), bytes) {
        (Some([a]), 4) => load_words(space, address, [*a]),
        (Some([a, b]), 4) => load_words(space, address, [*a, *b]),
        (Some([a, b, c, d]), 4) => load_words(space, address, [*a, *b, *c, *d]),
        (_, 1) => load_numbers::<1>(space, address, to, signed),
        (_, 2) => load_numbers::<2>(space, address, to, signed),
        (_, 4) => load_numbers::<4>(space, address, to, signed),
        _ => load_numbers::<8>(space, address, to, signed),
    })
}

fn load_words<const N: usize>(space: Space, address: Address, to: [u32; N]) -> Step {
    Step::Memory(Box::new(move |access, mask| {
        let at = address.row(&access.warp.registers);
        for lane in lanes(mask) {
            let from = bytes_at(access, space, at[lane], 4 * N, lane, false).or_else(fault(lane))?;
            // SAFETY: `bytes_at` has found that as many aligned words are there.
            let words = unsafe { from.cast::<[u32; N]>().read() };
            for (to, word) in to.iter().zip(words) {
                access.warp.registers.narrow[*to as usize][lane] = word;
            }
        }
        Ok(())
    }))
}

/// Loads numbers of up to eight bytes, and extends them.
fn load_numbers<const BYTES: usize>(space: Space, address: Address, to: Vec<Place>, signed: bool) -> Step {
    let (len, unused) = (BYTES * to.len(), 64 - 8 * BYTES as u32);
    Step::Memory(Box::new(move |access, mask| {
        let at = address.row(&access.warp.registers);
        for lane in lanes(mask) {
            let from = bytes_at(access, space, at[lane], len, lane, false).or_else(fault(lane))?;
            for (i, to) in to.iter().enumerate() {
                let mut value = [0; 8];
                // SAFETY: `bytes_at` has found that `len` bytes are there.
                value[..BYTES].copy_from_slice(&unsafe { from.add(i * BYTES).cast::<[u8; BYTES]>().read() });
                let value = u64::from_le_bytes(value);
                let value = if signed { ((value << unused) as i64 >> unused) as u64 } else { value };
                match to {
                    Place::Wide(to) => access.warp.registers.wide[*to as usize][lane] = value,
                    Place::Narrow(to) | Place::Predicate(to) => {
                        access.warp.registers.narrow[*to as usize][lane] = value as u32;
                    }
                }
            }
        }
        Ok(())
    }))
}

fn store(d: &mut Decoder, words: &[&str]) -> Result<Step, String> {
    let (space, bytes, _) = access_of(words)?;
    let address = Address::new(d, d.operand(0)?)?;
    let mut from = Vec::new();
    for part in d.parts(1)? {
        from.push(match d.place(&part) {
            Some(Place::Predicate(_)) => return Err("a predicate cannot be stored".into()),
            Some(place) => place,
            None if bytes == 8 => Place::Wide(d.source::<u64>(&part)?),
            None => Place::Narrow(d.source::<u32>(&part)?),
        });
    }
    Ok(match bytes {
        1 => store_numbers::<1>(space, address, from),
        2 => store_numbers::<2>(space, address, from),
        4 => store_numbers::<4>(space, address, from),
        _ => store_numbers::<8>(space, address, from),
    })
}

fn store_numbers<const BYTES: usize>(space: Space, address: Address, from: Vec<Place>) -> Step {
    let len = BYTES * from.len();
    Step::Memory(Box::new(move |access, mask| {
        let at = address.row(&access.warp.registers);
        for lane in lanes(mask) {
            let to = bytes_at(access, space, at[lane], len, lane, true).or_else(fault(lane))?;
            for (i, from) in from.iter().enumerate() {
                let value = match from {
                    Place::Wide(from) => access.warp.registers.wide[*from as usize][lane],
                    Place::Narrow(from) | Place::Predicate(from) => {
                        u64::from(access.warp.registers.narrow[*from as usize][lane])
                    }
                };
                let mut bytes = [0; BYTES];
                bytes.copy_from_slice(&value.to_le_bytes()[..BYTES]);
                // SAFETY: `bytes_at` has found that `len` bytes are there.
                unsafe { to.add(i * BYTES).cast::<[u8; BYTES]>().write(bytes) };
            }
        }
        Ok(())
    }))
}

/// Asynchronous copies to shared memory. They arrive when their lane waits for them, not before, so that a missing wait
/// is noticed.
fn copy(d: &mut Decoder, words: &[&str]) -> Result<Step, String> {
    match words {
        ["commit_group"] => Ok(Step::Memory(Box::new(|access, mask| {
            lanes(mask).for_each(|lane| access.warp.committed[lane] += 1);
            Ok(())
        }))),
        ["wait_all"] => Ok(Step::Memory(Box::new(|access, mask| {
            arrive(access, |copy, _| mask >> copy.lane & 1 == 1);
            Ok(())
        }))),
        ["wait_group"] => {
            let pending: u32 = d.operand(0)?.parse().map_err(|_| "no number of groups")?;
            Ok(Step::Memory(Box::new(move |access, mask| {
                arrive(access, |copy, committed| mask >> copy.lane & 1 == 1 && copy.group + pending < committed);
                Ok(())
            })))
        }
        ["ca" | "cg", "shared", "global"] => begin_copy(d),
        _ => Err("there is no such copy".into()),
    }
}

fn begin_copy(d: &mut Decoder) -> Result<Step, String> {
    let (to, from) = (Address::new(d, d.operand(0)?)?, Address::new(d, d.operand(1)?)?);
    let len: usize = d.operand(2)?.parse().ok().filter(|len| [4, 8, 16].contains(len)).ok_or("no such length")?;
    // The rest becomes zeros.
    let given = if d.operand(3).is_ok() { d.input::<u32>(3)? } else { d.constant(false, len as u64) };
    Ok(Step::Memory(Box::new(move |access, mask| {
        let (to, from) = (to.row(&access.warp.registers), from.row(&access.warp.registers));
        let given = access.warp.registers.narrow[given as usize];
        for lane in lanes(mask) {
            let (mut bytes, n) = ([0; 16], given[lane] as usize);
            if n > len {
                return Err(Fault { lane, what: format!("it copies {n} of {len} bytes") });
            }
            if n > 0 {
                let from = access.memory.access(from[lane], len).or_else(fault(lane))?;
                // SAFETY: `access` has found that `len` bytes are there, and n is not more.
                unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), n) };
            }
            access.shared.begin_copy(to[lane], len, access.warp.number).or_else(fault(lane))?;
            let group = access.warp.committed[lane];
            access.warp.copies.push(Copy { lane, group, to: to[lane], bytes, len });
        }
        Ok(())
    })))
}

/// Completes the copies that are waited for.
fn arrive(access: &mut Access<'_>, waited_for: impl Fn(&Copy, u32) -> bool) {
    let (warp, shared) = (&mut *access.warp, &mut *access.shared);
    warp.copies.retain(|copy| {
        let arrives = waited_for(copy, warp.committed[copy.lane]);
        if arrives {
            shared.end_copy(copy.to, &copy.bytes[..copy.len], warp.number);
        }
        !arrives
    });
}

//! Decoding: the statements of a kernel become closures over rows of registers.
//!
//! Names are resolved once. Constants, special registers and parameters become rows as well, so that an instruction
//! knows only rows. The instructions themselves are in [`super::arithmetic`], [`super::memory`] and
//! [`super::together`].

use super::parse::{Function, Module, Statement, Variable, type_bytes};
use super::{arithmetic, inline, memory, together};
use crate::machine::code::{Code, Instruction, ParameterRow, Special, Step, splat};
use crate::machine::registers::{LANES, Mask, Value};
use std::collections::HashMap;

/// Where a name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Narrow(u32),
    Wide(u32),
    Predicate(u32),
}

/// A kernel while it is decoded.
#[derive(Default)]
pub struct Decoder {
    code: Code,
    /// Registers by name, and those declared as `%r<9>` by the name without number.
    names: HashMap<String, Place>,
    families: HashMap<String, (Place, u32)>,
    constants: HashMap<(bool, u64), u32>,
    /// Addresses of variables.
    symbols: HashMap<String, u64>,
    /// Places and lengths of parameters.
    parameters: HashMap<String, (usize, usize)>,
    /// Registers that hold the address of a parameter. The compiler writes such a register once.
    addresses: HashMap<String, String>,
    labels: HashMap<String, u32>,
    /// Of the present instruction.
    operands: Vec<String>,
}

/// Decodes a kernel. `globals` are the addresses of the module's variables.
///
/// # Errors
/// If an instruction is unknown; the message names it.
pub fn decode(module: &Module, kernel: &Function, globals: &HashMap<String, u64>) -> Result<Code, String> {
    let statements = inline::inline_calls(module, kernel)?;
    let mut decoder = Decoder { symbols: globals.clone(), ..Decoder::default() };
    decoder.code.name.clone_from(&kernel.name);
    decoder.code.threads_max = kernel.threads_max.unwrap_or(1024);
    let mut end = 0usize;
    for Variable { name, bytes, align } in &kernel.parameters {
        let at = end.next_multiple_of(*align);
        decoder.parameters.insert(name.clone(), (at, *bytes));
        decoder.code.parameters.push((at, *bytes));
        end = at + bytes;
    }
    decoder.place_variables(module, &statements)?;
    let is_directive = |s: &Statement| s.text.starts_with('.');
    let mut number = 0;
    for statement in &statements {
        match statement.label() {
            Some(label) => drop(decoder.labels.insert(label.to_owned(), number)),
            None => number += u32::from(!is_directive(statement)),
        }
    }
    for statement in statements.iter().filter(|s| s.label().is_none()) {
        let wrong = |e: String| format!("kernel {}, line {}, `{}`: {e}", kernel.name, statement.line, statement.text);
        if is_directive(statement) {
            decoder.declare(&statement.text).map_err(wrong)?;
        } else {
            decoder.instruction(statement).map_err(wrong)?;
        }
    }
    Ok(decoder.code)
}

impl Decoder {
    /// Gives shared and local variables their addresses.
    fn place_variables(&mut self, module: &Module, statements: &[Statement]) -> Result<(), String> {
        let own =
            |space: &str| statements.iter().filter(|s| s.text.starts_with(space)).map(|s| s.text.clone()).collect();
        let read =
            |texts: Vec<String>| texts.iter().map(|text| super::parse::variable(text)).collect::<Result<Vec<_>, _>>();
        let mut shared = read(own(".shared"))?;
        let is_used = |v: &&Variable| statements.iter().any(|s| s.text.contains(v.name.as_str()));
        shared.extend(module.shared.iter().filter(is_used).cloned());
        // Arrays whose size the launch decides come last, all at the same place.
        shared.sort_by_key(|variable| variable.bytes == 0);
        let mut end = 0usize;
        for Variable { name, bytes, align } in &shared {
            end = end.next_multiple_of(*align);
            self.symbols.insert(name.clone(), end as u64);
            end += bytes;
        }
        self.code.shared_bytes = end;
        let mut end = 0usize;
        for Variable { name, bytes, align } in read(own(".local"))? {
            end = end.next_multiple_of(align);
            self.symbols.insert(name, end as u64);
            end += bytes;
        }
        self.code.local_bytes = end;
        Ok(())
    }

    /// Declares registers: `.reg .b32 %r<9>`, or the parameters of a call, which are registers here.
    fn declare(&mut self, text: &str) -> Result<(), String> {
        let mut words = text.split_whitespace();
        let (kind, ty) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        if kind == ".shared" || kind == ".local" {
            return Ok(());
        }
        let ty = ty.trim_start_matches('.');
        for name in words.collect::<String>().split(',') {
            let (name, count) = match name.split_once('<') {
                Some((name, count)) => (name, count.trim_end_matches('>').parse().map_err(|_| "no number")?),
                None => (name, 1),
            };
            let place = self.new_registers(ty, count)?;
            if text.contains('<') {
                self.families.insert(name.into(), (place, count));
            } else {
                self.names.insert(name.into(), place);
            }
        }
        Ok(())
    }

    fn new_registers(&mut self, ty: &str, count: u32) -> Result<Place, String> {
        let registers = &mut self.code.registers;
        if ty == "pred" {
            registers.predicates.resize(registers.predicates.len() + count as usize, 0);
            return Ok(Place::Predicate(registers.predicates.len() as u32 - count));
        }
        if type_bytes(ty).ok_or_else(|| format!("no type {ty}"))? == 8 {
            registers.wide.resize(registers.wide.len() + count as usize, splat(0));
            return Ok(Place::Wide(registers.wide.len() as u32 - count));
        }
        registers.narrow.resize(registers.narrow.len() + count as usize, splat(0));
        Ok(Place::Narrow(registers.narrow.len() as u32 - count))
    }

    /// Where a register is; none if the name is of no register.
    pub fn place(&self, name: &str) -> Option<Place> {
        if let Some(place) = self.names.get(name) {
            return Some(*place);
        }
        let family = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let (first, count) = self.families.get(family)?;
        let number: u32 = name[family.len()..].parse().ok().filter(|n| n < count)?;
        Some(match first {
            Place::Narrow(first) => Place::Narrow(first + number),
            Place::Wide(first) => Place::Wide(first + number),
            Place::Predicate(first) => Place::Predicate(first + number),
        })
    }

    fn instruction(&mut self, statement: &Statement) -> Result<(), String> {
        self.operands = statement.operands();
        let guard = match &statement.guard {
            None => None,
            Some((name, negated)) => Some((self.predicate_of(name)?, *negated)),
        };
        let name = statement.mnemonic().to_owned();
        let step = self.step(&name)?;
        self.code.instructions.push(Instruction { guard, step, line: statement.line });
        self.code.texts.push(statement.text.clone());
        Ok(())
    }

    fn step(&mut self, name: &str) -> Result<Step, String> {
        match name {
            "ret" | "exit" => return Ok(Step::Exit),
            "bra" | "bra.uni" => {
                let to = self.labels.get(&self.operands[0]).ok_or("no such label")?;
                return Ok(Step::Jump(*to));
            }
            "bar.sync" | "barrier.sync" if self.operands == ["0"] => return Ok(Step::Barrier(None)),
            "bar.red.or.pred" if self.operands.len() == 3 && self.operands[1] == "0" => {
                return Ok(Step::Barrier(Some((self.predicate(0)?, self.predicate(2)?))));
            }
            _ => {}
        }
        for family in [memory::decode, arithmetic::decode, together::decode] {
            if let Some(step) = family(self, name)? {
                return Ok(step);
            }
        }
        Err("the emulator does not know this instruction; it belongs into `emulator/src/ptx/`".into())
    }

    /// The text of an operand.
    pub fn operand(&self, i: usize) -> Result<&str, String> {
        self.operands.get(i).map(String::as_str).ok_or_else(|| "too few operands".into())
    }

    /// The parts of an operand in braces.
    pub fn parts(&self, i: usize) -> Result<Vec<String>, String> {
        Ok(super::parse::split(self.operand(i)?.trim_matches(['{', '}'])))
    }

    /// The predicate of a name.
    pub fn predicate_of(&self, name: &str) -> Result<u32, String> {
        match self.place(name) {
            Some(Place::Predicate(at)) => Ok(at),
            _ => Err(format!("{name} is no predicate")),
        }
    }

    /// The predicate that is operand i, or a constant one.
    pub fn predicate(&mut self, i: usize) -> Result<u32, String> {
        let name = self.operand(i)?.to_owned();
        match self.place(&name) {
            Some(Place::Predicate(at)) => Ok(at),
            _ if name == "0" || name == "1" || name == "-1" => {
                self.code.registers.predicates.push(if name == "0" { 0 } else { !0 });
                Ok(self.code.registers.predicates.len() as u32 - 1)
            }
            _ => Err(format!("{name} is no predicate")),
        }
    }

    /// The row that operand i writes.
    pub fn output<T: Value>(&self, i: usize) -> Result<u32, String> {
        self.row_of::<T>(self.operand(i)?)
    }

    /// The row of a register.
    pub fn row_of<T: Value>(&self, name: &str) -> Result<u32, String> {
        match self.place(name) {
            Some(Place::Narrow(at)) if !T::WIDE => Ok(at),
            Some(Place::Wide(at)) if T::WIDE => Ok(at),
            _ => Err(format!("{name} is no register of {} bits", if T::WIDE { 64 } else { 32 })),
        }
    }

    /// The row that operand i reads: a register, a special one, an address or a constant.
    pub fn input<T: Value>(&mut self, i: usize) -> Result<u32, String> {
        let text = self.operand(i)?.to_owned();
        self.source::<T>(&text)
    }

    /// The row of a source.
    pub fn source<T: Value>(&mut self, text: &str) -> Result<u32, String> {
        if self.place(text).is_some() {
            return self.row_of::<T>(text);
        }
        if let Some(special) = special(text) {
            return if T::WIDE { Err(format!("{text} has 32 bits")) } else { Ok(self.special_row(special)) };
        }
        let value =
            self.symbols.get(text).copied().or_else(|| number(text)).ok_or_else(|| format!("what is {text}?"))?;
        Ok(self.constant(T::WIDE, if T::WIDE { value } else { value & 0xffff_ffff }))
    }

    /// The address of a variable.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        self.symbols.get(name).copied()
    }

    /// A row that holds a constant.
    pub fn constant(&mut self, wide: bool, value: u64) -> u32 {
        let registers = &mut self.code.registers;
        *self.constants.entry((wide, value)).or_insert_with(|| {
            if wide {
                registers.wide.push(splat(value));
                registers.wide.len() as u32 - 1
            } else {
                registers.narrow.push(splat(value as u32));
                registers.narrow.len() as u32 - 1
            }
        })
    }

    fn special_row(&mut self, special: Special) -> u32 {
        if let Some((_, row)) = self.code.specials.iter().find(|(known, _)| *known == special) {
            return *row;
        }
        self.code.registers.narrow.push(splat(0));
        let row = self.code.registers.narrow.len() as u32 - 1;
        self.code.specials.push((special, row));
        row
    }

    /// Lets a register stand for a parameter, if the name is of one. It cannot stand for two, since the way to a load is not known
    /// here.
    pub fn name_parameter(&mut self, register: &str, name: &str) -> Result<bool, String> {
        if !self.parameters.contains_key(name) {
            return Ok(false);
        }
        match self.addresses.insert(register.to_owned(), name.to_owned()) {
            Some(other) if other != name => Err(format!("{register} stands for {other} already")),
            _ => Ok(true),
        }
    }

    /// The row of a part of a parameter, named or by a register that holds its address; none if it is of no parameter.
    pub fn parameter(&mut self, name: &str, offset: usize, bytes: usize, wide: bool) -> Result<Option<u32>, String> {
        let name = self.addresses.get(name).map_or(name, String::as_str);
        let Some((at, len)) = self.parameters.get(name).copied() else { return Ok(None) };
        if offset + bytes > len {
            return Err(format!("{bytes} bytes at {offset} of a parameter of {len} bytes"));
        }
        let key = |row: &&ParameterRow| (row.at, row.bytes, row.wide) == (at + offset, bytes, wide);
        if let Some(known) = self.code.parameter_rows.iter().find(key) {
            return Ok(Some(known.row));
        }
        let row = match self.new_registers(if wide { "b64" } else { "b32" }, 1)? {
            Place::Wide(row) | Place::Narrow(row) | Place::Predicate(row) => row,
        };
        self.code.parameter_rows.push(ParameterRow { at: at + offset, bytes, wide, row });
        Ok(Some(row))
    }

    /// Moves a row.
    pub fn copy<T: Value>(&mut self, to: u32, from: u32) -> Step {
        Step::Compute(Box::new(move |r, mask| T::write(r, to, &T::read(r, from), mask)))
    }

    /// d = f(a)
    pub fn one<A: Value, R: Value>(&mut self, f: impl Fn(A) -> R + Send + Sync + 'static) -> Result<Step, String> {
        let (d, a) = (self.output::<R>(0)?, self.input::<A>(1)?);
        Ok(Step::Compute(Box::new(move |r, mask| {
            let a = A::read(r, a);
            R::write(r, d, &rows(|i| f(a[i])), mask);
        })))
    }

    /// d = f(a, b)
    pub fn two<A: Value, B: Value, R: Value>(
        &mut self,
        f: impl Fn(A, B) -> R + Send + Sync + 'static,
    ) -> Result<Step, String> {
        let (d, a, b) = (self.output::<R>(0)?, self.input::<A>(1)?, self.input::<B>(2)?);
        Ok(Step::Compute(Box::new(move |r, mask| {
            let (a, b) = (A::read(r, a), B::read(r, b));
            R::write(r, d, &rows(|i| f(a[i], b[i])), mask);
        })))
    }

    /// d = f(a, b, c)
    pub fn three<A: Value, B: Value, C: Value, R: Value>(
        &mut self,
        f: impl Fn(A, B, C) -> R + Send + Sync + 'static,
    ) -> Result<Step, String> {
        let (d, a, b, c) = (self.output::<R>(0)?, self.input::<A>(1)?, self.input::<B>(2)?, self.input::<C>(3)?);
        Ok(Step::Compute(Box::new(move |r, mask| {
            let (a, b, c) = (A::read(r, a), B::read(r, b), C::read(r, c));
            R::write(r, d, &rows(|i| f(a[i], b[i], c[i])), mask);
        })))
    }

    /// p = f(a, b)
    pub fn compare<T: Value>(&mut self, f: impl Fn(T, T) -> bool + Send + Sync + 'static) -> Result<Step, String> {
        let (d, a, b) = (self.predicate(0)?, self.input::<T>(1)?, self.input::<T>(2)?);
        Ok(Step::Compute(Box::new(move |r, mask| {
            let (a, b) = (T::read(r, a), T::read(r, b));
            let mut bits: Mask = 0;
            for lane in 0..LANES {
                bits |= Mask::from(f(a[lane], b[lane])) << lane;
            }
            r.set_predicate(d, bits, mask);
        })))
    }
}

/// A row of f(lane).
#[inline(always)]
fn rows<R: Value>(f: impl Fn(usize) -> R) -> [R; LANES] {
    let mut row = [f(0); LANES];
    for (lane, value) in row.iter_mut().enumerate() {
        *value = f(lane);
    }
    row
}

fn special(text: &str) -> Option<Special> {
    if text == "%laneid" {
        return Some(Special::Lane);
    }
    let (name, dimension) = text.split_once('.')?;
    let dimension = ["x", "y", "z"].iter().position(|d| *d == dimension)?;
    match name {
        "%tid" => Some(Special::Thread(dimension)),
        "%ntid" => Some(Special::Threads(dimension)),
        "%ctaid" => Some(Special::Block(dimension)),
        "%nctaid" => Some(Special::Blocks(dimension)),
        _ => None,
    }
}

/// A literal: an integer, or the bits of a float (`0f3F800000`, `0d…`).
pub fn number(text: &str) -> Option<u64> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let hex = ["0f", "0F", "0d", "0D", "0x", "0X"].iter().find_map(|start| digits.strip_prefix(start));
    let value = match hex {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.trim_end_matches('U').parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

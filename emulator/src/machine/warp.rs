//! A warp: 32 lanes that run the same instruction, each lane with a mask bit.
//!
//! Lanes that branch apart form groups, each at an instruction of its own. The group that is furthest behind runs
//! first, and groups that meet are one again. An instruction for all lanes waits for the missing ones.

use super::code::{Code, Fault, Instruction, Step};
use super::registers::{LANES, Mask, Registers, lanes};
use super::shared::Shared;
use crate::memory::Memory;

/// Lanes that are at the same instruction.
#[derive(Clone, Copy, Debug)]
struct Group {
    at: u32,
    mask: Mask,
    /// Whether it waits for other lanes.
    waits: bool,
}

/// An asynchronous copy that a lane has begun.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    pub lane: usize,
    /// The number of its group among those of the lane.
    pub group: u32,
    pub to: u64,
    pub bytes: [u8; 16],
    pub len: usize,
}

/// A warp.
#[derive(Debug, Default)]
pub struct Warp {
    pub number: u32,
    pub registers: Registers,
    /// Local memory, lane after lane.
    pub local: Vec<u8>,
    /// Asynchronous copies that nobody has waited for, and how many groups each lane has committed.
    pub copies: Vec<Copy>,
    pub committed: [u32; LANES],
    groups: Vec<Group>,
    /// Lanes that have not ended.
    alive: Mask,
    /// The predicate that takes the result of the barrier at which the warp is.
    reduced: Option<(u32, Mask)>,
}

/// What an instruction can reach.
pub struct Access<'a> {
    pub warp: &'a mut Warp,
    pub shared: &'a mut Shared,
    pub memory: &'a Memory,
}

/// Why a warp has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// At a barrier, with a contribution to its reduction.
    Barrier(bool),
    End,
}

impl Warp {
    /// A warp of a block that runs a kernel.
    pub fn new(number: u32, code: &Code) -> Self {
        let local = vec![0; LANES * code.local_bytes];
        Self { number, registers: code.registers.clone(), local, ..Self::default() }
    }

    /// Begins a block with the lanes of `mask`.
    pub fn start(&mut self, mask: Mask) {
        self.groups.clear();
        self.groups.push(Group { at: 0, mask, waits: false });
        self.alive = mask;
        self.copies.clear();
        self.committed = [0; LANES];
        self.reduced = None;
        self.local.fill(0xff);
    }

    /// Whether lanes are left.
    pub fn is_alive(&self) -> bool {
        self.alive != 0
    }

    /// Runs up to the next barrier or the end. `reduced` is the result of the barrier before.
    /// A fault comes with the number of its instruction.
    pub fn run(
        &mut self,
        code: &Code,
        shared: &mut Shared,
        memory: &Memory,
        reduced: bool,
    ) -> Result<Stop, (u32, Fault)> {
        if let Some((to, mask)) = self.reduced.take() {
            self.registers.set_predicate(to, if reduced { !0 } else { 0 }, mask);
        }
        while let Some(mut group) = self.next_group(code)? {
            while let Some(instruction) = code.instructions.get(group.at as usize) {
                if !self.groups.is_empty() && self.meet(&mut group) {
                    break;
                }
                let mask = group.mask & self.guard(instruction);
                if mask == 0 {
                    group.at += 1;
                    continue;
                }
                let at = group.at;
                let failed = |fault| (at, fault);
                match &instruction.step {
                    Step::Compute(run) => run(&mut self.registers, mask),
                    Step::Memory(run) => {
                        run(&mut Access { warp: self, shared, memory }, mask).map_err(failed)?;
                    }
                    Step::Together(members, run) => {
                        if self.misses(*members, mask) {
                            self.groups.push(Group { waits: true, ..group });
                            break;
                        }
                        run(&mut Access { warp: self, shared, memory }, mask).map_err(failed)?;
                    }
                    Step::Jump(to) => {
                        if mask == group.mask {
                            group.at = *to;
                            continue;
                        }
                        self.groups.push(Group { at: *to, mask, waits: false });
                        group.mask &= !mask;
                    }
                    Step::Barrier(reduce) => {
                        if self.misses(None, mask) {
                            self.groups.push(Group { waits: true, ..group });
                            break;
                        }
                        self.groups.push(Group { at: group.at + 1, mask, waits: false });
                        let given = reduce.map_or(0, |(_, from)| self.registers.predicates[from as usize] & mask);
                        self.reduced = reduce.map(|(to, _)| (to, mask));
                        return Ok(Stop::Barrier(given != 0));
                    }
                    Step::Exit => {
                        self.alive &= !mask;
                        group.mask &= !mask;
                        if group.mask == 0 {
                            break;
                        }
                    }
                }
                group.at += 1;
            }
        }
        Ok(Stop::End)
    }

    #[inline]
    fn guard(&self, instruction: &Instruction) -> Mask {
        let Some((predicate, negated)) = instruction.guard else { return !0 };
        let value = self.registers.predicates[predicate as usize];
        if negated { !value } else { value }
    }

    /// Whether lanes that must take part are elsewhere.
    fn misses(&self, members: Option<u32>, mask: Mask) -> bool {
        let needed =
            members.map_or(!0, |row| self.registers.narrow[row as usize][mask.trailing_zeros() as usize % LANES]);
        let needed = needed & self.alive;
        mask & needed != needed
    }

    /// Takes the group that is furthest behind and does not wait.
    fn next_group(&mut self, code: &Code) -> Result<Option<Group>, (u32, Fault)> {
        let ready = self.groups.iter().enumerate().filter(|(_, group)| !group.waits);
        if let Some((i, _)) = ready.min_by_key(|(_, group)| group.at) {
            return Ok(Some(self.groups.swap_remove(i)));
        }
        // Lanes for which others waited may have ended.
        let can_go = self.groups.iter().position(|group| {
            let Some(instruction) = code.instructions.get(group.at as usize) else { return true };
            let members = if let Step::Together(members, _) = &instruction.step { *members } else { None };
            !self.misses(members, group.mask & self.guard(instruction))
        });
        if let Some(i) = can_go {
            return Ok(Some(self.groups.swap_remove(i)));
        }
        let Some(group) = self.groups.pop() else { return Ok(None) };
        let missing = self.alive & !group.mask;
        let what = format!("lanes {missing:#010x} of the warp do not come here, or must not run this instruction");
        Err((group.at, Fault { lane: lanes(group.mask).next().unwrap_or(0), what }))
    }

    /// Joins groups that are at the same place. True if another one is further behind; then that one is next.
    fn meet(&mut self, group: &mut Group) -> bool {
        let at = group.at;
        self.groups.retain(|other| {
            if other.at == at {
                group.mask |= other.mask;
            }
            other.at != at
        });
        let is_ahead = self.groups.iter().any(|other| !other.waits && other.at < at);
        if is_ahead {
            self.groups.push(*group);
        }
        is_ahead
    }
}

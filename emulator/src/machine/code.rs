//! What a kernel is once it is decoded: steps over the registers of a warp.

use super::registers::{Mask, Registers, Row};
use super::warp::Access;

/// Why a kernel cannot go on: the lane at fault and what it did.
#[derive(Clone, Debug)]
pub struct Fault {
    pub lane: usize,
    pub what: String,
}

/// Computes in registers.
pub type Compute = Box<dyn Fn(&mut Registers, Mask) + Send + Sync>;
/// Reads or writes memory too.
pub type Perform = Box<dyn Fn(&mut Access<'_>, Mask) -> Result<(), Fault> + Send + Sync>;

/// What an instruction does.
pub enum Step {
    Compute(Compute),
    Memory(Perform),
    /// What the lanes of a warp do together: those of the mask in a register, or all.
    Together(Option<u32>, Perform),
    /// To the step of this number.
    Jump(u32),
    /// To the barrier of the block, which may reduce predicates: by `or`, from one to another.
    Barrier(Option<(u32, u32)>),
    Exit,
}

/// An instruction.
pub struct Instruction {
    /// The predicate that it depends on, and whether it is negated.
    pub guard: Option<(u32, bool)>,
    pub step: Step,
    /// Its line in the module.
    pub line: u32,
}

/// A row that the machine fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// `%tid`, of dimension 0, 1 or 2.
    Thread(usize),
    /// `%ntid`.
    Threads(usize),
    /// `%ctaid`.
    Block(usize),
    /// `%nctaid`.
    Blocks(usize),
    Lane,
}

/// A row that is a part of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterRow {
    /// Its place in the buffer of parameters.
    pub at: usize,
    pub bytes: usize,
    /// Whether the row is of 64 bits.
    pub wide: bool,
    pub row: u32,
}

impl ParameterRow {
    /// Fills the row.
    pub fn fill(&self, registers: &mut Registers, parameters: &[u8]) {
        let mut bytes = [0; 8];
        bytes[..self.bytes].copy_from_slice(&parameters[self.at..self.at + self.bytes]);
        let value = u64::from_le_bytes(bytes);
        if self.wide {
            registers.wide[self.row as usize] = splat(value);
        } else {
            registers.narrow[self.row as usize] = splat(value as u32);
        }
    }
}

/// A kernel.
#[derive(Default)]
pub struct Code {
    pub name: String,
    pub instructions: Vec<Instruction>,
    /// Registers as they are before the first instruction: constants have their values.
    pub registers: Registers,
    pub specials: Vec<(Special, u32)>,
    /// Place and length of each parameter in the buffer of parameters.
    pub parameters: Vec<(usize, usize)>,
    /// The parts of parameters that it reads.
    pub parameter_rows: Vec<ParameterRow>,
    /// Bytes of its own shared memory; what the launch adds comes after them.
    pub shared_bytes: usize,
    pub local_bytes: usize,
    pub threads_max: usize,
    /// Each instruction's text, for messages.
    pub texts: Vec<String>,
}

/// A fault of a lane.
pub fn fault<T>(lane: usize) -> impl FnOnce(String) -> Result<T, Fault> {
    move |what| Err(Fault { lane, what })
}

/// The same number in every lane.
pub fn splat<T: Copy>(value: T) -> Row<T> {
    [value; super::registers::LANES]
}

//! Launches: the blocks of a grid over the threads of this machine, and the warps of a block in turn.

use super::code::{Code, Fault, Special, splat};
use super::registers::{LANES, Mask, Registers};
use super::shared::Shared;
use super::warp::{Stop, Warp};
use crate::memory::Memory;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Threads of a launch from which on starting another thread of this machine pays.
const THREADS_MIN: usize = 2048;

/// How a kernel is started.
#[derive(Clone, Debug)]
pub struct Launch {
    pub grid: [usize; 3],
    pub block: [usize; 3],
    /// Bytes of shared memory that the launch adds.
    pub shared_bytes: usize,
    /// The parameters, each at its place.
    pub parameters: Vec<u8>,
}

/// A kernel that can be started, with what earlier launches have left for the next one.
#[derive(Default)]
pub struct Kernel {
    pub code: Code,
    idle: Mutex<Vec<Block>>,
}

/// The state of a block; it is used again for the next one.
#[derive(Default)]
struct Block {
    warps: Vec<Warp>,
    shared: Shared,
    parameters: Vec<u8>,
}

/// All lanes up to `count`.
fn first(count: usize) -> Mask {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

impl Kernel {
    /// A kernel that was decoded.
    pub fn new(code: Code) -> Self {
        Self { code, idle: Mutex::default() }
    }

    /// Runs all blocks, on at most `n_threads` threads.
    ///
    /// # Errors
    /// The first fault, with its place.
    pub fn launch(&self, launch: &Launch, memory: &Memory, n_threads: usize) -> Result<(), String> {
        let (n_blocks, n_lanes) = (launch.grid.iter().product::<usize>(), launch.block.iter().product::<usize>());
        let n_threads = if n_blocks * n_lanes < THREADS_MIN { 1 } else { n_threads.min(n_blocks) };
        let (next, stop, failure) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let work = || {
            let mut block = self.take(launch);
            while !stop.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= n_blocks {
                    break;
                }
                let [x, y, _] = launch.grid;
                let at = [number % x, number / x % y, number / (x * y)];
                if let Err(problem) = block.run(&self.code, launch, at, memory) {
                    stop.store(true, Ordering::Relaxed);
                    // The block of the lowest number speaks, so that the message is the same each time.
                    let mut failure = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    if failure.as_ref().is_none_or(|(other, _)| number < *other) {
                        *failure = Some((number, problem));
                    }
                    return;
                }
            }
            self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(block);
        };
        std::thread::scope(|scope| {
            (1..n_threads).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        let failure = failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        failure.map_or(Ok(()), |(_, problem)| Err(problem))
    }

    /// The state for blocks of a launch.
    fn take(&self, launch: &Launch) -> Block {
        let idle = self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
        let mut block = idle.unwrap_or_default();
        let n_lanes = launch.block.iter().product::<usize>();
        block.warps.truncate(n_lanes.div_ceil(LANES));
        for number in block.warps.len()..n_lanes.div_ceil(LANES) {
            block.warps.push(Warp::new(number as u32, &self.code));
        }
        for warp in &mut block.warps {
            self.code.fill(&mut warp.registers, launch, warp.number as usize);
        }
        block.parameters.clone_from(&launch.parameters);
        block
    }
}

impl Code {
    /// Fills the rows that are the same for all blocks of a launch.
    fn fill(&self, registers: &mut Registers, launch: &Launch, warp: usize) {
        let [x, y, _] = launch.block;
        let place = |lane: usize, dimension: usize| {
            let thread = warp * LANES + lane;
            [thread % x, thread / x % y, thread / (x * y)][dimension] as u32
        };
        for (special, row) in &self.specials {
            registers.narrow[*row as usize] = match *special {
                Special::Thread(dimension) => std::array::from_fn(|lane| place(lane, dimension)),
                Special::Threads(dimension) => splat(launch.block[dimension] as u32),
                Special::Blocks(dimension) => splat(launch.grid[dimension] as u32),
                Special::Lane => std::array::from_fn(|lane| lane as u32),
                Special::Block(_) => continue,
            };
        }
        for parameter in &self.parameter_rows {
            parameter.fill(registers, &launch.parameters);
        }
    }
}

impl Block {
    /// Runs one block.
    fn run(&mut self, code: &Code, launch: &Launch, at: [usize; 3], memory: &Memory) -> Result<(), String> {
        let mut left = launch.block.iter().product::<usize>();
        for warp in &mut self.warps {
            for (special, row) in &code.specials {
                if let Special::Block(dimension) = special {
                    warp.registers.narrow[*row as usize] = splat(at[*dimension] as u32);
                }
            }
            warp.start(first(left));
            left = left.saturating_sub(LANES);
        }
        self.shared.reset(code.shared_bytes + launch.shared_bytes);
        let mut reduced = false;
        while self.warps.iter().any(Warp::is_alive) {
            let mut given = false;
            for warp in self.warps.iter_mut().filter(|warp| warp.is_alive()) {
                let number = warp.number as usize;
                let stop = warp.run(code, &mut self.shared, memory, reduced);
                let stop = stop
                    .map_err(|(instruction, fault)| describe(code, launch, at, number, instruction as usize, &fault))?;
                given |= stop == Stop::Barrier(true);
            }
            self.shared.barrier();
            reduced = given;
        }
        Ok(())
    }
}

/// A fault and its place.
fn describe(code: &Code, launch: &Launch, at: [usize; 3], warp: usize, instruction: usize, fault: &Fault) -> String {
    let (thread, [x, y, _]) = (warp * LANES + fault.lane, launch.block);
    let thread = [thread % x, thread / x % y, thread / (x * y)];
    let (name, text, what) = (&code.name, &code.texts[instruction], &fault.what);
    let line = code.instructions[instruction].line;
    format!("kernel {name}, block {at:?}, thread {thread:?}, line {line} of its PTX (`{text}`): {what}")
}

//! Threads that share one step.
//!
//! A kernel cuts its work into units. Their number depends only on shapes. [`Team::run`] distributes them. A unit's
//! result does not depend on the thread that computes it, so the bytes are the same for any number of threads. Each
//! thread starts with its own contiguous share of the units: its cache then holds what it wrote in the previous
//! operation. A thread that is done helps the others. A team of one runs the units in order on the caller's thread,
//! without synchronisation.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The work of one `run`: a function of (unit, worker).
type Work<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// A fixed group of threads, including the caller's.
pub struct Team {
    shared: Option<Arc<Shared>>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Written by the caller while every worker waits. Workers read it after `epoch` has changed.
    job: UnsafeCell<Option<(Work<'static>, usize)>>,
    epoch: AtomicUsize,
    /// The next unit of each thread's share.
    next_unit: Vec<Line>,
    /// Workers that have not finished the current epoch.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
    /// Workers that sleep or are about to.
    n_asleep: AtomicUsize,
}

/// A counter on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Line(AtomicUsize);

// SAFETY: `job` is the only field that is not `Sync` already. The epoch protocol in `run` and `worker` makes each
// access exclusive or read-only.
unsafe impl Sync for Shared {}
// SAFETY: as above; the job is a shared reference to a `Sync` closure.
unsafe impl Send for Shared {}

/// Spins before a waiting thread sleeps: about the duration of a small kernel.
const SPINS: usize = 20_000;

impl Team {
    /// The caller's thread alone.
    pub fn solo() -> Self {
        Self { shared: None, workers: Vec::new() }
    }

    /// `n_threads` threads including the caller's (0 counts as 1).
    pub fn new(n_threads: usize) -> Self {
        if n_threads <= 1 {
            return Self::solo();
        }
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            epoch: AtomicUsize::new(0),
            next_unit: (0..n_threads).map(|_| Line::default()).collect(),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            n_asleep: AtomicUsize::new(0),
        });
        let workers = (1..n_threads)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.work(worker))
            })
            .collect();
        Self { shared: Some(shared), workers }
    }

    /// The number of threads.
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(unit, part)` for the consecutive parts of `len` elements of a slice; the last part may be shorter.
    pub(super) fn parts<T: Send>(&mut self, slice: &mut [T], len: usize, work: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (end, slice) = (slice.len(), Shards::new(slice));
        self.run(end.div_ceil(len), &|unit, _| {
            // SAFETY: each unit has a part of its own.
            work(unit, unsafe { slice.part(unit * len..((unit + 1) * len).min(end)) });
        });
    }

    /// Calls `work(unit, worker)` once per unit of 0..n_units. Returns when all are done.
    ///
    /// # Panics
    /// If the work panicked on any thread.
    pub fn run(&mut self, n_units: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        let Some(shared) = self.shared.as_deref().filter(|_| n_units > 1) else {
            for unit in 0..n_units {
                work(unit, 0);
            }
            return;
        };
        // SAFETY: only the lifetime is extended. No worker uses the closure after `busy` has reached 0, and this
        // function does not return (or unwind) before that.
        let job = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        // SAFETY: `busy` is 0 and `&mut self` excludes another `run`, so no worker reads the cell now.
        unsafe { *shared.job.get() = Some((job, n_units)) };
        for (thread, next) in shared.next_unit.iter().enumerate() {
            next.0.store(nth_range(n_units, self.workers.len() + 1, thread).start, Ordering::Relaxed);
        }
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        shared.begin_epoch();
        let mine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.take_units(0)));
        let mut spins = 0;
        while shared.busy.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if let Err(panic) = mine {
            std::panic::resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a worker thread panicked");
    }
}

impl Team {
    /// Flushes memory that several threads have read from all caches, before one thread writes it again. Where cores
    /// share no cache, writing a line that another core has read takes ten times as long. Changes no value. Does
    /// nothing for a single thread or without a CPU instruction for it.
    pub(super) fn forget(&mut self, memory: &[f32]) {
        let n_parts = self.n_threads();
        if n_parts > 1 && flush::available() {
            self.run(n_parts, &|part, _| flush::lines(&memory[nth_range(memory.len(), n_parts, part)]));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod flush {
    use std::arch::{asm, x86_64};

    /// Whether the CPU has `clflushopt`.
    pub fn available() -> bool {
        static AVAILABLE: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
            let has_leaf = x86_64::__cpuid(0).eax >= 7;
            has_leaf && x86_64::__cpuid_count(7, 0).ebx & (1 << 23) != 0
        });
        *AVAILABLE
    }

    /// Writes the cache lines of `memory` back and evicts them from all caches. The CPU must have `clflushopt`.
    pub fn lines(memory: &[f32]) {
        for line in memory.chunks(16) {
            // SAFETY: the address is valid, and flushing a line changes no value.
            unsafe { asm!("clflushopt [{}]", in(reg) line.as_ptr(), options(nostack, preserves_flags)) };
        }
        // SAFETY: every x86-64 CPU has this instruction. Later writes wait for the flushes.
        unsafe { x86_64::_mm_sfence() };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod flush {
    pub fn available() -> bool {
        false
    }

    pub fn lines(_: &[f32]) {}
}

impl Drop for Team {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.stop.store(true, Ordering::Relaxed);
            shared.begin_epoch();
        }
        for worker in self.workers.drain(..) {
            // A worker catches every panic of the work it runs, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Team of {}", self.n_threads())
    }
}

impl Shared {
    /// Starts all workers and wakes those that sleep.
    fn begin_epoch(&self) {
        // The caller changes the epoch, then looks for sleepers. A worker counts itself as asleep, then looks at the
        // epoch. Sequential consistency orders all four, so at least one side sees the other.
        self.epoch.fetch_add(1, Ordering::SeqCst);
        if self.n_asleep.load(Ordering::SeqCst) > 0 {
            drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    fn take_units(&self, worker: usize) {
        // SAFETY: called between the epoch's start and `busy` reaching 0. Nothing writes the cell then.
        let Some((work, n_units)) = (unsafe { *self.job.get() }) else { return };
        let n_threads = self.next_unit.len();
        for share in (worker..n_threads).chain(0..worker) {
            let end = nth_range(n_units, n_threads, share).end;
            loop {
                let unit = self.next_unit[share].0.fetch_add(1, Ordering::Relaxed);
                if unit >= end {
                    break;
                }
                work(unit, worker);
            }
        }
    }

    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            let mut spins = 0;
            while self.epoch.load(Ordering::Acquire) == seen {
                spins += 1;
                if spins < SPINS {
                    std::hint::spin_loop();
                } else {
                    let guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
                    self.n_asleep.fetch_add(1, Ordering::SeqCst);
                    // The caller takes the same lock before it wakes workers, so no wake-up is missed.
                    if self.epoch.load(Ordering::SeqCst) == seen {
                        drop(self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner));
                    }
                    self.n_asleep.fetch_sub(1, Ordering::SeqCst);
                }
            }
            seen += 1;
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.take_units(worker))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }
}

/// A slice from which units take disjoint mutable parts.
pub(crate) struct Shards<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Shards` is an exclusively borrowed slice; callers of `part` promise disjointness.
unsafe impl<T: Send> Sync for Shards<'_, T> {}

impl<'a, T> Shards<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of element `i`. The caller is responsible for every access.
    pub fn at(&self, i: usize) -> *mut T {
        assert!(i <= self.len, "element {i} of {}", self.len);
        // SAFETY: inside the slice, or one past its end.
        unsafe { self.start.add(i) }
    }

    /// The part `range` of the slice.
    ///
    /// # Safety
    /// No other part that overlaps it may be alive.
    #[allow(clippy::mut_from_ref, reason = "handing out disjoint parts through a shared reference is the purpose")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// A vector to which gradients are added: its memory, and whether its content is meaningless so far.
pub(crate) struct Sum<'a> {
    pub values: &'a mut [f32],
    /// The first addend overwrites.
    pub fresh: bool,
}

impl<'a> Sum<'a> {
    /// Hands out parts that hold zeros if the sum is fresh. The thread that adds to a part also clears it.
    pub fn shards(self) -> SumShards<'a> {
        SumShards { shards: Shards::new(self.values), fresh: self.fresh }
    }
}

/// Disjoint parts of a [`Sum`].
pub(crate) struct SumShards<'a> {
    pub shards: Shards<'a, f32>,
    pub fresh: bool,
}

impl SumShards<'_> {
    /// The part `range`, ready to be added to.
    ///
    /// # Safety
    /// Each element is handed out once, and never in two parts that are alive at the same time.
    #[allow(clippy::mut_from_ref, reason = "disjoint parts through a shared reference, as Shards")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [f32] {
        // SAFETY: the caller's promise.
        let part = unsafe { self.shards.part(range) };
        if self.fresh {
            part.fill(0.0);
        }
        part
    }
}

/// Equal parts of some memory, one per worker.
pub(super) struct Private<'a> {
    shards: Shards<'a, f32>,
    len: usize,
}

impl<'a> Private<'a> {
    pub fn new(team: &Team, memory: &'a mut [f32]) -> Self {
        let len = memory.len() / team.n_threads();
        Self { shards: Shards::new(memory), len }
    }

    /// The part of a worker.
    ///
    /// # Safety
    /// A worker takes only its own part, and not while it still holds it.
    #[allow(clippy::mut_from_ref, reason = "disjoint parts through a shared reference, as Shards")]
    pub unsafe fn of(&self, worker: usize) -> &mut [f32] {
        // SAFETY: parts of different workers are disjoint.
        unsafe { self.shards.part(worker * self.len..(worker + 1) * self.len) }
    }
}

/// The `i`-th of `parts` nearly equal ranges of 0..n.
pub(super) fn nth_range(n: usize, parts: usize, i: usize) -> Range<usize> {
    n * i / parts..n * (i + 1) / parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_runs_once_whatever_the_team() {
        for n_threads in [0, 1, 2, 3] {
            let mut team = Team::new(n_threads);
            for n_units in [0, 1, 2, 7, 500] {
                let mut counts = vec![0u32; n_units];
                let shards = Shards::new(&mut counts);
                // SAFETY: each unit takes its own element.
                team.run(n_units, &|unit, _| unsafe { shards.part(unit..unit + 1)[0] += 1 });
                assert!(counts.iter().all(|&c| c == 1), "{n_threads} threads, {n_units} units");
            }
        }
    }

    #[test]
    fn forgetting_changes_no_value() {
        let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        for n_threads in [1, 2, 3] {
            let mut team = Team::new(n_threads);
            for range in [0..0, 0..1, 3..1000, 0..1000] {
                team.forget(&values[range]);
            }
        }
        assert_eq!(values, (0..1000).map(|i| i as f32).collect::<Vec<_>>());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let mut team = Team::new(2);
        for _ in 0..3 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                team.run(8, &|unit, _| assert!(unit != 5, "unit five"));
            }));
            assert!(caught.is_err());
            team.run(8, &|_, _| ());
        }
    }

    #[test]
    fn ranges_cover_everything_once() {
        for (n, parts) in [(10, 3), (2, 5), (0, 1), (64, 4)] {
            let all: Vec<usize> = (0..parts).flat_map(|i| nth_range(n, parts, i)).collect();
            assert_eq!(all, (0..n).collect::<Vec<_>>());
        }
    }
}

//! A list of work that several workers share. One that runs short of memory beside others gives its piece back and leaves.

use anyhow::{Error, Result};
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The pieces that nobody has begun, and who works on the others.
pub(crate) struct Queue(Mutex<State>);

struct State {
    waiting: VecDeque<usize>,
    n_workers: usize,
    failure: Option<Error>,
}

/// How a worker's error is taken.
pub(crate) trait Shortage: Sync {
    /// Whether a piece failed because memory was short, so that it may succeed beside fewer others.
    fn is_shortage(&self, _: &Error) -> bool {
        false
    }
    /// A worker has left for that reason: `n_workers` continue.
    fn fewer(&self, _: &Error, _: usize) {}
}

/// Memory is never short.
impl Shortage for () {}

impl Queue {
    /// A list of `n` pieces for `n_workers`.
    pub fn new(n: usize, n_workers: usize) -> Self {
        Self(Mutex::new(State { waiting: (0..n).collect(), n_workers, failure: None }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Workers that have not left.
    pub fn n_workers(&self) -> usize {
        self.lock().n_workers
    }

    /// Whether a piece has failed, so that the others should end early.
    pub fn is_halted(&self) -> bool {
        self.lock().failure.is_some()
    }

    /// Works the list off. `work` gets the number of a worker and of a piece.
    ///
    /// # Errors
    /// The first error of a piece, other than a shortage that others caused.
    pub fn run(&self, work: &(dyn Fn(usize, usize) -> Result<()> + Sync), shortage: &dyn Shortage) -> Result<()> {
        std::thread::scope(|scope| {
            let start = |worker| scope.spawn(move || while self.turn(&|piece| work(worker, piece), shortage) {});
            let workers: Vec<_> = (0..self.n_workers()).map(start).collect();
            // The scope itself would only say that some thread panicked.
            for worker in workers {
                worker.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
        });
        self.lock().failure.take().map_or(Ok(()), Err)
    }

    /// One piece of work; whether the worker stays.
    fn turn(&self, work: &dyn Fn(usize) -> Result<()>, shortage: &dyn Shortage) -> bool {
        let mut state = self.lock();
        let next = if state.failure.is_none() { state.waiting.pop_front() } else { None };
        let Some(piece) = next else {
            state.n_workers -= 1;
            return false;
        };
        let was_alone = state.n_workers == 1;
        drop(state);
        let Err(error) = work(piece) else { return true };
        let mut state = self.lock();
        if !was_alone && shortage.is_shortage(&error) {
            state.waiting.push_front(piece);
            // If the others have left since, their memory is free.
            if state.n_workers == 1 {
                return true;
            }
            state.n_workers -= 1;
            shortage.fewer(&error, state.n_workers);
        } else {
            state.n_workers -= 1;
            state.failure.get_or_insert(error);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    /// Takes "short" for a shortage, and remembers who is left.
    #[derive(Default)]
    struct Told(Mutex<Vec<usize>>);

    impl Shortage for Told {
        fn is_shortage(&self, error: &Error) -> bool {
            error.to_string() == "short"
        }

        fn fewer(&self, _: &Error, n_workers: usize) {
            self.0.lock().unwrap().push(n_workers);
        }
    }

    #[test]
    fn workers_run_side_by_side_and_every_piece_once() {
        let (both, done, told) = (Barrier::new(2), Mutex::new(Vec::new()), Told::default());
        let work = |worker, piece| {
            // Nobody passes alone.
            both.wait();
            done.lock().unwrap().push((worker, piece));
            Ok(())
        };
        Queue::new(6, 2).run(&work, &told).unwrap();
        let mut done = done.into_inner().unwrap();
        done.sort_unstable_by_key(|(_, piece)| *piece);
        assert!(done.iter().map(|(_, piece)| *piece).eq(0..6), "{done:?}");
        assert_eq!([0, 1].map(|worker| done.iter().filter(|(w, _)| *w == worker).count()), [3, 3]);
        assert!(told.0.into_inner().unwrap().is_empty());
    }

    #[test]
    fn a_shortage_beside_others_leaves_fewer_workers_and_loses_nothing() {
        let (n_begun, done, told) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Told::default());
        let start = Barrier::new(3);
        let work = |_, piece| {
            let nth = n_begun.fetch_add(1, SeqCst);
            if nth < 3 {
                start.wait();
            }
            if nth == 2 {
                bail!("short");
            }
            // The others are at work until the third has left.
            while told.0.lock().unwrap().is_empty() {
                std::thread::yield_now();
            }
            done.lock().unwrap().push(piece);
            Ok(())
        };
        Queue::new(7, 3).run(&work, &told).unwrap();
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert_eq!(done, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(told.0.into_inner().unwrap(), [2]);
    }

    #[test]
    fn a_shortage_is_tried_again_where_the_others_have_left() {
        let (queue, both, n_tries, told) = (Queue::new(2, 2), Barrier::new(2), AtomicUsize::new(0), Told::default());
        let work = |_, piece| {
            let nth = if piece == 0 { n_tries.fetch_add(1, SeqCst) } else { 0 };
            if nth == 0 {
                both.wait();
            }
            while piece == 0 && queue.n_workers() > 1 {
                std::thread::yield_now();
            }
            if piece == 0 && nth == 0 {
                bail!("short");
            }
            Ok(())
        };
        queue.run(&work, &told).unwrap();
        assert_eq!((n_tries.into_inner(), told.0.into_inner().unwrap().len()), (2, 0));
    }

    #[test]
    fn a_shortage_of_one_alone_is_an_error() {
        let told = Told::default();
        let failed = Queue::new(2, 1).run(&|_, _| bail!("short"), &told).unwrap_err();
        assert_eq!(failed.to_string(), "short");
        assert!(told.0.into_inner().unwrap().is_empty());
    }

    #[test]
    fn a_failure_halts_the_others_and_is_reported() {
        let (queue, told) = (Queue::new(100, 2), Told::default());
        let both = Barrier::new(2);
        let work = |_, piece| {
            if piece < 2 {
                both.wait();
            }
            if piece == 0 {
                bail!("broken");
            }
            while !queue.is_halted() {
                std::thread::yield_now();
            }
            bail!("stopped early")
        };
        assert_eq!(queue.run(&work, &told).unwrap_err().to_string(), "broken");
    }
}

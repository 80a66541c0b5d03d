//! Exponential back-off.

use std::time::Duration;

/// Waits that double with each failure, up to a limit.
#[derive(Debug)]
pub(crate) struct BackOff {
    first: Duration,
    max: Duration,
    n_failures: u32,
}

impl BackOff {
    pub fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, n_failures: 0 }
    }

    /// The wait after another failure.
    pub fn next(&mut self) -> Duration {
        let wait = self.first.saturating_mul(2u32.saturating_pow(self.n_failures));
        self.n_failures = self.n_failures.saturating_add(1);
        wait.min(self.max)
    }

    /// After a success: the next wait is the first again.
    pub fn reset(&mut self) {
        self.n_failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit_and_no_further() {
        let mut back_off = BackOff::new(Duration::from_millis(287), Duration::from_millis(30_037));
        let waits: Vec<Duration> = (0..1000).map(|_| back_off.next()).collect();
        assert!(waits[..7].windows(2).all(|w| w[1] == 2 * w[0]));
        assert_eq!(waits[999], Duration::from_millis(30_037));
        back_off.reset();
        assert_eq!(back_off.next(), waits[0]);
    }
}

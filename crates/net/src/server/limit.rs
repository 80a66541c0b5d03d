//! Rate limits: of requests, and of log lines that strangers cause.

use super::lock;
use std::sync::Mutex;
use std::time::Instant;

/// A token bucket: it fills at a rate, up to a limit.
#[derive(Debug)]
pub(crate) struct Bucket {
    per_s: f64,
    most: f64,
    left: f64,
    at: Instant,
}

impl Bucket {
    /// A full bucket; its limit is at least one.
    pub fn new(per_s: f64, most: f64) -> Self {
        let most = most.max(1.0);
        Self { per_s, most, left: most, at: Instant::now() }
    }

    /// Takes one token, if there is one.
    pub fn take(&mut self, now: Instant) -> bool {
        let filled = self.per_s * now.saturating_duration_since(self.at).as_secs_f64();
        (self.left, self.at) = ((self.left + filled).min(self.most), now);
        let may = self.left >= 1.0;
        if may {
            self.left -= 1.0;
        }
        may
    }
}

/// Limits warnings about strangers: a few at once, then one per second, with a count of those left out.
#[derive(Debug)]
pub(crate) struct Warnings {
    state: Mutex<(Bucket, u64)>,
}

impl Warnings {
    pub fn new() -> Self {
        Self { state: Mutex::new((Bucket::new(1.0, 20.0), 0)) }
    }

    /// If another warning may be written: how many were left out before it.
    pub fn next(&self) -> Option<u64> {
        self.next_at(Instant::now())
    }

    fn next_at(&self, now: Instant) -> Option<u64> {
        let mut state = lock(&self.state);
        let (bucket, left_out) = &mut *state;
        if bucket.take(now) {
            return Some(std::mem::take(left_out));
        }
        *left_out += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_flood_of_warnings_becomes_one_line_per_second_and_all_are_counted() {
        let (warnings, start) = (Warnings::new(), Instant::now());
        let (mut n_lines, mut n_left_out) = (0, 0);
        for ms in 0..60_000 {
            if let Some(left_out) = warnings.next_at(start + Duration::from_millis(ms)) {
                n_lines += 1;
                n_left_out += left_out;
            }
        }
        assert!((79..=80).contains(&n_lines), "{n_lines}");
        // All are counted but those after the last line.
        assert!(n_lines + n_left_out > 59_000 && n_lines + n_left_out <= 60_000, "{n_left_out}");
    }

    #[test]
    fn a_bucket_fills_no_higher_than_its_limit_and_no_clock_empties_it() {
        let mut bucket = Bucket::new(10.0, 20.0);
        let start = Instant::now();
        let take = |bucket: &mut Bucket, now| (0..100).filter(|_| bucket.take(now)).count();
        assert_eq!(take(&mut bucket, start), 20);
        assert_eq!(take(&mut bucket, start + Duration::from_secs(1)), 10);
        assert_eq!(take(&mut bucket, start), 0);
        assert_eq!(take(&mut bucket, start + Duration::from_hours(1)), 20);
        assert!(Bucket::new(0.01, 0.02).take(start));
    }
}

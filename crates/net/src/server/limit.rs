//! Rate limits: of requests, and of log lines that others cause.

use super::lock;
use std::collections::BTreeMap;
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

/// One bucket per key, for example per address.
#[derive(Debug)]
pub(crate) struct Buckets<K> {
    per_s: f64,
    most: f64,
    all: Mutex<BTreeMap<K, Bucket>>,
}

impl<K: Ord> Buckets<K> {
    /// Strangers choose their addresses. Beyond this number, buckets that have filled up again are forgotten.
    const KEYS_MAX: usize = 4096;

    pub fn new(per_s: f64, most: f64) -> Self {
        Self { per_s, most, all: Mutex::default() }
    }

    /// Takes one token from the key's bucket, if there is one.
    pub fn take(&self, key: K) -> bool {
        self.take_at(key, Instant::now())
    }

    fn take_at(&self, key: K, now: Instant) -> bool {
        let mut all = lock(&self.all);
        if all.len() >= Self::KEYS_MAX {
            let fills_in_s = self.most / self.per_s;
            all.retain(|_, bucket| now.saturating_duration_since(bucket.at).as_secs_f64() < fills_in_s);
        }
        all.entry(key).or_insert_with(|| Bucket::new(self.per_s, self.most)).take(now)
    }
}

/// Limits warnings: a few at once, then one per second, with a count of those omitted.
#[derive(Debug)]
pub(crate) struct Warnings {
    state: Mutex<(Bucket, u64)>,
}

impl Warnings {
    pub fn new() -> Self {
        Self { state: Mutex::new((Bucket::new(1.0, 20.0), 0)) }
    }

    /// If another warning may be written: how many were omitted before it.
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

/// Limits the warnings that each member causes, so that none can hide another's.
#[derive(Debug, Default)]
pub(crate) struct MemberWarnings {
    all: Mutex<BTreeMap<u32, Warnings>>,
}

impl MemberWarnings {
    /// As [`Warnings::next`], for a client.
    pub fn next(&self, client: u32) -> Option<u64> {
        lock(&self.all).entry(client).or_insert_with(Warnings::new).next()
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

    #[test]
    fn an_address_empties_its_own_bucket_only_and_many_addresses_do_not_fill_the_memory() {
        let (buckets, start) = (Buckets::new(5.0, 10.0), Instant::now());
        let take = |key: u32, now| (0..100).filter(|_| buckets.take_at(key, now)).count();
        assert_eq!((take(1, start), take(1, start), take(2, start)), (10, 0, 10));
        for key in 0..100_000 {
            buckets.take_at(key, start + Duration::from_millis(u64::from(key)));
        }
        let n = lock(&buckets.all).len();
        assert!(n <= 4096, "{n}");
    }
}

//! Counter-based random streams.
//!
//! There is no global generator. A [`Stream`] is a pure function of a seed, a [`Purpose`] and up to three ids
//! (round, client, epoch …). So a draw depends neither on the order of threads nor on earlier draws.
//! New randomness takes a new purpose; old runs then keep their draws. Draws that nobody may repeat come from [`System`].
//!
//! ```
//! use fedproj_rng::{Purpose, Stream};
//!
//! let mut a = Stream::new(7, Purpose::BatchOrder, [3, 1, 0]);
//! let mut b = Stream::new(7, Purpose::BatchOrder, [3, 1, 0]);
//! assert_eq!(a.permutation(10), b.permutation(10));
//! ```

mod philox;
mod system;

pub use philox::philox4x32_10;
pub use system::System;

/// What a stream is for. The numbers are part of every recorded run: never reuse or renumber them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Initial weights; ids: hash of the span name.
    Init = 1,
    /// Dropout masks; ids: caller's step key, node.
    Dropout = 2,
    /// Order of a client's samples; ids: round, client, epoch.
    BatchOrder = 3,
    /// Assignment of samples to clients; ids: attempt.
    Partition = 4,
    /// Which clients take part in a round; ids: round.
    Cohort = 5,
    /// Train/test or private/public split.
    Split = 6,
    /// The memory of a round; ids: round.
    Memory = 7,
    /// Order of memory batches; ids: round, client, pass.
    MemoryOrder = 8,
    /// Projection dropout; ids: round, client, step.
    ProjectionDropout = 9,
    /// Order of public batches in distillation; ids: round, epoch.
    DistillOrder = 10,
    /// Synthetic data for benchmarks and tests.
    Synthetic = 11,
    /// Samples a virtual client draws for itself; ids: client.
    VirtualClient = 12,
    /// Crops and flips of a client's images; ids: round, client, step.
    Augment = 13,
    /// Noise and coins of a run whose privacy is nominal; ids: round, what is drawn.
    Privacy = 14,
    /// Images that are drawn, not read; ids: the image's number.
    Image = 15,
    /// Laplace noise on an ensemble's logits; ids: round.
    LaplaceNoise = 20,
    /// Labels and noise of generated features; ids: round, client (the server: the largest number), step.
    Generator = 22,
}

/// A source of random bits.
pub trait Bits {
    /// The next 32 random bits.
    fn next_u32(&mut self) -> u32;
}

impl<B: Bits + ?Sized> Bits for Box<B> {
    fn next_u32(&mut self) -> u32 {
        (**self).next_u32()
    }
}

/// Bits fixed by (seed, purpose, ids).
#[derive(Clone, Debug)]
pub struct Philox {
    key: [u32; 2],
    counter: u64,
    block: [u32; 4],
    used: usize,
}

impl Philox {
    /// The bits of (`seed`, `purpose`, `ids`); unused ids are 0.
    pub fn new(seed: u64, purpose: Purpose, ids: [u32; 3]) -> Self {
        let seed_key = [seed as u32, (seed >> 32) as u32];
        // One Philox call mixes purpose and ids into a key of its own, which leaves the whole counter for draws.
        let [k0, k1, ..] = philox4x32_10([purpose as u32, ids[0], ids[1], ids[2]], seed_key);
        Self { key: [k0, k1], counter: 0, block: [0; 4], used: 4 }
    }
}

impl Bits for Philox {
    fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.block = philox4x32_10([self.counter as u32, (self.counter >> 32) as u32, 0, 0], self.key);
            self.counter += 1;
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }
}

/// A sequence of random numbers, by default one that is fixed by (seed, purpose, ids).
#[derive(Clone, Debug)]
pub struct Stream<B = Philox> {
    bits: B,
}

impl Stream {
    /// The stream of (`seed`, `purpose`, `ids`); unused ids are 0.
    pub fn new(seed: u64, purpose: Purpose, ids: [u32; 3]) -> Self {
        Self::over(Philox::new(seed, purpose, ids))
    }
}

impl<B: Bits> Stream<B> {
    /// The numbers that these bits make.
    pub fn over(bits: B) -> Self {
        Self { bits }
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        self.bits.next_u32()
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) | (u64::from(self.next_u32()) << 32)
    }

    /// Uniform in [0, 1) with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// Uniform in 0..n without bias (Lemire 2019).
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: u32) -> u32 {
        assert!(n > 0, "cannot draw from an empty range");
        let mut product = u64::from(self.next_u32()) * u64::from(n);
        if (product as u32) < n {
            let threshold = n.wrapping_neg() % n;
            while (product as u32) < threshold {
                product = u64::from(self.next_u32()) * u64::from(n);
            }
        }
        (product >> 32) as u32
    }

    /// Standard normal (Box–Muller, one of the pair, so that every draw consumes the same number of bits).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Gamma with the given shape and scale 1 (Marsaglia and Tsang 2000; boosted below shape 1).
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let boost = (1.0 - self.uniform()).powf(1.0 / shape);
            return self.gamma(shape + 1.0) * boost;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.uniform()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }

    /// A point of the symmetric Dirichlet distribution over `n` outcomes; sums to 1.
    ///
    /// A concentration so small that every gamma draw underflows puts the whole mass on one outcome.
    pub fn dirichlet(&mut self, concentration: f64, n: usize) -> Vec<f64> {
        let mut p: Vec<f64> = (0..n).map(|_| self.gamma(concentration)).collect();
        let total: f64 = p.iter().sum();
        if total > 0.0 {
            for v in &mut p {
                *v /= total;
            }
        } else if n > 0 {
            p[self.below(n as u32) as usize] = 1.0;
        }
        p
    }

    /// Shuffles in place (Fisher–Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u32 + 1) as usize);
        }
    }

    /// A random order of 0..n.
    pub fn permutation(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        self.shuffle(&mut order);
        order
    }

    /// `k` distinct values of 0..n in increasing order, in time and memory O(k) (Floyd's algorithm).
    ///
    /// # Panics
    /// If `k` exceeds `n`.
    pub fn choose(&mut self, n: u32, k: u32) -> Vec<u32> {
        assert!(k <= n, "cannot choose {k} of {n}");
        let mut chosen = std::collections::BTreeSet::new();
        for upper in n - k..n {
            let candidate = self.below(upper + 1);
            if !chosen.insert(candidate) {
                chosen.insert(upper);
            }
        }
        chosen.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(id: u32) -> Stream {
        Stream::new(1, Purpose::Synthetic, [id, 0, 0])
    }

    #[test]
    fn streams_differ_by_seed_purpose_and_each_id() {
        let first = |seed, purpose, ids| Stream::new(seed, purpose, ids).next_u64();
        let all = [
            first(0, Purpose::Init, [0, 0, 0]),
            first(1, Purpose::Init, [0, 0, 0]),
            first(1 << 32, Purpose::Init, [0, 0, 0]),
            first(0, Purpose::Cohort, [0, 0, 0]),
            first(0, Purpose::Init, [1, 0, 0]),
            first(0, Purpose::Init, [0, 1, 0]),
            first(0, Purpose::Init, [0, 0, 1]),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn the_systems_bits_never_repeat() {
        let mut all = std::collections::BTreeSet::new();
        for _ in 0..2 {
            let mut stream = Stream::over(System::default());
            // More than one buffer.
            all.extend((0..1000).map(|_| stream.next_u64()));
        }
        assert_eq!(all.len(), 2000);
    }

    #[test]
    fn moments_match_their_distributions() {
        let n = 40_000;
        let mean_and_variance = |draw: &mut dyn FnMut() -> f64| {
            let x: Vec<f64> = (0..n).map(|_| draw()).collect();
            let mean = x.iter().sum::<f64>() / f64::from(n);
            (mean, x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n))
        };
        let check = |name: &str, (mean, variance): (f64, f64), expected: (f64, f64)| {
            assert!((mean - expected.0).abs() < 0.03 * expected.0.abs().max(1.0), "{name}: mean {mean}");
            assert!((variance - expected.1).abs() < 0.06 * expected.1, "{name}: variance {variance}");
        };
        let mut s = stream(1);
        check("uniform", mean_and_variance(&mut || s.uniform()), (0.5, 1.0 / 12.0));
        check("normal", mean_and_variance(&mut || s.normal()), (0.0, 1.0));
        check("gamma 0.3", mean_and_variance(&mut || s.gamma(0.3)), (0.3, 0.3));
        check("gamma 4", mean_and_variance(&mut || s.gamma(4.0)), (4.0, 4.0));
        check("below 7", mean_and_variance(&mut || f64::from(s.below(7))), (3.0, 4.0));
    }

    #[test]
    fn dirichlet_sums_to_one_even_when_every_gamma_underflows() {
        for concentration in [1e-9, 0.1, 1.0, 100.0] {
            let p = stream(2).dirichlet(concentration, 13);
            assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{concentration}: {p:?}");
            assert!(p.iter().all(|v| (0.0..=1.0).contains(v)));
        }
    }

    #[test]
    fn permutation_and_choice_hold_each_value_once() {
        let mut order = stream(3).permutation(101);
        assert_ne!(order, (0..101).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..101).collect::<Vec<_>>());
        let chosen = stream(4).choose(1_000_000, 50);
        assert_eq!(chosen.len(), 50);
        assert!(chosen.windows(2).all(|w| w[0] < w[1]) && chosen[49] < 1_000_000);
        assert_eq!(stream(5).choose(5, 5), vec![0, 1, 2, 3, 4]);
        assert!(stream(6).choose(5, 0).is_empty());
    }
}

//! What a node's vector holds: counts, measurements and the parts of its contribution, each as integers of one scale.

use crate::error::{Error, Result};
use crate::wire::{part_name, parts_of};
use fedproj_core::fixed::{Scale, Sum, UNIT, encode, total_digits, weight_of};
use fedproj_core::privacy::discrete::Share;
use fedproj_core::{ClientSummary, Contributions, EnsembleWeights, Experiment, LocalStats, Measured, Method, Part};
use fedproj_rng::System;
use std::collections::BTreeMap;

/// The number of samples and the measurements, before the parts.
const HEAD: usize = 1 + 9;

/// The layout of a run's vectors. Server and nodes compute it from the configuration.
#[derive(Clone, Debug)]
pub struct MaskedLayout {
    /// What is summed, how clients weigh in it, and its values.
    parts: Vec<(Part<'static>, EnsembleWeights, usize)>,
    /// What makes integers of these values.
    integers: Integers,
}

#[derive(Clone, Debug)]
enum Integers {
    /// Weighed values, after counts and measurements.
    Weighed(Scale),
    /// Under privacy: clipped values with noise, and nothing else.
    Noised(Vec<Share>),
}

impl MaskedLayout {
    /// The layout of an experiment's contributions in a run with `n_clients` clients; a node knows only its own. Under privacy
    /// each client adds one of `n_adders` shares of the noise.
    ///
    /// # Errors
    /// If its sums are not in integers, or its method needs more than sums.
    pub fn new(experiment: &Experiment, method: &dyn Method, n_clients: usize, n_adders: usize) -> Result<Self> {
        let config = &experiment.config;
        let lengths: BTreeMap<String, usize> = parts_of(experiment, method, true).into_iter().collect();
        let part = |(by, part)| (part, by, lengths.get(&part_name(part)).copied().unwrap_or(0));
        if config.privacy.is_on() {
            if !config.privacy.is_by_nodes() || n_adders < 3 {
                return Err(Error::config(
                    "privacy: the noise of masked sums is the nodes'\nhint: privacy.noise=nodes",
                ));
            }
            let released = config.privacy.released(method.needs_public());
            let shares = released.iter().map(|released| config.privacy.share_of(released, n_adders)).collect();
            let parts = released.iter().map(|released| part((EnsembleWeights::Uniform, released.part))).collect();
            return Ok(Self { parts, integers: Integers::Noised(shares) });
        }
        let scale = config.federation.scale(n_clients).ok_or_else(|| {
            Error::config("server.secure: masked vectors are sums of integers\nhint: federation.sum=fixed")
        })?;
        let means = method.means().ok_or_else(|| {
            let name = &config.method.name;
            Error::config(format!("server.secure: {name} needs the results of single clients, and sums hide them"))
        })?;
        Ok(Self { parts: means.into_iter().map(part).collect(), integers: Integers::Weighed(scale) })
    }

    /// Values of a vector, its check word included.
    pub fn n_masked(&self) -> usize {
        let of = |(_, by, n): &(Part<'static>, EnsembleWeights, usize)| n + usize::from(total_digits(*by).is_some());
        let head = if matches!(self.integers, Integers::Noised(_)) { 0 } else { HEAD };
        head + self.parts.iter().map(of).sum::<usize>() + 1
    }

    /// A client's vector, without check word, from its summary, its normalised steps and its parts. `base`: the weights that it
    /// received. Under privacy this draws the client's noise, so a contribution is encoded once.
    ///
    /// # Errors
    /// If a value is out of range, or a part is missing.
    pub fn encode(
        &self,
        summary: ClientSummary<'_>,
        steps: f64,
        base: &[f32],
        parts: &[(Part<'_>, &Vec<f32>)],
    ) -> Result<Vec<u64>> {
        let found = |part: &Part<'_>, n: usize| {
            let found = parts.iter().find(|(of, vector)| of == part && vector.len() == n).map(|(_, v)| &v[..]);
            // What has no values need not be there.
            found.or((n == 0).then_some(&[][..])).ok_or_else(|| Error::internal(format!("no {n} values of {part:?}")))
        };
        let scale = match &self.integers {
            Integers::Weighed(scale) => *scale,
            Integers::Noised(shares) => {
                let (mut values, mut draws) = (Vec::new(), System::default());
                for ((part, _, n), share) in self.parts.iter().zip(shares) {
                    let vector = found(part, *n)?;
                    let base = if *part == Part::Weights { base } else { &vec![0.0; *n] };
                    let apart: Vec<f64> = vector.iter().zip(base).map(|(v, b)| f64::from(*v) - f64::from(*b)).collect();
                    values.extend(share.noised(&apart, &mut draws).into_iter().map(i64::cast_unsigned));
                }
                return Ok(values);
            }
        };
        let ClientSummary { n_samples, stats, .. } = summary;
        let mut values: Vec<u64> = vec![n_samples as u64];
        values.extend(Measured::of(stats).0.map(i64::cast_unsigned));
        for (part, by, n) in &self.parts {
            let vector = found(part, *n)?;
            let weight = weight_of(*by, n_samples, steps);
            // Its digits end at the point, so this is exact.
            values.extend(total_digits(*by).map(|digits| (weight * f64::from(1 << digits)) as u64));
            let encoded = encode(vector, weight, scale)?;
            values.extend(encoded.into_iter().map(i64::cast_unsigned));
        }
        Ok(values)
    }

    /// The sums in the sum of these clients' vectors, without its check word.
    pub fn sums(&self, clients: Vec<u32>, values: &[u64]) -> Sums {
        let mut values = values.iter().map(|v| v.cast_signed());
        if let Integers::Noised(_) = self.integers {
            let mut sum = |(part, by, n): &(Part<'static>, EnsembleWeights, usize)| {
                (*part, *by, Sum { values: values.by_ref().take(*n).collect(), weight: 0.0 })
            };
            let parts = self.parts.iter().map(&mut sum).collect();
            return Sums { clients, nothing: LocalStats::default(), measured: None, parts, n_samples: None };
        }
        let n_samples = values.next().unwrap_or_default();
        let measured = Measured(std::array::from_fn(|_| values.next().unwrap_or_default()));
        let mut sum = |(part, by, n): &(Part<'static>, EnsembleWeights, usize)| {
            let weight = match (by, total_digits(*by)) {
                (_, Some(digits)) => values.next().unwrap_or_default() as f64 / f64::from(1 << digits),
                (EnsembleWeights::Uniform, None) => UNIT * clients.len() as f64,
                (_, None) => n_samples as f64,
            };
            (*part, *by, Sum { values: values.by_ref().take(*n).collect(), weight })
        };
        let parts = self.parts.iter().map(&mut sum).collect();
        Sums { clients, nothing: LocalStats::default(), measured: Some(measured), parts, n_samples: Some(n_samples) }
    }

    /// The means of a sum. `base`: the weights from which clients started, to which noised updates are added.
    pub fn means(&self, sums: &Sums, base: &[f32]) -> Vec<(Part<'static>, Vec<f32>)> {
        let mean = |at: usize, part: Part<'static>, sum: &Sum| match &self.integers {
            Integers::Weighed(scale) => sum.mean(*scale),
            Integers::Noised(shares) => {
                let mean = shares[at].mean(&sum.values, sums.clients.len());
                let base = |at: usize| if part == Part::Weights { f64::from(base[at]) } else { 0.0 };
                mean.into_iter().enumerate().map(|(at, v)| (base(at) + v) as f32).collect()
            }
        };
        sums.parts.iter().enumerate().map(|(at, (part, _, sum))| (*part, mean(at, *part, sum))).collect()
    }
}

/// Contributions of which only the sums are known.
#[derive(Debug)]
pub struct Sums {
    clients: Vec<u32>,
    nothing: LocalStats,
    /// None under privacy.
    measured: Option<Measured>,
    parts: Vec<(Part<'static>, EnsembleWeights, Sum)>,
    /// None under privacy.
    n_samples: Option<i64>,
}

impl Sums {
    /// The number of samples of all clients, as they claim; none under privacy.
    pub fn n_samples(&self) -> Option<i64> {
        self.n_samples
    }

    fn find(&self, by: Option<EnsembleWeights>, part: Part<'_>) -> Option<&Sum> {
        let found = self.parts.iter().find(|(of, weighed, _)| *of == part && by.is_none_or(|by| by == *weighed));
        found.map(|(_, _, sum)| sum)
    }
}

impl Contributions for Sums {
    fn n(&self) -> usize {
        self.clients.len()
    }

    fn summary(&self, at: usize) -> ClientSummary<'_> {
        ClientSummary { client: self.clients[at], n_samples: 0, n_steps: 0, stats: &self.nothing }
    }

    fn len_of(&self, _: usize, part: Part<'_>) -> usize {
        self.find(None, part).map_or(0, |sum| sum.values.len())
    }

    fn n_values(&self, _: usize) -> usize {
        self.parts.iter().map(|(_, _, sum)| sum.values.len()).sum()
    }

    fn read(&self, _: usize, part: Part<'_>, _: usize, _: &mut [f32]) -> fedproj_core::Result<()> {
        Err(unknown(part))
    }

    fn summed(&self, by: EnsembleWeights, part: Part<'_>) -> Option<fedproj_core::Result<Sum>> {
        let found = self.find(Some(by), part).filter(|_| self.measured.is_some());
        Some(found.cloned().ok_or_else(|| unknown(part)))
    }

    fn noised(&self, part: Part<'_>) -> Option<&[i64]> {
        let found = self.find(None, part).filter(|_| self.measured.is_none());
        found.map(|sum| &sum.values[..])
    }

    fn measured(&self) -> Option<Measured> {
        self.measured
    }
}

fn unknown(part: Part<'_>) -> fedproj_core::Error {
    let problem = format!("{} is not known under secure aggregation", part_name(part));
    fedproj_core::Error::Internal { what: "reading a contribution", problem }
}

//! What a node's vector holds: counts, measurements and the parts of its contribution, each as integers of one scale.

use crate::error::{Error, Result};
use crate::wire::{part_name, parts_of};
use fedproj_core::fixed::{Scale, Sum, UNIT, encode, weight_of};
use fedproj_core::{Contributions, EnsembleWeights, Experiment, Head, LocalStats, Measured, Method, Part};
use std::collections::BTreeMap;

/// The number of samples and the measurements, before the parts.
const HEAD: usize = 1 + 9;

/// The layout of a run's vectors. Server and nodes compute it from the configuration.
#[derive(Clone, Debug)]
pub struct Layout {
    /// What is summed, how clients weigh in it, and its values.
    parts: Vec<(Part<'static>, EnsembleWeights, usize)>,
    scale: Scale,
}

impl Layout {
    /// The layout of an experiment's contributions in a run with so many clients. A node knows only its own.
    ///
    /// # Errors
    /// If its sums are not in integers, or its method needs more than sums.
    pub fn new(experiment: &Experiment, method: &dyn Method, n_clients: usize) -> Result<Self> {
        let config = &experiment.config;
        let scale = config.federation.scale(n_clients).ok_or_else(|| {
            Error::config("server.secure: masked vectors are sums of integers\nhint: federation.sum=fixed")
        })?;
        let means = method.means().ok_or_else(|| {
            let name = &config.method.name;
            Error::config(format!("server.secure: {name} needs the results of single clients, and sums hide them"))
        })?;
        let lengths: BTreeMap<String, usize> = parts_of(experiment, method, true).into_iter().collect();
        let part = |(by, part)| (part, by, lengths.get(&part_name(part)).copied().unwrap_or(0));
        Ok(Self { parts: means.into_iter().map(part).collect(), scale })
    }

    /// Values of a vector, its check word included.
    pub fn n_masked(&self) -> usize {
        HEAD + self.parts.iter().map(|(_, _, n)| n).sum::<usize>() + 1
    }

    /// A client's vector, without check word, from the parts of its contribution.
    ///
    /// # Errors
    /// If a value is out of range, or a part is missing.
    pub fn encode(&self, n_samples: usize, stats: &LocalStats, parts: &[(Part<'_>, &Vec<f32>)]) -> Result<Vec<u64>> {
        let mut values: Vec<u64> = vec![n_samples as u64];
        values.extend(Measured::of(stats).0.map(i64::cast_unsigned));
        for (part, by, n) in &self.parts {
            let vector = parts.iter().find(|(of, vector)| of == part && vector.len() == *n);
            let (_, vector) = vector.ok_or_else(|| Error::internal(format!("no {n} values of {part:?}")))?;
            let encoded = encode(vector, weight_of(*by, n_samples), self.scale)?;
            values.extend(encoded.into_iter().map(i64::cast_unsigned));
        }
        Ok(values)
    }

    /// The sums in the sum of these clients' vectors, without its check word.
    pub fn sums(&self, clients: Vec<u32>, values: &[u64]) -> Sums {
        let mut values = values.iter().map(|v| v.cast_signed());
        let n_samples = values.next().unwrap_or_default();
        let measured = Measured(std::array::from_fn(|_| values.next().unwrap_or_default()));
        let mut sum = |(part, by, n): &(Part<'static>, EnsembleWeights, usize)| {
            let weight = match by {
                EnsembleWeights::Samples => n_samples as f64,
                EnsembleWeights::Uniform => UNIT * clients.len() as f64,
            };
            (*part, *by, Sum { values: values.by_ref().take(*n).collect(), weight })
        };
        let parts = self.parts.iter().map(&mut sum).collect();
        Sums { clients, nothing: LocalStats::default(), measured, parts, n_samples }
    }

    /// The means of a sum.
    pub fn means(&self, sums: &Sums) -> Vec<(Part<'static>, Vec<f32>)> {
        sums.parts.iter().map(|(part, _, sum)| (*part, sum.mean(self.scale))).collect()
    }
}

/// Contributions of which only the sums are known.
#[derive(Debug)]
pub struct Sums {
    clients: Vec<u32>,
    nothing: LocalStats,
    measured: Measured,
    parts: Vec<(Part<'static>, EnsembleWeights, Sum)>,
    n_samples: i64,
}

impl Sums {
    /// The number of samples of all clients, as they claim.
    pub fn n_samples(&self) -> i64 {
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

    fn head(&self, at: usize) -> Head<'_> {
        Head { client: self.clients[at], n_samples: 0, n_steps: 0, stats: &self.nothing }
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
        Some(self.find(Some(by), part).cloned().ok_or_else(|| unknown(part)))
    }

    fn measured(&self) -> Option<Measured> {
        Some(self.measured)
    }
}

fn unknown(part: Part<'_>) -> fedproj_core::Error {
    let problem = format!("{} is not known under secure aggregation", part_name(part));
    fedproj_core::Error::Internal { what: "reading a contribution", problem }
}

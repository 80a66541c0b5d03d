//! The results of several clients as sums in integers: what a worker sends instead of every model.
//!
//! It works where `federation.sum` is `"fixed"` and the method asks for nothing but means ([`Method::means`]). A sum has twice the
//! bytes of a model, whatever the number of clients.

use crate::bytes::{Named, Sections, append, lengths, pack, split, unpack};
use crate::config::Config;
use crate::contributions::{ClientSummary, Contributions, Part};
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::evaluate::Outputs;
use crate::fixed::{Scale, Sum, add, weight_of};
use crate::method::Method;
use crate::trainer::{ClientResult, ClientStates, LocalStats};
use serde::{Deserialize, Serialize};

const MAGIC: &[u8] = b"FEDPROJU";
const VERSION: u32 = 1;

/// A mean that a method asks for: how clients weigh, and the vector.
pub type Mean = (EnsembleWeights, Part<'static>);

/// A part without values: of its mean, only the clients' weight is asked for.
pub(crate) const NO_VALUES: Part<'static> = Part::Upload("");

/// The means of a run whose clients may be summed before they arrive; `None` if something looks at single clients.
pub(crate) fn means_of(config: &Config, method: &dyn Method) -> Option<Vec<Mean>> {
    let federation = &config.federation;
    let robust = &federation.robust;
    let limits = [robust.clip, robust.clip_ratio, robust.claim_ratio];
    let looks = federation.evaluate_clients || config.privacy.is_on() || limits.iter().any(|limit| *limit > 0.0);
    if looks || federation.scale(1).is_none() { None } else { method.means() }
}

/// The averages of the models: their weights weighed in a way of the method's, their buffers by samples.
pub(crate) fn averages(by: EnsembleWeights) -> Vec<Mean> {
    vec![(by, Part::Weights), (EnsembleWeights::Samples, Part::Buffers)]
}

/// The ensemble's outputs on the public set.
pub(crate) fn ensemble(by: EnsembleWeights, with_features: bool) -> Vec<Mean> {
    [(by, Part::Logits), (by, Part::Features)].into_iter().take(1 + usize::from(with_features)).collect()
}

/// The results of several clients, summed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Partial {
    clients: Vec<Trained>,
    /// What the clients keep.
    pub states: ClientStates,
    sums: Vec<Sum>,
    means: Vec<Mean>,
}

/// A client of a partial sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Trained {
    client: u32,
    n_samples: usize,
    n_steps: u32,
    /// Values that the client itself would have sent.
    n_values: usize,
    stats: LocalStats,
}

impl Partial {
    /// Nothing yet, for these means.
    pub fn new(means: &[Mean]) -> Self {
        Self { sums: vec![Sum::default(); means.len()], means: means.to_vec(), ..Self::default() }
    }

    /// Adds a client's result, and its outputs on the public set where a mean is of them.
    ///
    /// # Errors
    /// If a value is out of range, or a vector of another length than those before.
    pub fn add_client(
        &mut self,
        result: ClientResult,
        outputs: Option<&Outputs>,
        config: &Config,
        scale: Scale,
    ) -> Result<()> {
        let steps = config.normalised_steps(result.n_steps);
        for ((by, part), sum) in self.means.iter().zip(&mut self.sums) {
            let values = match (part, outputs) {
                (Part::Logits, Some(outputs)) => &outputs.logits[..],
                (Part::Features, Some(outputs)) => &outputs.features[..],
                _ => result.part(*part),
            };
            if self.clients.is_empty() {
                sum.values.resize(values.len(), 0);
            }
            Error::check_len("a client's vector", values.len(), sum.values.len())?;
            sum.add_client(values, weight_of(*by, result.n_samples, steps), scale)?;
        }
        let n_values = result.n_values();
        let ClientResult { client, n_samples, n_steps, stats, state, .. } = result;
        self.clients.push(Trained { client, n_samples, n_steps, n_values, stats });
        if !state.is_empty() {
            self.states.insert(client, state);
        }
        Ok(())
    }

    /// The clients, in the order of their ids once sums were merged.
    pub fn clients(&self) -> impl Iterator<Item = u32> {
        self.clients.iter().map(|trained| trained.client)
    }

    /// Adds the sums of another worker.
    ///
    /// # Errors
    /// If they are of other means or lengths.
    pub fn merge(&mut self, other: Self) -> Result<()> {
        if self.clients.is_empty() {
            *self = other;
            return Ok(());
        }
        let lens = |partial: &Self| partial.sums.iter().map(|sum| sum.values.len()).collect::<Vec<_>>();
        if self.means != other.means || lens(self) != lens(&other) {
            let problem = format!("sums of {:?} values, others of {:?}", lens(self), lens(&other));
            return Err(Error::Message { what: "sums of one round", problem });
        }
        for (sum, more) in self.sums.iter_mut().zip(other.sums) {
            add(&mut sum.values, &more.values);
            sum.weight += more.weight;
        }
        self.clients.extend(other.clients);
        self.clients.sort_by_key(|trained| trained.client);
        self.states.extend(other.states);
        Ok(())
    }

    /// The sums as bytes.
    ///
    /// # Errors
    /// Never for sums that were made here.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let states = self.states.iter().flat_map(|(client, state)| state.iter().map(move |s| (client, s)));
        let sections: Vec<Named<'_>> =
            states.map(|(client, (name, values))| (format!("{client}:{name}"), &values[..])).collect();
        let sums = self.sums.iter().map(|sum| (sum.values.len(), sum.weight)).collect();
        let header = Header { clients: self.clients.clone(), sums, sections: lengths(&sections) };
        let mut bytes = pack(MAGIC, VERSION, &header, &sections)?;
        for sum in &self.sums {
            append(&mut bytes, &sum.values, i64::to_le_bytes);
        }
        Ok(bytes)
    }

    /// Sums of these means from bytes.
    ///
    /// # Errors
    /// If these are not the bytes of such sums.
    pub fn from_bytes(bytes: &[u8], means: &[Mean]) -> Result<Self> {
        let wrong = |problem| Error::Message { what: "partial sums", problem };
        let (header, rest) = unpack::<Header>(MAGIC, VERSION, "partial sum", bytes).map_err(wrong)?;
        let cut = || wrong("they are cut short".into());
        let n_floats = header.sections.iter().try_fold(0usize, |n, (_, len)| n.checked_add(*len));
        let n_bytes = n_floats.and_then(|n| n.checked_mul(4)).ok_or_else(cut)?;
        let (states, mut rest) = rest.split_at_checked(n_bytes).ok_or_else(cut)?;
        let mut partial = Self { clients: header.clients, means: means.to_vec(), ..Self::default() };
        for (name, values) in split(header.sections, states).map_err(wrong)? {
            let owner = name.split_once(':').and_then(|(client, name)| Some((client.parse().ok()?, name)));
            let (client, name) = owner.ok_or_else(|| wrong(format!("section `{name}`")))?;
            partial.states.entry(client).or_default().insert(name.to_owned(), values);
        }
        for (len, weight) in header.sums {
            let (values, others) = len.checked_mul(8).and_then(|n| rest.split_at_checked(n)).ok_or_else(cut)?;
            let values = values.as_chunks().0.iter().map(|value| i64::from_le_bytes(*value)).collect();
            partial.sums.push(Sum { values, weight });
            rest = others;
        }
        if partial.sums.len() != means.len() || !rest.is_empty() {
            return Err(wrong(format!("{} sums; expected {}", partial.sums.len(), means.len())));
        }
        Ok(partial)
    }

    fn sum(&self, by: Option<EnsembleWeights>, part: Part<'_>) -> Option<&Sum> {
        let at = self.means.iter().position(|mean| mean.1 == part && by.is_none_or(|by| by == mean.0))?;
        self.sums.get(at)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    clients: Vec<Trained>,
    /// Length and weight of each sum.
    sums: Vec<(usize, f64)>,
    sections: Sections,
}

fn single(part: Part<'_>) -> Error {
    Error::Internal {
        what: "fusing sums",
        problem: format!("{part:?} of single clients, or another mean than announced"),
    }
}

impl Contributions for Partial {
    fn n(&self) -> usize {
        self.clients.len()
    }

    fn summary(&self, at: usize) -> ClientSummary<'_> {
        let Trained { client, n_samples, n_steps, ref stats, .. } = self.clients[at];
        ClientSummary { client, n_samples, n_steps, stats }
    }

    fn len_of(&self, _: usize, part: Part<'_>) -> usize {
        self.sum(None, part).map_or(0, |sum| sum.values.len())
    }

    fn n_values(&self, at: usize) -> usize {
        self.clients[at].n_values
    }

    fn read(&self, _: usize, part: Part<'_>, _: usize, _: &mut [f32]) -> Result<()> {
        Err(single(part))
    }

    fn summed(&self, by: EnsembleWeights, part: Part<'_>) -> Option<Result<Sum>> {
        Some(self.sum(Some(by), part).cloned().ok_or_else(|| single(part)))
    }
}

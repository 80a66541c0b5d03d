//! Repeats recorded rounds and compares everything that a run publishes, bit for bit.

use super::compare::Differences;
use super::directory::{checkpoints, config_hashes};
use super::manifest::{Manifest, check_gpu};
use super::seal;
use super::stored::{read_config, read_metrics, read_summary};
use crate::checkpoint;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::files::read_if_exists;
use crate::record::{RoundRecord, Summary};
use crate::simulate::Simulation;
use serde::Serialize;
use std::path::Path;

/// What [`verify`] did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// First round that was run again.
    pub from: u32,
    /// Rounds compared.
    pub n_rounds: u32,
    /// Files that were compared.
    pub compared: Vec<String>,
    /// Whether the run has a seal, and its files match it.
    pub sealed: bool,
    /// What was not compared, and why.
    pub notes: Vec<String>,
}

/// Which rounds [`verify`] repeats. The default is all.
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyPart {
    /// Start from the oldest checkpoint that is left, not from the beginning.
    pub from_checkpoint: bool,
    /// Largest number of rounds.
    pub rounds: Option<u32>,
}

/// Repeats a recorded run or a part of it, and compares all that it publishes except times. These are the manifest and the
/// repeated rounds' lines of `metrics.jsonl`. If the last round was repeated, they are also the seal, `metrics.csv`,
/// `summary.json` and the model.
///
/// # Errors
/// [`Error::Differs`] with everything that is not the same or missing; or if the run cannot be read or repeated.
pub fn verify(
    dir: &Path,
    data_dir: Option<&Path>,
    device: impl Into<Device>,
    part: VerifyPart,
    progress: &(dyn Fn(u32) + Sync),
) -> Result<Verified> {
    let device = device.into();
    check_gpu(dir, device.gpu_name().as_ref())?;
    let (config, recorded, manifest) = (read_config(dir)?, read_metrics(dir, None)?, Manifest::read(dir)?);
    let method = config.method.build()?;
    let experiment = Experiment::load(config, method.as_ref(), data_dir)?;
    let mut check = Check { dir, recorded, manifest, found: Differences::default(), compared: vec![], notes: vec![] };
    check.manifest(&Manifest::of(&experiment, device.clone()))?;
    let oldest = if part.from_checkpoint { checkpoints(dir)?.into_iter().next() } else { None };
    let mut simulation = match oldest {
        Some((_, path)) => {
            let (state, clients) = checkpoint::load(&path, &config_hashes(dir)?)?;
            Simulation::resume(experiment, method, device, state, clients)?
        }
        None => Simulation::new(experiment, method, device)?,
    };
    let from = simulation.state().n_rounds_done;
    let is_repeatable = simulation.experiment().config.privacy.is_repeatable();
    let n_rounds = if is_repeatable {
        check.rounds(&mut simulation, part.rounds.unwrap_or(u32::MAX), progress)?
    } else {
        check.notes.push(UNREPEATABLE.into());
        0
    };
    let (left_out, broken): (Vec<_>, Vec<_>) = seal::broken(dir)?.into_iter().partition(seal::Broken::is_left_out);
    let broken: Vec<String> = broken.iter().map(|broken| format!("the seal: {broken}")).collect();
    let sealed = check.is_sealed() && broken.is_empty();
    if !is_repeatable || simulation.is_done() || (from + n_rounds) as usize == check.recorded.len() {
        for broken in broken {
            check.found.add(broken);
        }
        check.results(&simulation, is_repeatable)?;
        let models = left_out.iter().filter(|left_out| !is_repeatable && left_out.file.starts_with("model"));
        check.notes.extend(models.map(ToString::to_string));
    } else {
        check
            .notes
            .push("not compared, since the last round was not repeated: metrics.csv, summary.json, model".into());
        check.notes.extend(broken);
        check.notes.extend(left_out.iter().map(ToString::to_string));
    }
    check.found.into_result(dir, check.manifest.as_ref())?;
    Ok(Verified { from, n_rounds, compared: check.compared, sealed, notes: check.notes })
}

/// Why a run under privacy is not repeated.
const UNREPEATABLE: &str = "no round was repeated: noise and clients came from the operating system, which gives them once; \
    the seal, summary.json and metrics.csv were compared with metrics.jsonl";

/// A run directory that is being compared with its rerun.
struct Check<'a> {
    dir: &'a Path,
    recorded: Vec<RoundRecord>,
    manifest: Option<Manifest>,
    found: Differences,
    compared: Vec<String>,
    notes: Vec<String>,
}

impl Check<'_> {
    fn is_sealed(&self) -> bool {
        self.manifest.as_ref().is_some_and(Manifest::is_sealed)
    }

    fn is_federated(&self) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| manifest.federated)
    }

    /// All but what describes the program and the machine.
    fn manifest(&mut self, again: &Manifest) -> Result<()> {
        let Some(recorded) = self.manifest.clone() else {
            self.found.add("manifest.json is missing".into());
            return Ok(());
        };
        let Manifest { version, hardware, federated, extended, seal, .. } = recorded.clone();
        let mut again = Manifest { version, hardware, federated, extended, seal, ..again.clone() };
        if !self.is_sealed() {
            self.notes.push("the run is not sealed: an earlier version made it, or it is unfinished".into());
            // Earlier versions counted less.
            again.sizes.retain(|key, _| recorded.sizes.contains_key(key));
            if recorded.classes.is_empty() && recorded.class_counts.is_empty() {
                (again.classes, again.class_counts) = (Vec::new(), Vec::new());
            }
        }
        self.compared.push("manifest.json".into());
        self.found.compare("manifest.json", &recorded, &again)
    }

    /// Repeats recorded rounds and returns how many. Ends where the model differs: all later rounds would differ too.
    fn rounds(&mut self, simulation: &mut Simulation, most: u32, progress: &(dyn Fn(u32) + Sync)) -> Result<u32> {
        let from = simulation.state().n_rounds_done;
        if self.is_federated() {
            self.notes.push("not compared: the federation's choice of clients, and its traffic in bytes".into());
        }
        self.compared.push("metrics.jsonl".into());
        // Earlier versions did not record it, in any round.
        let has_forgetting = self.is_sealed() || self.recorded.iter().any(|line| line.forgetting_by_client.is_some());
        if !has_forgetting && simulation.experiment().config.federation.evaluate_clients {
            self.notes.push("not compared: forgetting_by_client, which earlier versions did not record".into());
        }
        let has_personal = self.recorded.iter().any(|line| line.personal_by_client.is_some());
        let mut n_rounds = 0;
        while n_rounds < most && !simulation.is_done() {
            let at = (from + n_rounds) as usize;
            let Some(expected) = self.recorded.get(at).cloned() else { break };
            let mut again = if self.is_federated() {
                // Some clients may have been late.
                check_cohort(&expected, simulation.experiment())?;
                simulation.round_of(&expected.cohort, &|_| ())?
            } else {
                simulation.round(&|_| ())?
            };
            n_rounds += 1;
            again.seconds = expected.seconds;
            if self.is_federated() {
                (again.bytes_up, again.bytes_down) = (expected.bytes_up, expected.bytes_down);
            }
            if !has_forgetting {
                again.forgetting_by_client = None;
            }
            if !has_personal {
                again.personal_by_client = None;
            }
            if self.is_federated() {
                // A server sees no model that a client keeps for itself.
                again.personal_accuracy = expected.personal_accuracy;
                again.personal_by_client.clone_from(&expected.personal_by_client);
            }
            self.found.compare(&format!("metrics.jsonl, round {}", again.round), &expected, &again)?;
            progress(again.round);
            let differs = expected.model_hash != again.model_hash;
            // The summary and the table must follow from the rerun, not from lines that may be forged.
            self.recorded[at] = again;
            if differs {
                break;
            }
        }
        Ok(n_rounds)
    }

    /// What is written when a run finishes.
    fn results(&mut self, simulation: &Simulation, is_repeated: bool) -> Result<()> {
        let experiment = simulation.experiment();
        let (config, n_recorded) = (&experiment.config, self.recorded.len());
        let (is_finished, rounds) = (self.dir.join("summary.json").exists(), config.federation.rounds);
        if n_recorded > rounds as usize || (is_finished && !config.may_end_after(n_recorded)) {
            self.found.add(format!("metrics.jsonl has {n_recorded} lines, but the configuration has {rounds} rounds"));
            return Ok(());
        }
        if !is_finished {
            // The seal names a missing file.
            if !self.is_sealed() {
                self.notes.push("the run is unfinished: it has no summary.json".into());
            }
            return Ok(());
        }
        let cohort = config.federation.cohort(experiment.partition.n_clients());
        let summary = Summary::of(&config.method.name, config.seed, &config.federation, cohort, &self.recorded);
        self.found.compare("summary.json", &read_summary(self.dir)?, &summary)?;
        self.compared.push("summary.json".into());
        if is_repeated {
            for (group, state) in simulation.state().groups().enumerate() {
                let file = seal::model_file(group);
                let (path, model, graph) = (self.dir.join(&file), state.published(), &experiment.group(group).graph);
                let again = fedproj_nn::weights::to_bytes(&path, graph, model.weights, model.buffers)?;
                self.file(&file, &again, |found| found.compare_model(&path, graph, model, state))?;
            }
        }
        let (mut again, unmarked) = (RoundRecord::csv(&self.recorded), RoundRecord::unmarked_csv(&self.recorded));
        let is_earlier = match read_if_exists(&self.dir.join("metrics.csv"))? {
            Some(found) => found == unmarked.as_bytes(),
            None => self.sealed("metrics.csv").is_some_and(|sealed| *sealed == seal::hash(unmarked.as_bytes())),
        };
        if is_earlier {
            again = unmarked;
        }
        self.file("metrics.csv", again.as_bytes(), |found| {
            found.add("metrics.csv: is not the table of the metrics".into());
        })
    }

    /// The hash of a file in the seal.
    fn sealed(&self, name: &str) -> Option<&String> {
        self.manifest.as_ref().and_then(|manifest| manifest.seal.get(name))
    }

    /// Compares a file, and explains where it differs. Runs are often stored without these files: then the seal has the
    /// file's hash, if an earlier version did not make the run.
    fn file(&mut self, name: &str, again: &[u8], explain: impl FnOnce(&mut Differences)) -> Result<()> {
        let path = self.dir.join(name);
        let sealed = self.sealed(name);
        match read_if_exists(&path)? {
            None if sealed.is_some_and(|sealed| *sealed != seal::hash(again)) => {
                self.found.add(format!("{name}: is missing, and the rerun's does not have its hash"));
            }
            None if sealed.is_some() => self.notes.push(format!("{name} is missing; the rerun's has its hash")),
            None => self.notes.push(format!("{name} is missing")),
            Some(bytes) => {
                self.compared.push(name.to_owned());
                if bytes != again {
                    explain(&mut self.found);
                }
            }
        }
        Ok(())
    }
}

/// A federation's clients are taken as recorded, so they must be clients of the partition.
fn check_cohort(record: &RoundRecord, experiment: &Experiment) -> Result<()> {
    let (cohort, n) = (&record.cohort, experiment.partition.n_clients());
    let is_increasing = cohort.windows(2).all(|pair| pair[0] < pair[1]);
    // A round without clients has left the model as it was.
    if is_increasing && cohort.last().is_none_or(|last| (*last as usize) < n) {
        return Ok(());
    }
    let problem = format!("round {}: {cohort:?} are not clients of a federation of {n}", record.round);
    Err(Error::Corrupt { path: "metrics.jsonl".into(), problem })
}

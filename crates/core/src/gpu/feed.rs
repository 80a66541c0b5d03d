//! Where batches on a GPU come from: a data set, and targets for its samples.

use super::OnGpu;
use crate::error::Result;
use crate::evaluate::Which;
use fedproj_nn::Mode;
use fedproj_nn::cuda::{Batches, Data, Fleet, Target};

/// Where the batches of a kind come from, and how the network runs on them.
#[derive(Debug)]
pub(super) struct Feed {
    pub data: Which,
    pub mode: Mode,
    /// Whether inputs and target logits are cut to whole numbers.
    pub truncates: bool,
    /// Whether images are moved, as the table of moves says.
    pub moves: bool,
    /// Tables over all samples.
    pub targets: Vec<(Target, Data)>,
}

impl Feed {
    /// Copies target rows to the device, over the last ones where there are any. Returns whether a table came or went,
    /// which recorded steps do not know.
    pub fn set_rows(&mut self, on: &OnGpu, target: Target, values: &[f32]) -> Result<bool> {
        let known = self.targets.iter().position(|(kind, _)| *kind == target);
        match known {
            Some(at) if values.is_empty() => drop(self.targets.remove(at)),
            Some(at) => self.targets[at].1.replace(&on.gpu, values)?,
            None if values.is_empty() => {}
            None => {
                let n = self.data.of(&on.experiment).map_or(1, fedproj_data::Dataset::n_samples);
                self.targets.push((target, Data::matrix(&on.gpu, values, values.len() / n)?));
            }
        }
        Ok(known.is_some() == values.is_empty())
    }

    /// Gathers the batch of a table's current entry (`offset` entries on), and its targets.
    pub fn gather(&self, on: &OnGpu, fleet: &mut Fleet, table: Batches, offset: usize) -> Result<()> {
        let Some(data) = on.data(self.data) else { return Ok(()) };
        if self.moves {
            fleet.gather_moved(data)?;
        } else {
            fleet.gather(data, table, offset, self.truncates)?;
        }
        for (target, data) in &self.targets {
            let truncates = self.truncates && *target == Target::Logits;
            fleet.gather_target(data, table, offset, *target, truncates)?;
        }
        Ok(())
    }
}

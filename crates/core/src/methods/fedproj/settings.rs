//! Which settings of FedProj fit together, and what they ask of a round.

use super::FedProj;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::partial::{Mean, averages, ensemble};
use fedproj_data::PartitionConfig;

impl FedProj {
    /// See [`Method::check`].
    pub(super) fn check_settings(&self, config: &Config) -> Result<()> {
        self.projection.check("method.fedproj.projection")?;
        self.memory.check("method.fedproj.memory")?;
        self.distill.check("method.fedproj.distill")?;
        self.averages.check("method.fedproj.averages")?;
        self.correction.check("method.fedproj.correction")?;
        let (lambda, key) = (self.lookahead, "method.fedproj.lookahead");
        Error::require((0.0..1.0).contains(&lambda), key, lambda, "in [0, 1)")?;
        let is_alone = lambda == 0.0 || !self.corrects();
        Error::require(is_alone, key, lambda, "0 where method.fedproj.correction.alpha is above 0")?;
        if self.corrects() && matches!(config.data.partition, PartitionConfig::Virtual { .. }) {
            return Err(Error::config(format!(
                "method.fedproj.correction.alpha = {}: a client keeps a vector for its next round, but data.partition.kind = \
                 \"virtual\" stands for clients that come once and keep nothing\n\
                 hint: preset=leading-stateless averages the teacher alone, or choose another data.partition",
                self.correction.alpha
            )));
        }
        Ok(())
    }

    /// See [`Method::means`].
    pub(super) fn means_asked_for(&self) -> Vec<Mean> {
        let mut means = averages(self.weights_in_average());
        if self.needs_public() {
            means.extend(ensemble(self.distill.weights, self.needs_features()));
        }
        means
    }
}

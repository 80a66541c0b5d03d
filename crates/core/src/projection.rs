//! When and how FedProj projects a gradient: the choices that its paper leaves open.

use crate::authors::Authors;
use crate::cone::REFERENCES_MAX;
use crate::error::{Error, Result};
use crate::evaluate::Model;
use crate::fusion::{Fusion, SEND};
use crate::memory::MemoryConfig;
use crate::step::{Batch, ProjectionRule, Scope, Step, Vector};
use crate::subspace;
use fedproj_nn::Graph;
use fedproj_nn::vector::Bounds;
use serde::{Deserialize, Serialize};

/// When and how gradients are projected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Projection {
    /// How g is kept from unlearning. All but `fedproj` ignore `mode` (if it is not `off`), `reference`, `space`, `scope`, `eps`
    /// and `soft_weight`.
    pub rule: Rule,
    /// 1 to 16. Rule `gem`: memory gradients r per step. Rule `ogd`: per round. Rules `owm`, `gpm`, `sgp` and `trgp`: vectors
    /// that the server sends, each with room for one direction per output of a layer.
    pub references: usize,
    /// Share of the energy of a layer's inputs that the directions of rules `gpm`, `sgp` and `trgp` hold, in (0, 1]. With rule
    /// `owm` a direction that holds 1 − `energy` counts half, and weaker ones count less.
    pub energy: f64,
    /// Which gradients g are projected against the memory gradient r.
    pub mode: ProjectionMode,
    /// Weights at which the constraint must hold.
    pub reference: Reference,
    /// What is projected: the gradient or the optimiser's step.
    pub space: Space,
    /// What an inner product covers.
    pub scope: Scope,
    /// Rounds without projection at the start. Below 1: this share of all rounds, rounded up.
    pub warmup: f64,
    /// Probability of training without projection, in [0, 1].
    pub dropout: f64,
    /// What one draw of `dropout` exempts from projection.
    pub dropout_unit: DropoutUnit,
    /// ε ≥ 0 in the denominator ‖r‖² + ε.
    pub eps: f64,
    /// Weight γ ≥ 0 of mode `soft`: the client descends CE + γ T² KL.
    pub soft_weight: f32,
}

impl Default for Projection {
    fn default() -> Self {
        Self {
            rule: Rule::FedProj,
            references: 4,
            energy: 0.97,
            mode: ProjectionMode::Conditional,
            reference: Reference::Step,
            space: Space::Gradient,
            scope: Scope::Global,
            warmup: 0.1,
            dropout: 0.0,
            dropout_unit: DropoutUnit::ClientRound,
            eps: 1e-8,
            soft_weight: 1.0,
        }
    }
}

/// See `Projection::rule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// Projects g where it conflicts with r, as set below.
    #[serde(rename = "fedproj")]
    FedProj,
    /// A-GEM (Chaudhry et al. 2019): the same with ε = 0, over all parameters.
    AGem,
    /// GEM (Lopez-Paz and Ranzato 2017): the vector nearest to g that conflicts with none of several r, each from its own
    /// memory batch.
    Gem,
    /// OGD (Farajtabar et al. 2020): removes from g its parts along the r of the round's first weights, whatever their signs.
    Ogd,
    /// OWM (Zeng et al. 2019): removes from g what acts on the means of the layers' inputs over memory batches.
    Owm,
    /// GPM (Saha et al. 2021): removes from g what acts on the main directions of the layers' inputs on the memory.
    Gpm,
    /// SGP (Saha and Roy 2023): as GPM, but in proportion to each direction's importance.
    Sgp,
    /// TRGP (Lin et al. 2022): as GPM, but layers whose g lies mostly along the directions may scale their weights there.
    Trgp,
}

/// See [`Projection::mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProjectionMode {
    /// Those with ⟨g, r⟩ < 0, as the paper's equation.
    Conditional,
    /// All, as the paper's Algorithm 1.
    Always,
    /// None. The client adds γ T² r to g instead.
    Soft,
    /// None: FedDF.
    Off,
}

/// See [`Projection::reference`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// The current weights, at every step.
    Step,
    /// The round's first weights: no projection while the memory loss is below theirs.
    RoundStart,
}

/// See [`Projection::space`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The gradient, before the optimiser sees it.
    Gradient,
    /// The optimiser's step: the first-order guarantee then holds for any optimiser.
    Update,
}

/// See [`Projection::dropout_unit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropoutUnit {
    /// A client's whole round.
    ClientRound,
    /// A single step.
    Step,
}

/// The plain projection against a reference.
const WHOLE: ProjectionRule = ProjectionRule { bounds: Bounds::PLAIN, scope: Scope::Global, from_round_start: false };
/// The same, whichever way g points.
const ALONG: ProjectionRule = ProjectionRule { bounds: Bounds { always: true, ..Bounds::PLAIN }, ..WHOLE };

impl Rule {
    /// Whether it projects away from the layers' inputs, whose directions the server sends, and not against memory gradients.
    pub(crate) fn is_of_inputs(self) -> bool {
        matches!(self, Self::Owm | Self::Gpm | Self::Sgp | Self::Trgp)
    }
}

impl Projection {
    /// Whether all settings are in their ranges; `key` is their table in the configuration.
    pub(crate) fn check(&self, key: &str) -> Result<()> {
        let require =
            |ok, name: &str, value: f64, expected| Error::require(ok, &format!("{key}.{name}"), value, expected);
        let references = (1..=REFERENCES_MAX).contains(&self.references);
        require(references, "references", self.references as f64, "from 1 to 16")?;
        let by_step = self.rule == Rule::Ogd && self.dropout > 0.0 && self.dropout_unit == DropoutUnit::Step;
        require(
            !by_step,
            "dropout",
            self.dropout,
            "0 for rule \"ogd\" where dropout_unit is \"step\": its directions are of the round",
        )?;
        require(self.warmup >= 0.0, "warmup", self.warmup, "rounds, or below 1 a share of them")?;
        require((0.0..=1.0).contains(&self.dropout), "dropout", self.dropout, "in [0, 1]")?;
        require(self.energy > 0.0 && self.energy <= 1.0, "energy", self.energy, "above 0 and at most 1")?;
        require(self.eps >= 0.0, "eps", self.eps, "0 or positive")?;
        require(self.soft_weight >= 0.0, "soft_weight", self.soft_weight.into(), "0 or positive")
    }

    /// Whether the rule can work on this network.
    pub(crate) fn check_network(&self, graph: &Graph) -> Result<()> {
        if self.is_on() && self.rule.is_of_inputs() { subspace::products(graph).map(drop) } else { Ok(()) }
    }

    /// Rounds without projection at the start of a run of `n_rounds`.
    pub(crate) fn warmup_rounds(&self, n_rounds: u32) -> f64 {
        if self.warmup < 1.0 { (self.warmup * f64::from(n_rounds)).ceil() } else { self.warmup }
    }

    /// Whether a run projects at all.
    pub(crate) fn is_on(&self) -> bool {
        self.mode != ProjectionMode::Off
    }

    /// Whether clients need memory batches.
    pub(crate) fn uses_memory(&self) -> bool {
        self.is_on() && !self.rule.is_of_inputs()
    }

    /// Computes the directions of the layers' inputs at the new global model and sends them, for rules that need them.
    pub(crate) fn send_inputs(&self, round: &mut Fusion<'_>, memory: &MemoryConfig) -> Result<()> {
        let (experiment, next) = (round.experiment, round.round() + 1);
        let (config, is_due) = (&experiment.config, self.is_on() && self.rule.is_of_inputs());
        let Some(public) = experiment.public.as_ref().filter(|_| is_due) else { return Ok(()) };
        if f64::from(next) >= self.warmup_rounds(config.federation.rounds) {
            let model = Model { weights: &round.state.weights, buffers: &round.state.buffers };
            let all = subspace::vectors(self, memory, (config.seed, next), &experiment.graph, model, public)?;
            let named = all.into_iter().enumerate().map(|(i, v)| (format!("{SEND}{}", subspace::name(i)), v));
            round.state.vectors.extend(named);
        }
        Ok(())
    }

    /// Whether this step is projected.
    pub(crate) fn applies(&self, step: &Step<'_>, authors: &Authors) -> bool {
        let at = step.place();
        // The directions of inputs are first known after a round.
        let has_references = if self.rule.is_of_inputs() { at.round > 0 } else { step.has_memory() };
        let in_time = f64::from(at.round) >= self.warmup_rounds(at.n_rounds)
            && (authors.stop_round == 0 || at.round < authors.stop_round);
        let kept = || match self.dropout_unit {
            DropoutUnit::ClientRound => step.chance_of_round() >= self.dropout,
            DropoutUnit::Step => step.chance_of_step() >= self.dropout,
        };
        self.is_on() && has_references && in_time && (self.dropout == 0.0 || kept())
    }

    /// Keeps a step along g from unlearning, by the rule. Returns the memory gradient r where [`Self::update`] needs it.
    pub(crate) fn constrain(
        &self,
        step: &mut Step<'_>,
        g: Vector,
        memory: &MemoryConfig,
        authors: &Authors,
    ) -> Result<Option<Vector>> {
        if !self.applies(step, authors) {
            return Ok(None);
        }
        let (loss, n_terms) = memory.loss();
        let reference = |step: &mut Step<'_>| step.gradient(Batch::Memory, &loss[..n_terms]);
        match self.rule {
            Rule::FedProj => {
                let r = reference(step)?;
                match (self.mode, self.space) {
                    (ProjectionMode::Soft, _) => {
                        step.add_scaled(g, self.soft_weight * memory.temperature * memory.temperature, r);
                    }
                    (_, Space::Gradient) => step.project(g, r, &self.rule(authors))?,
                    (_, Space::Update) => (),
                }
                return Ok(Some(r));
            }
            Rule::AGem => {
                let r = reference(step)?;
                step.project(g, r, &WHOLE)?;
            }
            Rule::Gem => {
                let references: Vec<Vector> = (0..self.references).map(|_| reference(step)).collect::<Result<_>>()?;
                step.project_to_cone(g, &references)?;
            }
            Rule::Ogd => {
                let directions: Vec<Vector> = (0..self.references).map(|i| step.state(&format!("ogd.{i}"))).collect();
                let is_first = step.place().step == 0;
                for (i, &kept) in directions.iter().enumerate().filter(|_| is_first) {
                    let r = reference(step)?;
                    // Gram–Schmidt: each loses its parts along those before it. Twice, since little is left of one that nearly
                    // depends on them, and rounding is a large part of that.
                    for _ in 0..2 {
                        directions[..i].iter().try_for_each(|&before| step.project(r, before, &ALONG))?;
                    }
                    step.assign(kept, r);
                }
                directions.iter().try_for_each(|&kept| step.project(g, kept, &ALONG))?;
            }
            Rule::Owm | Rule::Gpm | Rule::Sgp | Rule::Trgp => {
                let directions: Vec<Vector> =
                    (0..self.references).map(|i| step.broadcast(&subspace::name(i))).collect();
                step.project_inputs(g, &directions, self.rule == Rule::Trgp)?;
            }
        }
        Ok(None)
    }

    /// One step of the optimiser along g; in the space of updates it is made compatible with r.
    pub(crate) fn update(&self, step: &mut Step<'_>, g: Vector, r: Option<Vector>, authors: &Authors) -> Result<()> {
        if let (Some(r), ProjectionMode::Conditional | ProjectionMode::Always, Space::Update) =
            (r, self.mode, self.space)
        {
            return step.update_projected(g, r, &self.rule(authors));
        }
        step.update(g);
        Ok(())
    }

    /// The exact bounds of rule `fedproj`.
    fn rule(&self, authors: &Authors) -> ProjectionRule {
        let bounds = Bounds {
            always: self.mode == ProjectionMode::Always,
            eps: self.eps,
            norm_guard: authors.norm_guard,
            coefficient_max: if authors.coefficient_max > 0.0 { authors.coefficient_max } else { f64::INFINITY },
        };
        ProjectionRule { bounds, scope: self.scope, from_round_start: self.reference == Reference::RoundStart }
    }
}

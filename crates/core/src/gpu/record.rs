//! What a method does in a step, written down instead of done: host choices are made here, numbers are computed later.

use crate::error::{Error, Result};
use crate::step::{Backend, Batch, Place, ProjectionRule, Term};
use crate::trainer::VectorId;
use fedproj_nn::{Graph, NodeId};

/// One call of a method.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    Gradient { batch: Batch, objective: Vec<Term>, out: usize },
    Embed { index: usize },
    AddScaled { y: VectorId, a: f32, x: VectorId },
    AddScaledDiff { g: VectorId, a: f32, x: VectorId, y: VectorId },
    Clip { g: VectorId, norm_max: f32 },
    Project { g: VectorId, r: VectorId, rule: ProjectionRule },
    Update { g: VectorId },
    UpdateProjected { g: VectorId, r: VectorId, rule: ProjectionRule },
    KeepModel { name: String },
}

/// The calls of one step. Clients and steps with equal programs share launches.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Program {
    pub ops: Vec<Op>,
}

impl Program {
    /// Memory batches that it takes.
    pub fn n_memory(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::Gradient { batch: Batch::Memory, .. })).count()
    }

    /// Gradients that it holds at a time.
    pub fn n_gradients(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::Gradient { .. })).count()
    }
}

/// Names of the vectors that handles stand for, the same for all clients of a run.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub states: Vec<String>,
    pub broadcasts: Vec<String>,
    pub uploads: Vec<String>,
    pub embeddings: Vec<(VectorId, NodeId)>,
}

fn place_of(list: &mut Vec<String>, name: &str) -> usize {
    list.iter().position(|n| n == name).unwrap_or_else(|| {
        list.push(name.to_owned());
        list.len() - 1
    })
}

/// Writes down what a method does for one client.
#[derive(Debug)]
pub(super) struct Recorder<'a> {
    pub graph: &'a Graph,
    pub names: &'a mut Names,
    /// Names of what the client keeps, to which new ones are added.
    pub kept: &'a mut Vec<String>,
    pub has_memory: bool,
    pub lr_total: f32,
    pub program: Program,
}

impl Backend for Recorder<'_> {
    fn graph(&self) -> &Graph {
        self.graph
    }

    fn has_memory(&self) -> bool {
        self.has_memory
    }

    fn gradient(&mut self, _: Place, batch: Batch, objective: &[Term]) -> Result<VectorId> {
        let out = self.program.n_gradients();
        self.program.ops.push(Op::Gradient { batch, objective: objective.to_vec(), out });
        Ok(VectorId::Gradient(out))
    }

    fn embed(&mut self, weights: VectorId, node: NodeId) -> Result<usize> {
        if weights == VectorId::Weights {
            return Err(Error::config(
                "a GPU embeds a client's samples once a round, so not under the weights that move within it\n\
                 hint: --device cpu",
            ));
        }
        let known = self.names.embeddings.iter().position(|e| *e == (weights, node));
        let index = known.unwrap_or_else(|| {
            self.names.embeddings.push((weights, node));
            self.names.embeddings.len() - 1
        });
        self.program.ops.push(Op::Embed { index });
        Ok(index)
    }

    fn broadcast_id(&mut self, name: &str) -> VectorId {
        VectorId::Broadcast(place_of(&mut self.names.broadcasts, name))
    }

    fn state_id(&mut self, name: &str) -> VectorId {
        place_of(self.kept, name);
        VectorId::State(place_of(&mut self.names.states, name))
    }

    fn upload_id(&mut self, name: &str) -> VectorId {
        VectorId::Upload(place_of(&mut self.names.uploads, name))
    }

    fn kept_model(&self, name: &str) -> Option<VectorId> {
        let known = self.kept.iter().any(|n| n == name);
        self.names.states.iter().position(|n| n == name).filter(|_| known).map(VectorId::State)
    }

    fn keep_model(&mut self, name: &str) {
        self.program.ops.push(Op::KeepModel { name: name.to_owned() });
    }

    fn lr_total(&self) -> f32 {
        self.lr_total
    }

    fn add_scaled(&mut self, y: VectorId, a: f32, x: VectorId) {
        self.program.ops.push(Op::AddScaled { y, a, x });
    }

    fn add_scaled_diff(&mut self, g: VectorId, a: f32, x: VectorId, y: VectorId) {
        self.program.ops.push(Op::AddScaledDiff { g, a, x, y });
    }

    fn clip(&mut self, g: VectorId, norm_max: f32) {
        self.program.ops.push(Op::Clip { g, norm_max });
    }

    fn project(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        self.program.ops.push(Op::Project { g, r, rule: *rule });
        Ok(())
    }

    fn update(&mut self, g: VectorId) {
        self.program.ops.push(Op::Update { g });
    }

    fn update_projected(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        self.program.ops.push(Op::UpdateProjected { g, r, rule: *rule });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::method::Method;
    use crate::step::{Finish, Scope, Step};
    use fedproj_nn::models::{self, Variant};
    use fedproj_nn::{Shape, vector::Bounds};

    const G: VectorId = VectorId::Gradient(0);
    const R: VectorId = VectorId::Gradient(1);
    const PRIVATE: Batch = Batch::Private;

    /// The names of a run, and one client after another.
    struct Cohort {
        method: Box<dyn Method>,
        graph: Graph,
        names: Names,
    }

    impl Cohort {
        fn new(method: &str, settings: &[&str]) -> Self {
            let all = settings.iter().map(|s| (*s).to_owned()).chain([format!("method.name={method}")]);
            let config = Config::from_layers(None, &all.collect::<Vec<_>>()).unwrap();
            let variant = Variant { projection_head: (method == "moon").then_some(4), ..Variant::default() };
            let graph = models::mlp(Shape::vector(6), &[8], 3, variant).unwrap();
            Self { method: config.method.build().unwrap(), graph, names: Names::default() }
        }

        fn record(
            &mut self,
            kept: &mut Vec<String>,
            has_memory: bool,
            lr_total: f32,
            work: impl FnOnce(&dyn Method, &mut Recorder<'_>),
        ) -> Vec<Op> {
            let (graph, names) = (&self.graph, &mut self.names);
            let mut recorder = Recorder { graph, names, kept, has_memory, lr_total, program: Program::default() };
            work(self.method.as_ref(), &mut recorder);
            recorder.program.ops
        }

        /// A step of a client that keeps `kept`, in a round after any warm-up.
        fn step_at(&mut self, kept: &mut Vec<String>, has_memory: bool, client: u32, step: u32) -> Vec<Op> {
            let place = Place { seed: 3, round: 5, n_rounds: 10, client, epoch: 0, step };
            self.record(kept, has_memory, 0.0, |method, recorder| {
                method.local_step(&mut Step { trainer: recorder, place }).unwrap();
            })
        }

        fn step(&mut self, kept: &mut Vec<String>) -> Vec<Op> {
            self.step_at(kept, true, 0, 0)
        }

        fn finish(&mut self, kept: &mut Vec<String>, lr_total: f32) -> Vec<Op> {
            self.record(kept, true, lr_total, |method, recorder| {
                method.finish_local(&mut Finish { trainer: recorder });
            })
        }
    }

    fn gradient(batch: Batch, objective: &[Term], out: usize) -> Op {
        Op::Gradient { batch, objective: objective.to_vec(), out }
    }

    #[test]
    fn fedavg_takes_a_gradient_and_a_step() {
        let mut cohort = Cohort::new("fedavg", &[]);
        let expected = [gradient(PRIVATE, &[Term::CrossEntropy], 0), Op::Update { g: G }];
        assert_eq!(cohort.step(&mut Vec::new()), expected);
        assert_eq!(cohort.finish(&mut Vec::new(), 1.0), []);
    }

    #[test]
    fn fedproj_projects_between_the_two_where_there_is_a_memory() {
        let mut cohort = Cohort::new("fedproj", &[]);
        let memory = gradient(Batch::Memory, &[Term::MemoryKl { temperature: 3.0 }], 1);
        let bounds = Bounds { eps: 1e-8, norm_guard: 0.0, ..Bounds::default() };
        let rule = ProjectionRule { bounds, scope: Scope::Global, from_round_start: false };
        let own = gradient(PRIVATE, &[Term::CrossEntropy], 0);
        let projecting = [own.clone(), memory.clone(), Op::Project { g: G, r: R, rule }, Op::Update { g: G }];
        assert_eq!(cohort.step(&mut Vec::new()), projecting);
        assert_eq!(cohort.step_at(&mut Vec::new(), false, 0, 0), [own.clone(), Op::Update { g: G }]);
        let mut cohort = Cohort::new("fedproj", &["method.fedproj.projection.space=update"]);
        assert_eq!(cohort.step(&mut Vec::new()), [own, memory, Op::UpdateProjected { g: G, r: R, rule }]);
    }

    #[test]
    fn equal_steps_share_a_program_and_others_do_not() {
        let half = ["method.fedproj.projection.dropout=0.5", "method.fedproj.projection.dropout_unit=step"];
        let mut cohort = Cohort::new("fedproj", &half);
        let mut distinct: Vec<Vec<Op>> = Vec::new();
        for (client, step) in (0..4).flat_map(|client| (0..8).map(move |step| (client, step))) {
            let program = cohort.step_at(&mut Vec::new(), true, client, step);
            if !distinct.contains(&program) {
                distinct.push(program);
            }
        }
        // With the projection and without, whichever client and step.
        assert_eq!(distinct.len(), 2);
        let count = |n: usize| distinct.iter().filter(|ops| Program { ops: (*ops).clone() }.n_memory() == n).count();
        assert_eq!((count(0), count(1)), (1, 1));
    }

    #[test]
    fn scaffold_corrects_by_two_vectors_and_sends_what_changed() {
        let (mut cohort, mut kept) = (Cohort::new("scaffold", &["local.optimizer={kind='sgd', lr=0.1}"]), Vec::new());
        let (c, own, sent) = (VectorId::Broadcast(0), VectorId::State(0), VectorId::Upload(0));
        let expected = [
            gradient(PRIVATE, &[Term::CrossEntropy], 0),
            Op::AddScaledDiff { g: G, a: 1.0, x: c, y: own },
            Op::Update { g: G },
        ];
        assert_eq!(cohort.step(&mut kept), expected);
        let expected = [
            Op::AddScaled { y: sent, a: -1.0, x: c },
            Op::AddScaledDiff { g: sent, a: 2.0, x: VectorId::RoundStart, y: VectorId::Weights },
            Op::AddScaled { y: own, a: 1.0, x: sent },
        ];
        assert_eq!(cohort.finish(&mut kept, 0.5), expected);
        assert_eq!(kept, ["control_variate"]);
        assert_eq!((cohort.names.broadcasts.len(), cohort.names.uploads.len()), (1, 1), "one name, one vector");
    }

    #[test]
    fn feddyn_adds_both_terms_before_it_clips() {
        let settings = ["method.feddyn.alpha=0.1", "method.feddyn.clip=2.0"];
        let (mut cohort, mut kept) = (Cohort::new("feddyn", &settings), Vec::new());
        let expected = [
            gradient(PRIVATE, &[Term::CrossEntropy], 0),
            Op::AddScaledDiff { g: G, a: 0.1, x: VectorId::Weights, y: VectorId::RoundStart },
            Op::AddScaled { y: G, a: 0.1, x: VectorId::State(0) },
            Op::Clip { g: G, norm_max: 2.0 },
            Op::Update { g: G },
        ];
        assert_eq!(cohort.step(&mut kept), expected);
        let h = VectorId::State(0);
        let expected = [Op::AddScaledDiff { g: h, a: 1.0, x: VectorId::Weights, y: VectorId::RoundStart }];
        assert_eq!(cohort.finish(&mut kept, 1.0), expected);
    }

    #[test]
    fn moon_contrasts_only_for_clients_that_took_part_before() {
        let mut cohort = Cohort::new("moon", &[]);
        let plain = [gradient(PRIVATE, &[Term::CrossEntropy], 0), Op::Update { g: G }];
        assert_eq!(cohort.step(&mut Vec::new()), plain);
        assert_eq!(cohort.finish(&mut Vec::new(), 1.0), [Op::KeepModel { name: "previous".into() }]);
        // The trainer names what a client brings along.
        let mut kept = vec!["previous".to_owned()];
        cohort.names.states.push("previous".into());
        let ops = cohort.step(&mut kept);
        assert_eq!(ops[..2], [Op::Embed { index: 0 }, Op::Embed { index: 1 }]);
        let Op::Gradient { objective, .. } = &ops[2] else { panic!("{ops:?}") };
        assert!(matches!(objective[..], [Term::CrossEntropy, Term::ModelContrast { .. }]), "{objective:?}");
        assert_eq!(cohort.step(&mut Vec::new()), plain, "a newcomer beside them");
        // A second client finds the same embeddings.
        assert_eq!(cohort.step_at(&mut kept, true, 1, 4), ops);
        assert_eq!(cohort.names.embeddings.len(), 2);
    }

    #[test]
    fn names_are_shared_between_clients() {
        let mut cohort = Cohort::new("scaffold", &["local.optimizer={kind='sgd', lr=0.1}"]);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        assert_eq!(cohort.step_at(&mut first, true, 0, 0), cohort.step_at(&mut second, true, 1, 3));
        assert_eq!(cohort.names.states, ["control_variate"]);
        assert_eq!(first, second);
    }

    #[test]
    fn samples_are_not_embedded_under_weights_that_move() {
        let mut cohort = Cohort::new("fedavg", &[]);
        cohort.record(&mut Vec::new(), false, 0.0, |_, recorder| {
            let node = recorder.graph.output();
            assert!(recorder.embed(VectorId::Weights, node).is_err_and(|e| e.to_string().contains("--device cpu")));
            assert_eq!(recorder.embed(VectorId::RoundStart, node).unwrap(), 0);
        });
    }
}

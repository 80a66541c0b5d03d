//! Records what a method does in a step: host choices are made here, numbers are computed later.

use super::program::{Names, Op, Program, VectorId, buffers_name, place_of};
use crate::error::{Error, Result};
use crate::step::{Batch, Term};
use fedproj_nn::{EmbeddingId, Graph, NodeId};

/// Writes down what a method does for one client after another.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub graph: Graph,
    pub names: Names,
    /// States and uploads of the current client, by their places.
    pub kept: Vec<usize>,
    pub uploaded: Vec<usize>,
    pub has_memory: bool,
    pub has_generator: bool,
    pub has_logits: bool,
    /// Batches in a pass over the memory.
    pub n_memory_batches: usize,
    pub lr_total: f32,
    /// The step that is being recorded.
    pub program: Program,
}

impl Recorder {
    pub fn new(graph: &Graph) -> Self {
        Self {
            graph: graph.clone(),
            names: Names::default(),
            kept: Vec::new(),
            uploaded: Vec::new(),
            has_memory: false,
            has_generator: false,
            has_logits: false,
            n_memory_batches: 0,
            lr_total: 0.0,
            program: Program::default(),
        }
    }

    pub fn push(&mut self, op: Op) {
        self.program.ops.push(op);
    }

    /// The gradient of an objective on a batch at θ, at [`VectorId::Perturbed`] or at a state.
    pub fn gradient(&mut self, batch: Batch, at: VectorId, objective: &[impl Into<Term> + Copy]) -> VectorId {
        self.gradient_into(self.program.n_gradients(), batch, at, objective)
    }

    /// The same in the place `out`, whose gradient is no longer needed.
    pub fn gradient_into(
        &mut self,
        out: usize,
        batch: Batch,
        at: VectorId,
        objective: &[impl Into<Term> + Copy],
    ) -> VectorId {
        self.push(Op::Forward { batch, at });
        self.program.ops.extend(objective.iter().map(|&term| Op::Loss { term: term.into() }));
        self.push(Op::Backward { batch, at, out });
        VectorId::Gradient(out)
    }

    /// Samples are embedded before the first step, so only under weights that stay.
    pub fn embed(&mut self, weights: VectorId, node: NodeId) -> Result<EmbeddingId> {
        if !matches!(weights, VectorId::RoundStart | VectorId::State(_)) {
            return Err(Error::config(
                "samples are embedded once per round: under the received weights or a kept model, not under weights that move",
            ));
        }
        let known = self.names.embeddings.iter().position(|e| *e == (weights, node));
        let index = known.unwrap_or_else(|| {
            self.names.embeddings.push((weights, node));
            self.names.embeddings.len() - 1
        });
        self.push(Op::Embed { index });
        Ok(EmbeddingId(index))
    }

    pub fn broadcast_id(&mut self, name: &str) -> VectorId {
        VectorId::Broadcast(place_of(&mut self.names.broadcasts, name))
    }

    pub fn state_id(&mut self, name: &str) -> VectorId {
        VectorId::State(self.keep(name))
    }

    pub fn upload_id(&mut self, name: &str) -> VectorId {
        let at = place_of(&mut self.names.uploads, name);
        if !self.uploaded.contains(&at) {
            self.uploaded.push(at);
        }
        VectorId::Upload(at)
    }

    pub fn kept_model(&self, name: &str) -> Option<VectorId> {
        let at = self.names.states.iter().position(|n| n == name)?;
        self.kept.contains(&at).then_some(VectorId::State(at))
    }

    pub fn keep_model(&mut self, name: &str) {
        let (weights, buffers) = (self.keep(name), self.keep(&buffers_name(name)));
        self.push(Op::KeepModel { weights, buffers });
    }

    /// The place of a state that the client keeps from now on.
    fn keep(&mut self, name: &str) -> usize {
        let at = self.names.state(name);
        if !self.kept.contains(&at) {
            self.kept.push(at);
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::method::Method;
    use crate::step::{Finish, Place, ProjectionRule, Scope, Step};
    use fedproj_nn::models::{self, Variant};
    use fedproj_nn::{Loss, Shape, vector::Bounds};

    const G: VectorId = VectorId::Gradient(0);
    const R: VectorId = VectorId::Gradient(1);
    const PRIVATE: Batch = Batch::Private;

    /// The recorder of a run, and one client after another.
    struct Clients {
        method: Box<dyn Method>,
        recorder: Recorder,
    }

    impl Clients {
        fn new(method: &str, settings: &[&str]) -> Self {
            let all = settings.iter().map(|s| (*s).to_owned()).chain([format!("method.name={method}")]);
            let config = Config::from_layers(None, &all.collect::<Vec<_>>()).unwrap();
            let variant = Variant { projection_head: (method == "moon").then_some(4), ..Variant::default() };
            let graph = models::mlp(Shape::vector(6), &[8], 3, variant).unwrap();
            Self { method: config.method.build().unwrap(), recorder: Recorder::new(&graph) }
        }

        fn record(&mut self, kept: &mut Vec<usize>, work: impl FnOnce(&dyn Method, &mut Recorder)) -> Vec<Op> {
            self.recorder.kept = std::mem::take(kept);
            self.recorder.program.ops.clear();
            work(self.method.as_ref(), &mut self.recorder);
            *kept = std::mem::take(&mut self.recorder.kept);
            self.recorder.program.ops.clone()
        }

        /// A step of a client that keeps `kept`, in a round after any warm-up.
        fn step_at(&mut self, kept: &mut Vec<usize>, has_memory: bool, client: u32, step: u32) -> Vec<Op> {
            let place = Place { seed: 3, round: 5, n_rounds: 10, client, epoch: 0, step };
            self.recorder.has_memory = has_memory;
            self.record(kept, |method, recorder| method.local_step(&mut Step { recorder, place }).unwrap())
        }

        fn step(&mut self, kept: &mut Vec<usize>) -> Vec<Op> {
            self.step_at(kept, true, 0, 0)
        }

        fn finish(&mut self, kept: &mut Vec<usize>, lr_total: f32) -> Vec<Op> {
            self.recorder.lr_total = lr_total;
            self.record(kept, |method, recorder| method.finish_local(&mut Finish { recorder }).unwrap())
        }
    }

    fn gradient(batch: Batch, objective: &[Loss], out: usize) -> Vec<Op> {
        gradient_at(VectorId::Weights, batch, objective, out)
    }

    fn gradient_at(at: VectorId, batch: Batch, objective: &[Loss], out: usize) -> Vec<Op> {
        let losses = objective.iter().map(|&loss| Op::Loss { term: loss.into() });
        [Op::Forward { batch, at }].into_iter().chain(losses).chain([Op::Backward { batch, at, out }]).collect()
    }

    fn chain(first: &[Op], rest: &[Op]) -> Vec<Op> {
        first.iter().chain(rest).copied().collect()
    }

    #[test]
    fn fedavg_takes_a_gradient_and_a_step() {
        let mut clients = Clients::new("fedavg", &[]);
        let expected = chain(&gradient(PRIVATE, &[Loss::CrossEntropy], 0), &[Op::Update { g: G }]);
        assert_eq!(clients.step(&mut Vec::new()), expected);
        assert_eq!(clients.finish(&mut Vec::new(), 1.0), []);
    }

    #[test]
    fn fedproj_projects_between_the_two_where_there_is_a_memory() {
        let mut clients = Clients::new("fedproj", &[]);
        let memory = gradient(Batch::Memory, &[Loss::kl(3.0)], 1);
        let bounds = Bounds { eps: 1e-8, norm_guard: 0.0, ..Bounds::default() };
        let rule = ProjectionRule { bounds, scope: Scope::Global, from_round_start: false };
        let own = gradient(PRIVATE, &[Loss::CrossEntropy], 0);
        let both = chain(&own, &memory);
        let projecting = chain(&both, &[Op::Project { g: G, r: R, rule }, Op::Update { g: G }]);
        assert_eq!(clients.step(&mut Vec::new()), projecting);
        assert_eq!(clients.step_at(&mut Vec::new(), false, 0, 0), chain(&own, &[Op::Update { g: G }]));
        let mut clients = Clients::new("fedproj", &["method.fedproj.projection.space=update"]);
        assert_eq!(clients.step(&mut Vec::new()), chain(&both, &[Op::UpdateProjected { g: G, r: R, rule }]));
    }

    #[test]
    fn equal_steps_share_a_program_and_others_do_not() {
        let half = ["method.fedproj.projection.dropout=0.5", "method.fedproj.projection.dropout_unit=step"];
        let mut clients = Clients::new("fedproj", &half);
        let mut distinct: Vec<Vec<Op>> = Vec::new();
        for (client, step) in (0..4).flat_map(|client| (0..8).map(move |step| (client, step))) {
            let program = clients.step_at(&mut Vec::new(), true, client, step);
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
        let settings = ["local.optimizer={kind='sgd', lr=0.1}"];
        let (mut clients, mut kept) = (Clients::new("scaffold", &settings), Vec::new());
        let (c, own, sent) = (VectorId::Broadcast(0), VectorId::State(0), VectorId::Upload(0));
        let corrected = [Op::AddScaledDiff { g: G, a: 1.0, x: c, y: own }, Op::Update { g: G }];
        let expected = chain(&gradient(PRIVATE, &[Loss::CrossEntropy], 0), &corrected);
        assert_eq!(clients.step(&mut kept), expected);
        let expected = [
            Op::AddScaled { y: sent, a: -1.0, x: c },
            Op::AddScaledDiff { g: sent, a: 2.0, x: VectorId::RoundStart, y: VectorId::Weights },
            Op::AddScaled { y: own, a: 1.0, x: sent },
        ];
        assert_eq!(clients.finish(&mut kept, 0.5), expected);
        let names = &clients.recorder.names;
        assert_eq!((&kept[..], &names.states[..]), (&[0][..], &["control_variate".to_owned()][..]));
        assert_eq!((names.broadcasts.len(), names.uploads.len()), (1, 1), "one name, one vector");
    }

    #[test]
    fn feddyn_adds_both_terms_before_it_clips() {
        let settings = ["method.feddyn.alpha=0.1", "method.feddyn.clip=2.0"];
        let (mut clients, mut kept) = (Clients::new("feddyn", &settings), Vec::new());
        let then = [
            Op::AddScaledDiff { g: G, a: 0.1, x: VectorId::Weights, y: VectorId::RoundStart },
            Op::AddScaled { y: G, a: 0.1, x: VectorId::State(0) },
            Op::Clip { g: G, norm_max: 2.0 },
            Op::Update { g: G },
        ];
        assert_eq!(clients.step(&mut kept), chain(&gradient(PRIVATE, &[Loss::CrossEntropy], 0), &then));
        let h = VectorId::State(0);
        let expected = [Op::AddScaledDiff { g: h, a: 1.0, x: VectorId::Weights, y: VectorId::RoundStart }];
        assert_eq!(clients.finish(&mut kept, 1.0), expected);
    }

    #[test]
    fn fedspeed_corrects_the_gradient_uphill_of_the_weights() {
        let settings = ["method.fedspeed.radius=0.2", "method.fedspeed.alpha=0.1"];
        let ops = Clients::new("fedspeed", &settings).step(&mut Vec::new());
        let uphill = gradient_at(VectorId::Perturbed, PRIVATE, &[Loss::CrossEntropy], 1);
        let own = chain(&gradient(PRIVATE, &[Loss::CrossEntropy], 0), &[Op::Perturb { g: G, radius: 0.2 }]);
        let both = chain(&own, &uphill);
        assert_eq!(ops[..both.len()], both);
        assert_eq!(ops.last(), Some(&Op::Update { g: R }), "along the second gradient");
        assert!(ops[both.len()..].contains(&Op::AddScaled { y: R, a: 0.1, x: VectorId::State(0) }));
        let sam = Clients::new("fedsam", &["method.fedsam.radius=0.2"]).step(&mut Vec::new());
        assert_eq!(sam, chain(&both, &[Op::Update { g: R }]));
    }

    #[test]
    fn moon_contrasts_only_for_clients_that_took_part_before() {
        let mut clients = Clients::new("moon", &[]);
        let plain = chain(&gradient(PRIVATE, &[Loss::CrossEntropy], 0), &[Op::Update { g: G }]);
        let mut kept = Vec::new();
        assert_eq!(clients.step(&mut kept), plain);
        assert_eq!(clients.finish(&mut kept, 1.0), [Op::KeepModel { weights: 0, buffers: 1 }]);
        assert_eq!(
            (&kept[..], &clients.recorder.names.states[..]),
            (&[0, 1][..], &["previous", "previous.buffers"].map(String::from)[..])
        );
        let ops = clients.step(&mut kept);
        assert_eq!(ops[..2], [Op::Embed { index: 0 }, Op::Embed { index: 1 }]);
        let [_, _, Op::Forward { .. }, Op::Loss { term: own }, Op::Loss { term }, ..] = ops[..] else {
            panic!("{ops:?}")
        };
        assert_eq!(own, Loss::CrossEntropy.into());
        assert!(matches!(term.loss, Loss::Contrast { .. }), "{term:?}");
        assert_eq!(clients.step(&mut Vec::new()), plain, "a newcomer beside them");
        // A second client finds the same embeddings.
        assert_eq!(clients.step_at(&mut kept, true, 1, 4), ops);
        assert_eq!(clients.recorder.names.embeddings.len(), 2);
    }

    #[test]
    fn fedgen_adds_generated_features_once_there_is_a_generator() {
        let mut clients =
            Clients::new("fedgen", &["method.fedgen={generated_weight=2.0, distill_weight=3.0, decay=1.0}"]);
        assert_eq!(
            clients.step(&mut Vec::new()),
            chain(&gradient(PRIVATE, &[Loss::CrossEntropy], 0), &[Op::Update { g: G }])
        );
        clients.recorder.has_generator = true;
        let ops = clients.step(&mut Vec::new());
        let batches: Vec<Batch> = Program { ops: ops.clone() }.batches().collect();
        assert_eq!(batches, [Batch::Taught, Batch::Generated]);
        let of = |op: &Op| if let Op::Loss { term } = op { Some((term.loss, term.weight)) } else { None };
        let terms: Vec<_> = ops.iter().filter_map(of).collect();
        assert_eq!(terms, [(Loss::CrossEntropy, 1.0), (Loss::kl(1.0), 3.0), (Loss::CrossEntropy, 2.0)]);
        assert_eq!(ops[ops.len() - 2..], [Op::AddScaled { y: G, a: 1.0, x: R }, Op::Update { g: G }]);
    }

    #[test]
    fn names_are_shared_between_clients() {
        let mut clients = Clients::new("scaffold", &["local.optimizer={kind='sgd', lr=0.1}"]);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        assert_eq!(clients.step_at(&mut first, true, 0, 0), clients.step_at(&mut second, true, 1, 3));
        assert_eq!(clients.recorder.names.states, ["control_variate"]);
        assert_eq!(first, second);
    }

    #[test]
    fn samples_are_not_embedded_under_weights_that_move() {
        let mut clients = Clients::new("fedavg", &[]);
        clients.record(&mut Vec::new(), |_, recorder| {
            let node = recorder.graph.output();
            let refused = recorder.embed(VectorId::Weights, node).unwrap_err();
            assert!(refused.to_string().contains("once per round"), "{refused}");
            assert_eq!(recorder.embed(VectorId::RoundStart, node).unwrap(), EmbeddingId(0));
        });
    }
}

//! The layers of text encoders against finite differences of the double-precision oracle, on every instruction set; the same
//! bytes for any number of threads; and what a batch holds beside a text changes nothing in it.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod reference;

use fedproj_nn::models::{BertConfig, Pooling, Variant, bert};
use fedproj_nn::{
    Activation, Cpu, Error, Graph, Init, Isa, Loss, LossTargets, Mode, NormMode, Optimizer, Options, Rule, Shape,
    Tables, Workspace,
};
use reference::{Kind, Layer, Net, Problem, bits, check_gradients, linear, relative_error, stream, texts};

const GELU: Layer = Layer::Activation(Activation::Gelu);
const NORM: Layer = Layer::RowNorm(1e-12);

fn tables(width: usize) -> Tables {
    Tables { vocabulary: 11, positions: 140, types: 2, width }
}

/// Checks the layers behind an embedding, at every parameter and every node.
fn check(slots: usize, width: usize, batch: usize, layers: &[Layer]) {
    let net =
        layers.iter().fold(Net::chain(Shape::tokens(slots), &[Layer::Embedding(tables(width))]), |net, &l| net.then(l));
    check_net(net, batch);
}

fn check_net(net: Net, batch: usize) {
    let nodes: Vec<usize> = (1..=net.last()).collect();
    let problem = Problem::at_output(net, batch, NormMode::Frozen, Kind::Squared, 41);
    check_gradients(&problem, &nodes);
    let exact: Vec<f64> = problem.params.iter().map(|&v| f64::from(v)).collect();
    let expected = problem.exact(&exact, None);
    for isa in Isa::available() {
        let run = problem.run(Cpu::with_isa(1, isa), &nodes);
        for (&node, value) in nodes.iter().zip(&run.values) {
            let error = relative_error(value, &expected.nodes[node]);
            assert!(error < 1e-5, "{:?} on {isa:?}: n{node}: error {error:.1e}", problem.net);
        }
    }
}

#[test]
fn embeddings_and_pools_have_the_right_values_and_gradients() {
    for (slots, width, batch) in [(1, 1, 1), (5, 7, 3), (9, 32, 5), (140, 20, 4)] {
        for pool in [Layer::FirstToken, Layer::MeanOfTokens] {
            check(slots, width, batch, &[pool, linear(3)]);
        }
    }
    let tables = Tables { types: 1, ..tables(6) };
    check_net(Net::chain(Shape::tokens(4), &[Layer::Embedding(tables), Layer::MeanOfTokens]), 4);
}

#[test]
fn layer_norms_have_the_right_values_and_gradients() {
    for (slots, width, batch) in [(3, 5, 2), (7, 31, 4), (9, 33, 5), (70, 64, 4)] {
        check(slots, width, batch, &[Layer::RowNorm(1e-5), Layer::MeanOfTokens]);
    }
    let image = Net::chain(Shape::image(3, 2, 9), &[NORM, Layer::Activation(Activation::Tanh), Layer::GlobalAverage]);
    check_net(image, 3);
}

#[test]
fn linear_layers_of_tokens_have_the_right_values_and_gradients() {
    for (slots, width, outputs, batch) in [(1, 1, 1, 1), (5, 9, 17, 4), (12, 65, 70, 5), (6, 130, 3, 3)] {
        check(slots, width, batch, &[linear(outputs), GELU, Layer::MeanOfTokens]);
    }
    // More rows than one block of the weights' gradient.
    check(140, 8, 7, &[linear(9), Layer::MeanOfTokens]);
}

#[test]
fn attention_has_the_right_values_and_gradients() {
    for (slots, heads, width, batch) in [(1, 1, 1, 1), (6, 1, 5, 4), (9, 3, 21, 5), (17, 2, 32, 4), (33, 12, 24, 3)] {
        check(slots, width, batch, &[Layer::SelfAttention { heads }, Layer::MeanOfTokens]);
    }
    // More queries than one block.
    check(131, 10, 4, &[Layer::SelfAttention { heads: 2 }, Layer::FirstToken]);
}

#[test]
fn whole_encoder_layers_have_the_right_gradients() {
    let net = Net::chain(Shape::tokens(7), &[Layer::Embedding(tables(12)), NORM]); // 1 2
    let net = net.then(Layer::SelfAttention { heads: 3 }).then(linear(12)).then(Layer::Add(2)).then(NORM); // 3 4 5 6
    let net = net.then(linear(40)).then(GELU).then(linear(12)).then(Layer::Add(6)).then(NORM); // 7 8 9 10 11
    check_net(net.clone().then(Layer::MeanOfTokens).then(linear(3)), 5);
    check_net(
        net.then(Layer::FirstToken).then(linear(12)).then(Layer::Activation(Activation::Tanh)).then(linear(2)),
        5,
    );
}

/// A small encoder with dropout everywhere.
fn encoder(pooling: Pooling) -> Graph {
    let config = BertConfig { vocabulary: 50, positions: 70, pooling, ..BertConfig::sized(2, 36, 3, 70) };
    bert(&config, 70, 3, Variant::default()).unwrap()
}

/// Weights and losses after three Adam steps, as bits.
fn train(graph: &Graph, n_threads: usize, batch: usize) -> (Vec<u32>, Vec<u64>) {
    let mut ws = Workspace::new(graph, &Options::training(9), Cpu::new(n_threads)).unwrap();
    let mut params = graph.init_params(1, Init::Torch);
    let mut adam = Optimizer::new(Rule::adam(0.01), params.len()).unwrap();
    let mut grad = vec![f32::NAN; params.len()];
    let (mut s, mut losses) = (stream(3), Vec::new());
    for step in 0..3 {
        let x = texts(&mut s, batch, 70, Tables { vocabulary: 50, ..tables(36) });
        let labels: Vec<u32> = (0..batch).map(|_| s.below(3)).collect();
        let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
        losses.push(ws.loss_gradient(&params, &mut [], &x, &loss, Mode::train(step), &mut grad).unwrap().to_bits());
        adam.step(ws.cpu(), &mut params, &grad, 1.0);
    }
    (bits(&params), losses)
}

#[test]
fn encoders_leave_the_same_bytes_for_any_number_of_threads() {
    for pooling in [Pooling::Pooler, Pooling::Mean] {
        let graph = encoder(pooling);
        for batch in [1, 4, 9] {
            let alone = train(&graph, 1, batch);
            assert!(alone.0.iter().all(|p| f32::from_bits(*p).is_finite()), "diverged");
            for n_threads in [2, 3] {
                assert!(alone == train(&graph, n_threads, batch), "{pooling:?}, batch {batch}, {n_threads} threads");
            }
        }
    }
}

#[test]
fn a_text_among_others_is_what_it_is_alone() {
    let graph = encoder(Pooling::Mean);
    let params = graph.init_params(2, Init::Torch);
    let x = texts(&mut stream(4), 9, 70, Tables { vocabulary: 50, ..tables(36) });
    let features = graph.features().unwrap();
    let options = Options { taps: &[features], training: false, ..Options::training(9) };
    let mut ws = Workspace::new(&graph, &options, Cpu::new(1)).unwrap();
    ws.forward(&params, &mut [], &x, Mode::EVAL).unwrap();
    let together = bits(ws.value(features).unwrap());
    for (text, expected) in x.chunks_exact(70).zip(together.chunks_exact(36)) {
        ws.forward(&params, &mut [], text, Mode::EVAL).unwrap();
        assert_eq!(bits(ws.value(features).unwrap()), expected);
    }
}

#[test]
fn an_empty_text_gives_numbers() {
    for pooling in [Pooling::Pooler, Pooling::Mean] {
        let graph = encoder(pooling);
        let mut params = graph.init_params(5, Init::Torch);
        let bias = graph.params().find("classifier.bias").unwrap().range();
        params[bias].copy_from_slice(&[0.5, -1.0, 2.0]);
        let mut ws = Workspace::new(&graph, &Options::training(2), Cpu::new(1)).unwrap();
        let mut grad = vec![f32::NAN; params.len()];
        let loss = (Loss::CrossEntropy, LossTargets::labels(&[1, 0]));
        ws.loss_gradient(&params, &mut [], &[0.0; 140], &loss, Mode::train(0), &mut grad).unwrap();
        assert!(ws.output().iter().chain(&grad).all(|v| v.is_finite()));
        if pooling == Pooling::Mean {
            assert_eq!(ws.output(), [0.5, -1.0, 2.0, 0.5, -1.0, 2.0]);
        }
    }
}

#[test]
fn slots_that_hold_no_token_are_named() {
    let graph = encoder(Pooling::Mean);
    let params = graph.init_params(0, Init::Torch);
    let mut ws = Workspace::new(&graph, &Options { training: false, ..Options::training(2) }, Cpu::new(1)).unwrap();
    for (value, said) in [
        (101.0, "token 50 is outside the vocabulary of 50"),
        (2.5, "2.5 is not"),
        (-3.0, "-3 is not"),
        (f32::NAN, "NaN is not"),
        (1e9, "1000000000 is not"),
    ] {
        let mut x = vec![0.0; 140];
        (x[70], x[71]) = (1.0, value);
        let error = ws.forward(&params, &mut [], &x, Mode::EVAL).unwrap_err();
        assert!(
            matches!(error, Error::Token { sample: 1, slot: 1, .. }) && error.to_string().contains(said),
            "{error}"
        );
        // The same, before the samples go to a GPU as the eighth and ninth of a data set.
        let error = graph.check_samples(7, &x).unwrap_err();
        assert!(
            matches!(error, Error::Token { sample: 8, slot: 1, .. }) && error.to_string().contains(said),
            "{error}"
        );
    }
    let mut x = vec![0.0; 70];
    x[3] = 5.0;
    let error = ws.forward(&params, &mut [], &x, Mode::EVAL).unwrap_err().to_string();
    assert!(error.contains("slot 3 of text 0") && error.contains("follows an empty slot"), "{error}");
    x[3] = 0.0;
    graph.check_samples(0, &x).unwrap();
    Graph::new(Shape::vector(2)).check_samples(0, &[f32::NAN, 0.5]).unwrap();
}

#[test]
fn layers_that_do_not_go_together_are_refused() {
    let mut g = Graph::new(Shape::tokens(8));
    let x = g.embedding("words", tables(6)).unwrap();
    let refused = |found: fedproj_nn::Result<_>, said: &str| {
        let error = found.map(|_: fedproj_nn::NodeId| ()).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    };
    refused(g.batch_norm("bn", x), "pool them first");
    refused(g.flatten("flat", x), "pool them first");
    refused(g.embedding("again", tables(6)), "once");
    refused(g.self_attention("att", x, 4, 0.0), "4 equal heads");
    refused(g.layer_norm("norm", x, 0.0), "positive");
    let pooled = g.mean_of_tokens("mean", x).unwrap();
    refused(g.first_token("first", pooled), "needs tokens");
    refused(g.self_attention("att", pooled, 2, 0.0), "needs tokens");
    let mut ws = Workspace::new(&g, &Options { taps: &[x], ..Options::training(1) }, Cpu::new(1)).unwrap();
    ws.forward(&vec![0.1; g.params().len()], &mut [], &[1.0; 8], Mode::EVAL).unwrap();
    let error = ws.add_loss(x, &(Loss::MaskedSquares, LossTargets::features(&[0.0; 48])), 1.0).unwrap_err().to_string();
    assert!(error.contains("`words`") && error.contains("pools"), "{error}");
}

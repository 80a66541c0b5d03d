//! Text encoders: layers of odd shapes, whole networks, PyTorch's numbers, the faster products, and methods on texts.

use crate::backends::{random_labels, random_texts};
use crate::compare::Group;
use crate::digits::{self, TOLERANCE_DEEP};
use crate::nets::Net;
use crate::{Suite, config};
use crate::{golden, layers, networks, precisions, reruns};
use anyhow::Result;
use fedproj_core::{Device, Experiment, Simulation};
use fedproj_data::{Dataset, Samples, Tokens};
use fedproj_nn::cuda::Gpu;
use fedproj_nn::models::{self, BertConfig, Pooling, Variant};
use fedproj_nn::{Activation, Graph, NodeId, Shape, Tables};
use std::sync::Arc;

/// The number of words; few, so that most occur several times per batch.
const WORDS: u32 = 23;
/// For products in single precision.
const TOLERANCE_FP32: f64 = 1e-4;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    layers::check_nets(suite, group, &nets()?);
    if let Some(gpu) = suite.device.gpu() {
        check_precisions(suite, group, gpu)?;
    }
    for (name, pooling) in [("bert", Pooling::Pooler), ("bert-mean", Pooling::Mean)] {
        let config = BertConfig { vocabulary: 60, positions: 20, pooling, ..BertConfig::sized(2, 24, 3, 40) };
        let graph = models::bert(&config, 16, 3, Variant::default())?;
        let (x, labels) = (random_texts(7, 12, 16, (60, 2)), random_labels(8, 12, 3));
        if suite.device.gpu().is_some() {
            group.attempt(name, |group| networks::ten_steps(suite, group, name, &graph, (&x, &labels)));
        }
        if suite.fixtures.is_some() {
            group.attempt(name, |group| golden::check_model(suite, group, name, &graph));
        }
    }
    check_methods(suite, group)
}

/// The bytes of a lane alone, and products in every precision.
fn check_precisions(suite: &Suite, group: &mut Group, gpu: &Arc<Gpu>) -> Result<()> {
    for net in encoders(Some(5))? {
        precisions::check_net(group, gpu, &net, TOLERANCE_FP32);
    }
    // Without a projection head: rounding may switch units of its ReLU on or off, which moves the gradients of nine texts by
    // up to 0.3. That happened in 29 of 80 simulated batches with factors of 7 bits. The largest error was 0.014 in the other
    // 51, and 0.012 in 80 batches without a head.
    for (precision, tolerance) in precisions::TOLERANCES {
        let gpu = suite.gpu_in(precision)?;
        for net in encoders(None)?.into_iter().chain([many_tokens()?]) {
            precisions::check_net(group, &gpu, &net, tolerance);
        }
    }
    Ok(())
}

/// An embedding and the layers behind it.
fn net(
    name: String,
    (slots, width, batch): (usize, usize, usize),
    types: u32,
    then: impl FnOnce(&mut Graph, NodeId) -> fedproj_nn::Result<()>,
) -> fedproj_nn::Result<Net> {
    let mut g = Graph::new(Shape::tokens(slots));
    let tables = Tables { vocabulary: WORDS as usize, positions: slots + 2, types: types as usize, width };
    let x = g.embedding("embedding", tables)?;
    then(&mut g, x)?;
    let mut net = Net::new(name, g, batch);
    net.words = Some((WORDS, types));
    Ok(net)
}

fn end(g: &mut Graph, x: NodeId, mean: bool) -> fedproj_nn::Result<()> {
    let x = if mean { g.mean_of_tokens("mean", x)? } else { g.first_token("first", x)? };
    g.linear("classes", x, 3, true).map(|_| ())
}

/// Every layer of texts by itself, and whole encoders.
fn nets() -> fedproj_nn::Result<Vec<Net>> {
    let mut nets = embeddings()?;
    nets.extend(layer_norms()?);
    nets.extend(linears()?);
    nets.push(net("ReLU and dropout of tokens".into(), (11, 10, 5), 2, |g, x| {
        let x = g.dropout("drop1", x, 0.2)?;
        let y = g.linear("linear", x, 10, true)?;
        let y = g.activation("relu", y, Activation::Relu)?;
        let y = g.dropout("drop2", y, 0.5)?;
        let x = g.add("add", y, x)?;
        end(g, x, true)
    })?);
    nets.extend(attentions()?);
    nets.extend(encoders(Some(5))?);
    Ok(nets)
}

fn embeddings() -> fedproj_nn::Result<Vec<Net>> {
    let mut nets = Vec::new();
    for (slots, width, batch) in [(1, 1, 1), (5, 7, 3), (9, 32, 5), (40, 36, 9), (140, 20, 7)] {
        for (mean, types) in [(false, 2), (true, 2), (true, 1)] {
            let pooling = if mean { "mean" } else { "first" };
            let name = format!("embedding {width} of {types} types on {slots} slots, {pooling}");
            nets.push(net(name, (slots, width, batch), types, |g, x| end(g, x, mean))?.tapped(&["embedding"]));
        }
    }
    Ok(nets)
}

fn layer_norms() -> fedproj_nn::Result<Vec<Net>> {
    let mut nets = Vec::new();
    for (slots, width, batch) in [(3, 5, 2), (7, 31, 4), (9, 33, 5), (70, 64, 4), (12, 300, 6)] {
        let layer_norm = |g: &mut Graph, x| {
            let x = g.layer_norm("norm", x, 1e-5)?;
            let x = g.activation("tanh", x, Activation::Tanh)?;
            end(g, x, true)
        };
        let name = format!("layer-norm {width} on {slots} slots");
        nets.push(net(name.clone(), (slots, width, batch), 2, layer_norm)?);
        nets.push(net(format!("tapped {name}"), (slots, width, batch), 2, layer_norm)?.tapped(&["norm", "embedding"]));
    }
    let mut g = Graph::new(Shape::image(3, 2, 9));
    let x = g.layer_norm("norm", g.input(), 1e-12)?;
    let x = g.activation("tanh", x, Activation::Tanh)?;
    let x = g.global_average_pool("mean", x)?;
    let x = g.layer_norm("norm2", x, 1e-5)?;
    g.linear("classes", x, 4, true)?;
    nets.push(Net::new("layer-norm of pixels and vectors", g, 5).tapped(&["norm"]));
    Ok(nets)
}

fn linears() -> fedproj_nn::Result<Vec<Net>> {
    let cases = [
        (1, 1, 1, 1),
        (5, 9, 17, 4),
        (12, 65, 70, 5),
        (6, 130, 3, 3),
        (7, 600, 24, 3),
        (140, 8, 12, 9),
        (9, 16, 512, 5),
    ];
    let linear = |(slots, width, outputs, batch)| {
        let name = format!("linear {width} → {outputs} on {slots} slots");
        let net = net(name, (slots, width, batch), 2, |g, x| {
            let x = g.linear("linear", x, outputs, outputs != 70)?;
            let x = g.activation("gelu", x, Activation::Gelu)?;
            end(g, x, true)
        })?;
        Ok(net.tapped(&["linear"]))
    };
    cases.into_iter().map(linear).collect()
}

fn attentions() -> fedproj_nn::Result<Vec<Net>> {
    let mut nets = Vec::new();
    for (slots, heads, width, batch) in [
        (1, 1, 1, 1),
        (6, 1, 5, 4),
        (9, 3, 21, 5),
        (17, 2, 32, 4),
        (33, 12, 24, 3),
        (70, 2, 64, 7),
        (131, 2, 10, 7),
        (200, 1, 64, 7),
    ] {
        for rate in [0.0, 0.3] {
            let attention = |g: &mut Graph, x| {
                let x = g.self_attention("attention", x, heads, rate)?;
                end(g, x, slots != 131)
            };
            let name = format!("attention of {heads} heads, {width}, on {slots} slots, rate {rate}");
            nets.push(net(name, (slots, width, batch), 2, attention)?.tapped(&["attention", "embedding"]));
        }
    }
    Ok(nets)
}

/// Whole encoders with dropout everywhere: two small ones, the first with the projection head, and one layer as wide as
/// MiniLM's.
fn encoders(projection_head: Option<usize>) -> fedproj_nn::Result<Vec<Net>> {
    let small = BertConfig { vocabulary: WORDS as usize, positions: 50, ..BertConfig::sized(2, 36, 3, 70) };
    let mean = BertConfig { pooling: Pooling::Mean, ..small.clone() };
    let wide = BertConfig { layers: 1, hidden: 384, heads: 12, intermediate: 1536, ..mean.clone() };
    let head = Variant { projection_head, ..Variant::default() };
    let cases = [
        ("encoder with a pooler", small, 40, 9, head),
        ("encoder with the mean", mean, 40, 9, Variant::default()),
        ("wide encoder", wide, 24, 8, Variant::default()),
    ];
    let encoder = |(name, config, slots, batch, variant): (&str, BertConfig, usize, usize, Variant)| {
        let mut net = Net::new(name, models::bert(&config, slots, 3, variant)?, batch);
        net.words = Some((WORDS, 2));
        Ok(net.tapped(&["embeddings", "encoder.layer.0.attention.self", "encoder.layer.0.attention.output.LayerNorm"]))
    };
    cases.into_iter().map(encoder).collect()
}

/// Linear layers with many tiles: wide tiles for three lanes on a large GPU, narrow ones for one. Their sums over tokens are
/// split.
fn many_tokens() -> fedproj_nn::Result<Net> {
    net("linear layers of many tokens".into(), (40, 128, 300), 2, |g, x| {
        let x = g.linear("wide", x, 384, true)?;
        let x = g.activation("gelu", x, Activation::Gelu)?;
        let x = g.linear("narrow", x, 64, false)?;
        // Not a ReLU, because rounding may switch its units on or off.
        let x = g.activation("tanh", x, Activation::Tanh)?;
        let x = g.linear("last", x, 256, true)?;
        end(g, x, true)
    })
}

/// Further settings of methods on texts.
const SETTINGS: &[&str] = &[
    "model.name=bert-tiny",
    "local.epochs=1",
    "method.fedproj.memory={size=40, batch=12}",
    "method.fedproj.distill.epochs=1",
    "method.feddf.distill.epochs=1",
];

/// The method, and its own settings.
const METHODS: &[(&str, &[&str])] = &[
    ("fedavg", &[]),
    ("fedavg", &["model.name=minilm-l3", "local.optimizer={kind='adam', lr=0.0001}"]),
    ("moon", &["method.moon.head=6"]),
    ("feddf", &[]),
    ("fedproj", &[]),
    ("fedproj", &["method.fedproj.memory.feature_weight=0.1", "method.fedproj.distill.feature_weight=0.1"]),
];

fn check_methods(suite: &Suite, group: &mut Group) -> Result<()> {
    for (method, overrides) in METHODS {
        let what = [&[*method, "on texts"], *overrides].concat().join(" ");
        digits::compare(suite, group, &what, TOLERANCE_DEEP, &|device| simulation(method, overrides, device));
    }
    // On the CPU the methods above were compared bit for bit.
    if suite.device.gpu().is_some() {
        reruns::check_simulation(suite, group, "fedproj on texts", &|device| simulation("fedproj", &[], device))?;
    }
    Ok(())
}

/// Four clients with texts of two classes. Each class has words of its own among common words.
fn simulation(method: &str, overrides: &[&str], device: Device) -> Result<Simulation> {
    const SLOTS: usize = 24;
    let config = config(method, &[digits::BASE, SETTINGS, overrides])?;
    let dataset = |name: &str, id: u32, n: usize| {
        let (x, labels) = (random_texts(id, n, SLOTS - 1, (500, 2)), random_labels(id, n, 2));
        let mut texts = Tokens::default();
        for (slots, label) in x.chunks_exact(SLOTS - 1).zip(&labels) {
            let words = slots.iter().filter(|slot| **slot > 0.0).map(|slot| (*slot as u32 - 1) / 2).enumerate();
            let words = words.map(|(at, word)| if at % 3 == 0 { word + 500 * (1 + label) } else { word });
            // A text is never empty: tokenizers begin each with the same token.
            let ids: Vec<u32> = [0].into_iter().chain(words).collect();
            texts.push(&ids, ids.len().div_ceil(2), false)?;
        }
        let names = vec!["first".into(), "second".into()];
        Dataset::new(name, fedproj_data::Shape::Tokens { len: SLOTS }, Samples::Tokens(texts), Some(labels), names)
    };
    let (private, test, public) = (dataset("private", 20, 160)?, dataset("test", 21, 30)?, dataset("public", 22, 70)?);
    let method = config.method.build()?;
    let experiment = Experiment::new(config, method.as_ref(), private, test, Some(public))?;
    Ok(Simulation::new(experiment, method, device)?)
}

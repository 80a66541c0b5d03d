//! A published encoder against numbers that another implementation computed from the same weights: needs the folder
//! `minilm-l3` (config.json, model.safetensors, fixture.json) in `FEDPROJ_DATA`, and says so where it is not there.

#![allow(clippy::unwrap_used, reason = "a test that cannot read its files has failed")]

use fedproj_nn::models::{BertConfig, Pooling, Variant, bert};
use fedproj_nn::{Cpu, Init, Isa, Mode, Options, Workspace, weights};
use serde_json::Value;
use std::path::PathBuf;

/// Slots of a sample; the longest text of the fixture has 24 tokens.
const SLOTS: usize = 32;

fn folder() -> Option<PathBuf> {
    let folder = std::env::var_os("FEDPROJ_DATA").map(|data| PathBuf::from(data).join("minilm-l3"));
    let found = folder.filter(|folder| folder.join("model.safetensors").is_file());
    if found.is_none() {
        eprintln!("no minilm-l3 in FEDPROJ_DATA: nothing is tested");
    }
    found
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

#[test]
fn minilm_gives_the_published_vectors() {
    let Some(folder) = folder() else { return };
    let config = BertConfig::open(&folder).unwrap();
    assert_eq!(config, BertConfig { pooling: Pooling::Mean, ..BertConfig::sized(3, 384, 12, 1536) });
    let graph = bert(&config, SLOTS, 2, Variant::default()).unwrap();
    let mut params = graph.init_params(0, Init::Torch);
    let ignored = weights::load_encoder(&folder.join("model.safetensors"), &graph, &mut params).unwrap();
    assert!(ignored.is_empty(), "{ignored:?}");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("fixture.json")).unwrap()).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    let mut x = Vec::new();
    for case in cases {
        let (ids, types) = (numbers(&case["input_ids"]), numbers(&case["token_type_ids"]));
        x.extend(ids.iter().zip(&types).map(|(id, kind)| 1.0 + 2.0 * id + kind));
        x.resize(x.len().next_multiple_of(SLOTS), 0.0);
    }
    let (mean, last) = (graph.features().unwrap(), graph.find("encoder.layer.2.output.LayerNorm").unwrap());
    for isa in Isa::available() {
        let options = Options { taps: &[mean, last], training: false, ..Options::training(cases.len()) };
        let mut ws = Workspace::new(&graph, &options, Cpu::with_isa(1, isa)).unwrap();
        ws.forward(&params, &mut [], &x, Mode::EVAL).unwrap();
        let (means, tokens) = (ws.value(mean).unwrap(), ws.value(last).unwrap());
        let mut first_token = 0;
        for (case, mean) in cases.iter().zip(means.chunks_exact(config.hidden)) {
            let close = |name: &str, found: &[f32], expected: &[f32]| {
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        (found - expected).abs() < 1e-3,
                        "{isa:?}: {name} of {}: {found} ≠ {expected}",
                        case["text"]
                    );
                }
            };
            close("mean", mean, &numbers(&case["mean_pool_first8"]));
            let norm = mean.iter().map(|v| v * v).sum::<f32>().sqrt();
            close("norm", &[norm], &[case["mean_pool_l2"].as_f64().unwrap() as f32]);
            close("[CLS]", &tokens[first_token * config.hidden..], &numbers(&case["cls_first8"]));
            first_token += case["input_ids"].as_array().unwrap().len();
        }
        assert_eq!(tokens.len(), first_token * config.hidden, "no padding is computed");
    }
}

//! A run on texts, with a small random BERT: from a table and a vocabulary to a round, and what is refused on the way.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::{Config, Experiment};
use std::fmt::Write;
use std::path::Path;

const WORDS: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\nbad\nfilm\nplay\nday\nvery\n";

/// A folder with a table of 60 texts, 40 of them good, a public one and a checkpoint without weights.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = String::from("label\ttext\n");
    for i in 0..60 {
        let (label, word) = if i % 3 == 0 { (0, "bad") } else { (1, "good") };
        writeln!(rows, "{label}\t{word} {} {}", ["film", "play", "day"][i % 3], "very ".repeat(i % 7)).unwrap();
    }
    std::fs::write(dir.path().join("a.tsv"), &rows).unwrap();
    std::fs::write(dir.path().join("public.tsv"), rows.replace("bad", "very")).unwrap();
    checkpoint(dir.path(), "bert", 10);
    dir
}

fn checkpoint(dir: &Path, model_type: &str, vocab_size: usize) {
    let bert = dir.join("tiny");
    std::fs::create_dir_all(&bert).unwrap();
    std::fs::write(bert.join("vocab.txt"), WORDS).unwrap();
    let config = format!(
        "{{\"model_type\": \"{model_type}\", \"hidden_size\": 8, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, \
         \"intermediate_size\": 16, \"vocab_size\": {vocab_size}, \"max_position_embeddings\": 16, \"type_vocab_size\": 2, \
         \"hidden_dropout_prob\": 0.1, \"attention_probs_dropout_prob\": 0.1, \"layer_norm_eps\": 1e-12, \
         \"hidden_act\": \"gelu\"}}"
    );
    std::fs::write(bert.join("config.json"), config).unwrap();
}

fn load(dir: &Path, settings: &[&str]) -> Result<Experiment, String> {
    let common = [
        "data.private={name='text', path='a.tsv'}",
        "data.public={name='text', path='public.tsv'}",
        "data.partition={kind='iid', clients=3}",
        "data.text.max_length=8",
        "model.name=bert",
        "model.checkpoint=tiny",
        "model.pretrained=false",
        "federation.rounds=2",
        "local.epochs=1",
    ];
    let settings: Vec<String> = common.iter().chain(settings).map(|s| (*s).to_owned()).collect();
    let config = Config::from_layers(None, &settings).map_err(|e| e.to_string())?;
    let method = config.method.build().unwrap();
    Experiment::load(config, method.as_ref(), Some(dir)).map_err(|e| e.to_string())
}

#[test]
fn texts_are_read_cut_counted_and_drawn() {
    let dir = folder();
    let problem = load(dir.path(), &["data.augment=true"]).unwrap_err();
    assert!(problem.contains("moves and mirrors images, but the samples of `text` are texts"), "{problem}");
    let all = load(dir.path(), &[]).unwrap();
    assert_eq!((all.private.n_samples(), all.test.n_samples()), (48, 12));
    let notes = all.notes();
    assert!(notes.iter().any(|note| note.contains("texts of `text` are longer than 8 tokens")), "{notes:?}");
    assert!(all.public.as_ref().is_some_and(|public| public.labels().is_none() && public.n_samples() == 60));
    let balanced = load(dir.path(), &["data.private_draw=balanced"]).unwrap();
    let labels = balanced.private.labels().unwrap();
    // Of 16 bad and 32 good ones, at most 24 of each.
    assert_eq!((labels.iter().filter(|l| **l == 0).count(), labels.len()), (16, 40));
    let public = load(dir.path(), &["data.public_draw=balanced", "data.public_samples=20"]).unwrap().public.unwrap();
    assert_eq!((public.n_samples(), public.labels()), (20, None));
    let uniform = load(dir.path(), &["data.public_samples=20"]).unwrap().public.unwrap();
    assert_ne!(uniform.hash(), public.hash());
}

#[test]
fn what_does_not_fit_is_refused_with_file_and_cause() {
    let dir = folder();
    let check = |settings: &[&str], expected: &[&str]| {
        let message = load(dir.path(), settings).err().unwrap_or_else(|| panic!("{settings:?} is taken"));
        for part in expected {
            assert!(message.contains(part), "{settings:?}: no `{part}` in: {message}");
        }
    };
    check(&["model.name=mlp"], &["model.checkpoint"]);
    check(&["model.checkpoint="], &["model.checkpoint"]);
    check(&["model.name=mlp", "model.checkpoint="], &["vocabulary", "hint"]);
    check(&["data.text.max_length=17"], &["17", "16"]);
    check(&["model.pretrained=true"], &["model.safetensors"]);
    check(&["data.public=iris"], &["iris", "shape"]);
    checkpoint(dir.path(), "bert", 11);
    check(&[], &["vocab.txt", "10", "11"]);
    checkpoint(dir.path(), "gpt2", 10);
    check(&[], &["config.json", "gpt2", "bert"]);
    std::fs::remove_dir_all(dir.path().join("tiny")).unwrap();
    check(&[], &["tiny"]);
}

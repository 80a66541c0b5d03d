//! Runs on texts through the binary, with a random encoder of a few numbers: from a table to a verified run and the study of
//! Table 2; and what is wrong with a file, a vocabulary or a checkpoint is said with its place.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use command::{failure, fedproj, json, output, stdout};
use std::fmt::Write;
use std::path::Path;

/// A folder with a table of texts, a public one and a checkpoint without weights.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = String::from("label\ttext\n");
    for i in 0..90 {
        let (label, word) = [("bad", "dull"), ("good", "fine"), ("good", "great")][i % 3];
        writeln!(rows, "{label}\ta {word} film {}", "very ".repeat(i % 9)).unwrap();
    }
    std::fs::write(dir.path().join("reviews.tsv"), &rows).unwrap();
    std::fs::write(dir.path().join("public.tsv"), rows.replace("film", "play")).unwrap();
    checkpoint(dir.path(), "bert", 12);
    dir
}

fn checkpoint(dir: &Path, model_type: &str, vocab_size: usize) {
    let bert = dir.join("tiny");
    std::fs::create_dir_all(&bert).unwrap();
    let words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dull", "fine", "great", "film", "play", "very", "##y"];
    std::fs::write(bert.join("vocab.txt"), words.join("\n") + "\n").unwrap();
    let config = format!(
        "{{\"model_type\": \"{model_type}\", \"hidden_size\": 8, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, \
         \"intermediate_size\": 16, \"vocab_size\": {vocab_size}, \"max_position_embeddings\": 16}}"
    );
    std::fs::write(bert.join("config.json"), config).unwrap();
}

const TEXTS: &[&str] = &[
    "data.private={name='text', path='reviews.tsv'}",
    "data.public={name='text', path='public.tsv'}",
    "data.text.max_length=8",
    "model.name=bert",
    "model.checkpoint=tiny",
    "model.pretrained=false",
    "data.partition.clients=3",
    "data.partition.min_samples=3",
    "federation.rounds=2",
    "local.epochs=1",
];

#[test]
fn a_run_on_texts_counts_what_it_cuts_and_can_be_verified() {
    let folder = folder();
    let run = output(fedproj(folder.path(), &[&["run", "--out", "run"], TEXTS].concat()));
    let told = String::from_utf8(run.stderr).unwrap();
    assert!(run.status.success(), "{told}");
    assert!(told.contains("texts of `text` are longer than 8 tokens and were cut"), "{told}");
    let manifest = std::fs::read_to_string(folder.path().join("run/manifest.json")).unwrap();
    assert!(manifest.contains("private_truncated") && manifest.contains("public_truncated"), "{manifest}");
    stdout(folder.path(), &["verify", "run"]);
}

#[test]
fn table2_runs_four_methods_and_names_checkpoint_and_sizes() {
    let folder = folder();
    let own = ["data.private_samples=60", "data.public_samples=30", "--beta", "0.3", "--seeds", "1", "--quiet"];
    let study =
        json(folder.path(), &[&["reproduce", "table2", "--scale", "quick", "--out", "out"], TEXTS, &own].concat());
    let rows = study["tables"][0]["table"]["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["FedAvg", "FedDF", "FedET", "FedProj"]);
    let title = study["title"].as_str().unwrap();
    assert!(title.contains("checkpoint tiny") && !title.contains("stands in"), "{title}");
    // Of 72 texts for training a third is bad: 24 and, of the others, half of 60.
    assert!(title.contains("; 54 private, 18 test and 30 public samples"), "{title}");
}

#[test]
fn what_is_missing_for_table2_is_said_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    for (dataset, files) in [("sst2", ["sst2_train.tsv", "sent140.tsv"]), ("marc", ["marc.tsv", "yelp.tsv"])] {
        let (code, message) = failure(fedproj(folder.path(), &["reproduce", "table2", "--dataset", dataset]));
        assert_eq!(code, 1, "{message}");
        for word in [files[0], files[1], "checkpoint `minilm-l3` is not under", "vocab.txt"] {
            assert!(message.contains(word), "no `{word}` in: {message}");
        }
    }
    let (code, message) = failure(fedproj(folder.path(), &["reproduce", "table2", "--dataset", "cifar10"]));
    assert!(code == 2 && message.contains("sst2, mnli, marc"), "{message}");
}

#[test]
fn bad_texts_vocabularies_and_checkpoints_are_named() {
    let folder = folder();
    let check = |settings: &[&str], code: i32, words: &[&str]| {
        let args = [&["run", "--out", "bad", "--quiet"], TEXTS, settings].concat();
        let (found, message) = failure(fedproj(folder.path(), &args));
        assert_eq!(found, code, "{settings:?}: {message}");
        for word in words {
            assert!(message.contains(word), "{settings:?}: no `{word}` in: {message}");
        }
    };
    let write = |name: &str, content: &[u8]| std::fs::write(folder.path().join(name), content).unwrap();
    write("bad.tsv", b"label\ttext\ngood\tfine\nbad\t\n");
    check(&["data.private={name='text', path='bad.tsv'}"], 1, &["bad.tsv", "line 3", "an empty field"]);
    write("bad.tsv", b"label\ttext\ngood\tfine\nbad\t\xff\n");
    check(&["data.private={name='text', path='bad.tsv'}"], 1, &["bad.tsv", "line 3", "UTF-8"]);
    write("bad.tsv", b"label\ttext\nugly\tfine\n");
    check(&["data.private={name='text', path='reviews.tsv', test='bad.tsv'}"], 1, &["bad.tsv", "line 2", "`ugly`"]);
    check(&["data.private={name='text', path='reviews.tsv', text='body'}"], 1, &["reviews.tsv", "line 1", "`body`"]);
    check(&["data.private={name='text', path='reviews.tsv', txt='body'}"], 2, &["unknown key `txt`", "`text`"]);
    check(&["model.name=resnet8", "model.checkpoint="], 2, &["vocabulary"]);
    check(&["model.name=mlp", "model.checkpoint=", "data.text.vocabulary=tiny/vocab.txt"], 1, &["12 words", "30522"]);
    check(&["data.private=digits", "data.public=split"], 2, &["`bert` is for texts", "`digits` are numbers"]);
    check(&["model.pretrained=true"], 2, &["model.safetensors", "hint: model.pretrained=false"]);
    check(&["data.text.max_length=17"], 2, &["up to 16 tokens", "hint: data.text.max_length=16"]);
    checkpoint(folder.path(), "bert", 13);
    check(&[], 1, &["vocab.txt", "12 words", "13 rows"]);
    checkpoint(folder.path(), "distilbert", 12);
    check(&[], 1, &["config.json", "distilbert"]);
    check(&["model.checkpoint=none"], 1, &["none"]);
}

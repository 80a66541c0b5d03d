//! Word pieces: by hand with a small vocabulary, and, where `FEDPROJ_DATA` holds `minilm-l3`, against the ids that its
//! fixture has from another implementation.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic too")]

mod data_dir;

use std::path::{Path, PathBuf};

use data_dir::data_dir;
use fedproj_data::{SourceConfig, Text, TextConfig, Texts, Tokenizer, load_texts, load_with};

const WORDS: &[&str] = &["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cafe", "play", "##ing", "!", "b", "c", "d"];

fn vocabulary(dir: &Path, words: &[&str]) -> PathBuf {
    let path = dir.join("vocab.txt");
    std::fs::write(&path, words.join("\n") + "\n").unwrap();
    path
}

fn open(words: &[&str], config: &TextConfig) -> Result<Tokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    Tokenizer::open(&vocabulary(dir.path(), words), config, None).map_err(|e| e.to_string())
}

fn text(first: &str, second: Option<&str>) -> Text {
    Text { first: first.into(), second: second.map(str::to_owned) }
}

#[test]
fn words_are_cleaned_and_cut_into_the_longest_known_pieces() {
    let tokenizer = open(WORDS, &TextConfig::default()).unwrap();
    let ids = |first| tokenizer.encode(&text(first, None));
    assert_eq!(ids("A Café\u{a0}playing!"), (vec![2, 4, 5, 6, 7, 8, 3], 7, false));
    assert_eq!(ids("[CLS] zebra").0, [2, 1, 1, 1, 1, 3], "what users write never becomes a control token");
    assert_eq!(ids("\u{80}").0, [2, 3], "nothing readable is an empty sentence, not an error");
    let (ids, n_first, _) = tokenizer.encode(&text("a", Some("b!")));
    assert_eq!((ids, n_first), (vec![2, 4, 3, 9, 8, 3], 3));
    let cased = open(WORDS, &TextConfig { lowercase: false, ..TextConfig::default() }).unwrap();
    assert_eq!(cased.encode(&text("A a café", None)).0, [2, 1, 4, 1, 3]);
}

#[test]
fn long_texts_are_cut_and_counted() {
    let tokenizer = open(WORDS, &TextConfig { max_length: 6, ..TextConfig::default() }).unwrap();
    assert_eq!(tokenizer.encode(&text("a b c d", None)), (vec![2, 4, 9, 10, 11, 3], 6, false));
    assert_eq!(tokenizer.encode(&text("a b c d a", None)), (vec![2, 4, 9, 10, 11, 3], 6, true));
    // Of a pair the longer one loses first.
    assert_eq!(tokenizer.encode(&text("a b c d", Some("c"))), (vec![2, 4, 9, 3, 10, 3], 4, true));
    let texts = ["a", "a b c d a", "d d d d d d d"].map(|t| text(t, None)).to_vec();
    let set = Texts { name: "t".into(), texts, labels: None, groups: None, class_names: vec![] };
    let data = tokenizer.dataset(set).unwrap();
    assert_eq!((data.n_samples(), data.n_truncated()), (3, 2));
    assert_eq!((data.subset(&[0, 1]).n_truncated(), data.shape().to_string()), (1, "6 tokens".into()));
    let mut slots = [9.0; 6];
    data.gather(&[0], &mut slots);
    assert_eq!(slots.map(|v| v as u32), [5, 9, 7, 0, 0, 0]);
}

#[test]
fn what_is_no_vocabulary_is_refused_with_file_and_line() {
    let check = |words: &[&str], expected: &str| {
        let message = open(words, &TextConfig::default()).err().unwrap();
        assert!(message.contains("vocab.txt") && message.contains(expected), "no `{expected}` in: {message}");
    };
    check(&["[PAD]", "[UNK]", "[CLS]", "a"], "a line `[SEP]`");
    check(&["[UNK]", "[CLS]", "[SEP]", "a", "b", "a"], "line 6: expected a new word, found `a` of line 4 again");
    check(&["[UNK]", "", "[CLS]", "[SEP]"], "line 2: expected a word piece");
    let message = open(WORDS, &TextConfig { max_length: 4, ..TextConfig::default() }).err().unwrap();
    assert!(message.contains("data.text.max_length"), "{message}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vocab.txt");
    std::fs::write(&path, b"[UNK]\n\xff\n").unwrap();
    let message = Tokenizer::open(&path, &TextConfig::default(), None).err().unwrap().to_string();
    assert!(message.contains("line 2: expected UTF-8 text"), "{message}");
}

#[test]
fn tokens_are_kept_by_content_vocabulary_and_settings_and_damage_is_mended() {
    let dir = tempfile::tempdir().unwrap();
    let (words, cache) = (vocabulary(dir.path(), WORDS), dir.path().join("cache"));
    let tokens = |texts: &[&str], config: &TextConfig| {
        let texts = texts.iter().map(|t| text(t, None)).collect();
        let set = Texts { name: "t".into(), texts, labels: None, groups: None, class_names: vec![] };
        Tokenizer::open(&words, config, Some(cache.clone())).unwrap().dataset(set).unwrap()
    };
    let files = || -> Vec<PathBuf> { std::fs::read_dir(&cache).unwrap().map(|e| e.unwrap().path()).collect() };
    let first = tokens(&["a b", "Café"], &TextConfig::default());
    let kept = files();
    assert_eq!(kept.len(), 1);
    // What is in the cache is what is read: one set's tokens under another's name would come back.
    assert_eq!(tokens(&["a b", "Café"], &TextConfig::default()), first);
    assert_eq!(files(), kept);
    let good = std::fs::read(&kept[0]).unwrap();
    std::fs::write(&kept[0], &good[..good.len() / 2]).unwrap();
    assert_eq!(tokens(&["a b", "Café"], &TextConfig::default()), first, "a damaged file is made anew");
    assert_eq!(std::fs::read(&kept[0]).unwrap(), good);
    tokens(&["a b", "Cafe"], &TextConfig::default());
    tokens(&["a b", "Café"], &TextConfig { lowercase: false, ..TextConfig::default() });
    tokens(&["a b", "Café"], &TextConfig { max_length: 64, ..TextConfig::default() });
    assert_eq!(files().len(), 4);
    std::fs::write(&words, [WORDS.join("\n"), "\nmore\n".into()].concat()).unwrap();
    tokens(&["a b", "Café"], &TextConfig::default());
    assert_eq!(files().len(), 5);
}

#[test]
fn minilms_ids_are_those_of_its_fixture() {
    let Some(dir) = data_dir("minilm-l3") else { return };
    let vocabulary = dir.join("minilm-l3/vocab.txt");
    let tokenizer = Tokenizer::open(&vocabulary, &TextConfig::default(), None).unwrap();
    assert_eq!(tokenizer.n_words(), 30_522);
    let fixture = std::fs::read_to_string(dir.join("minilm-l3/fixture.json")).unwrap();
    let fixture: serde_json::Value = serde_json::from_str(&fixture).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let (first, second) = match &case["text"] {
            serde_json::Value::String(text) => (text.as_str(), case["text_pair"].as_str()),
            pair => (pair[0].as_str().unwrap(), pair[1].as_str()),
        };
        let numbers = |key: &str| -> Vec<u32> { serde_json::from_value(case[key].clone()).unwrap() };
        let (ids, n_first, is_truncated) = tokenizer.encode(&text(first, second));
        assert_eq!(ids, numbers("input_ids"), "{first}");
        let types: Vec<u32> = (0..ids.len()).map(|at| u32::from(at >= n_first)).collect();
        assert_eq!((types, is_truncated), (numbers("token_type_ids"), false));
    }
}

#[test]
fn the_papers_sets_are_read_whole() {
    let (Some(dir), Some(_)) = (data_dir("text"), data_dir("minilm-l3")) else { return };
    for (set, n_train, n_test, n_classes) in [
        ("sst2", 67_349, Some(872), 2),
        ("mnli", 32_945, Some(6_238), 3),
        ("marc", 6_912, None, 5),
        ("sent140", 44_229, None, 2),
        ("snli", 78_514, None, 3),
        ("yelp", 10_000, None, 5),
    ] {
        let splits = load_texts(&SourceConfig::named(set), Some(&dir)).unwrap();
        assert_eq!(splits.train.texts.len(), n_train, "{set}");
        assert_eq!(splits.test.map(|test| test.texts.len()), n_test, "{set}");
        assert_eq!(splits.train.class_names.len(), n_classes, "{set}");
    }
    let config = TextConfig::default();
    let tokenizer = Tokenizer::open(&dir.join("minilm-l3/vocab.txt"), &config, None).unwrap();
    let marc = load_with(&SourceConfig::named("marc"), Some(&dir), Some(&tokenizer)).unwrap().train;
    assert!(marc.n_truncated() > 100 && marc.n_truncated() < 3000, "{}", marc.n_truncated());
}

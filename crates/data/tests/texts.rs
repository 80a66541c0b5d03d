//! Tables of texts: what is read from them, and how errors name file, line and cause.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic too")]

use std::path::PathBuf;

use fedproj_data::{Column, SourceConfig, Splits, Text, TextColumns, Texts, load, load_texts};

fn name(name: &str) -> Column {
    Column::Name(name.into())
}

/// Reads `content` as `file`, with options set by `change`.
fn read(file: &str, content: &[u8], change: impl Fn(&mut SourceConfig)) -> Result<Splits<Texts>, String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(file), content).unwrap();
    std::fs::write(dir.path().join("test.tsv"), "label\ttext\ngood\tfine\n").unwrap();
    let mut config = SourceConfig { path: Some(file.into()), ..SourceConfig::named("text") };
    change(&mut config);
    load_texts(&config, Some(dir.path())).map_err(|e| e.to_string())
}

fn single(text: &str) -> Text {
    Text { first: text.into(), second: None }
}

fn pair(first: &str, second: &str) -> Text {
    Text { first: first.into(), second: Some(second.into()) }
}

#[test]
fn tsv_has_no_quoting_and_its_text_is_what_is_neither_label_nor_group() {
    let content = b"label\ttext\twho\ngood\t\"Fine\", she said \tann\n\nbad\tno\tbob\ngood\tyes\tann\n";
    let texts = read("a.tsv", content, |c| c.group = Some(name("who"))).unwrap().train;
    assert_eq!(texts.texts, [single("\"Fine\", she said"), single("no"), single("yes")]);
    assert_eq!(texts.class_names, ["bad", "good"]);
    assert_eq!((texts.labels, texts.groups), (Some(vec![1, 0, 1]), Some(vec![0, 1, 0])));
}

#[test]
fn csv_keeps_commas_quotes_and_line_breaks_inside_quotes() {
    let content = "first,second,kind\r\n\"a, \"\"b\"\"\nc\",d,2\r\nx,\"y\",10\n";
    let texts = read("a.csv", content.as_bytes(), |c| c.label = Some(name("kind"))).unwrap().train;
    assert_eq!(texts.texts, [pair("a, \"b\"\nc", "d"), pair("x", "y")]);
    assert_eq!(texts.class_names, ["2", "10"], "numbers in their order");
    let message = read("a.csv", b"text,label\n\"two\nlines\",1\none,2,3\n", |_| ()).unwrap_err();
    assert!(message.contains("line 4: expected 2 fields, found 3"), "{message}");
}

#[test]
fn json_lines_take_any_order_of_keys() {
    let content = b"{\"label\": 1, \"b\": \"two\", \"a\": \"one\", \"note\": null}\n\n{\"a\": \"x\", \"b\": \"y\", \"label\": true}\n";
    let texts = read("a.jsonl", content, |c| c.text = Some(TextColumns::Pair([name("b"), name("a")]))).unwrap().train;
    assert_eq!(texts.texts, [pair("two", "one"), pair("y", "x")]);
    assert_eq!(texts.class_names, ["1", "true"]);
    let message = read("a.jsonl", b"{\"label\": 1, \"b\": \"two\", \"a\": \"one\"}", |_| ()).unwrap_err();
    assert!(message.contains("which key is the first text"), "{message}");
}

#[test]
fn a_test_file_has_the_classes_of_the_training_file() {
    let train = b"label\ttext\nbad\ta\ngood\tb\n";
    let splits = read("a.tsv", train, |c| c.test = Some("test.tsv".into())).unwrap();
    assert_eq!(splits.test.unwrap().labels, Some(vec![1]));
    let message = read("a.tsv", b"label\ttext\nbad\ta\n", |c| c.test = Some("test.tsv".into())).unwrap_err();
    assert!(message.contains("test.tsv`, line 2") && message.contains("unknown label `good`"), "{message}");
}

#[test]
fn a_table_without_labels_is_a_public_set() {
    let texts = read("a.tsv", b"text\none\ntwo\n", |c| c.label = Some(name("none"))).unwrap().train;
    assert_eq!((texts.texts.len(), texts.labels, texts.class_names.len()), (2, None, 0));
}

#[test]
fn errors_name_file_line_and_cause() {
    let check = |file: &str, content: &[u8], expected: &str| {
        let message = read(file, content, |_| ()).unwrap_err();
        assert!(message.contains(file) && message.contains(expected), "no `{expected}` in: {message}");
    };
    check("a.tsv", b"label\ttext\n0\tfine\n1\t  \n", "line 3: expected a text, found an empty field");
    check("a.tsv", b"label\ttext\n0\tfine\n1\t\xff\xfe\n", "line 3: expected UTF-8 text");
    check("a.tsv", b"class\ttext\n0\tfine\n", "line 1: expected a column named `label`, found 2 columns: class, text");
    check("a.tsv", b"label\ttext\n0\tfine\tmore\n", "line 2: expected 2 fields, found 3");
    check("a.tsv", b"label\ta\tb\tc\n0\t1\t2\t3\n", "one column of text, or two");
    check("a.tsv", b"label\ttext\n", "at least one row");
    check("a.tsv", b"", "a line of column names");
    check(
        "a.jsonl",
        b"{\"label\": 0, \"text\": \"a\"}\n{\"label\": 0}\n",
        "line 2: expected a text or number under the key `text`",
    );
    check("a.jsonl", b"{\"label\": 0, \"text\": \"a\"}\nno json\n", "line 2: expected a JSON object");
    check("a.txt", b"label\ttext\n0\tfine\n", "name the file .tsv, .csv or .jsonl");
}

fn named(set: &str, files: &[(&str, &str)]) -> Result<Splits<Texts>, String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("text")).unwrap();
    for (file, content) in files {
        std::fs::write(dir.path().join("text").join(file), content).unwrap();
    }
    load_texts(&SourceConfig::named(set), Some(dir.path())).map_err(|e| e.to_string())
}

#[test]
fn known_sets_have_known_labels() {
    let dev = ("sst2_dev.tsv", "label\ttext\npositive\tyes\n");
    let splits = named("sst2", &[("sst2_train.tsv", "label\ttext\n1\tgood\n0\tbad\n"), dev]).unwrap();
    assert_eq!(splits.train.class_names, ["negative", "positive"]);
    assert_eq!((splits.train.labels, splits.test.unwrap().labels), (Some(vec![1, 0]), Some(vec![1])));
    let message = named("sst2", &[("sst2_train.tsv", "label\ttext\n1\tgood\n2\tbad\n"), dev]).unwrap_err();
    assert!(message.contains("sst2_train.tsv`, line 3") && message.contains("unknown label `2`"), "{message}");
    let message = named("sst2", &[dev]).unwrap_err();
    assert!(message.contains("text/sst2_train.tsv") && message.contains("columns label"), "{message}");
}

#[test]
fn mnli_loses_its_final_full_stops() {
    let rows = "label\tpremise\thypothesis\n0\tOne.\tTwo .\n2\tThree?\t.\n";
    let splits = named("mnli", &[("mnli_train.tsv", rows), ("mnli_test.tsv", rows)]).unwrap();
    assert_eq!(splits.train.texts, [pair("One", "Two"), pair("Three?", ".")]);
    assert_eq!(splits.test.unwrap().texts, splits.train.texts);
}

#[test]
fn texts_without_a_tokeniser_are_refused_with_what_to_set() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.tsv"), "label\ttext\n0\ta\n").unwrap();
    let config = SourceConfig { path: Some(PathBuf::from("a.tsv")), ..SourceConfig::named("text") };
    let message = load(&config, Some(dir.path())).unwrap_err().to_string();
    assert!(message.contains("model.checkpoint"), "{message}");
}

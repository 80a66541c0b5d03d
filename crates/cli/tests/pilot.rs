//! `fedproj reproduce pilot`: the phenomenon shows, and what is written agrees with itself.
//!
//! One run of the command serves all claims, since they are about one set of files.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use serde_json::Value;
use std::fs;
use std::path::Path;

const METHODS: [(&str, &str); 3] = [("fedavg", "FedAvg"), ("feddf", "FedDF"), ("fedproj", "FedProj")];

#[test]
fn the_pilot_study_shows_what_the_paper_describes() {
    let folder = tempfile::tempdir().unwrap();
    let results = command::json(folder.path(), &["reproduce", "pilot", "--seeds", "5", "--out", "pilot"]);
    let out = folder.path().join("pilot");
    let stored: Value = serde_json::from_str(&fs::read_to_string(out.join("results.json")).unwrap()).unwrap();
    assert_eq!(results, stored);
    collapses_without_projection_only(&results);
    clients_of_one_size_recover_but_forget(&results);
    clients_remember_pretrained_weights_in_every_seed(&results);
    figures_are_well_formed(&out.join("figures"));
    page_is_self_contained_and_says_the_same(&out, &results);
}

fn number(value: &Value, path: &[&str]) -> f64 {
    path.iter().fold(value, |v, key| &v[key]).as_f64().unwrap_or_else(|| panic!("{path:?}: {value}"))
}

fn seeds<'a>(value: &'a Value, path: &[&str]) -> &'a Vec<Value> {
    path.iter().fold(value, |v, key| &v[key]).as_array().unwrap()
}

/// Ranges, not digits: another stream of random numbers gives other digits.
fn collapses_without_projection_only(results: &Value) {
    let mean = |method| 100.0 * number(results, &["methods", method, "mean"]);
    for method in ["fedavg", "feddf"] {
        assert!((60.0..=70.0).contains(&mean(method)), "{method}: {}", mean(method));
    }
    assert!(mean("fedproj") >= 85.0 && mean("fedproj") >= mean("fedavg") + 15.0, "{}", mean("fedproj"));
    assert_eq!(seeds(results, &["methods", "fedproj", "seeds"]).len(), 5);
    assert!(number(results, &["methods", "fedproj", "projection_rate", "mean"]) > 0.8);
    assert!(results["methods"]["fedavg"]["projection_rate"].is_null());
}

fn clients_of_one_size_recover_but_forget(results: &Value) {
    assert!(number(results, &["balanced", "fedavg", "mean"]) > 0.85);
    let client = |method| number(results, &["balanced", method, "client_mean"]);
    assert!(client("fedproj") > client("fedavg") + 0.05 && client("fedproj") > client("feddf") + 0.05);
}

fn clients_remember_pretrained_weights_in_every_seed(results: &Value) {
    assert!(number(results, &["pretrained", "fedavg", "start", "min"]) > 0.94);
    let clients = |method| seeds(results, &["pretrained", method, "client", "seeds"]);
    for (i, fedproj) in clients("fedproj").iter().enumerate() {
        for other in ["fedavg", "feddf"] {
            assert!(fedproj.as_f64() > clients(other)[i].as_f64(), "seed {i}: {fedproj} {other} {}", clients(other)[i]);
        }
    }
}

fn figures_are_well_formed(dir: &Path) {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    let svgs: Vec<_> = names.iter().filter(|p| p.extension().is_some_and(|e| e == "svg")).collect();
    assert_eq!(svgs.len(), 11, "{names:?}");
    for path in svgs {
        let text = fs::read_to_string(path).unwrap();
        let picture = roxmltree::Document::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let size = |name| picture.root_element().attribute(name).unwrap().parse::<f64>().unwrap();
        for text in picture.descendants().filter(|n| n.has_tag_name("text")) {
            let at = |name| text.attribute(name).unwrap().parse::<f64>().unwrap();
            assert!((0.0..size("width")).contains(&at("x")) && (0.0..size("height")).contains(&at("y")));
            assert!(at("font-size") >= 11.0);
        }
        for reference in picture.descendants().filter_map(|n| n.attribute("href")) {
            let id = reference.strip_prefix('#').unwrap();
            assert!(picture.descendants().any(|n| n.attribute("id") == Some(id)), "{reference}");
        }
        assert!(fs::read(path.with_extension("png")).unwrap().starts_with(b"\x89PNG"));
    }
}

fn page_is_self_contained_and_says_the_same(out: &Path, results: &Value) {
    let html = fs::read_to_string(out.join("report.html")).unwrap();
    let allowed = html.replace("http://www.w3.org/2000/svg", "").replace("\"data:,\"", "");
    for outside in ["http:", "https:", "src=", "@import", "url(h", "data:image", "<iframe"] {
        assert!(!allowed.contains(outside), "{outside}");
    }
    let mut ids: Vec<&str> = html.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let n = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), n, "pictures share ids");
    let csv = fs::read_to_string(out.join("table.csv")).unwrap();
    for (setting, title) in [
        ("methods", "skewed, from scratch"),
        ("balanced", "balanced, from scratch"),
        ("pretrained", "skewed, pre-trained"),
    ] {
        for (key, name) in METHODS {
            let percent = |path: &[&str]| {
                let value = |of| 100.0 * number(&results[setting][key], &[path, &[of]].concat());
                format!("<td>{:.2} ({:.2}–{:.2})</td>", value("mean"), value("min"), value("max"))
            };
            let cells = percent(&[]) + &percent(&["client"]) + &percent(&["forgetting"]);
            let row = format!("<td class=\"name\">{title}</td><td class=\"name\">{name}</td>{cells}");
            assert!(html.contains(&row), "{row}");
            let mean = number(results, &[setting, key, "mean"]);
            let key_in_file = if setting == "methods" { "skewed" } else { setting };
            assert!(csv.contains(&format!("{key_in_file},{key},5,{mean},")), "{csv}");
        }
    }
}

#[test]
fn the_study_does_not_depend_on_the_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["1", "2"].map(|threads| {
        command::json(folder.path(), &["reproduce", "pilot", "--seeds", "1", "--threads", threads, "--out", threads])
    });
    assert_eq!(one, two);
    let read = |dir: &str, file: &str| fs::read(folder.path().join(dir).join(file)).unwrap();
    for file in ["report.html", "table.csv", "figures/regions-skewed-round-20.png"] {
        assert_eq!(read("1", file), read("2", file), "{file}");
    }
}

//! The documentation is true: its commands run, its links lead somewhere, the book holds every page, and the options that
//! it lists have the code's defaults.
//!
//! In a block marked `sh` every `fedproj` command is run. In one marked `sh needs-data` it may fail only because data are
//! missing, in one marked `sh needs-gpu` only because a GPU is.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Every page for users, by its path from the root.
fn pages() -> Vec<(String, String)> {
    let mut paths = vec![root().join("README.md")];
    let mut folders = vec![root().join("docs"), root().join("results")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(extension) if extension == "md" => paths.push(path),
                _ => (),
            }
        }
    }
    paths.sort();
    let page = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        (name, std::fs::read_to_string(path).unwrap())
    };
    paths.into_iter().map(page).collect()
}

/// The fenced blocks of a page: what stands behind the fence, and the lines.
fn blocks(page: &str) -> Vec<(&str, String)> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(mark) = line.strip_prefix("```") {
            let block: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("```")).collect();
            blocks.push((mark, block.join("\n")));
        }
    }
    blocks
}

/// The commands of a block that can be run here: the program is built already, and `tests/pilot.rs` runs the pilot.
fn runnable(block: &str) -> Vec<String> {
    let block = block.replace("\\\n", "");
    let program = block.lines().map(|line| line.replace("cargo run --release -- ", "fedproj "));
    let elsewhere = |line: &String| {
        let outside = ["cargo ", "git ", "cd ", "export "];
        outside.iter().any(|start| line.starts_with(start)) || line.starts_with("fedproj reproduce pilot")
    };
    program.filter(|line| !elsewhere(line)).collect()
}

#[cfg(unix)]
fn shell(folder: &Path, script: &str) -> std::process::Output {
    let program = Path::new(env!("CARGO_BIN_EXE_fedproj")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = std::process::Command::new("sh");
    shell.args(["-e", "-c", script]).current_dir(folder).env("PATH", path).env_remove("FEDPROJ_DATA");
    shell.output().unwrap()
}

#[cfg(unix)]
#[test]
fn commands_run() {
    let mut n_run = 0;
    for (name, page) in pages() {
        let folder = tempfile::tempdir().unwrap();
        copy_configurations(&root().join(&name), folder.path());
        for (mark, block) in blocks(&page) {
            let lines = runnable(&block);
            match mark {
                "sh" if !lines.is_empty() => {
                    let output = shell(folder.path(), &lines.join("\n"));
                    let told = String::from_utf8_lossy(&output.stderr);
                    assert!(output.status.success(), "{name}: {}\n{block}\n{told}", output.status);
                    n_run += lines.len();
                }
                "sh needs-data" | "sh needs-gpu" => {
                    let missing = if mark == "sh needs-data" { "is not under" } else { "GPU: using a GPU: " };
                    for line in lines {
                        let output = shell(folder.path(), &line);
                        let told = String::from_utf8_lossy(&output.stderr);
                        let is_missing = output.status.code() == Some(1) && told.contains(missing);
                        assert!(output.status.success() || is_missing, "{name}: {line}\n{told}");
                        n_run += 1;
                    }
                }
                _ => assert!(
                    !block.contains("fedproj run"),
                    "{name}: a block of commands without the mark `sh`:\n{block}"
                ),
            }
        }
        convinces(&name, folder.path());
    }
    assert!(n_run > 30, "only {n_run} commands were found");
}

/// A study's page runs the configuration beside it.
#[cfg(unix)]
fn copy_configurations(page: &Path, to: &Path) {
    for entry in std::fs::read_dir(page.parent().unwrap()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}

/// What a newcomer sees first is clear: FedProj leads, and the made-up classes are told apart.
#[cfg(unix)]
fn convinces(page: &str, folder: &Path) {
    if page == "README.md" || page == "docs/getting-started.md" {
        let compared = command::json(folder, &["compare", "runs/first"]);
        let rows = compared["settings"][0]["rows"].as_array().unwrap();
        let fedproj = &rows.iter().find(|row| row["name"] == "FedProj").unwrap()["difference"];
        let (mean, half) = (fedproj["mean"].as_f64().unwrap(), fedproj["half_width"].as_f64().unwrap());
        assert!(mean - half > 0.1, "{page}: FedProj leads FedAvg by {mean} ± {half}");
    }
    if page == "docs/getting-started.md" {
        let summary = std::fs::read_to_string(folder.join("runs/points/summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        assert!(summary["headline"].as_f64().unwrap() > 0.95, "{summary}");
    }
}

/// The lines of a page outside its blocks of code.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    page.lines().filter(move |line| {
        is_code ^= line.starts_with("```");
        !is_code
    })
}

/// Where a page's links lead to: `[text](target)` and `[name]: target`.
fn links(page: &str) -> Vec<&str> {
    let of_line = |line| {
        let named = str::split_once(line, "]: ").filter(|(name, _)| name.starts_with('[')).map(|(_, target)| target);
        line.split("](").skip(1).filter_map(|rest| rest.split(')').next()).chain(named)
    };
    prose(page).flat_map(of_line).collect()
}

/// The anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(page: &str) -> Vec<String> {
    let anchor = |heading: &str| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    prose(page)
        .filter_map(|line| line.strip_prefix('#'))
        .map(|line| anchor(line.trim_start_matches('#').trim()))
        .collect()
}

#[test]
fn the_configuration_reference_is_that_of_the_code() {
    let folder = tempfile::tempdir().unwrap();
    let made = command::stdout(folder.path(), &["config", "reference"]);
    let page = std::fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    assert!(page == made, "renew it: fedproj config reference > docs/configuration.md");
}

#[test]
fn links_lead_somewhere() {
    let mut pages = pages();
    for name in ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md"] {
        pages.push((name.to_owned(), std::fs::read_to_string(root().join(name)).unwrap()));
    }
    let mut n_links = 0;
    for (name, page) in &pages {
        for link in links(page).into_iter().filter(|link| !link.starts_with("http")) {
            let (target, anchor) = link.split_once('#').map_or((link, None), |(target, anchor)| (target, Some(anchor)));
            let path = root().join(name);
            let path = if target.is_empty() { path } else { path.parent().unwrap().join(target) };
            assert!(path.exists(), "{name}: nothing at `{link}`");
            if let Some(anchor) = anchor {
                let known = anchors(&std::fs::read_to_string(path).unwrap());
                assert!(known.iter().any(|known| known == anchor), "{name}: no heading at `{link}` among {known:?}");
            }
            n_links += 1;
        }
    }
    assert!(n_links > 80, "only {n_links} links were found");
}

/// Lines of 100 characters, rows of tables of 120, and a README that is read in five minutes.
#[test]
fn pages_stay_short() {
    // The reference is made of the code's comments.
    let is_written = |name: &str| name != "docs/configuration.md" && !name.starts_with("results");
    let beside = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md", "python/README.md"];
    let beside = beside.map(|name| (name.to_owned(), std::fs::read_to_string(root().join(name)).unwrap()));
    for (name, page) in pages().into_iter().filter(|(name, _)| is_written(name)).chain(beside) {
        for line in page.lines() {
            let n_max = if line.starts_with('|') { 120 } else { 100 };
            assert!(line.chars().count() <= n_max, "{name}: over {n_max} characters:\n{line}");
        }
        assert!(name != "README.md" || page.split_whitespace().count() <= 900, "the README has over 900 words");
    }
}

#[test]
fn the_book_holds_every_page_once() {
    let summary = std::fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let mut listed: Vec<String> = links(&summary).into_iter().map(|link| format!("docs/{link}")).collect();
    listed.push("docs/SUMMARY.md".to_owned());
    listed.sort();
    let names = pages().into_iter().map(|(name, _)| name).filter(|name| name.starts_with("docs/"));
    assert_eq!(listed, names.collect::<Vec<_>>());
}

#[test]
fn mdbook_builds_the_book_where_it_is_installed() {
    let out = tempfile::tempdir().unwrap();
    let mut mdbook = std::process::Command::new("mdbook");
    let Ok(output) = mdbook.arg("build").arg(root()).arg("--dest-dir").arg(out.path()).output() else {
        return eprintln!("skipped: mdbook is not installed (cargo install mdbook --locked)");
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for file in ["getting-started.html", "methods/index.html", "figures/pilot.svg"] {
        assert!(out.path().join(file).exists(), "the book has no {file}");
    }
}

fn flatten(value: &toml::Value, path: &str, out: &mut BTreeMap<String, toml::Value>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                flatten(value, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, out);
            }
        }
        value => _ = out.insert(path.to_owned(), value.clone()),
    }
}

/// The entries on a page are those of the reference. A page lists every option, or links to its section of the reference.
#[test]
fn every_method_has_a_page_with_its_options() {
    let config = fedproj_core::Config::from_layers(None, &[]).unwrap().to_toml().unwrap();
    let config: toml::Table = toml::from_str(&config).unwrap();
    for (method, _) in fedproj_core::methods::CATALOGUE {
        let page = std::fs::read_to_string(root().join(format!("docs/methods/{method}.md")));
        let page = page.unwrap_or_else(|e| panic!("docs/methods/{method}.md: {e}"));
        let mut keys = BTreeMap::new();
        flatten(&config["method"][*method], &format!("method.{method}"), &mut keys);
        let options = page.split_once("<!-- options -->\n").and_then(|(_, rest)| rest.split_once("<!-- end -->"));
        let options = options.unwrap_or_else(|| panic!("{method}: no list of options")).0;
        let entries = options.lines().filter_map(|line| line.strip_prefix("- `"));
        let listed: Vec<&str> = entries.filter_map(|line| line.split(['`', ' ']).next()).collect();
        if listed.is_empty() {
            assert_eq!(options, "", "docs/methods/{method}.md");
        } else {
            let made = command::stdout(Path::new("."), &[&["config", "reference"][..], &listed].concat());
            let renew = format!("fedproj config reference {}", listed.join(" "));
            assert!(options == made, "docs/methods/{method}.md: renew its options: {renew}");
        }
        // Constants of an optimiser are explained once, with `local.optimizer`.
        let has_link = links(&page).contains(&format!("../configuration.md#method{method}").as_str());
        for key in keys.keys().filter(|key| !has_link && !key.contains("optimizer.")) {
            assert!(listed.contains(&key.as_str()), "docs/methods/{method}.md does not list `{key}`");
        }
    }
}

/// A page cites what its module cites, and runs its method from one word.
#[test]
fn every_method_has_a_page_with_its_modules_citation_and_a_command() {
    for (method, _) in fedproj_core::methods::CATALOGUE {
        let read = |path: String| std::fs::read_to_string(root().join(&path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        let page = read(format!("docs/methods/{method}.md"));
        let module = read(format!("crates/core/src/methods/{method}.rs"));
        let doc: String = module.lines().map_while(|line| line.strip_prefix("//!")).collect();
        for cited in doc.split("arXiv:").skip(1) {
            let id = cited.split(|c: char| c != '.' && !c.is_ascii_digit()).next().unwrap().trim_end_matches('.');
            assert!(page.contains(id), "docs/methods/{method}.md does not cite arXiv:{id}");
        }
        assert!(doc.contains("State kept by a client"), "{method}.rs");
        assert!(page.contains("\n## Where does it depart from the paper?\n"), "{method}");
        let runs = [format!("fedproj run method.name={method} "), format!("fedproj run method={method} ")];
        assert!(runs.iter().any(|run| page.contains(run)), "{method}: no command");
    }
}

/// What the overview says that methods need and keep is what the program finds, for a network with batch-norm.
#[test]
fn the_overview_of_methods_says_what_they_need() {
    let page = std::fs::read_to_string(root().join("docs/methods/README.md")).unwrap();
    for method in command::json(Path::new("."), &["methods", "model.name=resnet8-thin"]).as_array().unwrap() {
        let name = method["name"].as_str().unwrap();
        let row = page.lines().find(|line| line.starts_with('|') && line.contains(&format!("]({name}.md)")));
        let row = row.unwrap_or_else(|| panic!("docs/methods/README.md has no row for {name}"));
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, _, public, keeps, travels, _] = columns[..] else { panic!("{row}") };
        assert_eq!(public.starts_with("yes"), method["public"] == true, "{row}");
        assert_eq!(keeps == "nothing", method["bytes_kept"] == 0, "{row}");
        assert!(travels != "–" || method["bytes_down"] == method["bytes_up"], "{row}");
    }
}

//! The limits on the sources that CONTRIBUTING states.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use std::path::{Path, PathBuf};

const LINES_MAX: usize = 70;

/// Every Rust file below a folder, without what is built there.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let of_entry = |path: PathBuf| match path.extension() {
        _ if path.is_dir() => sources(&path),
        Some(extension) if extension == "rs" => vec![path],
        _ => Vec::new(),
    };
    entries.filter(|path| !path.ends_with("target")).flat_map(of_entry).collect()
}

fn begins_function(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let is_qualifier = |word: &str| {
        matches!(word, "async" | "const" | "unsafe" | "extern") || word.starts_with("pub") || word.starts_with('"')
    };
    words.find(|word| !is_qualifier(word)) == Some("fn")
}

/// The number of the line where each function begins, and how many lines it has. rustfmt indents the line that closes a
/// function like the line that begins it.
fn functions(source: &str) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let of_line = |(start, line): (usize, &&str)| {
        let indent = line.len() - line.trim_start().len();
        let closes = |line: &&str| {
            let rest = line.get(indent..).unwrap_or_default();
            line.starts_with(&" ".repeat(indent))
                && (rest.starts_with('}') || rest.starts_with(')') && rest.ends_with(';'))
        };
        let is_whole = line.ends_with(['}', ';']);
        let n_more = if is_whole { 0 } else { 1 + lines[start + 1..].iter().position(closes).unwrap() };
        (start + 1, 1 + n_more)
    };
    lines.iter().enumerate().filter(|(_, line)| begins_function(line)).map(of_line).collect()
}

#[test]
fn functions_are_counted_from_their_name_to_their_brace() {
    let source = "fn one() {}\n\npub(crate) async fn four(\n    x: u32,\n) {\n}\n\ntrait T {\n    fn three(\n        &self,\n    );\n    \
                  const fn two() {\n    }\n}\n// fn none\n";
    assert_eq!(functions(source), [(1, 1), (3, 4), (9, 3), (12, 2)]);
}

#[test]
fn no_function_is_longer_than_a_screen() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let (mut n_functions, mut too_long) = (0, Vec::new());
    for path in ["crates", "emulator", "fuzz", "python/src"].iter().flat_map(|folder| sources(&root.join(folder))) {
        for (line, n_lines) in functions(&std::fs::read_to_string(&path).unwrap()) {
            n_functions += 1;
            if n_lines > LINES_MAX {
                too_long.push(format!("{}:{line}: {n_lines} lines", path.strip_prefix(&root).unwrap().display()));
            }
        }
    }
    assert!(n_functions > 4000, "only {n_functions} functions were found");
    assert!(too_long.is_empty(), "functions of more than {LINES_MAX} lines:\n{}", too_long.join("\n"));
}

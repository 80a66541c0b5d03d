//! Run directories of earlier versions are still read, and mean what they meant.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::{Config, StoredRun};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Every committed run directory.
fn runs() -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results")]);
    while let Some(folder) = folders.pop() {
        if folder.join("config.toml").exists() {
            found.push(folder.clone());
        }
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        folders.extend(entries.filter(|path| path.is_dir()));
    }
    assert!(found.len() >= 190, "only {} runs were found", found.len());
    found
}

/// Every value of `given` is in one of `tables` too, under the same key; the first that has the key counts.
fn check_within(given: &Table, tables: &[&Table], place: &str) {
    for (key, value) in given {
        let place = format!("{place}.{key}");
        let found = tables.iter().find_map(|table| table.get(key)).unwrap_or_else(|| panic!("{place} is lost"));
        if let Value::Table(value) = value {
            let inner: Vec<&Table> = tables.iter().filter_map(|table| table.get(key)?.as_table()).collect();
            check_within(value, &inner, &place);
        } else {
            assert_eq!(value, found, "{place}");
        }
    }
}

#[test]
fn configurations_of_earlier_versions_keep_every_value() {
    for run in runs() {
        let text = std::fs::read_to_string(run.join("config.toml")).unwrap();
        let config = Config::from_toml(&text).unwrap_or_else(|e| panic!("{}: {e}", run.display()));
        // Under the names that keys had first, nothing is lost and nothing has another value. The identity leaves out what
        // was added later and changes nothing; that has its own name.
        let tables = [config.identity(), config.to_toml()].map(|text| toml::from_str(&text.unwrap()).unwrap());
        check_within(&toml::from_str(&text).unwrap(), &tables.each_ref(), &run.display().to_string());
        // Given as a file, it is checked like a new one and is the same run: so it can be resumed and verified.
        let again = Config::from_layers(Some(&toml::from_str(&text).unwrap()), &[]).unwrap();
        assert_eq!(again.to_toml().unwrap(), config.to_toml().unwrap(), "{}", run.display());
        assert_eq!(Config::from_toml(&config.to_toml().unwrap()).unwrap(), config, "{}", run.display());
    }
}

#[test]
fn finished_runs_of_earlier_versions_open() {
    for run in runs().into_iter().filter(|run| run.join("summary.json").exists()) {
        let stored = StoredRun::open(&run).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(stored.rounds.len(), stored.config.federation.rounds as usize, "{}", run.display());
    }
}

#[test]
fn a_moved_key_may_be_given_by_its_old_name() {
    let config = |pairs: &[&str]| {
        Config::from_layers(None, &pairs.iter().map(|pair| (*pair).to_owned()).collect::<Vec<_>>()).unwrap()
    };
    let new = config(&["method.fedproj.authors.stop_round=3", "method.fedproj.authors.integer_cast=true"]);
    let old = config(&["method.fedproj.projection.stop_round=3", "method.fedproj.memory.integer_cast=true"]);
    assert_eq!(old, new);
    // The later of both wins, whatever its name.
    let last = config(&["method.fedproj.authors.stop_round=9", "method.fedproj.projection.stop_round=3"]);
    assert_eq!(last.method.fedproj.authors.stop_round, 3);
}

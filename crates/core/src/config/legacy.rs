//! Keys that have moved or were added. Configurations of earlier versions are translated here and nowhere else.

use toml::{Table, Value};

/// Old path, new path.
const MOVED: &[(&str, &str)] = &[
    ("method.fedproj.projection.stop_round", "method.fedproj.authors.stop_round"),
    ("method.fedproj.projection.norm_guard", "method.fedproj.authors.norm_guard"),
    ("method.fedproj.projection.coefficient_max", "method.fedproj.authors.coefficient_max"),
    ("method.fedproj.memory.integer_cast", "method.fedproj.authors.integer_cast"),
];

/// Keys that earlier versions do not know, and the value that says what they did.
const ADDED: &[(&str, Value)] = &[
    ("data.augment", Value::Boolean(false)),
    ("model.layers", Value::Array(Vec::new())),
    ("federation.average_evaluated", Value::Float(0.0)),
    ("federation.robust.clip_ratio", Value::Float(0.0)),
    ("federation.robust.claim_ratio", Value::Float(0.0)),
    ("method.feddyn.absent", Value::Boolean(false)),
    ("method.feddyn.authors", Value::Boolean(false)),
    ("method.fedspeed.absent", Value::Boolean(false)),
    ("method.fedproj.correction.absent", Value::Boolean(false)),
    ("method.fedproj.averages.teacher", Value::Float(0.0)),
    ("method.fedproj.averages.memory", Value::Float(0.0)),
    ("method.fedproj.correction.alpha", Value::Float(0.0)),
    ("method.fedproj.correction.clip", Value::Float(10.0)),
    ("method.fedproj.lookahead", Value::Float(0.0)),
    ("method.fedproj.projection.references", Value::Integer(4)),
    ("method.fedproj.projection.energy", Value::Float(0.97)),
];

/// Likewise, where the value is a word.
const ADDED_WORDS: &[(&str, &str)] = &[("federation.sum", "float"), ("method.fedproj.projection.rule", "fedproj")];

/// The methods that every version knows. The settings of another one count only where it runs.
const FIRST_METHODS: &[&str] = &[
    "fedavg", "fedprox", "fednova", "feddyn", "moon", "fedrcl", "feddf", "fedet", "fedproj", "scaffold", "fedavgm",
    "fedadam",
];

/// Puts moved keys where they are now.
pub(super) fn translate(table: &mut Table) {
    for (old, new) in MOVED {
        rename(table, old, new);
    }
}

/// Puts moved keys where they were first, and removes added keys and methods that change nothing.
pub(super) fn restore(table: &mut Table) {
    if let Some(Value::Table(methods)) = table.get_mut("method") {
        let chosen = methods.get("name").and_then(Value::as_str).map(str::to_owned);
        let is_used =
            |name: &str| FIRST_METHODS.contains(&name) || name == "external" || chosen.as_deref() == Some(name);
        methods.retain(|name, value| !value.is_table() || is_used(name));
    }
    // Privacy that is off decides nothing.
    if find(table, "privacy.noise_multiplier") == Some(&Value::Float(0.0)) {
        table.remove("privacy");
    }
    for (path, unchanged) in ADDED {
        if find(table, path) == Some(unchanged) {
            take(table, path);
        }
    }
    for (path, unchanged) in ADDED_WORDS {
        if find(table, path).and_then(Value::as_str) == Some(unchanged) {
            take(table, path);
        }
    }
    for (old, new) in MOVED {
        rename(table, new, old);
    }
}

/// Moves a value, if it is there; what stands at `to` is replaced, and a table that is empty then goes.
fn rename(table: &mut Table, from: &str, to: &str) {
    let Some(value) = take(table, from) else { return };
    let (parents, key) = to.rsplit_once('.').unwrap_or(("", to));
    let mut at = table;
    for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
        let entry = at.entry(parent).or_insert_with(|| Value::Table(Table::new()));
        let Value::Table(inner) = entry else { return };
        at = inner;
    }
    at.insert(key.to_owned(), value);
}

fn find<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    match path.split_once('.') {
        Some((parent, rest)) => find(table.get(parent)?.as_table()?, rest),
        None => table.get(path),
    }
}

fn take(table: &mut Table, path: &str) -> Option<Value> {
    let Some((parent, rest)) = path.split_once('.') else { return table.remove(path) };
    let inner = table.get_mut(parent)?.as_table_mut()?;
    let value = take(inner, rest);
    if value.is_some() && inner.is_empty() {
        table.remove(parent);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_keys_come_back_where_they_were() {
        let old: Table = toml::from_str(
            "[method.fedproj]\nprojection = { stop_round = 3, eps = 0.5 }\nmemory = { integer_cast = true }",
        )
        .unwrap();
        let mut table = old.clone();
        translate(&mut table);
        let new: Table = toml::from_str(
            "[method.fedproj]\nprojection = { eps = 0.5 }\nauthors = { stop_round = 3, integer_cast = true }",
        )
        .unwrap();
        assert_eq!(table, new);
        restore(&mut table);
        assert_eq!(table, old);
    }

    #[test]
    fn the_settings_of_an_added_method_show_only_where_it_runs() {
        let text = |name: &str| format!("[method]\nname = '{name}'\nfedavg = {{}}\nfedlc = {{ margin = 1.0 }}");
        let restored = |name: &str| {
            let mut table: Table = toml::from_str(&text(name)).unwrap();
            restore(&mut table);
            table
        };
        assert_eq!(restored("fedlc"), toml::from_str(&text("fedlc")).unwrap());
        assert_eq!(restored("fedavg"), toml::from_str("[method]\nname = 'fedavg'\nfedavg = {}").unwrap());
    }

    #[test]
    fn an_added_key_shows_only_where_it_changes_something() {
        let robust = |text: &str| toml::from_str::<Table>(&format!("[federation.robust]\n{text}")).unwrap();
        let mut table = robust("clip = 0.0\nclip_ratio = 0.0\nclaim_ratio = 3.0");
        restore(&mut table);
        assert_eq!(table, robust("clip = 0.0\nclaim_ratio = 3.0"));
        let sum =
            |word: &str| toml::from_str::<Table>(&format!("federation = {{ rounds = 1, sum = '{word}' }}")).unwrap();
        let (mut float, mut fixed) = (sum("float"), sum("fixed"));
        restore(&mut float);
        restore(&mut fixed);
        assert_eq!((float, fixed), (toml::from_str("federation.rounds = 1").unwrap(), sum("fixed")));
    }

    #[test]
    fn privacy_shows_only_where_it_is_on() {
        let privacy =
            |z: &str| toml::from_str::<Table>(&format!("[privacy]\nnoise_multiplier = {z}\nclip = 2.0")).unwrap();
        let (mut off, mut on) = (privacy("0.0"), privacy("1.5"));
        restore(&mut off);
        restore(&mut on);
        assert_eq!((off, on), (Table::new(), privacy("1.5")));
    }
}

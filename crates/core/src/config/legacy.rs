//! Keys that have moved. Configurations of earlier versions are translated here and nowhere else.

use toml::{Table, Value};

/// Old path, new path.
const MOVED: &[(&str, &str)] = &[
    ("method.fedproj.projection.stop_round", "method.fedproj.authors.stop_round"),
    ("method.fedproj.projection.norm_guard", "method.fedproj.authors.norm_guard"),
    ("method.fedproj.projection.coefficient_max", "method.fedproj.authors.coefficient_max"),
    ("method.fedproj.memory.integer_cast", "method.fedproj.authors.integer_cast"),
];

/// Puts moved keys where they are now.
pub(super) fn translate(table: &mut Table) {
    for (old, new) in MOVED {
        rename(table, old, new);
    }
}

/// Puts moved keys where they were first.
pub(super) fn restore(table: &mut Table) {
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
}

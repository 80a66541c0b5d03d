//! Many runs from one configuration file: `seeds` and `[sweep]`.

use fedproj_core::{Config, Error, Result, parse_value, split_pair};
use std::collections::BTreeSet;
use toml::{Table, Value};

/// One run of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepRun {
    /// A directory name, unique within the sweep; empty if there is only one run.
    pub id: String,
    /// Its configuration.
    pub config: Config,
}

/// The runs that a configuration asks for: every combination of the `[sweep]` table's lists, for every seed. `seeds` is a
/// list, or a number n for the seeds from 0 to n − 1.
///
/// ```toml
/// seeds = [0, 1, 2]
/// [sweep]
/// "method.name" = ["fedavg", "fedproj"]
/// ```
///
/// # Errors
/// If a key is unknown or a value cannot be used.
pub fn expand(file: Option<&Table>, overrides: &[String]) -> Result<Vec<SweepRun>> {
    let (table, plain, axes) = axes(file, overrides)?;
    let mut combinations: Vec<Vec<(String, Value)>> = vec![Vec::new()];
    for (key, values) in &axes {
        let extend = |c: &Vec<(String, Value)>| {
            let c = c.clone();
            values.iter().map(move |v| [c.clone(), vec![(key.clone(), v.clone())]].concat()).collect::<Vec<_>>()
        };
        combinations = combinations.iter().flat_map(extend).collect();
    }
    let run = |combination: Vec<(String, Value)>| {
        let chosen = combination.iter().map(|(key, value)| format!("{key}={value}"));
        let overrides: Vec<String> = plain.iter().cloned().chain(chosen).collect();
        let config = Config::from_layers(Some(&table), &overrides)?;
        let part = |(key, value): &(String, Value)| {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let key = key.rsplit('.').next().unwrap_or(key);
            if key == "name" { value } else { format!("{key}{value}") }
        };
        let id: Vec<String> = combination.iter().map(part).collect();
        let safe = |c: char| if c.is_alphanumeric() || "-.".contains(c) { c } else { '_' };
        Ok(SweepRun { id: id.join("-").chars().map(safe).collect(), config })
    };
    let runs = combinations.into_iter().map(run).collect::<Result<Vec<_>>>()?;
    let mut ids = BTreeSet::new();
    match runs.iter().find(|run| !ids.insert(run.id.as_str())) {
        // Both would be made in one directory.
        Some(twice) => Err(Error::config(format!(
            "two runs of the sweep have the name `{}`\nhint: name each value once, and give keys whose values look alike \
             different values",
            twice.id
        ))),
        None => Ok(runs),
    }
}

/// A key and the values that it takes.
type Axis = (String, Vec<Value>);

/// Splits the settings into those of one run and those that vary. The seed varies fastest.
fn axes(file: Option<&Table>, overrides: &[String]) -> Result<(Table, Vec<String>, Vec<Axis>)> {
    let mut table = file.cloned().unwrap_or_default();
    let (mut plain, mut seeds) = (Vec::new(), table.remove("seeds"));
    let mut sweep = match table.remove("sweep") {
        None => Table::new(),
        Some(Value::Table(sweep)) => sweep,
        Some(other) => return Err(Error::config(format!("[sweep] must be a table of lists, not {other}"))),
    };
    for pair in overrides {
        let (key, text) = split_pair(pair)?;
        if key == "seeds" {
            // One number counts seeds; a list names them.
            let n: Option<i64> = text.trim().parse().ok();
            seeds = Some(n.map_or_else(|| parse_list(pair, text), |n| Ok(Value::Integer(n)))?);
        } else if let Some(key) = key.strip_prefix("sweep.") {
            sweep.insert(key.to_owned(), parse_list(pair, text)?);
        } else {
            plain.push(pair.clone());
        }
    }
    let mut axes = Vec::new();
    for (key, value) in sweep {
        axes.push((key.clone(), list_of(&format!("sweep.{key}"), value)?));
    }
    if let Some(value) = seeds {
        let seeds = match value {
            Value::Integer(n) if n > 0 => (0..n).map(Value::Integer).collect(),
            other => list_of("seeds", other)?,
        };
        axes.push(("seed".into(), seeds));
    }
    Ok((table, plain, axes))
}

fn list_of(key: &str, value: Value) -> Result<Vec<Value>> {
    match value {
        Value::Array(values) if !values.is_empty() => Ok(values),
        other => Err(Error::config(format!("{key} = {other}: must be a list with at least one value"))),
    }
}

/// `[a, b]`, where plain words need no quotes, or `a,b`.
fn parse_list(pair: &str, text: &str) -> Result<Value> {
    if let Value::Array(items) = parse_value(text)
        && !items.is_empty()
    {
        return Ok(Value::Array(items));
    }
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    let items: Vec<Value> = inner.split(',').map(str::trim).filter(|i| !i.is_empty()).map(parse_value).collect();
    if items.is_empty() { Err(Error::config(format!("`{pair}`: an empty list"))) } else { Ok(Value::Array(items)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_gets_a_name_of_its_own() {
        let file: Table = toml::from_str("seeds = [0, 1]\n[sweep]\n'method.name' = ['fedavg', 'feddf']").unwrap();
        let runs = expand(Some(&file), &["federation.rounds=2".into()]).unwrap();
        let ids: Vec<&str> = runs.iter().map(|r| r.id.as_str()).collect();
        assert_eq!(ids, ["fedavg-seed0", "fedavg-seed1", "feddf-seed0", "feddf-seed1"]);
        assert!(runs.iter().all(|r| r.config.federation.rounds == 2));
        assert_eq!(runs[3].config.method.name, "feddf");
        assert_eq!(runs[3].config.seed, 1);
    }

    #[test]
    fn overrides_may_sweep_too_and_one_run_has_no_name() {
        let runs = expand(None, &["sweep.method.name=[fedavg,fedprox]".into(), "seeds=3,4".into()]).unwrap();
        assert_eq!(runs.len(), 4);
        assert_eq!(expand(None, &[]).unwrap()[0].id, "");
        assert!(expand(None, &["seeds=[]".into()]).is_err());
        let widths = expand(None, &["sweep.model.hidden=[[8], [8, 4]]".into()]).unwrap();
        assert_eq!(widths[1].config.model.hidden, [8, 4]);
        let error = expand(None, &["seeds".into()]).unwrap_err().to_string();
        assert_eq!(error, "`seeds` is not of the form key=value");
    }

    #[test]
    fn a_value_that_is_named_twice_is_rejected() {
        for pair in ["seeds=1,1", "sweep.method.name=fedavg,fedprox,fedavg", "sweep.model.hidden=[[8], [8]]"] {
            let message = expand(None, &[pair.into()]).unwrap_err().to_string();
            assert!(message.contains("hint: name each value once"), "{message}");
        }
    }

    #[test]
    fn a_number_of_seeds_counts_them_and_a_list_names_them() {
        let seeds = |file: &str, pairs: &[&str]| -> Vec<u64> {
            let pairs: Vec<String> = pairs.iter().map(|&pair| pair.to_owned()).collect();
            let runs = expand(Some(&toml::from_str(file).unwrap()), &pairs).unwrap();
            runs.iter().map(|run| run.config.seed).collect()
        };
        assert_eq!(seeds("", &["seeds=3"]), [0, 1, 2]);
        assert_eq!(seeds("seeds = 3", &[]), [0, 1, 2]);
        assert_eq!(seeds("seeds = 3", &["seeds=[7]"]), [7]);
        assert_eq!(seeds("", &["seeds=7,"]), [7]);
        assert!(expand(None, &["seeds=0".into()]).is_err() && expand(None, &["seeds=-1".into()]).is_err());
    }
}

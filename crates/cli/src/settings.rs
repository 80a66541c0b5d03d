//! Configuration from the command line: a TOML file and `key=value` pairs.

use anyhow::{Result, bail};
use clap::Args;
use fedproj_core::{Config, Error, RobustConfig, methods};
use fedproj_data::registry;
use fedproj_net::ServerConfig;
use fedproj_study::{SweepRun, expand};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest configuration file.
const BYTES_MAX: u64 = 1 << 22;

/// The arguments by which runs are configured.
#[derive(Args)]
pub struct Settings {
    /// A configuration file (TOML), and `key=value` pairs that override it, such as method.name=fedavg
    #[arg(value_name = "CONFIG | KEY=VALUE")]
    pub settings: Vec<String>,
    /// Data directory [default: $FEDPROJ_DATA, then ./data]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
}

impl Settings {
    /// The runs that the settings ask for. Settings of a server are checked and ignored.
    ///
    /// # Errors
    /// If the file cannot be read, a key is unknown, or a value cannot be used.
    pub fn runs(&self) -> Result<Vec<SweepRun>> {
        self.planned().map(|(runs, _)| runs)
    }

    /// The runs, and what a user should know about their settings. The file is read once: it may be a pipe.
    fn planned(&self) -> Result<(Vec<SweepRun>, Vec<String>)> {
        let (mut table, mut overrides) = self.parts()?;
        ServerConfig::take(&mut table, &mut overrides)?;
        let runs = expand(Some(&table), &overrides)?;
        let notes = notes(&table, &overrides, &runs);
        Ok((runs, notes))
    }

    /// The one run that the settings ask for in a federation, and its server. Limits on its clients are on unless the
    /// settings mention them. Beside the run: what the same settings meant before there were such limits.
    pub(crate) fn federation(&self) -> Result<(Config, Config, ServerConfig)> {
        let (mut table, mut overrides) = self.parts()?;
        let server = ServerConfig::take(&mut table, &mut overrides)?;
        let earlier = one_run(&table, &overrides)?;
        if earlier.privacy.is_on() {
            // Limits that compare contributions have no place under privacy, nor has `federation.sum`: noise in integers has a
            // scale of its own.
            return Ok((earlier.clone(), earlier, server));
        }
        let federation = table.get("federation");
        let is_given = |key: &str| {
            let in_file = federation.is_some_and(|federation| federation.get(key).is_some());
            in_file || overrides.iter().any(|pair| pair.contains(&format!("federation.{key}")))
        };
        if server.secure {
            // Limits that compare contributions cannot be held, and sums under masks are sums of integers.
            if !is_given("sum") {
                overrides.push("federation.sum=fixed".into());
            }
            return Ok((one_run(&table, &overrides)?, earlier, server));
        }
        let robust = federation.and_then(|federation| federation.get("robust"));
        for (key, value) in RobustConfig::FEDERATION {
            let is_set = robust.is_some_and(|robust| robust.get(key).is_some());
            if !is_set && !overrides.iter().any(|pair| pair.contains(key)) {
                overrides.push(format!("federation.robust.{key}={value:?}"));
            }
        }
        Ok((one_run(&table, &overrides)?, earlier, server))
    }

    fn parts(&self) -> Result<(toml::Table, Vec<String>)> {
        let (overrides, files): (Vec<&String>, Vec<&String>) = self.settings.iter().partition(|s| s.contains('='));
        let table = match files[..] {
            [] => toml::Table::new(),
            [file] => {
                let text = read(file).map_err(|e| {
                    Error::config(format!("cannot read the configuration `{file}`: {e}{}", hint(file, e.kind())))
                })?;
                let parsed = toml::from_str(&text);
                parsed.map_err(|e| Error::config(format!("`{file}`: {}", e.to_string().trim_end())))?
            }
            [first, second, ..] => bail!(Error::config(format!(
                "`{first}` and `{second}`: only one configuration file is expected{}",
                if Path::new(first).exists() {
                    String::new()
                } else {
                    format!("\nhint: without spaces, {first}={second}")
                }
            ))),
        };
        Ok((table, overrides.into_iter().cloned().collect()))
    }

    /// The data directory.
    pub(crate) fn data_dir(&self) -> Result<Option<PathBuf>> {
        crate::data::data_dir(self.data_dir.clone())
    }
}

/// The settings of several runs.
#[derive(Args)]
pub struct SweepSettings {
    #[command(flatten)]
    settings: Settings,
    /// Number of seeds: 0, 1, …, as seeds=N
    #[arg(long, value_name = "N")]
    seeds: Option<u16>,
}

impl SweepSettings {
    /// Whether nothing is set.
    pub(crate) fn is_empty(&self) -> bool {
        self.settings.settings.is_empty() && self.seeds.is_none()
    }

    /// As [`Settings::runs`], once per seed.
    pub(crate) fn runs(&self) -> Result<Vec<SweepRun>> {
        self.planned().map(|(runs, _)| runs)
    }

    /// The runs, and what a user should know about their settings.
    pub(crate) fn planned(&self) -> Result<(Vec<SweepRun>, Vec<String>)> {
        let (given, data_dir) = (&self.settings, self.settings.data_dir.clone());
        let settings = given.settings.iter().cloned().chain(self.seeds.map(|n| format!("seeds={n}"))).collect();
        Settings { settings, data_dir }.planned()
    }

    /// The only word, if it is a directory, such as that of a sweep.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match &self.settings.settings[..] {
            [only] if self.seeds.is_none() => Some(Path::new(only)).filter(|path| path.is_dir()),
            _ => None,
        }
    }

    /// The data directory.
    pub(crate) fn data_dir(&self) -> Result<Option<PathBuf>> {
        self.settings.data_dir()
    }
}

/// Pairs that none of the runs reads, and the optimisers that methods bring along.
fn notes(table: &toml::Table, overrides: &[String], runs: &[SweepRun]) -> Vec<String> {
    let key = |pair: &String| {
        let key = pair.split('=').next().unwrap_or_default().trim();
        key.strip_prefix("sweep.").unwrap_or(key).to_owned()
    };
    let given: Vec<String> = overrides.iter().map(key).collect();
    let names: BTreeSet<&str> = runs.iter().map(|run| run.config.method.name.as_str()).collect();
    let of_another = |key: &&String| {
        let method = key.strip_prefix("method.").and_then(|rest| rest.split('.').next());
        let is_known = |name: &&str| methods::CATALOGUE.iter().any(|(known, _)| known == name);
        method.filter(is_known).is_some_and(|name| !names.contains(name))
    };
    let chosen = names.iter().copied().collect::<Vec<_>>().join(", ");
    let unread = given.iter().filter(of_another);
    let mut notes: Vec<String> = unread.map(|key| format!("`{key}` has no effect: method.name is {chosen}")).collect();
    let optimizer = table.get("local").and_then(|local| local.get("optimizer"));
    let in_file = optimizer.is_some_and(|optimizer| optimizer.is_str() || optimizer.get("kind").is_some());
    if !in_file && !given.iter().any(|key| ["local", "local.optimizer", "local.optimizer.kind"].contains(&key.as_str()))
    {
        let brings = |config: &&Config| config.method.build().is_ok_and(|method| method.optimizer().is_some());
        let brought: BTreeSet<String> = (runs.iter().map(|run| &run.config).filter(brings))
            .map(|config| {
                let (name, lr) = (&config.method.name, config.local.optimizer.lr);
                format!("{name} needs plain SGD, so local.optimizer = {{ kind = \"sgd\", lr = {lr} }}")
            })
            .collect();
        notes.extend(brought);
    }
    notes
}

/// A configuration file, which may be a pipe, but not an endless one.
fn read(file: &str) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(file)?.take(BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > BYTES_MAX {
        return Err(std::io::Error::other(format!("it has more than {BYTES_MAX} bytes, as no configuration has")));
    }
    Ok(text)
}

/// What was probably meant by a configuration file that cannot be read.
fn hint(file: &str, problem: std::io::ErrorKind) -> String {
    let is_word = |name: &str| name.eq_ignore_ascii_case(file);
    let run = std::path::Path::new(file).join("config.toml");
    let hint = if run.exists() {
        format!("`{}` is the configuration of the run there", run.display())
    } else if problem != std::io::ErrorKind::NotFound {
        return String::new();
    } else if methods::CATALOGUE.iter().any(|(name, _)| is_word(name)) {
        format!("did you mean method={file}?")
    } else if registry::READERS.iter().any(|reader| is_word(reader.name)) {
        format!("did you mean data.private={file}?")
    } else if std::path::Path::new(file).extension().is_some_and(|ending| ending == "toml") {
        format!("`fedproj new {file}` writes one")
    } else {
        format!("a setting has the form {file}=value")
    };
    format!("\nhint: {hint}")
}

fn one_run(table: &toml::Table, overrides: &[String]) -> Result<Config> {
    match <[_; 1]>::try_from(expand(Some(table), overrides)?) {
        Ok([only]) => Ok(only.config),
        Err(all) => bail!(Error::config(format!(
            "a federation runs one configuration, but these settings ask for {}",
            all.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn robust(settings: &[&str]) -> (f64, f64, f64) {
        let settings = settings.iter().map(|s| (*s).to_owned()).collect();
        let (config, earlier, _) = Settings { settings, data_dir: None }.federation().unwrap();
        let robust = config.federation.robust;
        (robust.clip_ratio, robust.claim_ratio, earlier.federation.robust.clip_ratio)
    }

    #[test]
    fn settings_without_effect_and_optimisers_that_methods_bring_are_noted() {
        let noted = |settings: &[&str]| {
            let settings = settings.iter().map(|s| (*s).to_owned()).collect();
            Settings { settings, data_dir: None }.planned().unwrap().1
        };
        assert!(noted(&["method=fedprox", "method.fedprox.proximal_weight=0.1", "seed=1"]).is_empty());
        let unread = "`method.feddyn.alpha` has no effect: method.name is fedavg, fedprox";
        assert_eq!(noted(&["sweep.method.name=fedavg,fedprox", "method.feddyn.alpha=0.1"]), [unread]);
        assert!(noted(&["sweep.method.name=fedavg,feddyn", "sweep.method.feddyn.alpha=0.1,0.2"]).is_empty());
        let sgd = "scaffold needs plain SGD, so local.optimizer = { kind = \"sgd\", lr = 0.05 }";
        assert_eq!(noted(&["sweep.method.name=fedavg,scaffold", "local.optimizer.lr=0.05", "seeds=2"]), [sgd]);
        assert!(noted(&["method=scaffold", "local.optimizer={kind='sgd', lr=0.1}"]).is_empty());
    }

    #[test]
    fn a_federation_limits_its_clients_unless_the_settings_say_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("fed.toml");
        std::fs::write(&file, "[federation]\nrobust = { clip_ratio = 2.0 }").unwrap();
        let file = file.to_str().unwrap();
        assert_eq!(robust(&["seed=1"]), (3.0, 3.0, 0.0));
        assert_eq!(robust(&[file]), (2.0, 3.0, 2.0));
        assert_eq!(robust(&["federation.robust={ claim_ratio = 0.0 }"]), (3.0, 0.0, 0.0));
    }
}

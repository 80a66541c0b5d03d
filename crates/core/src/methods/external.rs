//! Methods from outside this program, such as a Python class.
//!
//! A configuration names one by the hash of its source, with its settings. The program that registered this source makes the
//! method itself.

use crate::error::{Error, Result};
use crate::method::Method;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use toml::Table;

/// Makes a method of its settings.
pub type Maker = dyn Fn(&Table) -> Result<Box<dyn Method>> + Send + Sync;

/// A method from outside, as a configuration stores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct External {
    /// BLAKE3 of its source.
    pub hash: String,
    /// Its settings.
    #[serde(default)]
    pub settings: Table,
}

/// What was registered, by the hash of its source.
static KNOWN: Mutex<BTreeMap<String, (String, Arc<Maker>)>> = Mutex::new(BTreeMap::new());

fn known() -> MutexGuard<'static, BTreeMap<String, (String, Arc<Maker>)>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl External {
    /// Makes a source known to this process and selects it with these settings.
    pub fn register(source: &str, settings: Table, make: Arc<Maker>) -> Self {
        let hash = blake3::hash(source.as_bytes()).to_hex().to_string();
        known().insert(hash.clone(), (source.to_owned(), make));
        Self { hash, settings }
    }

    /// Its source, if it was registered.
    pub fn source(&self) -> Option<String> {
        known().get(&self.hash).map(|(source, _)| source.clone())
    }

    /// The method under the name that the configuration gives it.
    ///
    /// # Errors
    /// If no such source was registered, or its settings cannot be used.
    pub fn build(&self, name: &str) -> Result<Box<dyn Method>> {
        let make = known().get(&self.hash).map(|(_, make)| Arc::clone(make));
        let make = make.ok_or_else(|| {
            Error::config(format!(
                "method `{name}` is a class in Python, which is not at hand here\nhint: in Python, define the class as in \
                 `method_source` of manifest.json and give it to fedproj.run or Run.verify"
            ))
        })?;
        // Not under the lock: a maker may take long, and may itself look at methods.
        make(&self.settings)
    }
}

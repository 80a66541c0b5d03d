//! What differs between a run and its rerun, in words.

use super::manifest::Manifest;
use crate::error::{Error, Result};
use crate::evaluate::Model;
use crate::fusion::ServerState;
use fedproj_nn::{Graph, Isa};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

/// Differences that are listed; the others are only counted.
const LISTED_MAX: usize = 20;

/// Longest value that is shown whole, in characters.
const VALUE_MAX: usize = 80;

/// What differs between a run and its rerun.
#[derive(Debug, Default)]
pub(super) struct Differences {
    lines: Vec<String>,
}

impl Differences {
    pub fn add(&mut self, line: String) {
        self.lines.push(line);
    }

    /// [`Error::Differs`] unless there is no difference.
    pub fn into_result(mut self, dir: &Path, manifest: Option<&Manifest>) -> Result<()> {
        if self.lines.is_empty() {
            return Ok(());
        }
        let (made, now) = (manifest.and_then(|m| m.hardware.get("isa")), Isa::detect().name());
        let hint = made.filter(|isa| *isa != now).map_or_else(String::new, |isa| {
            format!(
                "\nhint: the run was made with {isa}, this machine has {now}; their results agree only up to rounding"
            )
        });
        let n_others = self.lines.len().saturating_sub(LISTED_MAX);
        self.lines.truncate(LISTED_MAX);
        if n_others > 0 {
            self.lines.push(format!("{n_others} more"));
        }
        Err(Error::Differs { dir: dir.into(), differences: self.lines.join("\n  ") + &hint })
    }

    /// Compares two values field by field.
    pub fn compare<T: Serialize>(&mut self, place: &str, recorded: &T, again: &T) -> Result<()> {
        let value = |of: &T| serde_json::to_value(of).map_err(Error::internal("comparing a run"));
        self.values(place, "", &value(recorded)?, &value(again)?);
        Ok(())
    }

    fn values(&mut self, place: &str, key: &str, recorded: &Value, again: &Value) {
        match (recorded, again) {
            _ if recorded == again => (),
            (Value::Object(a), Value::Object(b)) => {
                let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
                for name in keys {
                    let of = |side: &serde_json::Map<String, Value>| side.get(name).cloned().unwrap_or_default();
                    let name = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                    self.values(place, &name, &of(a), &of(b));
                }
            }
            // The first element that differs stands for all.
            (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
                if let Some(i) = (0..a.len()).find(|&i| a[i] != b[i]) {
                    self.values(place, &format!("{key}[{i}]"), &a[i], &b[i]);
                }
            }
            _ => self.add(format!("{place}: {key} is {}, the rerun gives {}", shown(recorded), shown(again))),
        }
    }

    /// Names the first tensor of a weight file that is not the rerun's.
    pub fn compare_model(&mut self, path: &Path, graph: &Graph, again: Model<'_>, state: &ServerState) {
        let file = path.file_name().unwrap_or_default().display();
        let (weights, buffers) = match fedproj_nn::weights::load(path, graph) {
            Ok(model) => model,
            Err(error) => return self.add(error.to_string()),
        };
        if weights == state.weights && weights != again.weights {
            let problem = "holds what clients receive, not what was evaluated, as earlier versions did";
            return self.add(format!("{file}: {problem}"));
        }
        let sides = [(graph.params(), &weights[..], again.weights), (graph.buffers(), &buffers[..], again.buffers)];
        for (layout, recorded, again) in sides {
            for span in layout.spans() {
                let (recorded, again) = (span.to_torch(recorded), span.to_torch(again));
                let pairs = recorded.iter().zip(&again).enumerate();
                if let Some((i, (a, b))) = pairs.into_iter().find(|(_, (a, b))| a.to_bits() != b.to_bits()) {
                    return self.add(format!("{file}: {}[{i}] is {a}, the rerun gives {b}", span.name));
                }
            }
        }
        self.add(format!("{file}: the tensors are the rerun's, but the file has other bytes"));
    }
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= VALUE_MAX { text } else { text.chars().take(VALUE_MAX).chain("…".chars()).collect() }
}

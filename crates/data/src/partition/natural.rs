//! One client per group of the data set: writers, hospitals, devices. Every sample exactly once.

use std::collections::BTreeMap;

use super::Partition;
use crate::dataset::Dataset;
use crate::error::{Error, Result};

pub(super) fn partition(data: &Dataset) -> Result<Partition> {
    let groups = data.groups().ok_or_else(|| {
        let problem = format!("data set `{}` has no groups", data.name());
        Error::impossible("natural", problem, "name a column with group = \"…\" (csv) or add an array `group` (numpy)")
    })?;
    // Clients follow the order of the ids. In a subset an id may have no samples; then it has no client.
    let mut lists: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (index, &group) in groups.iter().enumerate() {
        lists.entry(group).or_default().push(index as u32);
    }
    Partition::from_lists("natural", lists.into_values().collect(), groups.len())
}

//! The same bytes on every run, whatever clients are trained together.

use crate::Suite;
use crate::compare::Group;
use crate::digits::simulation;
use anyhow::Result;
use fedproj_core::{Device, Simulation};

/// Methods with state on the server, on clients, and on both.
const CASES: &[(&str, &[&str])] = &[
    ("fedproj", &["method.fedproj.projection.warmup=1"]),
    ("fedproj", &["model.name=resnet8-thin", "data.private_samples=100"]),
    ("fedproj", &["method.fedproj.projection.dropout=0.5", "method.fedproj.projection.dropout_unit=step"]),
    ("fedproj", &["model.name=cnn", "data.augment=true"]),
    ("moon", &[]),
    ("scaffold", &[]),
    ("fedgen", &[]),
    ("fedgkt", &[]),
];

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    for (method, overrides) in CASES {
        let what = [&[*method], *overrides].concat().join(" ");
        check_simulation(suite, group, &what, &|device| simulation(method, overrides, device))?;
    }
    Ok(())
}

/// Two rounds of four clients: twice, and with one, two and three clients at a time.
pub fn check_simulation(
    suite: &Suite,
    group: &mut Group,
    what: &str,
    simulation: &dyn Fn(Device) -> Result<Simulation>,
) -> Result<()> {
    let hashes = |device: Device| -> Result<Vec<String>> {
        let mut simulation = simulation(device)?;
        (0..2).map(|_| Ok(simulation.round(&|_| ())?.model_hash)).collect()
    };
    let first = hashes(suite.device.clone())?;
    group.require(hashes(suite.device.clone())? == first, &format!("{what}: the same bytes once more"));
    for n in [1, 2, 3] {
        let device =
            if suite.device.gpu().is_some() { suite.device.clone().with_lanes_max(n) } else { Device::from(n) };
        group.require(hashes(device)? == first, &format!("{what}: the same bytes with {n} clients at a time"));
    }
    Ok(())
}

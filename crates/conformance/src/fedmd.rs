//! FedMD among two networks against an independent reference in double precision (`fixtures/fedmd`), on the scene of
//! [`crate::traces`].

use crate::compare::{Group, difference};
use crate::traces::{BASE, TOLERANCE, TOLERANCE_MOVEMENT, experiment};
use crate::{Suite, config};
use anyhow::{Context, Result};
use fedproj_core::Simulation;

const TWO: &[&str] = &[
    "model.clients=[{name='mlp', hidden=[8], share=0.5}, {name='mlp', hidden=[5], share=0.5}]",
    "method.fedmd.memory={size=8, batch=4}",
];

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    let (scene, golden) = (suite.fixture("methods/methods")?, suite.fixture("fedmd/fedmd")?);
    let config = config("fedmd", &[BASE, TWO])?;
    let method = config.method.build()?;
    let experiment = experiment(&scene, config, method.as_ref())?;
    let networks = [0, 1].map(|of| (experiment.group(of).graph.clone(), experiment.group(of).weights.clone()));
    group.require(networks[1].1 == golden.flat(networks[1].0.params(), "init1")?, "fedmd: the initial weights");
    let mut simulation = Simulation::new(experiment, method, suite.device.clone())?;
    for round in 0..3 {
        simulation.round(&|_| ())?;
        for (k, (graph, init)) in networks.iter().enumerate() {
            let own = simulation.clients().get(&(k as u32)).and_then(|state| state.get("stays"));
            let student = simulation.state().group(k).published().weights;
            for (name, found) in [("client", own.context("a client's own model")?), ("student", &student.to_vec())] {
                let expected = golden.flat(graph.params(), &format!("round{round}/{name}{k}"))?;
                let what = format!("fedmd, round {round}, {name} {k}:");
                group.compare_each(&what, graph.params(), found, &expected, TOLERANCE);
                let (found, expected) = (difference(found, init), difference(&expected, init));
                group.compare(&format!("{what} movement"), &found, &expected, TOLERANCE_MOVEMENT);
            }
        }
    }
    Ok(())
}

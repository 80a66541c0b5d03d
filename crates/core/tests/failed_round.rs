//! A round that fails takes nothing from the clients: what they keep is as it was before the round.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::{Batch, Config, Error, Experiment, Finish, Fusion, Loss, Method, Result, Simulation, Step};

/// Every client counts its rounds' movement in a vector; a round fails in local training or in fusion.
#[derive(Debug)]
struct Failing {
    round: u32,
    in_fusion: bool,
}

impl Failing {
    fn fail(&self, round: u32, in_fusion: bool) -> Result<()> {
        if (round, in_fusion) != (self.round, self.in_fusion) {
            return Ok(());
        }
        Err(Error::NotFinite { round, client: 0, epoch: 0, step: 0, loss: f64::NAN })
    }
}

impl Method for Failing {
    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        self.fail(step.place().round, false)?;
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        let moved = client.state("moved");
        client.add_scaled_diff(moved, 1.0, client.weights(), client.weights_round_start());
        Ok(())
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        self.fail(round.round(), true)?;
        round.average()
    }
}

#[test]
fn clients_keep_their_state_when_a_round_fails() {
    let settings = ["federation.rounds=3", "local.epochs=1", "data.public=none", "method.name=fedavg"];
    let config = Config::from_layers(None, &settings.map(str::to_owned)).unwrap();
    for in_fusion in [false, true] {
        let method = Box::new(Failing { round: 1, in_fusion });
        let experiment = Experiment::load(config.clone(), method.as_ref(), None).unwrap();
        let cohort: Vec<u32> = (0..4).collect();
        let mut simulation = Simulation::new(experiment, method, 2).unwrap();
        simulation.round_of(&cohort, &|_| ()).unwrap();
        let before = simulation.clients().clone();
        assert_eq!(before.len(), cohort.len());
        simulation.round_of(&cohort, &|_| ()).unwrap_err();
        assert_eq!(*simulation.clients(), before, "failed in fusion: {in_fusion}");
    }
}

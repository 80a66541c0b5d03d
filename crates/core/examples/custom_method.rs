//! A method of one's own in one file: FedMedian, whose server takes the median of the clients' weights, coordinate by
//! coordinate, instead of their mean (Yin et al., ICML 2018). One client that sends rubbish ruins a mean, not a median.
//!
//! `cargo run --release --example custom_method -p fedproj-core`

use fedproj_core::{Batch, Config, Experiment, Finish, Fusion, Loss, Method, Part, Result, Simulation, Step};

/// Only what differs from FedAvg is written; every other hook of [`Method`] has FedAvg's as its default.
#[derive(Clone, Debug)]
struct FedMedian {
    /// Largest norm of a client's gradient.
    clip: f32,
}

impl Method for FedMedian {
    /// What a client does with a mini-batch. Vectors are handles: nothing is copied.
    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        step.clip(g, self.clip);
        step.update(g);
        Ok(())
    }

    /// What it does after the last one: keep vectors for its next round, or upload some. FedMedian does neither.
    fn finish_local(&self, _: &mut Finish<'_>) -> Result<()> {
        Ok(())
    }

    /// How the server turns the results into the next global model.
    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        round.state.weights = round.by_coordinate(Part::Weights, |column| {
            column.sort_by(f32::total_cmp);
            column[(column.len() - 1) / 2].midpoint(column[column.len() / 2])
        })?;
        round.average_buffers()
    }
}

fn main() -> Result<()> {
    // The embedded digits on ten clients; any key of a configuration file can be set here.
    let settings = ["federation.rounds=30", "federation.fraction=1.0", "local.epochs=5", "data.public=none"];
    let settings: Vec<String> =
        settings.iter().map(|s| (*s).to_owned()).chain(["method.name=fedavg".to_owned()]).collect();
    let config = Config::from_layers(None, &settings)?;
    let methods: [(&str, Box<dyn Method>); 2] =
        [("fedavg", config.method.build()?), ("fedmedian", Box::new(FedMedian { clip: 10.0 }))];
    for (name, method) in methods {
        let experiment = Experiment::load(config.clone(), method.as_ref(), None)?;
        let mut simulation = Simulation::new(experiment, method, 2)?;
        let mut accuracy = 0.0;
        while !simulation.is_done() {
            accuracy = simulation.round(&|_| ())?.accuracy.unwrap_or(accuracy);
        }
        println!("{name:<10} {:.1} % after 30 rounds", 100.0 * accuracy);
    }
    Ok(())
}

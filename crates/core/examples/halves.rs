//! The two halves of a round in two threads that exchange bytes and nothing else, as a program of your own would run them on
//! two machines. The model is the one that `fedproj run` makes of the same settings, bit for bit.
//!
//! ```text
//! cargo run --release --example halves -- method.name=feddyn federation.rounds=3
//! ```

use fedproj_core::{
    ClientResult, ClientState, ClientStates, Config, Coordinator, Download, Experiment, LocalTraining, Result,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A round's download, and each client's state.
type Task = (Vec<u8>, Vec<(u32, ClientState)>);

fn main() -> Result<()> {
    let settings: Vec<String> = std::env::args().skip(1).collect();
    let config = Config::from_layers(None, &settings)?;
    let (tasks, given) = channel();
    let (results, received) = channel();
    let clients = config.clone();
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || train(clients, &given, &results));
        let served = serve(config, &tasks, &received);
        drop(tasks);
        worker.join().unwrap_or(Ok(())).and(served)
    })
}

/// The clients' half. It needs the data of its clients, and never sees the test set's results.
fn train(config: Config, tasks: &Receiver<Task>, results: &Sender<Vec<Vec<u8>>>) -> Result<()> {
    let method = config.method.build()?;
    let experiment = Arc::new(Experiment::load(config, method.as_ref(), None)?);
    let mut training = LocalTraining::open(&experiment, method.as_ref(), 2)?;
    for (download, clients) in tasks {
        let download = Arc::new(Download::from_bytes(&download)?);
        let clients: Vec<_> = clients.iter().map(|(client, state)| (*client, state)).collect();
        let trained = training.run_many(method.as_ref(), &download, &clients)?;
        if results.send(trained.iter().map(ClientResult::to_bytes).collect::<Result<_>>()?).is_err() {
            break;
        }
    }
    Ok(())
}

/// The server's half. It keeps the clients' states between rounds; they could as well stay where the clients train.
fn serve(config: Config, tasks: &Sender<Task>, results: &Receiver<Vec<Vec<u8>>>) -> Result<()> {
    let method = config.method.build()?;
    let mut server = Coordinator::new(Experiment::load(config, method.as_ref(), None)?, method, 2)?;
    let mut states = ClientStates::new();
    while !server.is_done() {
        let opening = server.open()?;
        let kept_by = |client: &u32| (*client, states.remove(client).unwrap_or_default());
        let clients = opening.cohort.iter().map(kept_by).collect();
        let sent = tasks.send((opening.download.to_bytes()?, clients));
        let Ok(bytes) = results.recv() else { break };
        if sent.is_err() {
            break;
        }
        let mut trained = bytes.iter().map(|bytes| ClientResult::from_bytes(bytes)).collect::<Result<Vec<_>>>()?;
        states.extend(trained.iter_mut().map(|result| (result.client, std::mem::take(&mut result.state))));
        let record = server.close(&opening, &trained, 0.0)?;
        println!("round {}: {}", record.round, record.model_hash);
    }
    Ok(())
}

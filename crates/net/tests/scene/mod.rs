//! A server on loopback with enrolled nodes, for tests that play the nodes themselves.

#![allow(dead_code, reason = "not every test file uses every helper")]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, Response};
use fedproj_core::{Config, LocalStats};
use fedproj_net::node::Home;
use fedproj_net::server::http::Addresses;
use fedproj_net::server::journal::{Event, Journal};
use fedproj_net::server::status::Status;
use fedproj_net::server::{Authority, INVITATION_LASTS, Registry, ServeSetup, ServerConfig, serve};
use fedproj_net::wire::{
    Contribution, Heartbeat, NamedBlob, Store, Task, VerdictKind, WorkKind, WorkRequest, encode_f32,
};
use fedproj_net::{Error, Link, Node, NodeData, Policy, Setup};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::{Client, Error as ClientError, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// A client without a link's limits: what anybody with a certificate can send.
pub struct Http(Client<HttpsConnector<HttpConnector>, Body>);

impl Http {
    pub fn new(tls: rustls::ClientConfig) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        Self(Client::builder(TokioExecutor::new()).build(HttpsConnector::from((tcp, tls))))
    }

    pub async fn send(&self, method: &str, address: &str, body: Vec<u8>) -> Result<Response<Bytes>, ClientError> {
        let request = Request::builder().method(method).uri(address).body(body.into()).unwrap();
        let (parts, body) = self.0.request(request).await?.into_parts();
        Ok(Response::from_parts(parts, to_bytes(Body::new(body), 1 << 26).await.unwrap()))
    }
}

/// A server in this process, with some clients of an IID digits run.
pub struct Scene {
    pub dir: tempfile::TempDir,
    setup: ServeSetup,
    pub addresses: Addresses,
    pub status: Arc<Status>,
    pub serving: Serving,
}

impl Scene {
    pub async fn new(n_clients: u32, settings: &[&str], change: impl FnOnce(&mut ServerConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let setup = setup_of(dir.path(), n_clients, settings, change);
        let (serving, (addresses, status)) = start(setup.clone()).await.unwrap();
        let scene = Self { dir, setup, addresses, status, serving };
        // A round begins when all nodes are alive.
        for client in 0..n_clients {
            scene.enrol(client).await;
            scene.attacker(client).send(&Heartbeat::default()).await.unwrap();
        }
        scene
    }

    /// Why a server does not start.
    pub async fn refused(n_clients: u32, settings: &[&str], change: impl FnOnce(&mut ServerConfig)) -> String {
        let dir = tempfile::tempdir().unwrap();
        let setup = setup_of(dir.path(), n_clients, settings, change);
        serve(setup, |_, _| ()).await.unwrap_err().to_string()
    }

    /// Waits for an event in the journal.
    pub async fn wait_for(&self, is_meant: impl Fn(&Event) -> bool) {
        let seen = async {
            while !self.journal().iter().any(&is_meant) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, seen).await.expect("it happens");
    }

    /// Stops the server and lets `between` happen; then the server starts again.
    pub async fn restart(&mut self, between: impl FnOnce(&Path)) {
        self.serving.abort();
        let _ = (&mut self.serving).await;
        // The round loop runs on a thread of its own, which still holds the run's folder.
        let lock = |path: PathBuf| std::fs::File::create(path).unwrap().try_lock().is_ok();
        let runs: Vec<PathBuf> =
            std::fs::read_dir(self.server_dir().join("runs")).unwrap().map(|e| e.unwrap().path()).collect();
        while !runs.iter().all(|run| lock(run.join(".lock"))) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        between(&self.server_dir());
        (self.serving, (self.addresses, self.status)) = start(self.setup.clone()).await.unwrap();
    }

    pub fn home(&self, client: u32) -> PathBuf {
        self.dir.path().join(format!("n{client}"))
    }

    pub fn server_dir(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub fn address(&self) -> String {
        format!("https://{}", self.addresses.listen)
    }

    pub async fn enrol(&self, client: u32) {
        let dir = self.server_dir();
        let (authority, registry) = (Authority::open(&dir).unwrap(), Registry::open(&dir).unwrap());
        let (token, _) = registry.invite(&authority, &format!("n{client}"), Some(client), INVITATION_LASTS).unwrap();
        let home = self.home(client);
        let enrol = format!("https://{}", self.addresses.enrol.unwrap());
        fedproj_net::enrol(&home, &enrol, &token.to_string()).await.unwrap();
    }

    /// The attacker's own connection to the server, with a node's certificate.
    pub fn attacker(&self, client: u32) -> Link {
        Link::new(&self.address(), Home::new(&self.home(client)).tls().unwrap()).unwrap()
    }

    /// An honest node that works until the run is over.
    pub fn honest(&self, client: u32) -> JoinHandle<fedproj_net::Result<String>> {
        self.honest_with(client, Policy::default())
    }

    pub fn honest_with(&self, client: u32, policy: Policy) -> JoinHandle<fedproj_net::Result<String>> {
        let setup = Setup { data: NodeData::OfRun, data_dir: None, policy };
        tokio::spawn(Node::open(&self.home(client), &self.address(), setup).unwrap().run(true))
    }

    pub fn journal(&self) -> Vec<Event> {
        let mut all = Vec::new();
        Journal::open(&self.server_dir(), &mut |entry| all.push(entry.event)).unwrap();
        all
    }

    /// A contribution of these weights to a task, its blobs in a folder of this name.
    pub fn contribution(&self, folder: &str, task: &Task, weights: &[f32]) -> (Contribution, Store) {
        let store = Store::open(&self.dir.path().join(folder)).unwrap();
        let parts = vec![named(&store, "weights", weights), named(&store, "buffers", &[])];
        let (run, stats) = (task.run.clone(), LocalStats { loss: 1.0, ..LocalStats::default() });
        (Contribution { run, round: task.round, client: task.client, n_samples: 10, n_steps: 1, stats, parts }, store)
    }
}

fn setup_of(dir: &Path, n_clients: u32, settings: &[&str], change: impl FnOnce(&mut ServerConfig)) -> ServeSetup {
    let partition = format!("data.partition={{kind='iid', clients={n_clients}}}");
    let base = ["model.hidden=[8]", "local.epochs=1", "federation.fraction=1.0", "method.name=fedavg", &partition];
    let settings: Vec<String> = base.iter().chain(settings).map(|s| (*s).to_owned()).collect();
    let loopback = "127.0.0.1:0".parse().unwrap();
    let mut server = ServerConfig { listen: loopback, enrol: Some(loopback), ..ServerConfig::default() };
    change(&mut server);
    let config = Config::from_layers(None, &settings).unwrap();
    let earlier = config.clone();
    ServeSetup { dir: dir.join("s"), config, earlier, server, data_dir: None, n_threads: 1 }
}

type Serving = JoinHandle<fedproj_net::Result<fedproj_net::Served>>;

async fn start(setup: ServeSetup) -> Option<(Serving, (Addresses, Arc<Status>))> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let serving =
        tokio::spawn(serve(setup, move |addresses, status| drop(tell.send((*addresses, Arc::clone(status))))));
    Some((serving, told.await.ok()?))
}

/// A loaded machine may pause everything for a minute; a longer wait is a hang.
const PATIENCE: Duration = Duration::from_mins(3);

/// A vector in a store, as a contribution names it.
pub fn named(store: &Store, name: &str, values: &[f32]) -> NamedBlob {
    NamedBlob { name: name.into(), blob: store.put(&encode_f32(values)).unwrap() }
}

pub async fn task_of(link: &Link) -> Task {
    let asking = async {
        loop {
            match link.send(&WorkRequest::current()).await.unwrap().kind {
                Some(WorkKind::Train(task)) => return *task,
                Some(WorkKind::Done(_)) => panic!("the run is over"),
                _ => (),
            }
        }
    };
    tokio::time::timeout(PATIENCE, asking).await.expect("there is a task")
}

/// Hands in as a node does; returns the final verdict.
pub async fn hand_in(link: &Link, contribution: &Contribution, store: &Store) -> VerdictKind {
    loop {
        match link.send(contribution).await {
            Ok(verdict) => match verdict.kind.unwrap() {
                VerdictKind::Missing(missing) => {
                    for part in &contribution.parts {
                        if let Some(have) = missing.have.iter().find(|have| have.hash == part.blob.hash) {
                            link.upload(&part.blob, have.len, store).await.unwrap();
                        }
                    }
                }
                last => return last,
            },
            // Between two rounds the server cannot answer yet.
            Err(Error::Rejected { status: 503, .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

pub fn reason(verdict: VerdictKind) -> String {
    match verdict {
        VerdictKind::Rejected(rejected) => rejected.reason,
        other => panic!("not refused: {other:?}"),
    }
}

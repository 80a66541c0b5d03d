//! A server against those who mean harm, or have broken software: strangers, expired certificates, and enrolled nodes that
//! send nonsense. The server is a real one on loopback; the attacker is this test.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::Config;
use fedproj_net::blob::Store;
use fedproj_net::home::Home;
use fedproj_net::http::Addresses;
use fedproj_net::identity::{Authority, enrol_tls, node_request, node_tls};
use fedproj_net::journal::{Event, Journal};
use fedproj_net::message::{Contribution, Decline, Named, Receipt, Stats, Train, verdict, work};
use fedproj_net::numbers::encode_f32;
use fedproj_net::registry::{INVITATION_LASTS, Registry};
use fedproj_net::{Error, Link, Node, NodeData, Policy, ServeSetup, ServerConfig, Setup, serve};
use std::path::{Path, PathBuf};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

/// A server in this process, with some clients of an IID digits run.
struct Scene {
    dir: tempfile::TempDir,
    addresses: Addresses,
    serving: JoinHandle<fedproj_net::Result<fedproj_net::Served>>,
}

impl Scene {
    async fn new(n_clients: u32, settings: &[&str], change: impl FnOnce(&mut ServerConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let partition = format!("data.partition={{kind='iid', clients={n_clients}}}");
        let base = ["model.hidden=[8]", "local.epochs=1", "federation.fraction=1.0", "method.name=fedavg", &partition];
        let settings: Vec<String> = base.iter().chain(settings).map(|s| (*s).to_owned()).collect();
        let loopback = "127.0.0.1:0".parse().unwrap();
        let mut server = ServerConfig { listen: loopback, enrol: Some(loopback), ..ServerConfig::default() };
        change(&mut server);
        let config = Config::from_layers(None, &settings).unwrap();
        let setup = ServeSetup { dir: dir.path().join("s"), config, server, data_dir: None, n_threads: 1 };
        let (tell, told) = tokio::sync::oneshot::channel();
        let serving = tokio::spawn(serve(setup, move |addresses, _| tell.send(*addresses).unwrap()));
        let scene = Self { dir, addresses: told.await.unwrap(), serving };
        // A round begins when all are there.
        for client in 0..n_clients {
            scene.enrol(client).await;
            scene.attacker(client).heartbeat(None).await.unwrap();
        }
        scene
    }

    fn home(&self, client: u32) -> PathBuf {
        self.dir.path().join(format!("n{client}"))
    }

    fn server_dir(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn address(&self) -> String {
        format!("https://{}", self.addresses.listen)
    }

    async fn enrol(&self, client: u32) {
        let dir = self.server_dir();
        let (authority, registry) = (Authority::open(&dir).unwrap(), Registry::open(&dir).unwrap());
        let (token, _) = registry.invite(&authority, &format!("n{client}"), Some(client), INVITATION_LASTS).unwrap();
        let home = self.home(client);
        let enrol = format!("https://{}", self.addresses.enrol.unwrap());
        fedproj_net::enrol(&home, &enrol, &token.to_string()).await.unwrap();
    }

    /// The attacker's own line to the server, with a node's certificate.
    fn attacker(&self, client: u32) -> Link {
        Link::new(&self.address(), Home::new(&self.home(client)).tls().unwrap()).unwrap()
    }

    /// An honest node that works until the run is over.
    fn honest(&self, client: u32) -> JoinHandle<fedproj_net::Result<String>> {
        let setup = Setup { data: NodeData::OfRun, data_dir: None, policy: Policy::default() };
        tokio::spawn(Node::open(&self.home(client), &self.address(), setup).unwrap().run(true))
    }

    fn journal(&self) -> Vec<Event> {
        let mut all = Vec::new();
        Journal::open(&self.server_dir(), &mut |entry| all.push(entry.event)).unwrap();
        all
    }

    /// A contribution of these weights to a task, its blobs in a folder of this name.
    fn contribution(&self, folder: &str, task: &Train, weights: &[f32]) -> (Contribution, Store) {
        let store = Store::open(&self.dir.path().join(folder)).unwrap();
        let named =
            |name: &str, values: &[f32]| Named { name: name.into(), blob: store.put(&encode_f32(values)).unwrap() };
        let parts = vec![named("weights", weights), named("buffers", &[])];
        let (run, stats) = (task.run.clone(), Stats { loss: 1.0, ..Stats::default() });
        (Contribution { run, round: task.round, client: task.client, n_samples: 10, n_steps: 1, stats, parts }, store)
    }
}

async fn task_of(link: &Link) -> Train {
    loop {
        match link.work().await.unwrap().kind {
            Some(work::Kind::Train(task)) => return *task,
            Some(work::Kind::Done(_)) => panic!("the run is over"),
            _ => (),
        }
    }
}

/// Hands in as a node does; the server's last word.
async fn hand_in(link: &Link, contribution: &Contribution, store: &Store) -> verdict::Kind {
    loop {
        match link.contribute(contribution).await {
            Ok(verdict) => match verdict.kind.unwrap() {
                verdict::Kind::Missing(missing) => {
                    for part in &contribution.parts {
                        if let Some(have) = missing.have.iter().find(|have| have.hash == part.blob.hash) {
                            link.upload(&part.blob, have.len, store).await.unwrap();
                        }
                    }
                }
                last => return last,
            },
            // Between two rounds the server cannot say yet.
            Err(Error::Refused { status: 503, .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

fn reason(verdict: verdict::Kind) -> String {
    match verdict {
        verdict::Kind::Refused(refusal) => refusal.reason,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_from_enrolled_nodes_does_not_count_and_the_rest_goes_on() {
    // One honest client of eight, and a quorum of one. Each attacker spoils its own contribution only.
    let scene = Scene::new(8, &["federation.rounds=1"], |server| {
        (server.quorum, server.norm_max, server.samples_max) = (0.1, 100.0, 1000);
    })
    .await;
    let n = 64 * 8 + 8 + 8 * 10 + 10;
    let with = |at: usize, value: f32| {
        let mut weights = vec![0.01; n];
        weights[at] = value;
        weights
    };
    let spoilt = [
        (with(n - 1, f32::NAN), "value NaN"),
        (with(0, f32::NEG_INFINITY), "value -inf"),
        (with(3, 3e38), "finite ones up to"),
        (vec![50.0; n], "norm_max"),
        (vec![0.01; n - 1], "values of 4 bytes are expected"),
    ];
    for (client, (weights, expected)) in spoilt.iter().enumerate() {
        let link = scene.attacker(client as u32);
        let task = task_of(&link).await;
        let (contribution, store) = scene.contribution(&format!("out{client}"), &task, weights);
        let told = reason(hand_in(&link, &contribution, &store).await);
        assert!(told.contains(expected), "{told}");
        // Refused once is refused for the round.
        assert!(reason(hand_in(&link, &contribution, &store).await).contains("not waited for"));
    }
    let link = scene.attacker(5);
    let task = task_of(&link).await;
    let (honest, store) = scene.contribution("five", &task, &vec![0.01; n]);
    for (case, expected) in [
        (Contribution { client: 7, ..honest.clone() }, "stands for client 5"),
        (Contribution { round: 3, ..honest.clone() }, "round 3 is not open"),
        (Contribution { run: "../../x".into(), ..honest.clone() }, "is not open"),
    ] {
        assert!(reason(hand_in(&link, &case, &store).await).contains(expected), "{expected}");
    }
    // Bytes that were not announced, or that leave a gap, are not taken.
    let announced = honest.parts[0].blob.clone();
    assert!(link.upload(&announced, 0, &store).await.is_err(), "nothing was announced yet");
    assert!(matches!(link.contribute(&honest).await.unwrap().kind, Some(verdict::Kind::Missing(_))));
    let other = store.put(b"other bytes").unwrap();
    assert!(link.upload(&other, 0, &store).await.is_err());
    assert!(link.upload(&announced, 8, &store).await.is_err(), "a gap");
    // A claim beyond what the server believes.
    let claim = Contribution { n_samples: 1_000_000_000, ..honest.clone() };
    assert!(reason(hand_in(&link, &claim, &store).await).contains("1000000000 samples"));
    // Another hash than the bytes have.
    let liar = scene.attacker(6);
    let mut lie = Contribution { client: 6, ..honest.clone() };
    lie.parts[0].blob.hash = vec![7; 32];
    let lying_store = scene.contribution("liar", &task, &[]).1;
    std::fs::write(scene.dir.path().join("liar").join("07".repeat(32)), encode_f32(&vec![0.02; n])).unwrap();
    assert!(matches!(liar.contribute(&lie).await.unwrap().kind, Some(verdict::Kind::Missing(_))));
    let told = liar.upload(&lie.parts[0].blob, 0, &lying_store).await.unwrap_err().to_string();
    assert!(told.contains("do not match its hash"), "{told}");
    liar.decline(&Decline { run: lie.run.clone(), round: 0, reason: "found out".into() }).await.unwrap();

    scene.honest(7).await.unwrap().unwrap();
    let events = scene.journal();
    let counted = events.iter().find_map(|e| match e {
        Event::RoundClosed { counted, .. } => Some(counted.clone()),
        _ => None,
    });
    assert_eq!(counted, Some(vec![7]));
    assert_eq!(events.iter().filter(|e| matches!(e, Event::Refused { .. })).count(), 6);
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_and_replayed_contributions_count_once() {
    let scene = Scene::new(2, &["federation.rounds=2"], |_| ()).await;
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    let n = (task.weights.len / 4) as usize;
    let (first, store) = scene.contribution("a", &task, &vec![0.01; n]);
    assert!(matches!(hand_in(&link, &first, &store).await, verdict::Kind::Accepted(_)));
    // The same again, many at a time: the same receipt. Another one: refused.
    let again: Vec<_> = (0..8)
        .map(|_| {
            let (link, first) = (link.clone(), first.clone());
            tokio::spawn(async move { link.contribute(&first).await.unwrap().kind.unwrap() })
        })
        .collect();
    for answer in again {
        assert_eq!(answer.await.unwrap(), verdict::Kind::Accepted(Receipt { id: first.id() }));
    }
    let (second, store) = scene.contribution("b", &task, &vec![0.02; n]);
    assert!(reason(hand_in(&link, &second, &store).await).contains("has contributed"));
    let honest = scene.honest(1);
    // In the next round the old contribution gets its old receipt and nothing more.
    let next = task_of(&link).await;
    assert_eq!(next.round, 1);
    assert!(matches!(hand_in(&link, &first, &store).await, verdict::Kind::Accepted(_)));
    assert!(reason(hand_in(&link, &second, &store).await).contains("round 0 is not open"));
    let (last, store) = scene.contribution("c", &next, &vec![0.03; n]);
    assert!(matches!(hand_in(&link, &last, &store).await, verdict::Kind::Accepted(_)));
    honest.await.unwrap().unwrap();
    let accepted = scene.journal().iter().filter(|e| matches!(e, Event::Accepted(_))).count();
    assert_eq!(accepted, 4);
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_cannot_do_without_those_who_dropped_out_asks_them_again() {
    // Both clients are needed. One declines, then sends what cannot count, then does as it should.
    let scene = Scene::new(2, &["federation.rounds=1"], |_| ()).await;
    let honest = scene.honest(1);
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    link.decline(&Decline { run: task.run.clone(), round: 0, reason: "busy".into() }).await.unwrap();
    let task = task_of(&link).await;
    let n = (task.weights.len / 4) as usize;
    let (spoilt, store) = scene.contribution("a", &task, &vec![f32::NAN; n]);
    assert!(reason(hand_in(&link, &spoilt, &store).await).contains("NaN"));
    let task = task_of(&link).await;
    let (whole, store) = scene.contribution("b", &task, &vec![0.01; n]);
    assert!(matches!(hand_in(&link, &whole, &store).await, verdict::Kind::Accepted(_)));
    honest.await.unwrap().unwrap();
    let closed = scene.journal().into_iter().find_map(|e| match e {
        Event::RoundClosed { counted, .. } => Some(counted),
        _ => None,
    });
    assert_eq!(closed, Some(vec![0, 1]));
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_do_not_get_past_the_door() {
    let scene = Scene::new(1, &["federation.rounds=1"], |_| ()).await;
    let authority = Authority::open(&scene.server_dir()).unwrap();
    let foreign_dir = tempfile::tempdir().unwrap();
    let foreign = Authority::open(foreign_dir.path()).unwrap();
    let (key, request) = node_request().unwrap();
    let try_with = async |certificate: &str| {
        let tls = node_tls(authority.certificate(), certificate, &key).unwrap();
        Link::new(&scene.address(), tls).unwrap().work().await.unwrap_err()
    };
    // Another authority's certificate, and one of ours that has expired.
    let error = try_with(&foreign.sign(&request, "n0", 10).unwrap()).await;
    assert!(matches!(error, Error::Unreachable(_)), "{error}");
    let error = try_with(&authority.sign(&request, "n0", -1).unwrap()).await;
    assert!(matches!(error, Error::Unreachable(_)) && error.to_string().contains("Expired"), "{error}");
    // Signed by this authority, but never entered in the registry: the handshake passes, the door stays shut.
    let error = try_with(&authority.sign(&request, "n0", 10).unwrap()).await;
    assert!(matches!(error, Error::Refused { status: 403, .. }), "{error}");
    // No certificate at all, and no TLS at all.
    let without = Link::new(&scene.address(), enrol_tls(authority.fingerprint().unwrap()).unwrap());
    let error = without.unwrap().work().await.unwrap_err();
    assert!(matches!(error, Error::Unreachable(_)), "{error}");
    let mut plain = tokio::net::TcpStream::connect(scene.addresses.listen).await.unwrap();
    plain.write_all(b"POST /v1/work HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
    // A node does not talk to a server of another federation.
    let tls = node_tls(foreign.certificate(), &foreign.sign(&request, "n0", 10).unwrap(), &key).unwrap();
    let error = Link::new(&scene.address(), tls).unwrap().work().await.unwrap_err();
    assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    assert!(scene.journal().iter().all(|e| matches!(e, Event::RoundOpened { .. } | Event::Enrolled { .. })));
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_in_the_registry_is_out_as_soon_as_it_is_revoked() {
    let scene = Scene::new(1, &["federation.rounds=1"], |_| ()).await;
    let link = scene.attacker(0);
    task_of(&link).await;
    Registry::open(&scene.server_dir()).unwrap().revoke("n0").unwrap();
    let error = link.work().await.unwrap_err();
    assert!(matches!(&error, Error::Refused { status: 403, reason } if reason.contains("revoked")), "{error}");
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_too_much_and_too_often_are_refused() {
    let scene = Scene::new(1, &["federation.rounds=1"], |server| server.requests_per_s = 5.0).await;
    let tls = Home::new(&scene.home(0)).tls().unwrap();
    let client = reqwest::Client::builder().tls_backend_preconfigured(tls).build().unwrap();
    let post = async |path: &str, body: Vec<u8>| {
        let response = client.post(scene.address() + path).body(body).send().await;
        response.map(|r| r.status().as_u16())
    };
    assert_eq!(post("/v1/work", vec![0xff; 40]).await.unwrap(), 400);
    assert_eq!(post("/v1/contribute", vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]).await.unwrap(), 400);
    assert_eq!(post("/v1/nothing", Vec::new()).await.unwrap(), 404);
    let get = client.get(scene.address() + "/v1/blob/..%2f..%2fca.key/0").send().await.unwrap();
    assert_eq!(get.status().as_u16(), 400);
    // A body beyond the limit is not read to its end.
    match post("/v1/contribute", vec![0; 3 << 20]).await {
        Ok(status) => assert_eq!(status, 413),
        Err(error) => assert!(error.is_request() || error.is_body(), "{error}"),
    }
    let mut refused = 0;
    for _ in 0..40 {
        // The connection on which too much was sent may just be closing.
        refused += u32::from(post("/v1/heartbeat", Vec::new()).await.is_ok_and(|status| status == 429));
    }
    assert!(refused > 0, "40 requests at once against a limit of 5 a second");
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn http_1_1_is_enough_and_the_status_page_tells_and_takes_nothing() {
    let scene =
        Scene::new(1, &["federation.rounds=1"], |server| server.status = Some("127.0.0.1:0".parse().unwrap())).await;
    let mut tls = Home::new(&scene.home(0)).tls().unwrap();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let client = reqwest::Client::builder().tls_backend_preconfigured(tls).http1_only().build().unwrap();
    let response = client.post(scene.address() + "/v1/heartbeat").body(Vec::new()).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (204, reqwest::Version::HTTP_11));
    let status = format!("http://{}", scene.addresses.status.unwrap());
    task_of(&scene.attacker(0)).await;
    let page = client.get(&status).send().await.unwrap();
    assert!(page.headers()["content-security-policy"].to_str().unwrap().contains("default-src 'none'"));
    let text = page.text().await.unwrap();
    assert!(text.contains("round 1 of 1: 0 of 1 contributions") && !text.contains("<script"), "{text}");
    let metrics = client.get(format!("{status}/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("\nfedproj_nodes_alive 1\n"), "{metrics}");
    let taken = client.post(&status).send().await.unwrap();
    assert_eq!(taken.status().as_u16(), 405);
    scene.serving.abort();
}

/// Keeps the helper honest: a path given by a peer never leaves its folder.
#[test]
fn only_hashes_become_file_names() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("in")).unwrap();
    std::fs::write(dir.path().join("secret"), "x").unwrap();
    assert!(fedproj_net::message::Blob { hash: b"../secret".to_vec(), len: 1 }.check().is_err());
    assert!(store.read(Path::new("../secret").as_os_str().as_encoded_bytes(), 0, 10).unwrap().is_none());
}

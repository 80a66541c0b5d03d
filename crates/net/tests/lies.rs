//! A server that lies to a node in a secure sum. The node is a real one with its folder and its connection; the server is this
//! test, which plays the other members too and sends whatever steps it likes.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use fedproj_core::ClientState;
use fedproj_net::node::{Home, Summing};
use fedproj_net::secure::{Party, Roster, shared_for};
use fedproj_net::server::Authority;
use fedproj_net::wire::{
    Accepted, Announce, Blob, Contribution, EnrolReply, Instruction, InstructionKind, Member, NOISE_CLIENTS, NamedBlob,
    PLAIN, Rejected, Request, Reveal, RevealFor, Shares, SharesFor, Survivors, Task, Verdict, VerdictKind, Wait,
    decode, encode_u64,
};
use fedproj_net::{Link, Policy};
use prost::Message;
use rcgen::{KeyPair, SigningKey};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

const N: u32 = 5;
const ALL: &[u32] = &[0, 1, 2, 3, 4];
const FOUR: &[u32] = &[0, 1, 2, 3];
const ROUND: u32 = 3;

/// What the server says next.
#[derive(Clone, Copy, Debug)]
enum Say {
    /// A roster with this threshold, whose other members contribute to the task of this hash or to the node's own.
    Share(usize, Option<u8>),
    /// Who has shared.
    Mask(&'static [u32]),
    Sign(&'static [u32]),
    /// Survivors, and which of the others have signed them.
    Reveal(&'static [u32], &'static [u32]),
    Renew,
    /// The round is over.
    End,
}
use Say::{End, Mask, Renew, Reveal as Show, Share, Sign};

/// The server, and the members that it plays.
struct Liar {
    people: Vec<(Vec<u8>, KeyPair)>,
    task: Vec<u8>,
    /// Makes the keys of each roster new.
    n_rosters: u8,
    parties: BTreeMap<u32, Party>,
    roster: Option<Roster>,
    shares: BTreeMap<u32, Shares>,
    sharers: &'static [u32],
    script: VecDeque<Say>,
    n_masked: usize,
    revealed: Vec<Reveal>,
    announced: Vec<Member>,
}

impl Liar {
    fn instruction(&mut self, announce: &Announce) -> InstructionKind {
        self.announced.push(announce.member.clone());
        match self.script.pop_front().unwrap_or(End) {
            Share(threshold, task) => self.new_roster(announce, threshold, task),
            Mask(sharers) => {
                self.sharers = sharers;
                InstructionKind::Mask(self.shared(0))
            }
            Sign(clients) => InstructionKind::Sign(self.survivors(clients, Vec::new())),
            Show(clients, signers) => {
                let signed = |client: &u32| {
                    let party = self.parties.get(client).filter(|_| signers.contains(client));
                    let survivors = self.survivors(clients, Vec::new());
                    let signed =
                        party.map(|party| party.sign(self.roster(), &self.shared(*client), &survivors).unwrap());
                    signed.unwrap_or_default()
                };
                InstructionKind::Reveal(self.survivors(clients, clients.iter().map(signed).collect()))
            }
            Renew => InstructionKind::Renew(Wait {}),
            End => InstructionKind::Rejected(Rejected { reason: "the round is over".into() }),
        }
    }

    fn roster(&self) -> &Roster {
        self.roster.as_ref().unwrap()
    }

    fn new_roster(&mut self, announce: &Announce, threshold: usize, task: Option<u8>) -> InstructionKind {
        self.n_rosters += 1;
        let mut members: Vec<Member> = vec![announce.member.clone()];
        for client in 1..N {
            let party = Party::new(client, [self.n_rosters * 16 + client as u8; 32]);
            let (certificate, key) = &self.people[client as usize];
            let sign = |text: &[u8]| Ok(key.sign(text).unwrap());
            let task = task.map_or(self.task.clone(), |byte| vec![byte; 32]);
            members.push(party.member(&announce.run, announce.round, task, certificate.clone(), &sign).unwrap());
            self.parties.insert(client, party);
        }
        let roster = Roster::with_threshold(&announce.run, announce.round, members, threshold).unwrap();
        self.shares = self.parties.iter().map(|(client, party)| (*client, party.shares(&roster).unwrap())).collect();
        let step = InstructionKind::Share(roster.for_node(0));
        self.roster = Some(roster);
        step
    }

    fn shared(&self, client: u32) -> fedproj_net::wire::Shared {
        let mut shares = self.shares.clone();
        shares.retain(|client, _| self.sharers.contains(client));
        shared_for(self.roster(), &shares, client)
    }

    fn survivors(&self, clients: &[u32], signed: Vec<Vec<u8>>) -> Survivors {
        Survivors {
            roster: self.roster.as_ref().map_or_else(Vec::new, |roster| roster.hash().to_vec()),
            clients: clients.to_vec(),
            signed,
        }
    }
}

type Shared = State<Arc<Mutex<Liar>>>;

fn routes(liar: &Arc<Mutex<Liar>>) -> Router {
    let announce = async |State(liar): Shared, body: Bytes| {
        let step = liar.lock().unwrap().instruction(&decode(&body).unwrap());
        Instruction { kind: Some(step) }.encode_to_vec()
    };
    let share = async |State(liar): Shared, body: Bytes| {
        let message: SharesFor = decode(&body).unwrap();
        liar.lock().unwrap().shares.insert(0, message.shares);
        StatusCode::NO_CONTENT
    };
    let masked = async |State(liar): Shared, body: Bytes| {
        let id = decode::<Contribution>(&body).unwrap().id();
        liar.lock().unwrap().n_masked += 1;
        Verdict { kind: Some(VerdictKind::Accepted(Accepted { id })) }.encode_to_vec()
    };
    let reveal = async |State(liar): Shared, body: Bytes| {
        liar.lock().unwrap().revealed.push(decode::<RevealFor>(&body).unwrap().reveal);
        StatusCode::NO_CONTENT
    };
    Router::new()
        .route(Announce::PATH, post(announce))
        .route(SharesFor::PATH, post(share))
        .route(Contribution::PATH, post(masked))
        .route(RevealFor::PATH, post(reveal))
        .with_state(Arc::clone(liar))
}

struct Door(TcpListener, TlsAcceptor);

impl axum::serve::Listener for Door {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (tcp, address) = self.0.accept().await.unwrap();
            if let Ok(stream) = self.1.accept(tcp).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

/// A node, and the server that it trusts.
struct Scene {
    _dir: tempfile::TempDir,
    authority: Authority,
    home: Home,
    link: Link,
    liar: Arc<Mutex<Liar>>,
}

impl Scene {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(&dir.path().join("server")).unwrap();
        let people: Vec<_> =
            (0..N).map(|client| enrol(&authority, &dir.path().join(format!("n{client}")), client)).collect();
        let home = Home::new(&dir.path().join("n0"));
        let liar = Arc::new(Mutex::new(Liar {
            people,
            task: task().common_hash(),
            n_rosters: 0,
            parties: BTreeMap::new(),
            roster: None,
            shares: BTreeMap::new(),
            sharers: ALL,
            script: VecDeque::new(),
            n_masked: 0,
            revealed: Vec::new(),
            announced: Vec::new(),
        }));
        let tls = authority.server_tls(&["127.0.0.1".into()], true).unwrap();
        let door = Door(TcpListener::bind("127.0.0.1:0").await.unwrap(), TlsAcceptor::from(tls));
        let link = Link::new(&format!("https://{}", door.0.local_addr().unwrap()), home.tls().unwrap()).unwrap();
        tokio::spawn(axum::serve(door, routes(&liar)).into_future());
        Self { _dir: dir, authority, home, link, liar }
    }

    /// The node has trained: its vector waits for a sum.
    fn trained(&self, run: &str, vector: u64) -> Contribution {
        let blob: Blob = self.home.outbox().unwrap().put(&encode_u64(&[vector, 2, 3, 4])).unwrap();
        self.pending(run, vec![NamedBlob { name: PLAIN.into(), blob }])
    }

    /// The same with a share of noise that protects sums of so many clients.
    fn trained_with_noise(&self, vector: u64, n_clients: u64) -> Contribution {
        let mut parts = self.trained("r", vector).parts;
        let blob = self.home.outbox().unwrap().put(&encode_u64(&[n_clients])).unwrap();
        parts.push(NamedBlob { name: NOISE_CLIENTS.into(), blob });
        self.pending("r", parts)
    }

    fn pending(&self, run: &str, parts: Vec<NamedBlob>) -> Contribution {
        let pending = Contribution { run: run.into(), round: ROUND, client: 0, parts, ..Contribution::default() };
        self.home.set_pending(&task(), &pending, &ClientState::new()).unwrap();
        pending
    }

    /// What the node makes of the server's steps: its error, and how often it has masked and revealed.
    async fn says(&self, pending: &Contribution, policy: &Policy, script: &[Say]) -> (Option<String>, usize, usize) {
        let before = {
            let mut liar = self.liar.lock().unwrap();
            liar.script = script.iter().copied().collect();
            (liar.n_masked, liar.revealed.len())
        };
        let summing = Summing { link: &self.link, home: &self.home, policy, pending };
        let error = summing.run().await.err().map(|error| error.to_string());
        let liar = self.liar.lock().unwrap();
        (error, liar.n_masked - before.0, liar.revealed.len() - before.1)
    }
}

/// A node's certificate and key.
fn enrol(authority: &Authority, dir: &Path, client: u32) -> (Vec<u8>, KeyPair) {
    let home = Home::new(dir);
    let name = format!("n{client}");
    let certificate = authority.sign(&home.request().unwrap(), &name, 10).unwrap();
    let reply = EnrolReply { name, client, certificate: certificate.clone(), authority: authority.bundle() };
    home.enrolled(&reply).unwrap();
    let key = KeyPair::from_pem(&std::fs::read_to_string(dir.join("key.pem")).unwrap()).unwrap();
    (CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap().to_vec(), key)
}

/// The node's task; the others' differs in the client only.
fn task() -> Task {
    Task { run: "r".into(), round: ROUND, client: 0, secure_clients: N, ..Task::default() }
}

/// The roster that the node's policy asks for: two thirds of five, and one task.
const TRUE: Say = Share(4, None);
const OTHERS: &[u32] = &[1, 2, 3, 4];

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_not_lied_to_reveals_once_and_a_killed_one_does_the_same_again() {
    let (scene, policy) = (Scene::new().await, Policy::default());
    let pending = scene.trained("r", 1);
    let whole = [TRUE, Mask(ALL), Sign(ALL), Show(ALL, OTHERS), End];
    assert_eq!(scene.says(&pending, &policy, &whole).await, (None, 1, 1));
    let revealed = scene.liar.lock().unwrap().revealed[0].clone();
    assert!(revealed.shares.len() == 5 && revealed.shares.iter().all(|share| share.len() == 32));
    // Killed and started again: the same list, the same shares. With the list of another, nothing.
    let pending = scene.trained("r", 2);
    scene.says(&pending, &policy, &[TRUE, Mask(ALL), Sign(ALL), Show(FOUR, OTHERS)]).await;
    let again = [Mask(ALL), Sign(ALL), Show(ALL, OTHERS), Show(ALL, OTHERS)];
    let (error, masked, revealed) = scene.says(&pending, &policy, &again).await;
    assert_eq!((error, masked, revealed), (None, 1, 2));
    let liar = scene.liar.lock().unwrap();
    assert_eq!(liar.revealed[1], liar.revealed[2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_reveals_nothing_to_a_server_that_changes_what_it_has_said() {
    let strict = Policy { cohort_min: 5, ..Policy::default() };
    let (scene, policy) = (Scene::new().await, Policy::default());
    let cases: &[(&Policy, &[Say], &str)] = &[
        // Another roster, another list of sharers, another list of survivors.
        (&policy, &[TRUE, TRUE], "roster differs"),
        (&policy, &[TRUE, Mask(ALL), Mask(FOUR)], "shares differ"),
        (&policy, &[TRUE, Mask(ALL), Sign(ALL), Sign(FOUR)], "survivors differ"),
        (&policy, &[TRUE, Mask(ALL), Sign(ALL), Show(FOUR, OTHERS)], "survivors differ"),
        // Lists that too few others have signed, or that they have not signed at all.
        (&policy, &[TRUE, Mask(ALL), Sign(ALL), Show(ALL, &[1, 2, 3])], "fewer than 4 neighbours have signed"),
        (&policy, &[TRUE, Mask(ALL), Show(FOUR, &[1, 2, 3])], "fewer than 4 neighbours have signed"),
        (&policy, &[TRUE, Mask(ALL), Show(ALL, &[])], "fewer than 4 neighbours have signed"),
        // Fewer clients than the policy asks for, at each stage.
        (&strict, &[TRUE, Mask(FOUR)], "cohort_min = 5"),
        (&strict, &[TRUE, Mask(ALL), Sign(FOUR)], "cohort_min = 5"),
        (&strict, &[TRUE, Mask(ALL), Show(FOUR, OTHERS)], "cohort_min = 5"),
        // A threshold at which two lists could be signed, and other tasks for the others.
        (&policy, &[Share(3, None)], "threshold_min"),
        (&policy, &[Share(4, Some(7))], "client 1 has been given another task"),
        // Steps for which the time has not come.
        (&policy, &[TRUE, Sign(ALL)], "no shares were accepted"),
        (&policy, &[TRUE, Show(ALL, OTHERS)], "no shares were accepted"),
    ];
    for (policy, script, told) in cases {
        let pending = scene.trained("r", 1);
        let (error, _, revealed) = scene.says(&pending, policy, script).await;
        let error = error.unwrap_or_default();
        assert!(error.contains(told) && revealed == 0, "{script:?}: {error}; {revealed} revealed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_reveals_nothing_for_a_sum_with_less_noise_than_promised() {
    let (scene, policy) = (Scene::new().await, Policy { threshold_min: 0.5, ..Policy::default() });
    let start = [Share(3, None), Mask(ALL)];
    let signing = [&start[..], &[Sign(FOUR), Show(FOUR, &[1, 2, 3])]].concat();
    let at_once = [&start[..], &[Show(FOUR, &[1, 2, 3])]].concat();
    for (vector, least, script, is_enough) in
        [(1, 4, &signing, true), (2, 5, &signing, false), (3, 4, &at_once, true), (4, 5, &at_once, false)]
    {
        let pending = scene.trained_with_noise(vector, least);
        let (error, _, revealed) = scene.says(&pending, &policy, script).await;
        let is_told =
            error.as_ref().is_some_and(|e| e.contains("4 clients are left, and the noise that the run promises"));
        assert_eq!((is_told, revealed), (!is_enough, usize::from(is_enough)), "{least}, {script:?}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_node_has_signed_holds_after_a_crash() {
    let (scene, policy) = (Scene::new().await, Policy::default());
    let pending = scene.trained("r", 1);
    // Not the end of the attempt: the connection breaks after the first list.
    let (error, masked, _) = scene.says(&pending, &policy, &[TRUE, Mask(ALL), Sign(ALL), Show(FOUR, &[])]).await;
    assert!(error.unwrap().contains("survivors differ") && masked == 1);
    for script in [&[Sign(FOUR)][..], &[Show(FOUR, OTHERS)], &[Mask(FOUR)], &[TRUE]] {
        let (error, masked, revealed) = scene.says(&pending, &policy, script).await;
        assert!(error.is_some_and(|e| e.contains("differ")) && (masked, revealed) == (0, 0), "{script:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vector_is_in_one_sum_only_whatever_the_attempt_or_the_run() {
    let (scene, policy) = (Scene::new().await, Policy { threshold_min: 0.5, ..Policy::default() });
    let pending = scene.trained("r", 1);
    let first = [TRUE, Mask(ALL), Sign(ALL), Show(ALL, OTHERS)];
    let second = [Share(3, None), Mask(FOUR), Sign(FOUR), Show(FOUR, &[1, 2, 3])];
    let script = [&first[..], &[Renew], &second].concat();
    let (error, masked, revealed) = scene.says(&pending, &policy, &script).await;
    assert!(error.unwrap().contains("this vector was in a sum of clients [0, 1, 2, 3, 4]"));
    assert_eq!((masked, revealed), (2, 1));
    // The same in a run of another name; another vector is free.
    let pending = scene.trained("another run", 1);
    let (error, _, revealed) = scene.says(&pending, &policy, &second).await;
    assert!(error.unwrap().contains("this vector was in a sum") && revealed == 0);
    let pending = scene.trained("another run", 9);
    assert_eq!(scene.says(&pending, &policy, &second).await, (None, 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_a_certificate_that_was_renewed_are_announced_no_more_unless_a_roster_has_them() {
    let (scene, policy) = (Scene::new().await, Policy::default());
    for (script, keeps) in [(&[Sign(ALL)][..], false), (&[TRUE, Sign(ALL)], true)] {
        let pending = scene.trained("r", 1);
        assert!(scene.says(&pending, &policy, script).await.0.is_some());
        let before = scene.liar.lock().unwrap().announced.last().unwrap().clone();
        let certificate = scene.authority.sign(&scene.home.renewal_request().unwrap(), "n0", 10).unwrap();
        let authority = scene.authority.bundle();
        scene.home.renewed(&EnrolReply { name: "n0".into(), client: 0, certificate, authority }).unwrap();
        scene.says(&pending, &policy, &[End]).await;
        let after = scene.liar.lock().unwrap().announced.last().unwrap().clone();
        assert_eq!((before == after, before.certificate == after.certificate), (keeps, keeps));
    }
}

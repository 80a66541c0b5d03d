//! Members that lie in a secure sum. The server and the other nodes are real ones on loopback; the liar is this test.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod scene;

use fedproj_net::secure::{Party, Roster};
use fedproj_net::server::journal::Event;
use fedproj_net::wire::{
    Announce, Contribution, InstructionKind, MASKED, Member, NamedBlob, RevealFor, SharesFor, Store, Task, VerdictKind,
    WorkKind, WorkRequest, encode_u64,
};
use fedproj_net::{Error, Link};
use rcgen::{KeyPair, PublicKeyData, SigningKey};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use scene::{Scene, hand_in, reason};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

const FIXED: &str = "federation.sum=fixed";

fn repeats(scene: &Scene) {
    let run = std::fs::read_dir(scene.server_dir().join("runs")).unwrap().next().unwrap().unwrap().path();
    fedproj_core::verify(&run, None, 1, fedproj_core::VerifyPart::default(), &|_| ()).unwrap();
}

/// What a member does wrong that else follows the protocol, with a vector of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// Keys that agree with everybody.
    Keys,
    /// Announces itself and says no more.
    Stalls,
    /// Shares for one neighbour that it cannot read.
    Sealed,
    /// Shares that do not give its secret.
    Dealt,
    /// A vector without its masks.
    Mask,
    /// More samples than there are.
    Samples,
    /// Values that no network has.
    Values,
    /// Another vector while shares are revealed.
    Late,
    /// Wrong shares of others' secrets.
    Reveals,
    /// Leaves once its vector has arrived.
    LeavesMasked,
    /// Leaves once it has signed the lists.
    LeavesSigned,
}

/// A member of a scene that this test plays.
struct Played {
    link: Link,
    client: u32,
    certificate: Vec<u8>,
    key: KeyPair,
    /// The public keys of all certificates.
    keys: BTreeMap<Vec<u8>, Vec<u8>>,
    folder: PathBuf,
    lie: Lie,
}

impl Played {
    fn new(scene: &Scene, client: u32, n: u32, lie: Lie) -> Self {
        let read = |client: u32| {
            let file = |name| std::fs::read_to_string(scene.home(client).join(name)).unwrap();
            let certificate = CertificateDer::from_pem_slice(file("certificate.pem").as_bytes()).unwrap().to_vec();
            (certificate, KeyPair::from_pem(&file("key.pem")).unwrap())
        };
        let keys = (0..n).map(read).map(|(certificate, key)| (certificate, key.der_bytes().to_vec())).collect();
        let (certificate, key) = read(client);
        let (link, folder) = (scene.attacker(client), scene.dir.path().join("lies"));
        Self { link, client, certificate, key, keys, folder, lie }
    }

    /// Takes part in all rounds of the run.
    async fn play(self) {
        let mut seed = 0;
        loop {
            // The server may be gone by now.
            let Ok(work) = self.link.send(&WorkRequest::current()).await else { return };
            match work.kind.unwrap() {
                WorkKind::Train(task) => {
                    seed += 1;
                    self.round(&task, Party::new(self.client, [seed; 32])).await;
                }
                WorkKind::Done(_) => return,
                WorkKind::Wait(_) => (),
            }
        }
    }

    fn member(&self, task: &Task, party: &Party) -> Member {
        let text = Mutex::new(Vec::new());
        let sign = |signed: &[u8]| {
            *text.lock().unwrap() = signed.to_vec();
            Ok(self.key.sign(signed).unwrap())
        };
        let of = task.common_hash();
        let mut member = party.member(&task.run, task.round, of, self.certificate.clone(), &sign).unwrap();
        if self.lie == Lie::Keys {
            let mut text = text.into_inner().unwrap();
            let at = text.windows(32).position(|key| key == member.share_key).unwrap();
            member.share_key = vec![0; 32];
            text[at..at + 32].fill(0);
            member.signature = self.key.sign(&text).unwrap();
        }
        member
    }

    fn masked(&self, task: &Task, n_values: u64, word: impl FnOnce(&mut Vec<u64>)) -> (Contribution, Store) {
        let mut values = vec![0; 10 + n_values as usize];
        values[0] = if self.lie == Lie::Samples { 1 << 50 } else { 10 };
        if self.lie == Lie::Values {
            values[10..].fill(1 << 60);
        }
        word(&mut values);
        if self.lie == Lie::Mask {
            values[3] ^= 1;
        }
        let store = Store::open(&self.folder).unwrap();
        let blob = store.put(&encode_u64(&values)).unwrap();
        let parts = vec![NamedBlob { name: MASKED.into(), blob }];
        let (run, round, client) = (task.run.clone(), task.round, self.client);
        (Contribution { run, round, client, parts, ..Contribution::default() }, store)
    }

    async fn round(&self, task: &Task, party: Party) {
        let (run, round, n_values) = (task.run.clone(), task.round, (task.weights.len + task.buffers.len) / 4);
        let mut announce =
            Announce { run: run.clone(), round, member: self.member(task, &party), ..Announce::default() };
        let (mut roster, mut shared) = (None, None);
        let key_of = |certificate: &[u8]| Ok(self.keys[certificate].clone());
        loop {
            let step = match self.link.send(&announce).await {
                Ok(step) => step.kind.unwrap(),
                Err(Error::Unreachable(_)) => return,
                Err(error) => {
                    assert!(
                        self.lie == Lie::Keys && error.to_string().contains("same secret with everybody"),
                        "{error}"
                    );
                    pause().await;
                    return;
                }
            };
            match step {
                InstructionKind::Wait(_) => (),
                InstructionKind::Share(_) if self.lie == Lie::Stalls => pause().await,
                InstructionKind::Sign(_) if self.lie == Lie::LeavesMasked => pause().await,
                InstructionKind::Reveal(_) if self.lie == Lie::LeavesSigned => pause().await,
                InstructionKind::Share(message) => {
                    let accepted = Roster::check(&run, round, &announce.member, message, 0.5, &key_of).unwrap();
                    let mut shares = party.shares(&accepted).unwrap();
                    match self.lie {
                        Lie::Sealed => shares.sealed[0].fill(7),
                        Lie::Dealt => shares.commitment.fill(7),
                        _ => (),
                    }
                    announce.roster = accepted.hash().to_vec();
                    roster = Some(accepted);
                    self.link.send(&SharesFor { run: run.clone(), round, shares }).await.unwrap();
                }
                InstructionKind::Mask(message) => {
                    let of = roster.as_ref().unwrap();
                    let mask = |values: &mut Vec<u64>| party.mask(of, &message, values).unwrap();
                    let (contribution, store) = self.masked(task, n_values, mask);
                    if let VerdictKind::Accepted(accepted) = hand_in(&self.link, &contribution, &store).await {
                        announce.id = accepted.id;
                    }
                    shared = Some(message);
                }
                InstructionKind::Sign(survivors) => {
                    announce.signed =
                        party.sign(roster.as_ref().unwrap(), shared.as_ref().unwrap(), &survivors).unwrap();
                }
                InstructionKind::Reveal(survivors) => {
                    if self.lie == Lie::Late {
                        let (other, store) = self.masked(task, n_values, |values| values.push(5));
                        reason(hand_in(&self.link, &other, &store).await);
                    }
                    let revealed = party.reveal(roster.as_ref().unwrap(), shared.as_ref().unwrap(), &survivors);
                    let mut reveal = revealed.unwrap();
                    if self.lie == Lie::Reveals {
                        reveal.shares.iter_mut().for_each(|share| share[0] ^= 1);
                    }
                    self.link.send(&RevealFor { run: run.clone(), round, reveal }).await.unwrap();
                }
                InstructionKind::Renew(_) | InstructionKind::Counted(_) | InstructionKind::Rejected(_) => return,
            }
        }
    }
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// One of five members lies in every round. The run ends all the same, after at most one deadline.
async fn with_a_liar(lie: Lie) -> Scene {
    let mut scene = Scene::new(5, &["federation.rounds=3", FIXED], |server| {
        (server.secure, server.deadline_s) = (true, 20.0);
    })
    .await;
    let nodes: Vec<_> = (0..4).map(|client| scene.honest(client)).collect();
    let liar = tokio::spawn(Played::new(&scene, 4, 5, lie).play());
    let ended = tokio::time::timeout(Duration::from_mins(4), &mut scene.serving).await.expect("the run ends");
    ended.unwrap().unwrap();
    for node in nodes {
        node.await.unwrap().unwrap();
    }
    liar.abort();
    if let Err(error) = liar.await {
        assert!(error.is_cancelled(), "{lie:?}: {error}");
    }
    scene
}

/// `counted`: how many are in each sum. `told`: why a round had none.
async fn check(lie: Lie, counted: &[usize], told: &str) {
    let scene = Box::pin(with_a_liar(lie)).await;
    let events = scene.journal();
    let reason = |e: &Event| if let Event::RoundEmpty { reason, .. } = e { Some(reason.clone()) } else { None };
    let reasons: Vec<String> = events.iter().filter_map(reason).collect();
    assert_eq!(reasons.len(), counted.iter().filter(|n| **n == 0).count(), "{lie:?}: {reasons:?}");
    assert!(reasons.iter().all(|reason| reason.contains(told)), "{lie:?}: {reasons:?}");
    let run = std::fs::read_dir(scene.server_dir().join("runs")).unwrap().next().unwrap().unwrap().path();
    let rounds = fedproj_core::StoredRun::open(&run).unwrap().rounds;
    assert_eq!(rounds.iter().map(|r| r.cohort.len()).collect::<Vec<_>>(), counted, "{lie:?}");
    // Where the liar's vector does not count, the simulator repeats the run.
    if !counted.contains(&5) {
        repeats(&scene);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_with_wrong_keys_shares_or_messages_costs_no_round() {
    check(Lie::Sealed, &[5, 5, 5], "").await;
    check(Lie::Late, &[5, 5, 5], "").await;
    check(Lie::Reveals, &[5, 5, 5], "").await;
    check(Lie::Keys, &[4, 4, 4], "").await;
    check(Lie::Stalls, &[4, 4, 4], "").await;
    // It is named, and left out of the next rounds.
    check(Lie::Dealt, &[0, 4, 4], "client 4: the 5 shares of its secret do not fit together").await;
}

/// Four of five rebuild its own mask, so its vector counts and nobody waits for the deadline.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_leaves_after_masking_is_in_the_sum() {
    check(Lie::LeavesMasked, &[5, 5, 5], "").await;
    check(Lie::LeavesSigned, &[5, 5, 5], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vector_that_spoils_the_sum_ends_the_round_and_not_the_server() {
    check(Lie::Mask, &[0, 0, 0], "the masks have not cancelled").await;
    check(Lie::Samples, &[0, 0, 0], "the sum cannot be used: 11258999").await;
    check(Lie::Values, &[0, 0, 0], "the sum cannot be used: the mean of weights contains the value").await;
}

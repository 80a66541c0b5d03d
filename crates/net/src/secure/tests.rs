use super::masks::{Sign, add};
use super::party::{own_mask_seed, pair_seed, sign_of};
use super::*;
use crate::error::Result;
use crate::wire::{Member, Reveal, RosterMessage, Shared, Shares, Survivors};
use proptest::prelude::*;
use rcgen::{KeyPair, PublicKeyData, SigningKey};
use std::collections::BTreeMap;
use std::sync::LazyLock;

const RUN: &str = "run";
const ROUND: u32 = 3;
const TASK: &[u8] = b"a hash of the task";
const N_VALUES: usize = 5;

/// A certificate is the key itself here; the federation's are read by rustls.
static KEYS: LazyLock<Vec<KeyPair>> = LazyLock::new(|| (0..140).map(|_| KeyPair::generate().unwrap()).collect());

#[allow(clippy::unnecessary_wraps, reason = "a certificate may be none of the federation")]
fn key_of(certificate: &[u8]) -> Result<Vec<u8>> {
    Ok(certificate.to_vec())
}

fn member_of(party: &Party, client: u32) -> Member {
    let key = &KEYS[client as usize];
    let sign = |text: &[u8]| Ok(key.sign(text).unwrap());
    party.member(RUN, ROUND, TASK.to_vec(), key.der_bytes().to_vec(), &sign).unwrap()
}

/// The nodes of an attempt and the roster that all have accepted.
struct Attempt {
    parties: BTreeMap<u32, (Party, Roster)>,
    roster: Roster,
    shares: BTreeMap<u32, Shares>,
}

impl Attempt {
    fn new(n: u32, share: f64, seed: u8) -> Self {
        let parties: Vec<Party> = (0..n).map(|c| Party::new(c, [seed ^ c as u8; 32])).collect();
        let members = (0..n).zip(&parties).map(|(client, party)| member_of(party, client)).collect();
        let roster = Roster::new(RUN, ROUND, members, share).unwrap();
        let accept = |(client, party): (u32, Party)| {
            let own = member_of(&party, client);
            // ECDSA signs with a random number, so the entry is the one of the roster.
            let own = Member { signature: roster.member(client).unwrap().signature.clone(), ..own };
            let accepted = Roster::check(RUN, ROUND, &own, roster.for_node(client), 0.5, &key_of).unwrap();
            (client, (party, accepted))
        };
        let parties = (0..n).zip(parties).map(accept).collect();
        Self { parties, roster, shares: BTreeMap::new() }
    }

    /// These clients share.
    fn share(&mut self, clients: &[u32]) {
        for client in clients {
            let (party, roster) = &self.parties[client];
            self.shares.insert(*client, party.shares(roster).unwrap());
        }
    }

    /// What a client gets of those who have shared.
    fn shared_for(&self, client: u32) -> Shared {
        shared_for(&self.roster, &self.shares, client)
    }

    fn mask(&self, client: u32) -> Vec<u64> {
        let (party, roster) = &self.parties[&client];
        let mut values = values_of(client);
        party.mask(roster, &self.shared_for(client), &mut values).unwrap();
        values
    }

    fn survivors(&self, clients: &[u32]) -> Survivors {
        Survivors { roster: self.roster.hash().to_vec(), clients: clients.to_vec(), signed: Vec::new() }
    }

    /// What a client has signed, if it was shown these clients as those who have shared and as survivors.
    fn signed(&self, client: u32, sharers: Option<&[u32]>, survivors: &[u32]) -> Vec<u8> {
        let Some((party, roster)) = self.parties.get(&client) else { return Vec::new() };
        let shared = self.shared_with(client, sharers);
        party.sign(roster, &shared, &self.survivors(survivors)).unwrap_or_default()
    }

    fn shared_with(&self, client: u32, sharers: Option<&[u32]>) -> Shared {
        let mut shares = self.shares.clone();
        shares.retain(|client, _| sharers.is_none_or(|sharers| sharers.contains(client)));
        shared_for(&self.roster, &shares, client)
    }

    /// What these clients have signed for the same survivors.
    fn all_signed(&self, signers: &[u32], survivors: &[u32]) -> BTreeMap<u32, Vec<u8>> {
        signers.iter().map(|client| (*client, self.signed(*client, None, survivors))).collect()
    }

    fn reveal_if(&self, client: u32, survivors: &[u32], signed: &BTreeMap<u32, Vec<u8>>) -> Result<Reveal> {
        let (party, roster) = &self.parties[&client];
        let signed =
            roster.near(client, survivors).map(|other| signed.get(&other).cloned().unwrap_or_default()).collect();
        party.reveal(roster, &self.shared_for(client), &Survivors { signed, ..self.survivors(survivors) })
    }

    fn reveal(&self, client: u32, survivors: &[u32]) -> Result<Reveal> {
        self.reveal_if(client, survivors, &self.all_signed(survivors, survivors))
    }

    fn unmask(
        &self,
        survivors: &[u32],
        reveals: &BTreeMap<u32, Reveal>,
        sum: &mut Vec<u64>,
    ) -> std::result::Result<(), Failed> {
        let commitments = self.shares.iter().map(|(client, s)| (*client, s.commitment.clone())).collect();
        Unmasking { roster: &self.roster, commitments: &commitments, survivors, reveals }.unmask(sum)
    }
}

fn values_of(client: u32) -> Vec<u64> {
    (0..N_VALUES as u64)
        .map(|i| (u64::from(client) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(i as u32))
        .collect()
}

fn add_up<'a>(vectors: impl IntoIterator<Item = &'a Vec<u64>>) -> Vec<u64> {
    let mut sum = Vec::new();
    for vector in vectors {
        sum.resize(vector.len(), 0u64);
        sum.iter_mut().zip(vector).for_each(|(s, v)| *s = s.wrapping_add(*v));
    }
    sum
}

fn chosen(n: u32, bits: u64) -> Vec<u32> {
    (0..n).filter(|c| bits >> c & 1 == 1).collect()
}

/// A whole attempt of five nodes in which nobody drops out.
fn whole() -> (Attempt, Vec<u32>, BTreeMap<u32, Reveal>, Vec<u64>) {
    let (mut attempt, all) = (Attempt::new(5, 2.0 / 3.0, 1), vec![0, 1, 2, 3, 4]);
    attempt.share(&all);
    let sum = add_up(&all.iter().map(|c| attempt.mask(*c)).collect::<Vec<_>>());
    let reveals = all.iter().map(|c| (*c, attempt.reveal(*c, &all).unwrap())).collect();
    (attempt, all, reveals, sum)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn masks_cancel_for_every_set_of_survivors_above_the_threshold_and_for_no_other(
        n in 2u32..9, share in 0.5..1.0f64, lost in any::<[u16; 3]>(), seed: u8,
    ) {
        // Few bits of `lost` are set, so that many sets are above the threshold.
        let lost = lost.map(|bits| u64::from(bits & bits >> 3 & bits >> 7));
        let mut attempt = Attempt::new(n, share, seed);
        let threshold = attempt.roster.threshold();
        let sharing = chosen(n, !lost[0]);
        prop_assume!(sharing.len() >= threshold);
        attempt.share(&sharing);
        let survivors: Vec<u32> = sharing.iter().copied().filter(|c| lost[1] >> c & 1 == 0).collect();
        let revealing: Vec<u32> = survivors.iter().copied().filter(|c| lost[2] >> c & 1 == 0).collect();
        let mut sum = add_up(&survivors.iter().map(|c| attempt.mask(*c)).collect::<Vec<_>>());
        let revealed: Result<BTreeMap<u32, Reveal>> =
            revealing.iter().map(|c| Ok((*c, attempt.reveal(*c, &survivors)?))).collect();
        let Ok(reveals) = revealed else {
            prop_assert!(survivors.len() < threshold);
            return Ok(());
        };
        let unmasked = attempt.unmask(&survivors, &reveals, &mut sum);
        prop_assert_eq!(unmasked.is_ok(), revealing.len() >= threshold, "{:?}", unmasked);
        prop_assert_eq!(is_enough(&attempt.roster, &sharing, &revealing), revealing.len() >= threshold);
        if unmasked.is_ok() {
            prop_assert_eq!(sum, add_up(&survivors.iter().map(|c| values_of(*c)).collect::<Vec<_>>()));
        }
    }

    #[test]
    fn one_flipped_bit_is_found_or_ends_the_attempt_without_a_wrong_sum(which in 0usize..5, at: usize, bit in 0u32..8) {
        let (mut attempt, all, mut reveals, mut sum) = whole();
        let expected = add_up(&all.iter().map(|c| values_of(*c)).collect::<Vec<_>>());
        let client = (at % 5) as u32;
        let flip = |bytes: &mut [u8]| bytes[at / 5 % bytes.len()] ^= 1 << bit;
        match which {
            // A share on its way to a neighbour.
            0 => {
                flip(&mut attempt.shares.get_mut(&client).unwrap().sealed[at % 4]);
                sum = add_up(&all.iter().map(|c| attempt.mask(*c)).collect::<Vec<_>>());
                reveals = all.iter().map(|c| (*c, attempt.reveal(*c, &all).unwrap())).collect();
                let n_empty = reveals.values().flat_map(|r| &r.shares).filter(|share| share.is_empty()).count();
                prop_assert_eq!(n_empty, 1);
            }
            // A key or a signature in the roster.
            1 => {
                let other = (client + 1) % 5;
                let own = attempt.roster.member(other).unwrap().clone();
                let mut message = attempt.roster.for_node(other);
                let entry = &mut message.members[client as usize];
                match at % 4 {
                    0 => flip(&mut entry.mask_key),
                    3 => flip(&mut entry.list_key),
                    1 => flip(&mut entry.share_key),
                    _ => flip(&mut entry.signature),
                }
                prop_assert!(Roster::check(RUN, ROUND, &own, message, 0.5, &key_of).is_err());
                return Ok(());
            }
            // A revealed share, of four that are needed and five that are there.
            2 => flip(&mut reveals.get_mut(&client).unwrap().shares[at % 5]),
            // The same, with none to spare.
            3 => {
                reveals.remove(&client);
                flip(&mut reveals.get_mut(&((client + 1) % 5)).unwrap().shares[at % 5]);
            }
            // A masked vector.
            _ => {
                let n = sum.len();
                sum[at % n] ^= 1 << (8 * (at / 7 % 8) as u32 + bit);
            }
        }
        let unmasked = attempt.unmask(&all, &reveals, &mut sum);
        prop_assert_eq!(unmasked.is_ok(), which == 0 || which == 2, "{:?}", unmasked);
        prop_assert!(unmasked.is_err() || sum == expected);
    }
}

#[test]
fn a_ring_of_neighbours_gives_the_sum_of_many_nodes() {
    let n = 140;
    let mut attempt = Attempt::new(n, 0.6, 9);
    let roster = &attempt.roster;
    assert_eq!((roster.neighbourhood(0).len(), roster.threshold()), (101, 61));
    for client in 0..n {
        let near = roster.neighbourhood(client);
        assert!(near.contains(&client) && near.iter().all(|c| roster.neighbourhood(*c).contains(&client)));
    }
    let sharing: Vec<u32> = (0..n).filter(|c| c % 40 != 7).collect();
    attempt.share(&sharing);
    let survivors: Vec<u32> = sharing.iter().copied().filter(|c| c % 30 != 11).collect();
    let mut sum = add_up(&survivors.iter().map(|c| attempt.mask(*c)).collect::<Vec<_>>());
    let (revealing, signed) = (survivors.iter().filter(|c| *c % 25 != 3), attempt.all_signed(&survivors, &survivors));
    let reveals = revealing.map(|c| (*c, attempt.reveal_if(*c, &survivors, &signed).unwrap())).collect();
    attempt.unmask(&survivors, &reveals, &mut sum).unwrap();
    assert_eq!(sum, add_up(&survivors.iter().map(|c| values_of(*c)).collect::<Vec<_>>()));
}

#[test]
fn no_masked_vector_shows_its_values_and_no_two_attempts_share_a_mask() {
    let (attempt, ..) = whole();
    let mut again = Attempt::new(5, 2.0 / 3.0, 2);
    again.share(&[0, 1, 2, 3, 4]);
    for client in 0..5 {
        let plain = values_of(client);
        let (a, b) = (attempt.mask(client), again.mask(client));
        assert!(plain.iter().zip(a.iter().zip(&b)).all(|(x, (a, b))| x != a && x != b && a != b));
        assert_eq!(attempt.mask(client), a, "masking again gives the same");
    }
}

#[test]
fn all_others_together_cannot_read_a_vector_without_the_share_of_its_own_mask() {
    let (attempt, all, ..) = whole();
    let (roster, victim) = (&attempt.roster, 2);
    let mut left = attempt.mask(victim);
    for other in all.iter().filter(|other| **other != victim) {
        let seed = pair_seed(roster, &attempt.parties[other].0.mask_key(), victim).unwrap();
        add(&seed, -sign_of(victim, *other), &mut left);
    }
    let plain = values_of(victim);
    assert!(left.iter().zip(&plain).all(|(left, plain)| left != plain));
    add(&own_mask_seed(roster, &attempt.parties[&victim].0.own_mask()), Sign::Minus, &mut left);
    assert_eq!(left[..N_VALUES], plain);
}

/// Five honest nodes and a server that wants the vector of the first. It says to that node that only two others have shared, and
/// to each of the others that another set of vectors has arrived, so that all three of its masks follow from the shares. Bonawitz
/// et al. exclude this by their round of consistency.
#[test]
fn a_server_that_gives_each_node_other_lists_gets_no_share() {
    let mut attempt = Attempt::new(5, 0.5, 1);
    assert_eq!(attempt.roster.threshold(), 3);
    attempt.share(&[0, 1, 2, 3, 4]);
    let lists: [&[u32]; 5] = [&[0, 1, 2], &[0, 1, 3, 4], &[0, 2, 3, 4], &[0, 3, 4], &[0, 3, 4]];
    let of = |client: u32| (if client == 0 { Some(lists[0]) } else { None }, lists[client as usize]);
    for client in 1..5 {
        let (party, roster) = &attempt.parties[&client];
        let (sharers, survivors) = of(client);
        let signed = roster.near(client, survivors).map(|other| {
            let (sharers, survivors) = of(other);
            attempt.signed(other, sharers, survivors)
        });
        let signed = signed.collect();
        let shown = Survivors { signed, ..attempt.survivors(survivors) };
        let error = party.reveal(roster, &attempt.shared_with(client, sharers), &shown).unwrap_err().to_string();
        assert!(error.contains("fewer than 3 neighbours have signed"), "{error}");
    }
}

#[test]
fn a_node_reveals_only_what_a_threshold_of_its_neighbours_has_signed() {
    let (attempt, all, ..) = whole();
    assert_eq!(attempt.roster.threshold(), 4);
    let is_enough = |signers: &[u32]| attempt.reveal_if(0, &all, &attempt.all_signed(signers, &all)).is_ok();
    assert!(is_enough(&[0, 2, 3, 4]) && !is_enough(&[0, 2, 3]));
    let (party, roster) = &attempt.parties[&0];
    let with = |change: &dyn Fn(&mut Vec<Vec<u8>>)| {
        let mut signed: Vec<Vec<u8>> = all.iter().map(|other| attempt.signed(*other, None, &all)).collect();
        change(&mut signed);
        party.reveal(roster, &attempt.shared_for(0), &Survivors { signed, ..attempt.survivors(&all) }).is_ok()
    };
    assert!(with(&|_| ()));
    // One signature for all, or for another, or over other survivors or sharers.
    assert!(!with(&|signed| *signed = vec![signed[0].clone(); 5]));
    assert!(!with(&|signed| signed.rotate_left(1)));
    assert!(!with(&|signed| signed.truncate(3)));
    for lie in [attempt.signed(1, None, &[0, 1, 2, 3]), attempt.signed(1, Some(&[0, 1, 2, 3]), &[0, 1, 2, 3])] {
        assert!(with(&|signed| signed[1].clone_from(&lie)));
        assert!(!with(&|signed| (signed[1].clone_from(&lie), signed[2].clear()).0));
    }
}

type Lie<'a> = (&'a str, &'a dyn Fn(&mut RosterMessage));

#[test]
fn a_roster_that_lies_is_refused() {
    let (attempt, ..) = whole();
    let own = attempt.roster.member(0).unwrap().clone();
    let true_message = attempt.roster.for_node(0);
    let check =
        |message: RosterMessage| Roster::check(RUN, ROUND, &own, message, 0.5, &key_of).map_err(|e| e.to_string());
    assert_eq!(check(true_message.clone()).unwrap().hash(), attempt.roster.hash());
    let lies: [Lie<'_>; 8] = [
        ("own entry", &|m| m.members[0].mask_key[0] ^= 1),
        ("own entry", &|m| drop(m.members.remove(0))),
        ("expected", &|m| drop(m.members.pop())),
        ("changed", &|m| m.hashes[40] ^= 1),
        ("2 of 5 nodes would rebuild", &|m| m.threshold = 2),
        ("6 of 5 nodes would rebuild", &|m| m.threshold = 6),
        ("twice", &|m| m.clients[1] = 0),
        ("twice", &|m| m.hashes.truncate(64)),
    ];
    for (told, lie) in lies {
        let mut message = true_message.clone();
        lie(&mut message);
        let error = check(message).unwrap_err();
        assert!(error.contains(told), "{told}: {error}");
    }
    // Entries that fit together, but one owner has not signed its keys: the server has put its own in their place.
    let swap = |certificate: Vec<u8>| {
        let mut members: Vec<Member> = attempt.roster.members().cloned().collect();
        members[2] = Member { certificate, ..member_of(&Party::new(2, [77; 32]), 3) };
        members[2].client = 2;
        check(Roster::new(RUN, ROUND, members, 2.0 / 3.0).unwrap().for_node(0)).unwrap_err()
    };
    assert!(swap(KEYS[2].der_bytes().to_vec()).contains("client 2 has not signed"));
    // One node under two numbers.
    assert!(swap(KEYS[3].der_bytes().to_vec()).contains("client"));
    // Entries that their owners have signed, for another task: they would add other terms to the sum, or of another scale.
    let other_task = |client: u32| {
        let mut members: Vec<Member> = attempt.roster.members().cloned().collect();
        let (key, party) = (&KEYS[client as usize], Party::new(client, [client as u8; 32]));
        let sign = |text: &[u8]| Ok(key.sign(text).unwrap());
        let entry = party.member(RUN, ROUND, b"another".to_vec(), key.der_bytes().to_vec(), &sign).unwrap();
        members[client as usize] = entry;
        check(Roster::new(RUN, ROUND, members, 2.0 / 3.0).unwrap().for_node(0)).unwrap_err()
    };
    assert!(other_task(2).contains("client 2 has been given another task"));
    // Another round's roster has another hash, and its signatures do not fit.
    assert!(Roster::check(RUN, ROUND + 1, &own, true_message, 0.5, &key_of).is_err());
}

#[test]
fn a_threshold_below_the_policy_is_refused_and_half_of_the_nodes_is_never_enough() {
    for (n, policy, least) in [(2, 0.0, 2), (4, 0.5, 3), (5, 0.5, 3), (6, 2.0 / 3.0, 4), (8, 2.0 / 3.0, 6), (6, 1.0, 6)]
    {
        let members: Vec<Member> = (0..n).map(|c| member_of(&Party::new(c, [c as u8; 32]), c)).collect();
        for threshold in 1..=n as usize {
            let roster = Roster::with_threshold(RUN, ROUND, members.clone(), threshold).unwrap();
            let checked = Roster::check(RUN, ROUND, &members[0], roster.for_node(0), policy, &key_of);
            assert_eq!(checked.is_ok(), threshold >= least, "{threshold} of {n} at {policy}");
        }
    }
}

#[test]
fn a_node_reveals_one_kind_of_share_per_node_and_only_for_its_roster() {
    let (attempt, all, reveals, _) = whole();
    let with_drop = attempt.reveal(0, &[0, 1, 2, 3]).unwrap();
    // Both lists together would give both secrets of client 4, so a node answers one of them; the shares do differ.
    assert_eq!(with_drop.shares[..4], reveals[&0].shares[..4]);
    assert_ne!(with_drop.shares[4], reveals[&0].shares[4]);
    for impossible in [&[1, 2, 3, 4][..], &[0, 1, 2, 3, 9], &[0, 0, 1, 2, 3], &[0, 1, 2]] {
        assert!(attempt.reveal(0, impossible).is_err(), "{impossible:?}");
    }
    let (party, roster) = &attempt.parties[&0];
    let mut other = attempt.survivors(&all);
    other.roster[0] ^= 1;
    let error = party.reveal(roster, &attempt.shared_for(0), &other).unwrap_err().to_string();
    assert!(error.contains("another roster"), "{error}");
    assert!(!is_enough(roster, &[], &[]), "nobody is not enough");
}

#[test]
fn keys_that_agree_with_everybody_are_refused() {
    let (attempt, ..) = whole();
    let mut members: Vec<Member> = attempt.roster.members().cloned().collect();
    members[1].mask_key = vec![0; 32];
    let roster = Roster::new(RUN, ROUND, members.clone(), 0.7).unwrap();
    let mut values = values_of(0);
    let shares: Vec<Shares> = (0..5).map(|c| attempt.parties[&c].0.shares(&roster).unwrap()).collect();
    let sealed = (1..5).map(|c| shares[c].sealed[0].clone()).collect();
    let shared = Shared { roster: roster.hash().to_vec(), clients: vec![0, 1, 2, 3, 4], sealed };
    assert!(attempt.parties[&0].0.mask(&roster, &shared, &mut values).is_err());
    members[1].share_key = vec![1; 31];
    let roster = Roster::new(RUN, ROUND, members, 0.7).unwrap();
    let error = attempt.parties[&0].0.shares(&roster).unwrap_err().to_string();
    assert!(error.contains("client 1 has a key that has not 32 bytes"), "{error}");
    // The server sees it in the announcement.
    let fine = member_of(&Party::new(1, [1; 32]), 1);
    assert!(are_usable(&fine));
    // u = 1 has a small order.
    let one = [&[1][..], &[0; 31]].concat();
    for bad in [vec![0; 32], one, vec![9; 31], Vec::new()] {
        assert!(!are_usable(&Member { mask_key: bad.clone(), ..fine.clone() }), "{bad:?}");
        assert!(!are_usable(&Member { share_key: bad.clone(), ..fine.clone() }), "{bad:?}");
    }
    assert!(!are_usable(&Member { list_key: vec![9; 31], ..fine }));
}

#[test]
fn several_wrong_shares_are_found_among_enough_right_ones() {
    let n = 12;
    let (mut attempt, all) = (Attempt::new(n, 0.5, 4), (0..n).collect::<Vec<u32>>());
    let threshold = attempt.roster.threshold();
    attempt.share(&all);
    let survivors: Vec<u32> = all.iter().copied().filter(|c| *c != 5).collect();
    let masked = add_up(&survivors.iter().map(|c| attempt.mask(*c)).collect::<Vec<_>>());
    let signed = attempt.all_signed(&survivors, &survivors);
    let right: BTreeMap<u32, Reveal> =
        survivors.iter().map(|c| (*c, attempt.reveal_if(*c, &survivors, &signed).unwrap())).collect();
    for n_wrong in [0, 1, 3, 4, 5] {
        let (mut reveals, mut sum) = (right.clone(), masked.clone());
        for (client, reveal) in reveals.iter_mut().take(n_wrong) {
            let wrong = |at: usize| (at as u8).wrapping_mul(37).wrapping_add(11 * *client as u8 + 1);
            reveal.shares.iter_mut().for_each(|share| share.iter_mut().enumerate().for_each(|(at, b)| *b ^= wrong(at)));
        }
        let unmasked = attempt.unmask(&survivors, &reveals, &mut sum);
        assert_eq!(unmasked.is_ok(), survivors.len() - n_wrong >= threshold, "{n_wrong} wrong: {unmasked:?}");
        if let Err(failed) = unmasked {
            // All secrets fail, so no dealer is to blame; and the sum can be tried again with more shares.
            assert_eq!((failed.clients.len(), &sum), (n as usize, &masked));
            attempt.unmask(&survivors, &right, &mut sum).unwrap();
        }
        assert_eq!(sum, add_up(&survivors.iter().map(|c| values_of(*c)).collect::<Vec<_>>()));
    }
    // A client that has dealt wrong shares is named.
    let mut reveals = right;
    for reveal in reveals.values_mut() {
        reveal.shares[5][7] ^= 1;
    }
    assert_eq!(attempt.unmask(&survivors, &reveals, &mut masked.clone()).unwrap_err().clients, [5]);
}

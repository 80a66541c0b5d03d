//! Every decoder of foreign bytes. Any input gives a value or an error, never a panic; what was decoded encodes to something
//! that decodes again.
//!
//! `fuzz/` runs these functions under libFuzzer, and `tests/decoders.rs` on random and damaged bytes.

use fedproj_net::Policy;
use fedproj_net::identity::{Token, expiry_of};
use fedproj_net::node::decode_kept;
use fedproj_net::secure::{Party, Roster, Unmasking};
use fedproj_net::server::journal::Tail;
use fedproj_net::server::{check_export, key_of_request};
use fedproj_net::wire::{
    Blob, Contribution, ROUND_TRIPS, Reveal, RosterMessage, Shared, Survivors, Task, decode, decode_f32, decode_public,
    decode_u32, encode_public,
};
use std::sync::LazyLock;

/// All messages.
#[allow(dead_code, reason = "each fuzz target uses one function")]
pub fn messages(bytes: &[u8]) {
    for round_trip in ROUND_TRIPS {
        // Bytes are compared, because a NaN does not equal itself.
        if let Ok(encoded) = round_trip(bytes) {
            assert_eq!(round_trip(&encoded).expect("what was encoded decodes"), encoded);
        }
    }
    if let Ok(task) = decode::<Task>(bytes) {
        let blobs = task.blobs();
        // A hash that passes the check is a file name of 64 digits and nothing else.
        let is_name = |b: &&Blob| b.check().is_err() || (b.hex().len() == 64 && Blob::parse_hex(&b.hex()).is_some());
        assert!(blobs.iter().all(is_name));
        let _ = Policy::default().check_task(&task);
    }
    if let Ok(contribution) = decode::<Contribution>(bytes) {
        let json = serde_json::to_string(&contribution).expect("a contribution can be written to the journal");
        if let Ok(back) = serde_json::from_str::<Contribution>(&json) {
            assert_eq!(back.id(), contribution.id());
        }
    }
}

/// A node that gets any messages of a secure sum from its server.
#[allow(dead_code, reason = "each fuzz target uses one function")]
pub fn secure(bytes: &[u8]) {
    let unsigned = |_: &[u8]| Ok(vec![0; 64]);
    if let Ok(message) = decode::<RosterMessage>(bytes) {
        let own = message.members.first().cloned().unwrap_or_default();
        assert!(Roster::check("r", 0, &own, message, 0.5, &unsigned).is_err(), "nobody has signed it");
    }
    let (party, roster) = &*PARTY;
    let hash = || roster.hash().to_vec();
    if let Ok(shared) = decode::<Shared>(bytes) {
        let mut values = vec![1];
        assert!(party.mask(roster, &Shared { roster: hash(), ..shared.clone() }, &mut values).is_err());
        assert_eq!(values, [1]);
        if let Ok(survivors) = decode::<Survivors>(bytes) {
            assert!(party.reveal(roster, &shared, &Survivors { roster: hash(), ..survivors }).is_err());
        }
    }
    if let Ok(reveal) = decode::<Reveal>(bytes) {
        let (commitments, reveals) = ([(0, vec![0; 32])].into(), [(0, reveal)].into());
        let unmasking = Unmasking { roster, commitments: &commitments, survivors: &[0, 1, 2], reveals: &reveals };
        assert!(unmasking.unmask(&mut vec![1, 2]).is_err());
    }
}

/// A node and its roster of three.
static PARTY: LazyLock<(Party, Roster)> = LazyLock::new(|| {
    let parties = [0, 1, 2].map(|client| Party::new(client, [client as u8 + 1; 32]));
    let members =
        parties.iter().map(|party| party.member("r", 0, Vec::new(), Vec::new(), &|_| Ok(Vec::new())).expect("keys"));
    let roster = Roster::new("r", 0, members.collect(), 0.6).expect("a roster");
    (parties[0].clone(), roster)
});

/// Vectors and public sets.
#[allow(dead_code, reason = "each fuzz target uses one function")]
pub fn blobs(bytes: &[u8]) {
    if let Ok(values) = decode_f32(bytes, bytes.len() / 4, "values") {
        assert!(values.iter().all(|v| v.is_finite()) && 4 * values.len() == bytes.len());
    }
    if let Ok(values) = decode_u32(bytes, bytes.len() / 4, 1000, "indices") {
        assert!(values.iter().all(|v| *v < 1000));
    }
    // Chance does not find eight magic bytes; with them given, it reaches what follows.
    for bytes in [bytes, &[&b"FEDPROJP"[..], bytes].concat()] {
        if let Ok(data) = decode_public(bytes) {
            assert!(data.n_samples() > 0);
            let back = decode_public(&encode_public(&data)).expect("what was encoded decodes");
            assert_eq!(back.hash(), data.hash());
        }
    }
}

/// What is read from disk or pasted by users; certificates and their requests.
#[allow(dead_code, reason = "each fuzz target uses one function")]
pub fn disk(bytes: &[u8]) {
    let _ = decode_kept(bytes);
    let _ = decode_kept(&[blake3::hash(bytes).as_bytes(), bytes].concat());
    let _ = Tail::default().check(bytes);
    let _ = check_export("", &mut &bytes[..]);
    let text = String::from_utf8_lossy(bytes);
    if let Ok(token) = Token::parse(&text) {
        assert_eq!(Token::parse(&token.to_string()).expect("a token reads back"), token);
    }
    let _ = Blob::parse_hex(&text);
    let _ = toml::from_str::<Policy>(&text);
    let _ = key_of_request(bytes);
    let _ = expiry_of(bytes);
}

//! Every decoder of foreign bytes behind one function each, for fuzzing: whatever comes in, the outcome is a value or an
//! error, and what was decoded encodes to something that decodes again.
//!
//! The functions are run by `fuzz/` under libFuzzer, and by `tests/decoders.rs` on random and damaged bytes.

use crate::error::Result;
use crate::identity::Token;
use crate::node::home::decode_kept;
use crate::server::journal::Tail;
use crate::wire::message::{
    Blob, Contribution, Decline, EnrolReply, EnrolRequest, Heartbeat, Received, Train, Verdict, Work, WorkRequest,
    decode,
};
use crate::wire::numbers::{decode_f32, decode_public, decode_u32, encode_public};
use prost::Message;

/// All messages.
///
/// # Panics
/// If a decoder has a defect.
pub fn messages(bytes: &[u8]) {
    again::<WorkRequest>(bytes);
    again::<Work>(bytes);
    again::<Verdict>(bytes);
    again::<Received>(bytes);
    again::<Heartbeat>(bytes);
    again::<Decline>(bytes);
    again::<EnrolRequest>(bytes);
    again::<EnrolReply>(bytes);
    if let Some(task) = again::<Train>(bytes) {
        let blobs = task.blobs();
        let checked = blobs.iter().map(|blob| blob.check()).collect::<Result<Vec<()>>>();
        // A hash that passes the check is a file name of 64 digits and nothing else.
        assert!(checked.is_err() || blobs.iter().all(|b| b.hex().len() == 64 && Blob::parse_hex(&b.hex()).is_some()));
        let _ = crate::Policy::default().check_task(&task);
    }
    if let Some(contribution) = again::<Contribution>(bytes) {
        let accepted = crate::server::journal::Accepted::of(&contribution);
        assert_eq!(accepted.id, contribution.id());
    }
}

/// Decodes, encodes and decodes again. Bytes are compared: a NaN does not equal itself.
fn again<M: Message + Default>(bytes: &[u8]) -> Option<M> {
    let message: M = decode(bytes).ok()?;
    let encoded = message.encode_to_vec();
    let back: M = decode(&encoded).expect("what was encoded decodes");
    assert_eq!(back.encode_to_vec(), encoded);
    Some(message)
}

/// Vectors and public sets.
///
/// # Panics
/// If a decoder has a defect.
pub fn blobs(bytes: &[u8]) {
    if let Ok(values) = decode_f32(bytes, bytes.len() / 4, "values") {
        assert!(values.iter().all(|v| v.is_finite()) && 4 * values.len() == bytes.len());
    }
    if let Ok(values) = decode_u32(bytes, bytes.len() / 4, 1000, "indices") {
        assert!(values.iter().all(|v| *v < 1000));
    }
    // Chance does not find eight magic bytes; with them given, it gets to what follows.
    for bytes in [bytes, &[&b"FEDPROJP"[..], bytes].concat()] {
        if let Ok(data) = decode_public(bytes) {
            assert!(data.n_samples() > 0);
            let back = decode_public(&encode_public(&data)).expect("what was encoded decodes");
            assert_eq!(back.hash(), data.hash());
        }
    }
}

/// What is read back from disk or pasted by users; certificate requests.
///
/// # Panics
/// If a decoder has a defect.
pub fn disk(bytes: &[u8]) {
    let _ = decode_kept(bytes);
    let _ = decode_kept(&[blake3::hash(bytes).as_bytes(), bytes].concat());
    let _ = Tail::default().check(bytes);
    let text = String::from_utf8_lossy(bytes);
    if let Ok(token) = Token::parse(&text) {
        assert_eq!(Token::parse(&token.to_string()).expect("a token reads back"), token);
    }
    let _ = Blob::parse_hex(&text);
    let _ = toml::from_str::<crate::Policy>(&text);
    let _ = crate::identity::key_of_request(bytes);
    let _ = crate::identity::end_of(bytes);
}

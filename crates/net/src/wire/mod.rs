//! What travels between server and nodes: messages, contributions, blobs and vectors.
//!
//! Messages are protobuf and small. Models, logits and public data travel beside them as [`Blob`]s, named by their hash.
//! Decoding gives text and numbers only; the code that uses a message checks its sizes and shapes.

mod blob;
mod contribution;
mod message;
mod public;
mod secure;
mod vectors;

pub(crate) use blob::hex;
pub use blob::{Blob, Store};
pub(crate) use contribution::parts_of;
pub use contribution::{Contribution, NamedBlob, part_name};
pub use message::{
    Accepted, Beat, Decline, Done, EnrolReply, EnrolRequest, Heartbeat, Missing, ROUND_TRIPS, Received, Rejected,
    RenewRequest, Request, Task, TaskMemory, Verdict, VerdictKind, Wait, Work, WorkKind, WorkRequest,
};
pub use public::{decode_public, encode_public};
pub use secure::{
    Announce, Instruction, InstructionKind, MASKED, Member, NOISE_CLIENTS, PLAIN, Reveal, RevealFor, RosterMessage,
    Shared, Shares, SharesFor, Survivors,
};
pub use vectors::{decode_f32, decode_u32, decode_u64, encode_f32, encode_u32, encode_u64, place_rows};

use crate::error::{Error, Result};
use fedproj_core::Config;
use prost::Message;

/// Version of the protocol; server and nodes must agree.
pub const VERSION: u32 = 2;

/// The largest message.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// The piece of a blob that travels in one request. It is large because a slow line answers late. A server passes it on in
/// blocks of [`BLOCK_BYTES`].
pub const PIECE_BYTES: usize = 1 << 22;

/// What a server holds of a blob in memory: a hundred nodes upload at the same time.
pub const BLOCK_BYTES: usize = 1 << 16;

/// Decodes a message.
///
/// # Errors
/// If it is too long or of another kind.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        let n = bytes.len();
        return Err(Error::protocol(format!("a message of {n} bytes exceeds the limit of {MESSAGE_BYTES_MAX}")));
    }
    M::decode(bytes).map_err(|e| Error::protocol(format!("not a message of this kind: {e}")))
}

/// Rejects runs that only the simulator makes. These are runs on texts, since they name a checkpoint and a vocabulary by path,
/// and a node takes no path from the network. They are also runs of groups with networks of their own, and runs whose models
/// must not travel.
///
/// # Errors
/// If the run is one.
pub(crate) fn reject_simulated(config: &Config) -> Result<()> {
    if !config.model.checkpoint.is_empty() || !config.data.text.vocabulary.as_os_str().is_empty() {
        return Err(Error::config(
            "only the simulator runs on texts so far: model.checkpoint and data.text.vocabulary are paths, which nodes do not \
             take from the network",
        ));
    }
    if config.model.clients.len() > 1 {
        return Err(Error::config(
            "only the simulator has groups of clients with networks of their own (model.clients) so far\n\
             hint: model.clients=[], and one network for all with model.name",
        ));
    }
    if let Ok(method) = config.method.build()
        && !method.sends_weights()
    {
        let logits = format!(
            "method `{}` sends logits in the place of models, which only the simulator does so far\n\
             hint: method.name=feddf distils the clients' models on public data",
            config.method.name
        );
        return Err(Error::config(method.needs_simulator().map_or(logits, str::to_owned)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_the_simulator_does_is_rejected() {
        let config = |pairs: &[&str]| {
            Config::from_layers(None, &pairs.iter().map(|pair| (*pair).to_owned()).collect::<Vec<_>>()).unwrap()
        };
        assert!(reject_simulated(&config(&[])).is_ok());
        for pairs in [&["model.name=bert", "model.checkpoint=/etc"][..], &["data.text.vocabulary=/etc/passwd"]] {
            let message = reject_simulated(&config(pairs)).unwrap_err().to_string();
            assert!(message.contains("do not take from the network"), "{message}");
        }
        let two = "model.clients=[{name='mlp', share=0.5}, {name='cnn', share=0.5}]";
        for (pairs, told) in [
            (&["method=feddf", two][..], "model.clients"),
            (&["method=fedmd"], "sends logits"),
            (&["method=fedgkt"], "labels of private samples"),
        ] {
            let message = reject_simulated(&config(pairs)).unwrap_err().to_string();
            assert!(message.contains(told) && message.contains("only the simulator"), "{message}");
        }
    }
}

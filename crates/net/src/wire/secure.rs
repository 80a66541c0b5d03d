//! The messages of secure aggregation, see [`crate::secure`]. Field numbers are never reused.

use super::{Accepted, Rejected, Wait};
use prost::{Message, Oneof};

/// The name of a contribution's one vector, under masks.
pub const MASKED: &str = "masked";

/// The same vector before it is masked. It never leaves its node.
pub const PLAIN: &str = "plain";

/// Beside it under privacy: min clients in a sum with it, so that their noise protects it.
pub const NOISE_CLIENTS: &str = "noise_clients";

/// A node's entry in a roster: its keys for one attempt, signed with the key of its certificate.
#[derive(Clone, PartialEq, Message)]
pub struct Member {
    /// The node's client.
    #[prost(uint32, tag = "1")]
    pub client: u32,
    /// The node's certificate (DER).
    #[prost(bytes = "vec", tag = "2")]
    pub certificate: Vec<u8>,
    /// X25519 key with which pairs of nodes agree on masks.
    #[prost(bytes = "vec", tag = "3")]
    pub mask_key: Vec<u8>,
    /// X25519 key with which nodes encrypt shares for each other.
    #[prost(bytes = "vec", tag = "4")]
    pub share_key: Vec<u8>,
    /// ECDSA (P-256, SHA-256, DER) over run, round, task, client and all keys.
    #[prost(bytes = "vec", tag = "5")]
    pub signature: Vec<u8>,
    /// Ed25519 key with which the node signs whose vectors are in the sum.
    #[prost(bytes = "vec", tag = "6")]
    pub list_key: Vec<u8>,
    /// The task to which the node contributes, see [`super::Task::common_hash`].
    #[prost(bytes = "vec", tag = "7")]
    pub task: Vec<u8>,
}

/// A roster as one node gets it: everybody's hash, and the entries of its neighbours and its own.
#[derive(Clone, PartialEq, Message)]
pub struct RosterMessage {
    /// All clients, in increasing order.
    #[prost(uint32, repeated, tag = "1")]
    pub clients: Vec<u32>,
    /// The hashes of all entries, 32 bytes each, in the same order.
    #[prost(bytes = "vec", tag = "2")]
    pub hashes: Vec<u8>,
    /// The entries of the node's neighbourhood, itself included, in increasing order.
    #[prost(message, repeated, tag = "3")]
    pub members: Vec<Member>,
    /// Shares that rebuild a secret.
    #[prost(uint32, tag = "4")]
    pub threshold: u32,
}

/// A node's shares of its two secrets, for its neighbours.
#[derive(Clone, PartialEq, Message)]
pub struct Shares {
    /// The roster's hash.
    #[prost(bytes = "vec", tag = "1")]
    pub roster: Vec<u8>,
    /// A hash of the seed of its own mask.
    #[prost(bytes = "vec", tag = "2")]
    pub commitment: Vec<u8>,
    /// The shares for each neighbour, encrypted for it, in increasing order of clients.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub sealed: Vec<Vec<u8>>,
}

/// What a node gets before it masks: who has shared, and its neighbours' shares for it.
#[derive(Clone, PartialEq, Message)]
pub struct Shared {
    /// The roster's hash.
    #[prost(bytes = "vec", tag = "1")]
    pub roster: Vec<u8>,
    /// All clients that have shared, in increasing order.
    #[prost(uint32, repeated, tag = "2")]
    pub clients: Vec<u32>,
    /// The shares for this node from each neighbour that has shared, in the same order.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub sealed: Vec<Vec<u8>>,
}

/// The clients whose masked vectors have arrived. A node signs the list, and reveals shares for it if enough others have
/// signed the same one.
#[derive(Clone, PartialEq, Message)]
pub struct Survivors {
    /// The roster's hash.
    #[prost(bytes = "vec", tag = "1")]
    pub roster: Vec<u8>,
    /// The clients, in increasing order.
    #[prost(uint32, repeated, tag = "2")]
    pub clients: Vec<u32>,
    /// Before the reveal: what each of them in the node's neighbourhood has signed, in the same order; empty where it has not.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub signed: Vec<Vec<u8>>,
}

/// A node's shares of its neighbours' secrets: of the own mask of a survivor, of the mask key of one that dropped out.
#[derive(Clone, PartialEq, Message)]
pub struct Reveal {
    /// The roster's hash.
    #[prost(bytes = "vec", tag = "1")]
    pub roster: Vec<u8>,
    /// One share of 32 bytes per member of its neighbourhood that has shared, in increasing order of clients; empty where the
    /// member's share could not be read.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub shares: Vec<Vec<u8>>,
}

/// A node has trained and wants to take part in the sum of a round; it asks for its next step.
#[derive(Clone, PartialEq, Message)]
pub struct Announce {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// The round.
    #[prost(uint32, tag = "2")]
    pub round: u32,
    /// The node's entry for the roster.
    #[prost(message, required, tag = "3")]
    pub member: Member,
    /// The hash of the roster that the node has accepted with these keys; empty before.
    #[prost(bytes = "vec", tag = "4")]
    pub roster: Vec<u8>,
    /// The id of the masked contribution that the server has accepted; empty before.
    #[prost(string, tag = "5")]
    pub id: String,
    /// Ed25519 over the attempt's lists of clients, once the node has seen them; empty before.
    #[prost(bytes = "vec", tag = "6")]
    pub signed: Vec<u8>,
}

/// The server's answer to an [`Announce`].
#[derive(Clone, PartialEq, Message)]
pub struct Instruction {
    /// `None` is an answer of a later version.
    #[prost(oneof = "InstructionKind", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub kind: Option<InstructionKind>,
}

/// The kinds of [`Instruction`].
#[derive(Clone, PartialEq, Oneof)]
pub enum InstructionKind {
    /// Nothing at present: ask again.
    #[prost(message, tag = "1")]
    Wait(Wait),
    /// The attempt is over: announce new keys.
    #[prost(message, tag = "2")]
    Renew(Wait),
    /// Send shares to this roster.
    #[prost(message, tag = "3")]
    Share(RosterMessage),
    /// Send the masked vector.
    #[prost(message, tag = "4")]
    Mask(Shared),
    /// Reveal shares, if enough neighbours have signed this list.
    #[prost(message, tag = "5")]
    Reveal(Survivors),
    /// The node's vector is in the sum.
    #[prost(message, tag = "6")]
    Counted(Accepted),
    /// The node's vector does not count.
    #[prost(message, tag = "7")]
    Rejected(Rejected),
    /// Sign this list of survivors.
    #[prost(message, tag = "8")]
    Sign(Survivors),
}

impl From<InstructionKind> for Instruction {
    fn from(kind: InstructionKind) -> Self {
        Self { kind: Some(kind) }
    }
}

/// [`Shares`] on their way to the server.
#[derive(Clone, PartialEq, Message)]
pub struct SharesFor {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// The round.
    #[prost(uint32, tag = "2")]
    pub round: u32,
    /// The shares.
    #[prost(message, required, tag = "3")]
    pub shares: Shares,
}

/// A [`Reveal`] on its way to the server.
#[derive(Clone, PartialEq, Message)]
pub struct RevealFor {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// The round.
    #[prost(uint32, tag = "2")]
    pub round: u32,
    /// The shares.
    #[prost(message, required, tag = "3")]
    pub reveal: Reveal,
}

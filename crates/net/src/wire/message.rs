//! The messages between server and nodes, as protobuf. Field numbers are never reused.

use super::{Announce, Blob, Contribution, Instruction, NamedBlob, RevealFor, SharesFor, decode};
use crate::error::Result;
use prost::{Message, Oneof};

/// A message that a node posts.
pub trait Request: Message + Default {
    /// Where it is posted.
    const PATH: &'static str;
    /// The largest body that the server reads.
    const BYTES_MAX: usize;
    /// What the server answers.
    type Reply: Message + Default;
}

macro_rules! requests {
    ($($request:ty => $reply:ty, $path:literal, $bytes_max:expr;)*) => {
        $(impl Request for $request {
            const PATH: &'static str = $path;
            const BYTES_MAX: usize = $bytes_max;
            type Reply = $reply;
        })*

        /// Decoding and encoding again, for each request and reply. Fuzzing runs them all, so it cannot miss a message.
        pub const ROUND_TRIPS: &[fn(&[u8]) -> Result<Vec<u8>>] =
            &[round_trip::<Received>, $(round_trip::<$request>, round_trip::<$reply>),*];
    };
}

requests! {
    WorkRequest => Work, "/v1/work", 1 << 12;
    Heartbeat => Beat, "/v1/heartbeat", 1 << 12;
    Decline => (), "/v1/decline", 1 << 12;
    // A few names and hashes.
    Contribution => Verdict, "/v1/contribute", 1 << 16;
    EnrolRequest => EnrolReply, "/v1/enrol", 1 << 14;
    RenewRequest => EnrolReply, "/v1/renew", 1 << 14;
    // A certificate and two keys.
    Announce => Instruction, "/v1/secure/announce", 1 << 14;
    // 80 bytes per neighbour, and 32.
    SharesFor => (), "/v1/secure/shares", 1 << 16;
    RevealFor => (), "/v1/secure/reveal", 1 << 16;
}

fn round_trip<M: Message + Default>(bytes: &[u8]) -> Result<Vec<u8>> {
    decode::<M>(bytes).map(|message| message.encode_to_vec())
}

/// A node asks for work.
#[derive(Clone, PartialEq, Message)]
pub struct WorkRequest {
    /// [`super::VERSION`]
    #[prost(uint32, tag = "1")]
    pub version: u32,
}

impl WorkRequest {
    /// The request of this version.
    pub fn current() -> Self {
        Self { version: super::VERSION }
    }
}

/// The server's answer to a [`WorkRequest`].
#[derive(Clone, PartialEq, Message)]
pub struct Work {
    /// `None` is an answer of a later version.
    #[prost(oneof = "WorkKind", tags = "1, 2, 3")]
    pub kind: Option<WorkKind>,
}

/// The kinds of [`Work`].
#[derive(Clone, PartialEq, Oneof)]
pub enum WorkKind {
    /// Nothing at present: ask again.
    #[prost(message, tag = "1")]
    Wait(Wait),
    /// Train.
    #[prost(message, tag = "2")]
    Train(Box<Task>),
    /// The run is over.
    #[prost(message, tag = "3")]
    Done(Done),
}

impl From<WorkKind> for Work {
    fn from(kind: WorkKind) -> Self {
        Self { kind: Some(kind) }
    }
}

/// Nothing to do at present.
#[derive(Clone, PartialEq, Message)]
pub struct Wait {}

/// The run is over.
#[derive(Clone, PartialEq, Message)]
pub struct Done {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// BLAKE3 of the final model.
    #[prost(string, tag = "2")]
    pub model_hash: String,
}

/// A round's task: everything that a client's local training depends on, as text and blobs.
#[derive(Clone, PartialEq, Message)]
pub struct Task {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// Round, counted from 0.
    #[prost(uint32, tag = "2")]
    pub round: u32,
    /// The node's client.
    #[prost(uint32, tag = "3")]
    pub client: u32,
    /// The run's configuration (TOML).
    #[prost(message, required, tag = "4")]
    pub config: Blob,
    /// The public set, if the method has one.
    #[prost(message, optional, tag = "5")]
    pub public: Option<Blob>,
    /// The global weights.
    #[prost(message, required, tag = "6")]
    pub weights: Blob,
    /// Their buffers.
    #[prost(message, required, tag = "7")]
    pub buffers: Blob,
    /// The method's further vectors.
    #[prost(message, repeated, tag = "8")]
    pub vectors: Vec<NamedBlob>,
    /// The round's memory, if there is one.
    #[prost(message, optional, tag = "9")]
    pub memory: Option<TaskMemory>,
    /// What the client computes on the public set for the ensemble: 0 nothing, 1 logits, 2 logits and features.
    #[prost(uint32, tag = "10")]
    pub outputs: u32,
    /// The clients of the run, if contributions go into a secure sum; otherwise 0. The scale of the sum depends on them.
    #[prost(uint32, tag = "11")]
    pub secure_clients: u32,
    /// Min clients in a secure sum under privacy; each adds its share of the noise. Otherwise 0.
    #[prost(uint32, tag = "12")]
    pub noise_clients: u32,
}

/// The round's memory: public samples and their targets, row by row.
#[derive(Clone, PartialEq, Message)]
pub struct TaskMemory {
    /// Indices into the public set (u32).
    #[prost(message, required, tag = "1")]
    pub indices: Blob,
    /// Logits of these samples.
    #[prost(message, required, tag = "2")]
    pub logits: Blob,
    /// Features of these samples, if features are distilled.
    #[prost(message, required, tag = "3")]
    pub features: Blob,
}

impl Task {
    /// A hash of the task without its client: equal for all clients of a round.
    pub fn common_hash(&self) -> Vec<u8> {
        let common = Self { client: 0, ..self.clone() };
        blake3::Hasher::new_derive_key("fedproj task 1").update(&common.encode_to_vec()).finalize().as_bytes().to_vec()
    }

    /// All blobs of the task.
    pub fn blobs(&self) -> Vec<&Blob> {
        let mut all = vec![&self.config, &self.weights, &self.buffers];
        all.extend(&self.public);
        all.extend(self.vectors.iter().map(|v| &v.blob));
        all.extend(self.memory.iter().flat_map(|m| [&m.indices, &m.logits, &m.features]));
        all
    }
}

/// The server's answer to a [`Contribution`].
#[derive(Clone, PartialEq, Message)]
pub struct Verdict {
    /// `None` is an answer of a later version.
    #[prost(oneof = "VerdictKind", tags = "1, 2, 3")]
    pub kind: Option<VerdictKind>,
}

/// The kinds of [`Verdict`].
#[derive(Clone, PartialEq, Oneof)]
pub enum VerdictKind {
    /// It is on the server's disk and counts.
    #[prost(message, tag = "1")]
    Accepted(Accepted),
    /// The server still needs these blobs.
    #[prost(message, tag = "2")]
    Missing(Missing),
    /// It does not count.
    #[prost(message, tag = "3")]
    Rejected(Rejected),
}

impl From<VerdictKind> for Verdict {
    fn from(kind: VerdictKind) -> Self {
        Self { kind: Some(kind) }
    }
}

/// The receipt of a contribution that counts.
#[derive(Clone, PartialEq, Message)]
pub struct Accepted {
    /// See [`Contribution::id`].
    #[prost(string, tag = "1")]
    pub id: String,
}

/// Blobs that the server lacks, wholly or in part.
#[derive(Clone, PartialEq, Message)]
pub struct Missing {
    /// The blobs; `len` is the number of bytes that the server already has.
    #[prost(message, repeated, tag = "1")]
    pub have: Vec<Blob>,
}

/// Why a contribution does not count.
#[derive(Clone, PartialEq, Message)]
pub struct Rejected {
    /// What is wrong.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// The server's answer to a piece of a blob.
#[derive(Clone, PartialEq, Message)]
pub struct Received {
    /// Bytes of the blob that the server has, from the start.
    #[prost(uint64, tag = "1")]
    pub have: u64,
}

/// A node is alive.
#[derive(Clone, PartialEq, Message)]
pub struct Heartbeat {
    /// The round for which it trains or uploads, if it does.
    #[prost(uint32, optional, tag = "1")]
    pub round: Option<u32>,
}

/// The server's answer to a [`Heartbeat`].
#[derive(Clone, PartialEq, Message)]
pub struct Beat {
    /// It is time to renew the node's certificate.
    #[prost(bool, tag = "1")]
    pub renew: bool,
}

/// A node will not do a task.
#[derive(Clone, PartialEq, Message)]
pub struct Decline {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// The round.
    #[prost(uint32, tag = "2")]
    pub round: u32,
    /// Why.
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// A stranger with a token wants a certificate.
#[derive(Clone, PartialEq, Message)]
pub struct EnrolRequest {
    /// The token's secret half.
    #[prost(bytes = "vec", tag = "1")]
    pub secret: Vec<u8>,
    /// A certificate signing request (DER).
    #[prost(bytes = "vec", tag = "2")]
    pub request: Vec<u8>,
}

/// A member wants another certificate, before its own expires.
#[derive(Clone, PartialEq, Message)]
pub struct RenewRequest {
    /// A certificate signing request (DER).
    #[prost(bytes = "vec", tag = "1")]
    pub request: Vec<u8>,
}

/// The certificate.
#[derive(Clone, PartialEq, Message)]
pub struct EnrolReply {
    /// The node's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The node's client.
    #[prost(uint32, tag = "2")]
    pub client: u32,
    /// The node's certificate (PEM).
    #[prost(string, tag = "3")]
    pub certificate: String,
    /// The certificates of the authorities that the node shall trust (PEM).
    #[prost(string, tag = "4")]
    pub authority: String,
}

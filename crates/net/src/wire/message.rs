//! The messages between server and nodes, as protobuf.
//!
//! Messages are small: models, logits and public data travel beside them as [`Blob`]s, named by their hash. What is
//! decoded here is text and numbers and nothing else; sizes and shapes are checked where a message is used.

use crate::error::{Error, Result};
use fedproj_core::{LocalStats, Part};
use prost::Message;

/// Version of the protocol; server and nodes must agree.
pub const VERSION: u32 = 1;

/// The largest message.
pub const BYTES_MAX: usize = 1 << 20;

/// The piece of a blob that travels in one request: large, because a slow line answers late; a server passes it on in
/// blocks of [`BLOCK_BYTES`].
pub const PIECE_BYTES: usize = 1 << 22;

/// What a server holds of a blob in memory. A hundred nodes upload at the same time.
pub const BLOCK_BYTES: usize = 1 << 16;

/// Bytes named by their hash.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Message)]
pub struct Blob {
    /// BLAKE3, 32 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub hash: Vec<u8>,
    /// Length in bytes.
    #[prost(uint64, tag = "2")]
    pub len: u64,
}

/// A vector under a name.
#[derive(Clone, PartialEq, Message)]
pub struct Named {
    /// The name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its values, little-endian.
    #[prost(message, required, tag = "2")]
    pub blob: Blob,
}

/// A node asks for work.
#[derive(Clone, PartialEq, Message)]
pub struct WorkRequest {
    /// [`VERSION`]
    #[prost(uint32, tag = "1")]
    pub version: u32,
}

/// What the server has for it.
#[derive(Clone, PartialEq, Message)]
pub struct Work {
    /// One of the three; none is an answer of a later version.
    #[prost(oneof = "work::Kind", tags = "1, 2, 3")]
    pub kind: Option<work::Kind>,
}

/// The kinds of [`Work`].
pub mod work {
    /// See [`super::Work`].
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Kind {
        /// Nothing at present: ask again.
        #[prost(message, tag = "1")]
        Wait(super::Wait),
        /// Train.
        #[prost(message, tag = "2")]
        Train(Box<super::Train>),
        /// The run is over.
        #[prost(message, tag = "3")]
        Done(super::Done),
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
pub struct Train {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// Round, counted from 0.
    #[prost(uint32, tag = "2")]
    pub round: u32,
    /// The client that the node stands for.
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
    /// A method's further vectors.
    #[prost(message, repeated, tag = "8")]
    pub vectors: Vec<Named>,
    /// The memory, if there is one this round.
    #[prost(message, optional, tag = "9")]
    pub memory: Option<Memory>,
    /// What the client computes on the public set for the ensemble: 0 nothing, 1 logits, 2 logits and features.
    #[prost(uint32, tag = "10")]
    pub outputs: u32,
}

/// The round's memory: public samples and their targets, row by row.
#[derive(Clone, PartialEq, Message)]
pub struct Memory {
    /// Which samples of the public set (u32).
    #[prost(message, required, tag = "1")]
    pub indices: Blob,
    /// Their logits.
    #[prost(message, required, tag = "2")]
    pub logits: Blob,
    /// Their features, if features are distilled.
    #[prost(message, required, tag = "3")]
    pub features: Blob,
}

impl Train {
    /// All blobs of the task.
    pub fn blobs(&self) -> Vec<&Blob> {
        let mut all = vec![&self.config, &self.weights, &self.buffers];
        all.extend(&self.public);
        all.extend(self.vectors.iter().map(|v| &v.blob));
        all.extend(self.memory.iter().flat_map(|m| [&m.indices, &m.logits, &m.features]));
        all
    }
}

/// What a client contributes to a round.
#[derive(Clone, PartialEq, Message)]
pub struct Contribution {
    /// The run.
    #[prost(string, tag = "1")]
    pub run: String,
    /// The round.
    #[prost(uint32, tag = "2")]
    pub round: u32,
    /// The client.
    #[prost(uint32, tag = "3")]
    pub client: u32,
    /// Its samples.
    #[prost(uint64, tag = "4")]
    pub n_samples: u64,
    /// Its local steps.
    #[prost(uint32, tag = "5")]
    pub n_steps: u32,
    /// What it measured.
    #[prost(message, required, tag = "6")]
    pub stats: Stats,
    /// Its vectors, see [`part_name`].
    #[prost(message, repeated, tag = "7")]
    pub parts: Vec<Named>,
}

impl Contribution {
    /// The contribution's id: a hash of run, round, client and content. What was measured (times above all) is not part of
    /// it, so that training again after a crash gives the same id.
    pub fn id(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("fedproj contribution 1");
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(self.run.as_bytes());
        field(&self.round.to_le_bytes());
        field(&self.client.to_le_bytes());
        field(&self.n_samples.to_le_bytes());
        field(&self.n_steps.to_le_bytes());
        for part in &self.parts {
            field(part.name.as_bytes());
            field(&part.blob.hash);
            field(&part.blob.len.to_le_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// The name of a part in a [`Contribution`].
pub fn part_name(part: Part<'_>) -> String {
    match part {
        Part::Weights => "weights".into(),
        Part::Buffers => "buffers".into(),
        Part::Logits => "logits".into(),
        Part::Features => "features".into(),
        Part::Upload(name) => format!("upload.{name}"),
    }
}

/// Measurements of a client's local training.
#[derive(Clone, PartialEq, Message)]
pub struct Stats {
    /// As in [`LocalStats`].
    #[prost(double, tag = "1")]
    pub loss: f64,
    /// As in [`LocalStats`].
    #[prost(uint32, tag = "2")]
    pub n_compared: u32,
    /// As in [`LocalStats`].
    #[prost(uint32, tag = "3")]
    pub n_projected: u32,
    /// As in [`LocalStats`].
    #[prost(double, optional, tag = "4")]
    pub cosine: Option<f64>,
    /// As in [`LocalStats`].
    #[prost(double, optional, tag = "5")]
    pub memory_loss_before: Option<f64>,
    /// As in [`LocalStats`].
    #[prost(double, optional, tag = "6")]
    pub memory_loss_after: Option<f64>,
    /// As in [`LocalStats`].
    #[prost(double, tag = "7")]
    pub seconds: f64,
}

impl From<&LocalStats> for Stats {
    fn from(s: &LocalStats) -> Self {
        let LocalStats { loss, n_compared, n_projected, cosine, memory_loss_before, memory_loss_after, seconds } = *s;
        Self { loss, n_compared, n_projected, cosine, memory_loss_before, memory_loss_after, seconds }
    }
}

impl From<&Stats> for LocalStats {
    fn from(s: &Stats) -> Self {
        let Stats { loss, n_compared, n_projected, cosine, memory_loss_before, memory_loss_after, seconds } = *s;
        Self { loss, n_compared, n_projected, cosine, memory_loss_before, memory_loss_after, seconds }
    }
}

impl Stats {
    /// Whether all numbers are finite, and so small that their sum over clients is finite too.
    pub fn is_sane(&self) -> bool {
        let optional = [self.cosine, self.memory_loss_before, self.memory_loss_after];
        [self.loss, self.seconds].into_iter().chain(optional.into_iter().flatten()).all(|v| v.abs() <= 1e12)
    }
}

/// What the server says to a contribution.
#[derive(Clone, PartialEq, Message)]
pub struct Verdict {
    /// One of the three.
    #[prost(oneof = "verdict::Kind", tags = "1, 2, 3")]
    pub kind: Option<verdict::Kind>,
}

/// The kinds of [`Verdict`].
pub mod verdict {
    /// See [`super::Verdict`].
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Kind {
        /// It is on the server's disk and counts.
        #[prost(message, tag = "1")]
        Accepted(super::Receipt),
        /// These blobs are still to be sent.
        #[prost(message, tag = "2")]
        Missing(super::Missing),
        /// It does not count.
        #[prost(message, tag = "3")]
        Refused(super::Refusal),
    }
}

/// The receipt of a contribution that counts.
#[derive(Clone, PartialEq, Message)]
pub struct Receipt {
    /// See [`Contribution::id`].
    #[prost(string, tag = "1")]
    pub id: String,
}

/// Blobs that the server has not got, or not wholly.
#[derive(Clone, PartialEq, Message)]
pub struct Missing {
    /// The blobs, with the bytes that are there already in the place of their length.
    #[prost(message, repeated, tag = "1")]
    pub have: Vec<Blob>,
}

/// Why a contribution does not count.
#[derive(Clone, PartialEq, Message)]
pub struct Refusal {
    /// What is wrong.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// Bytes of a blob that the server has got.
#[derive(Clone, PartialEq, Message)]
pub struct Received {
    /// From the start.
    #[prost(uint64, tag = "1")]
    pub have: u64,
}

/// A node is alive, and what it works at.
#[derive(Clone, PartialEq, Message)]
pub struct Heartbeat {
    /// The round that it trains or uploads, if it does.
    #[prost(uint32, optional, tag = "1")]
    pub round: Option<u32>,
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

/// The certificate.
#[derive(Clone, PartialEq, Message)]
pub struct EnrolReply {
    /// The node's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The client that it stands for.
    #[prost(uint32, tag = "2")]
    pub client: u32,
    /// Its certificate (PEM).
    #[prost(string, tag = "3")]
    pub certificate: String,
    /// The authority's certificate (PEM).
    #[prost(string, tag = "4")]
    pub authority: String,
}

/// Decodes a message.
///
/// # Errors
/// If it is too long or not of that kind.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M> {
    if bytes.len() > BYTES_MAX {
        return Err(Error::protocol(format!("a message of {} bytes is beyond the limit of {BYTES_MAX}", bytes.len())));
    }
    M::decode(bytes).map_err(|e| Error::protocol(format!("not a message of this kind: {e}")))
}

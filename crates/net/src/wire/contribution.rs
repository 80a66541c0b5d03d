//! A contribution: one type from the node's training to the server's fusion. A node announces it and keeps it while it is
//! on its way, both as protobuf; the server enters it in the journal as JSON. Its vectors are blobs beside it.

use super::{Blob, PLAIN};
use fedproj_core::{Experiment, LocalStats, Method, Part};
use prost::Message;
use serde::ser::{Serialize, SerializeStruct, Serializer};
use serde::{Deserialize, Serialize as DeriveSerialize};

/// What a client contributes to a round.
#[derive(Clone, PartialEq, Message, Deserialize)]
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
    /// Its measurements.
    #[prost(message, required, tag = "6")]
    pub stats: LocalStats,
    /// Its vectors, named by [`part_name`].
    #[prost(message, repeated, tag = "7")]
    pub parts: Vec<NamedBlob>,
}

impl Contribution {
    /// A hash of run, round, client and content. It excludes the measurements (times above all), so training again after a
    /// crash gives the same id.
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

    /// Whether it is kept for a secure sum and must not leave its node.
    pub fn is_plain(&self) -> bool {
        self.parts.iter().any(|part| part.name == PLAIN)
    }

    /// The blob of a part, if it was sent.
    pub fn blob(&self, part: Part<'_>) -> Option<&Blob> {
        let name = part_name(part);
        self.parts.iter().find(|p| p.name == name).map(|p| &p.blob)
    }
}

/// The journal's form: the id stands beside the content from which it follows, for readers of the audit.
impl Serialize for Contribution {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("Contribution", 8)?;
        out.serialize_field("run", &self.run)?;
        out.serialize_field("round", &self.round)?;
        out.serialize_field("client", &self.client)?;
        out.serialize_field("id", &self.id())?;
        out.serialize_field("n_samples", &self.n_samples)?;
        out.serialize_field("n_steps", &self.n_steps)?;
        out.serialize_field("stats", &self.stats)?;
        out.serialize_field("parts", &self.parts)?;
        out.end()
    }
}

/// A vector under a name. In the journal it is an array of name, hash and length in bytes.
#[derive(Clone, PartialEq, Message, DeriveSerialize, Deserialize)]
#[serde(into = "(String, String, u64)", try_from = "(String, String, u64)")]
pub struct NamedBlob {
    /// The name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its values, little-endian.
    #[prost(message, required, tag = "2")]
    pub blob: Blob,
}

impl From<NamedBlob> for (String, String, u64) {
    fn from(part: NamedBlob) -> Self {
        (part.name, part.blob.hex(), part.blob.len)
    }
}

impl TryFrom<(String, String, u64)> for NamedBlob {
    type Error = &'static str;

    fn try_from((name, hash, len): (String, String, u64)) -> Result<Self, Self::Error> {
        let hash = Blob::parse_hex(&hash).ok_or("a part's hash must have 64 hexadecimal digits")?;
        Ok(Self { name, blob: Blob { hash, len } })
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

/// The vectors of a contribution, with their numbers of values. `with_outputs`: clients evaluate the public set.
pub(crate) fn parts_of(e: &Experiment, method: &dyn Method, with_outputs: bool) -> Vec<(String, usize)> {
    let mut parts = vec![(Part::Weights, e.weights.len()), (Part::Buffers, e.buffers.len())];
    parts.extend(method.uploads().iter().map(|name| (Part::Upload(name), e.weights.len())));
    if let Some(public) = e.public.as_ref().filter(|_| with_outputs && method.needs_public()) {
        let width = |node| e.graph.shape(node).len();
        parts.push((Part::Logits, public.n_samples() * width(e.graph.output())));
        if method.needs_features() {
            let features = e.graph.features().map_or(0, width);
            parts.push((Part::Features, public.n_samples() * features));
        }
    }
    parts.into_iter().map(|(part, n)| (part_name(part), n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formats of version 0.1.0: old journals stay readable, and old nodes stay compatible.
    #[test]
    fn bytes_of_earlier_versions_are_read_and_written_again() {
        let blob = Blob { hash: vec![0xab; 32], len: 8 };
        let contribution = Contribution {
            run: "r".into(),
            round: 3,
            client: 2,
            n_samples: 10,
            n_steps: 4,
            stats: LocalStats { loss: 0.5, n_compared: 4, cosine: Some(-0.25), seconds: 1.5, ..LocalStats::default() },
            parts: vec![NamedBlob { name: "weights".into(), blob }],
        };
        let json = JSON.replace("HASH", &"ab".repeat(32));
        assert_eq!(serde_json::to_string(&contribution).unwrap(), json);
        assert_eq!(serde_json::from_str::<Contribution>(&json).unwrap(), contribution);
        let bytes = contribution.encode_to_vec();
        assert_eq!(crate::wire::hex(&bytes), WIRE.replace("HASH", &"ab".repeat(32)));
        assert_eq!(Contribution::decode(&bytes[..]).unwrap(), contribution);
    }

    const JSON: &str = concat!(
        r#"{"run":"r","round":3,"client":2,"#,
        r#""id":"0ee7d48a3b908d6c88524d32491ad410d7a87b414108c516c086035ff3faafc4","n_samples":10,"n_steps":4,"#,
        r#""stats":{"loss":0.5,"n_compared":4,"n_projected":0,"cosine":-0.25,"memory_loss_before":null,"#,
        r#""memory_loss_after":null,"seconds":1.5},"parts":[["weights","HASH",8]]}"#,
    );
    const WIRE: &str = concat!(
        "0a017210031802200a2804321d09000000000000e03f100421000000000000d0bf39000000000000f83f",
        "3a2f0a077765696768747312240a20HASH1008",
    );
}

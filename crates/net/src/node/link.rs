//! The node's side of HTTPS: requests outwards only, each with a time limit and a limit on the answer.

use crate::error::{Error, Result};
use crate::wire::blob::Store;
use crate::wire::message::{
    BLOCK_BYTES, BYTES_MAX, Blob, Contribution, Decline, EnrolReply, EnrolRequest, Heartbeat, PIECE_BYTES, Received,
    VERSION, Verdict, Work, WorkRequest, decode,
};
use prost::Message;
use std::net::IpAddr;
use std::time::Duration;

/// Long polls are held for less than this.
const TIME_MAX: Duration = Duration::from_secs(90);

/// A connection to a server; it comes back by itself when it breaks.
#[derive(Clone, Debug)]
pub struct Link {
    client: reqwest::Client,
    server: String,
}

impl Link {
    /// A link to `https://host:port`; nothing is sent yet.
    ///
    /// # Errors
    /// If the address is not one.
    pub fn new(server: &str, tls: rustls::ClientConfig) -> Result<Self> {
        let server = server.trim_end_matches('/').to_owned();
        let url = reqwest::Url::parse(&server).ok().filter(|url| url.scheme() == "https");
        let Some(host) = url.as_ref().and_then(reqwest::Url::host_str) else {
            return Err(Error::config(format!("`{server}`: the server's address has the form https://host:port")));
        };
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
        let mut builder = reqwest::Client::builder();
        if host == "localhost" || address.is_ok_and(|address| address.is_loopback()) {
            // The system's proxy leads elsewhere.
            builder = builder.no_proxy();
        }
        let client = builder
            .tls_backend_preconfigured(tls)
            .https_only(true)
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(20))
            .timeout(TIME_MAX)
            .http2_keep_alive_interval(Duration::from_secs(30))
            .http2_keep_alive_timeout(Duration::from_mins(1))
            .build()
            .map_err(|e| Error::config(with_causes(&e)))?;
        Ok(Self { client, server })
    }

    /// Sends a request and hands on the body of its answer as it comes; how many bytes came.
    async fn stream(
        &self,
        request: reqwest::RequestBuilder,
        limit: usize,
        take: &mut (dyn FnMut(&[u8]) -> Result<()> + Send),
    ) -> Result<usize> {
        let unreachable = |e: reqwest::Error| Error::Unreachable(with_causes(&e));
        let mut response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        let (mut n, mut reason) = (0, Vec::new());
        while let Some(piece) = response.chunk().await.map_err(unreachable)? {
            n += piece.len();
            if n > limit {
                return Err(Error::protocol(format!("an answer of more than {limit} bytes")));
            }
            if status.is_success() {
                take(&piece)?;
            } else if n < BLOCK_BYTES {
                reason.extend_from_slice(&piece);
            }
        }
        if status.is_success() {
            return Ok(n);
        }
        let reason = String::from_utf8_lossy(&reason).chars().filter(|c| !c.is_control()).take(500).collect();
        Err(Error::Refused { status: status.as_u16(), reason })
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        let mut take = |piece: &[u8]| {
            body.extend_from_slice(piece);
            Ok(())
        };
        self.stream(request, BYTES_MAX, &mut take).await?;
        Ok(body)
    }

    async fn post(&self, path: &str, message: &impl Message) -> Result<Vec<u8>> {
        let request = self.client.post(format!("{}{path}", self.server));
        let request = request.header("content-type", "application/x-protobuf").body(message.encode_to_vec());
        self.send(request).await
    }

    /// Asks for work; the server may hold the answer for a while.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    pub async fn work(&self) -> Result<Work> {
        decode(&self.post("/v1/work", &WorkRequest { version: VERSION }).await?)
    }

    /// A sign of life.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    pub async fn heartbeat(&self, round: Option<u32>) -> Result<()> {
        self.post("/v1/heartbeat", &Heartbeat { round }).await.map(drop)
    }

    /// Drops out of a round.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    pub async fn decline(&self, decline: &Decline) -> Result<()> {
        self.post("/v1/decline", decline).await.map(drop)
    }

    /// Hands in a contribution, or asks what of it is missing.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    pub async fn contribute(&self, contribution: &Contribution) -> Result<Verdict> {
        decode(&self.post("/v1/contribute", contribution).await?)
    }

    /// Enrols.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    pub async fn enrol(&self, secret: &[u8], request: &[u8]) -> Result<EnrolReply> {
        let message = EnrolRequest { secret: secret.to_vec(), request: request.to_vec() };
        decode(&self.post("/v1/enrol", &message).await?)
    }

    /// Fetches a blob into a store, from where an earlier try stopped.
    ///
    /// # Errors
    /// If the server cannot be reached, has no such blob, or sends other bytes.
    pub async fn fetch(&self, blob: &Blob, store: &Store) -> Result<()> {
        blob.check()?;
        while !store.has(blob) {
            let from = store.have(blob);
            let address = format!("{}/v1/blob/{}/{from}", self.server, blob.hex());
            let mut at = from;
            // What has come stays, even if the line breaks before the piece's end.
            let mut take = |bytes: &[u8]| {
                store.append(blob, at, bytes)?;
                at += bytes.len() as u64;
                Ok(())
            };
            if self.stream(self.client.get(address), PIECE_BYTES, &mut take).await? == 0 {
                return Err(Error::protocol("the server's blob is shorter than it said"));
            }
        }
        Ok(())
    }

    /// Sends a blob, from where the server has it.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    pub async fn upload(&self, blob: &Blob, mut have: u64, store: &Store) -> Result<()> {
        while have < blob.len {
            let piece = store.read(&blob.hash, have, PIECE_BYTES)?.map(|(bytes, _)| bytes).unwrap_or_default();
            if piece.is_empty() {
                return Err(Error::protocol("the outbox does not hold what was announced"));
            }
            let address = format!("{}/v1/blob/{}/{have}", self.server, blob.hex());
            let received: Received = decode(&self.send(self.client.put(address).body(piece)).await?)?;
            if received.have <= have {
                return Err(Error::protocol("the server does not take the next piece; it will be asked again"));
            }
            have = received.have;
        }
        Ok(())
    }
}

/// The error with its causes: reqwest alone does not say what TLS found wrong.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_https_addresses_are_taken() {
        let new = |server: &str| Link::new(server, crate::identity::enrol_tls([0; 32]).unwrap());
        for server in ["https://fed.example.org:7443", "https://127.0.0.1:1/", "https://[::1]:7443"] {
            new(server).unwrap();
        }
        for server in ["", "fed.example.org:7443", "http://127.0.0.1:1", "https://"] {
            assert!(new(server).unwrap_err().to_string().contains("https://host:port"), "{server}");
        }
    }
}

//! The node's side of HTTPS: requests outwards only, each with a time limit and a limit on the answer.

use crate::error::{Error, Result};
use crate::wire::{BLOCK_BYTES, Blob, MESSAGE_BYTES_MAX, PIECE_BYTES, Received, Request, Store, decode};
use std::net::IpAddr;
use std::time::Duration;

/// Longer than a long poll.
const TIME_MAX: Duration = Duration::from_secs(90);

/// A connection to a server; it reconnects by itself.
#[derive(Clone, Debug)]
pub struct Link {
    client: reqwest::Client,
    server: String,
}

impl Link {
    /// A link to `https://host:port`; nothing is sent yet.
    ///
    /// # Errors
    /// If the address is malformed.
    pub fn new(server: &str, tls: rustls::ClientConfig) -> Result<Self> {
        let server = server.trim_end_matches('/').to_owned();
        let url = reqwest::Url::parse(&server).ok().filter(|url| url.scheme() == "https");
        let Some(host) = url.as_ref().and_then(reqwest::Url::host_str) else {
            return Err(Error::config(format!("`{server}`: a server's address has the form https://host:port")));
        };
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
        let mut builder = reqwest::Client::builder();
        if host == "localhost" || address.is_ok_and(|address| address.is_loopback()) {
            // The system's proxy cannot reach this machine.
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
            .map_err(|e| Error::internal(with_causes(&e)))?;
        Ok(Self { client, server })
    }

    /// The server's address.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Sends a request and passes the answer's body to `take` as it arrives; returns its length.
    async fn stream(
        &self,
        request: reqwest::RequestBuilder,
        limit: usize,
        take: &mut (dyn FnMut(&[u8]) -> Result<()> + Send),
    ) -> Result<usize> {
        let unreachable = |e: reqwest::Error| {
            if distrusts(&e) { Error::Identity(with_causes(&e)) } else { Error::Unreachable(with_causes(&e)) }
        };
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
        Err(Error::Rejected { status: status.as_u16(), reason })
    }

    async fn body(&self, request: reqwest::RequestBuilder) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        let mut take = |piece: &[u8]| {
            body.extend_from_slice(piece);
            Ok(())
        };
        self.stream(request, MESSAGE_BYTES_MAX, &mut take).await?;
        Ok(body)
    }

    /// Sends a request. The server may hold its answer for a while.
    ///
    /// # Errors
    /// If the server cannot be reached or rejects the request.
    pub async fn send<R: Request>(&self, request: &R) -> Result<R::Reply> {
        let post = self.client.post(format!("{}{}", self.server, R::PATH));
        let post = post.header("content-type", "application/x-protobuf").body(request.encode_to_vec());
        decode(&self.body(post).await?)
    }

    /// Fetches a blob into a store; resumes an interrupted transfer.
    ///
    /// # Errors
    /// If the server cannot be reached, has no such blob, or sends other bytes.
    pub async fn fetch(&self, blob: &Blob, store: &Store) -> Result<()> {
        blob.check()?;
        while !store.has(blob) {
            let from = store.have(blob);
            let address = format!("{}/v1/blob/{}/{from}", self.server, blob.hex());
            let mut at = from;
            // Each part is stored at once, in case the line breaks before the end of the piece.
            let mut take = |bytes: &[u8]| {
                store.append(blob, at, bytes)?;
                at += bytes.len() as u64;
                Ok(())
            };
            if self.stream(self.client.get(address), PIECE_BYTES, &mut take).await? == 0 {
                return Err(Error::protocol("the server's blob is shorter than announced"));
            }
        }
        Ok(())
    }

    /// Sends a blob; the server already has the first `have` bytes.
    ///
    /// # Errors
    /// If the server cannot be reached or rejects a piece.
    pub async fn upload(&self, blob: &Blob, mut have: u64, store: &Store) -> Result<()> {
        while have < blob.len {
            let piece = store.read(&blob.hash, have, PIECE_BYTES)?.map(|(bytes, _)| bytes).unwrap_or_default();
            if piece.is_empty() {
                return Err(Error::protocol("the outbox lacks an announced blob"));
            }
            let address = format!("{}/v1/blob/{}/{have}", self.server, blob.hex());
            let received: Received = decode(&self.body(self.client.put(address).body(piece)).await?)?;
            if received.have <= have {
                return Err(Error::protocol("the server does not accept the next piece; trying again"));
            }
            have = received.have;
        }
        Ok(())
    }
}

/// The error with its causes: reqwest's own message lacks the TLS error.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Whether the server's certificate is the problem. Trying again cannot help then.
fn distrusts(error: &(dyn std::error::Error + 'static)) -> bool {
    if let Some(tls) = error.downcast_ref::<rustls::Error>() {
        return matches!(tls, rustls::Error::InvalidCertificate(_));
    }
    // The source of an I/O error is that of the error inside it.
    match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(inside) => distrusts(inside),
        None => error.source().is_some_and(distrusts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_https_addresses_are_accepted() {
        let new = |server: &str| Link::new(server, crate::node::enrol_tls([0; 32]).unwrap());
        for server in ["https://fed.example.org:7443", "https://127.0.0.1:1/", "https://[::1]:7443"] {
            new(server).unwrap();
        }
        for server in ["", "fed.example.org:7443", "http://127.0.0.1:1", "https://"] {
            assert!(new(server).unwrap_err().to_string().contains("https://host:port"), "{server}");
        }
    }
}

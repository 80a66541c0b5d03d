//! The node's side of HTTPS: requests outwards only, each with a time limit and a limit on the answer.

use crate::error::{Error, Result};
use crate::wire::{BLOCK_BYTES, Blob, MESSAGE_BYTES_MAX, PIECE_BYTES, Received, Request, Store, decode};
use axum::body::Body;
use axum::http::{Method, Request as HttpRequest, Uri};
use futures_util::StreamExt;
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::net::IpAddr;
use std::time::Duration;
use tokio::net::TcpStream;
use tower::timeout::Timeout;
use tower::util::BoxCloneSyncService;

/// Longer than a long poll.
const TIME_MAX: Duration = Duration::from_secs(90);

/// Until a connection is open and its certificates are checked.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(20);

/// Opens TLS connections, directly or through a proxy.
type Connector = BoxCloneSyncService<Uri, MaybeHttpsStream<TokioIo<TcpStream>>, tower::BoxError>;

/// A connection to a server; it reconnects by itself.
#[derive(Clone, Debug)]
pub struct Link {
    client: Client<Connector, Body>,
    server: String,
}

impl Link {
    /// A link to `https://host:port`, through the system's proxy if it has one; nothing is sent yet.
    ///
    /// # Errors
    /// If the address or the proxy's address is malformed.
    pub fn new(server: &str, tls: rustls::ClientConfig) -> Result<Self> {
        Self::through(&Matcher::from_system(), server, tls)
    }

    fn through(proxies: &Matcher, server: &str, tls: rustls::ClientConfig) -> Result<Self> {
        let server = server.trim_end_matches('/').to_owned();
        let address = server.parse::<Uri>().ok().filter(|uri| uri.scheme_str() == Some("https"));
        let Some(address) = address else {
            return Err(Error::config(format!("`{server}`: a server's address has the form https://host:port")));
        };
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_keep_alive_interval(Duration::from_secs(30))
            .http2_keep_alive_timeout(Duration::from_mins(1))
            .build(connector(proxies, &address, tls)?);
        Ok(Self { client, server })
    }

    /// The server's address.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Sends a request and passes the answer's body to `take` as it arrives; returns its length.
    async fn stream(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        limit: usize,
        take: &mut (dyn FnMut(&[u8]) -> Result<()> + Send),
    ) -> Result<usize> {
        let request = HttpRequest::builder().method(method).uri(format!("{}{path}", self.server)).body(body.into());
        let response = self.client.request(request.map_err(Error::internal)?).await.map_err(unreachable)?;
        let status = response.status();
        let (mut n, mut reason) = (0, Vec::new());
        let mut pieces = Body::new(response.into_body()).into_data_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(unreachable)?;
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

    /// Sends a request whose answer is a message.
    async fn message(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Vec<u8>> {
        let mut answer = Vec::new();
        let mut take = |piece: &[u8]| {
            answer.extend_from_slice(piece);
            Ok(())
        };
        in_time(self.stream(method, path, body, MESSAGE_BYTES_MAX, &mut take)).await?;
        Ok(answer)
    }

    /// Sends a request. The server may hold its answer for a while.
    ///
    /// # Errors
    /// If the server cannot be reached or rejects the request.
    pub async fn send<R: Request>(&self, request: &R) -> Result<R::Reply> {
        decode(&self.message(Method::POST, R::PATH, request.encode_to_vec()).await?)
    }

    /// Fetches a blob into a store; resumes an interrupted transfer.
    ///
    /// # Errors
    /// If the server cannot be reached, has no such blob, or sends other bytes.
    pub async fn fetch(&self, blob: &Blob, store: &Store) -> Result<()> {
        blob.check()?;
        loop {
            // Also completes what a crash has left whole: the server would have nothing more to send.
            let from = store.have(blob);
            if from == blob.len {
                return Ok(());
            }
            let path = format!("/v1/blob/{}/{from}", blob.hex());
            let mut at = from;
            // Each part is stored at once, in case the line breaks before the end of the piece.
            let mut take = |bytes: &[u8]| {
                store.append(blob, at, bytes)?;
                at += bytes.len() as u64;
                Ok(())
            };
            if in_time(self.stream(Method::GET, &path, Vec::new(), PIECE_BYTES, &mut take)).await? == 0 {
                return Err(Error::protocol("the server's blob is shorter than announced"));
            }
        }
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
            let path = format!("/v1/blob/{}/{have}", blob.hex());
            let received: Received = decode(&self.message(Method::PUT, &path, piece).await?)?;
            if received.have <= have {
                return Err(Error::protocol("the server does not accept the next piece; trying again"));
            }
            have = received.have;
        }
        Ok(())
    }
}

/// Opens TLS connections to a server, through the proxy that the system names for it.
fn connector(proxies: &Matcher, server: &Uri, tls: rustls::ClientConfig) -> Result<Connector> {
    let host = server.host().unwrap_or_default();
    let is_here = host == "localhost"
        || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    // The system's proxy cannot reach this machine.
    let Some(proxy) = proxies.intercept(server).filter(|_| !is_here) else {
        return Ok(Connector::new(Timeout::new(HttpsConnector::from((tcp, tls)), CONNECT_TIME_MAX)));
    };
    if proxy.uri().scheme_str() != Some("http") {
        return Err(Error::config(format!("`{}`: a proxy's address has the form http://host:port", proxy.uri())));
    }
    let mut tunnel = Tunnel::new(proxy.uri().clone(), tcp);
    if let Some(password) = proxy.basic_auth() {
        tunnel = tunnel.with_auth(password.clone());
    }
    Ok(Connector::new(Timeout::new(HttpsConnector::from((tunnel, tls)), CONNECT_TIME_MAX)))
}

async fn in_time<T>(answer: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::Unreachable(format!("no complete answer within {} s", TIME_MAX.as_secs()));
    tokio::time::timeout(TIME_MAX, answer).await.map_err(late)?
}

/// The error with its causes: the outermost message lacks the TLS error.
fn unreachable(error: impl std::error::Error + 'static) -> Error {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    let text = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
    if distrusts(&error) { Error::Identity(text) } else { Error::Unreachable(text) }
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
    use crate::wire::WorkRequest;
    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

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

    /// A node that was killed after the last piece must not decline its task for that.
    #[tokio::test]
    async fn a_blob_that_a_crash_left_whole_is_not_fetched_again() {
        let here = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let link = Link::new(&format!("https://{here}"), crate::node::enrol_tls([0; 32]).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (store, blob) = (Store::open(folder.path()).unwrap(), Blob::of(&[7; 5000]));
        std::fs::write(folder.path().join(blob.hex() + ".part"), [7; 5000]).unwrap();
        link.fetch(&blob, &store).await.unwrap();
        assert!(store.has(&blob));
        let lacking = link.fetch(&Blob::of(b"another"), &store).await;
        assert!(matches!(lacking, Err(Error::Unreachable(_))), "{lacking:?}");
    }

    #[tokio::test]
    async fn the_systems_proxy_is_asked_for_other_machines_only() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = listener.local_addr().unwrap();
        let link = |server: &str, proxy: &str| {
            let proxies = Matcher::builder().https(proxy).build();
            Link::through(&proxies, server, crate::node::enrol_tls([0; 32]).unwrap())
        };
        let work = WorkRequest::default();
        let (asked, seen) = tokio::join!(
            async { link("https://fed.example.org:7443", &format!("http://me:secret@{proxy}"))?.send(&work).await },
            async {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut start = vec![0; 200];
                let n = stream.read(&mut start).await.unwrap();
                stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").await.unwrap();
                String::from_utf8_lossy(&start[..n]).into_owned()
            }
        );
        assert!(seen.starts_with("CONNECT fed.example.org:7443 ") && seen.contains("Basic bWU6c2VjcmV0"), "{seen}");
        assert!(matches!(asked, Err(Error::Unreachable(_))), "{asked:?}");
        // A free port of this machine: asking it fails at once, and the proxy hears nothing.
        let here = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        link(&format!("https://{here}"), &format!("http://{proxy}")).unwrap().send(&work).await.unwrap_err();
        assert!(listener.accept().now_or_never().is_none());
        let error = link("https://fed.example.org", "socks5://127.0.0.1:1").unwrap_err();
        assert!(error.to_string().contains("http://host:port"), "{error}");
    }
}

//! A door accepts connections: it limits their number, does the TLS handshake, and serves HTTP/2 or HTTP/1.1. It closes a
//! connection when its time is over or its node is no longer a member.

use super::limit::Warnings;
use super::routes::REQUEST_TIME_MAX;
use super::{Registry, lock};
use crate::error::Error;
use crate::identity::fingerprint;
use crate::wire::BLOCK_BYTES;
use axum::Router;
use axum::extract::Extension;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(20);

/// How long a visitor's connection may last: there are few places, and a page or an enrolment is quick.
pub(crate) const VISIT_TIME_MAX: Duration = Duration::from_secs(30);

/// How long pending requests may still take when their connection's time is over.
const FAREWELL: Duration = Duration::from_secs(5);

/// How often an open connection's membership is checked. Each request is checked as well.
const LOOK_AGAIN: Duration = Duration::from_secs(3);

/// A node has one connection over HTTP/2 and a few over HTTP/1.1. Broken ones stay until they time out.
const CONNECTIONS_PER_NODE: usize = 16;

/// Who comes through a door.
#[derive(Clone)]
pub(crate) enum Visitors {
    /// Anybody, without TLS.
    Browsers,
    /// Anybody, without a certificate.
    Strangers(TlsAcceptor),
    /// Nodes with a certificate of this federation, while the registry admits them.
    Nodes(TlsAcceptor, Registry),
}

/// A listening socket's rules.
pub(crate) struct Door {
    pub visitors: Visitors,
    /// Max connections at a time.
    pub connections_max: usize,
    /// See [`VISIT_TIME_MAX`].
    pub visit_time_max: Duration,
    pub warnings: Arc<Warnings>,
    pub routes: Router,
}

/// The fingerprint of a connection's certificate.
#[derive(Clone, Debug)]
pub(crate) struct Peer(pub String);

impl Door {
    /// Accepts connections for ever. Those beyond the limit wait in the system's queue.
    pub async fn open(self, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(self.connections_max));
        let (door, guests) = (Arc::new(self), Guests::default());
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let (door, guests) = (Arc::clone(&door), guests.clone());
                    tokio::spawn(async move {
                        door.welcome(stream, peer, &guests).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    // Probably out of file descriptors: ending connections free some.
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn welcome(&self, stream: TcpStream, peer: SocketAddr, guests: &Guests) {
        let visit = sleep(self.visit_time_max);
        match &self.visitors {
            Visitors::Browsers => talk(stream, peer, self.routes.clone(), visit).await,
            Visitors::Strangers(tls) => {
                if let Some(stream) = self.handshake(tls, stream, peer).await {
                    talk(stream, peer, self.routes.clone(), visit).await;
                }
            }
            Visitors::Nodes(tls, registry) => {
                if let Some(stream) = self.handshake(tls, stream, peer).await {
                    self.receive(stream, peer, registry, guests).await;
                }
            }
        }
    }

    async fn handshake(&self, tls: &TlsAcceptor, stream: TcpStream, peer: SocketAddr) -> Option<TlsStream<TcpStream>> {
        let problem = match timeout(HANDSHAKE_TIME_MAX, tls.accept(stream)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it took too long".into(),
        };
        if let Some(left_out) = self.warnings.next() {
            tracing::warn!(%peer, error = problem, left_out, "handshake rejected");
        }
        None
    }

    /// Serves a connection with a certificate of this federation. A node that is not a member learns only that.
    async fn receive(&self, stream: TlsStream<TcpStream>, peer: SocketAddr, registry: &Registry, guests: &Guests) {
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let Some(fingerprint) = certificate.map(|c| fingerprint(c)) else { return };
        let warn = |error: &dyn std::fmt::Display| {
            if let Some(left_out) = self.warnings.next() {
                tracing::warn!(%peer, fingerprint, %error, left_out, "connection rejected");
            }
        };
        let Some(_place) = guests.place(&fingerprint) else {
            return warn(&format!("this node already has {CONNECTIONS_PER_NODE} connections"));
        };
        if let Err(error) = registry.admit(&fingerprint) {
            warn(&error);
            let told = Arc::new(error);
            let refusal = Router::new().fallback(move || {
                let told = Arc::clone(&told);
                async move { told.response() }
            });
            return talk(stream, peer, refusal, sleep(FAREWELL)).await;
        }
        let out = async {
            loop {
                sleep(LOOK_AGAIN).await;
                if let Err(error @ Error::NotAMember(_)) = registry.admit(&fingerprint) {
                    return warn(&error);
                }
            }
        };
        let routes = self.routes.clone().layer(Extension(Peer(fingerprint.clone())));
        talk(stream, peer, routes, out).await;
    }
}

/// Answers requests until the connection ends or has to end.
async fn talk<S>(stream: S, peer: SocketAddr, routes: Router, has_to_leave: impl Future<Output = ()>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(REQUEST_TIME_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_mins(1))
        .max_concurrent_streams(16)
        // The server's buffers per node: enough for 5 MB/s with 50 ms latency.
        .initial_stream_window_size(1 << 18)
        .initial_connection_window_size(1 << 19)
        .max_send_buf_size(BLOCK_BYTES);
    let mut connection =
        std::pin::pin!(builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes)));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = has_to_leave => {
            connection.as_mut().graceful_shutdown();
            timeout(FAREWELL, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%peer, error, "connection ended");
    }
}

/// Open connections per certificate.
#[derive(Clone, Default)]
struct Guests {
    n_connections: Arc<Mutex<BTreeMap<String, usize>>>,
}

/// One of a certificate's connections, until it is dropped.
struct Place<'a> {
    guests: &'a Guests,
    fingerprint: &'a str,
}

impl Guests {
    fn place<'a>(&'a self, fingerprint: &'a str) -> Option<Place<'a>> {
        let mut all = lock(&self.n_connections);
        let n = all.entry(fingerprint.to_owned()).or_default();
        if *n >= CONNECTIONS_PER_NODE {
            return None;
        }
        *n += 1;
        Some(Place { guests: self, fingerprint })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.guests.n_connections);
        if let Some(n) = all.get_mut(self.fingerprint) {
            *n -= 1;
            if *n == 0 {
                all.remove(self.fingerprint);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn silent_connections_do_not_keep_the_few_places_for_ever() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let door = Door {
            visitors: Visitors::Browsers,
            connections_max: 2,
            visit_time_max: Duration::from_millis(200),
            warnings: Arc::new(Warnings::new()),
            routes: Router::new().fallback(|| async { "here" }),
        };
        tokio::spawn(door.open(listener));
        let mut silent = Vec::new();
        for _ in 0..4 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut late = TcpStream::connect(address).await.unwrap();
        late.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        late.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("here"), "{answer}");
        for mut connection in silent {
            assert_eq!(connection.read(&mut [0; 10]).await.unwrap_or(0), 0);
        }
    }
}

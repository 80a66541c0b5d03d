//! A door accepts connections: it limits their number, does the TLS handshake, and serves HTTP/2 or HTTP/1.1. It closes a
//! connection when its time is over, when a newcomer needs its place, or when its node is no longer a member.

use super::limit::Warnings;
use super::refusals::Refusals;
use super::routes::REQUEST_TIME_MAX;
use super::strangers::{Place, Strangers, origin};
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
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// How long strangers may take for the handshake, and browsers for each request.
const STRANGERS_TIME_MAX: Duration = Duration::from_secs(5);

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
    /// The places of strangers, shared by all doors.
    pub strangers: Arc<Strangers>,
    /// Max connections of members.
    pub members_max: usize,
    /// See [`VISIT_TIME_MAX`].
    pub visit_time_max: Duration,
    pub warnings: Arc<Warnings>,
    pub refusals: Arc<Refusals>,
    pub routes: Router,
}

/// Where a connection comes from: an address or a network, see [`origin`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct From(pub IpAddr);

/// The fingerprint of a connection's certificate.
#[derive(Clone, Debug)]
pub(crate) struct Peer(pub String);

impl Door {
    /// Accepts connections for ever.
    pub async fn open(self, listener: TcpListener) {
        let members = Guests { n_connections: Arc::default(), places: Arc::new(Semaphore::new(self.members_max)) };
        let door = Arc::new(self);
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    // Decided here, not in the connection's task: a flood must not become open files that wait for a turn.
                    let Some(place) = door.strangers.place(peer.ip()) else {
                        door.warn(peer, &"too many connections from this address");
                        continue;
                    };
                    let (door, members) = (Arc::clone(&door), members.clone());
                    tokio::spawn(async move { door.welcome(stream, peer, place, &members).await });
                }
                Err(error) => {
                    // Another process may have used up the system's open files; ending connections free some.
                    if let Some(left_out) = door.warnings.next() {
                        tracing::warn!(%error, left_out, "cannot accept a connection; trying again");
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn welcome(&self, stream: TcpStream, peer: SocketAddr, place: Place, members: &Guests) {
        let visit = async |stream| {
            let routes = self.routes.clone().layer(Extension(From(origin(peer.ip()))));
            talk(stream, peer, routes, sleep(self.visit_time_max)).await;
        };
        let visited = async {
            timeout(STRANGERS_TIME_MAX, stream.readable()).await.ok()?.ok()?;
            place.speaks();
            match &self.visitors {
                Visitors::Browsers => {
                    let routes = self.routes.clone();
                    talk_to_browser(stream, peer, routes, sleep(self.visit_time_max)).await;
                    None
                }
                Visitors::Strangers(tls) => {
                    visit(self.handshake(tls, stream, peer).await?).await;
                    None
                }
                Visitors::Nodes(tls, registry) => Some((self.handshake(tls, stream, peer).await?, registry)),
            }
        };
        let handshake = tokio::select! {
            visited = visited => visited,
            () = place.taken() => return self.warn(peer, &"its place was needed"),
        };
        drop(place);
        if let Some((stream, registry)) = handshake {
            self.receive(stream, peer, registry, members).await;
        }
    }

    fn warn(&self, peer: SocketAddr, error: &dyn std::fmt::Display) {
        if let Some(left_out) = self.warnings.next() {
            tracing::warn!(%peer, %error, left_out, "connection rejected");
        }
    }

    async fn handshake(&self, tls: &TlsAcceptor, stream: TcpStream, peer: SocketAddr) -> Option<TlsStream<TcpStream>> {
        let problem = match timeout(STRANGERS_TIME_MAX, tls.accept(stream)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it took too long".into(),
        };
        self.refusals.note(origin(peer.ip()), &problem);
        if let Some(left_out) = self.warnings.next() {
            tracing::warn!(%peer, error = problem, left_out, "handshake rejected");
        }
        None
    }

    /// Serves a connection with a certificate of this federation. A node that is not a member learns only that.
    async fn receive(&self, stream: TlsStream<TcpStream>, peer: SocketAddr, registry: &Registry, members: &Guests) {
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let Some(fingerprint) = certificate.map(|c| fingerprint(c)) else { return };
        let warn = |error: &dyn std::fmt::Display| {
            if let Some(left_out) = self.warnings.next() {
                tracing::warn!(%peer, fingerprint, %error, left_out, "connection rejected");
            }
        };
        let Some(_seat) = members.seat(&fingerprint) else {
            return warn(&format!("this node already has {CONNECTIONS_PER_NODE} connections"));
        };
        let Ok(_place) = members.places.try_acquire() else {
            return warn(&"there are as many connections as server.connections_max and the system's open files allow");
        };
        if let Err(error) = registry.admit(&fingerprint) {
            warn(&error);
            self.refusals.note(origin(peer.ip()), &format!("{error}: {fingerprint}"));
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
    serve(&builder, stream, peer, routes, has_to_leave).await;
}

/// As [`talk`], over HTTP/1.1 only: there, a visit that sends no request ends soon.
async fn talk_to_browser(stream: TcpStream, peer: SocketAddr, routes: Router, has_to_leave: impl Future<Output = ()>) {
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(STRANGERS_TIME_MAX);
    serve(&builder, stream, peer, routes, has_to_leave).await;
}

async fn serve<S>(
    builder: &auto::Builder<TokioExecutor>,
    stream: S,
    peer: SocketAddr,
    routes: Router,
    has_to_leave: impl Future<Output = ()>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
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

/// Open connections of members, per certificate and in all.
#[derive(Clone)]
struct Guests {
    n_connections: Arc<Mutex<BTreeMap<String, usize>>>,
    places: Arc<Semaphore>,
}

/// One of a certificate's connections, until it is dropped.
struct Seat<'a> {
    guests: &'a Guests,
    fingerprint: &'a str,
}

impl Guests {
    fn seat<'a>(&'a self, fingerprint: &'a str) -> Option<Seat<'a>> {
        let mut all = lock(&self.n_connections);
        let n = all.entry(fingerprint.to_owned()).or_default();
        if *n >= CONNECTIONS_PER_NODE {
            return None;
        }
        *n += 1;
        Some(Seat { guests: self, fingerprint })
    }
}

impl Drop for Seat<'_> {
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

    async fn door(n_places: usize, visit_time_max: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let door = Door {
            visitors: Visitors::Browsers,
            strangers: Arc::new(Strangers::new(n_places)),
            members_max: 1,
            visit_time_max,
            warnings: Arc::new(Warnings::new()),
            refusals: Arc::default(),
            routes: Router::new().fallback(|| async { "here" }),
        };
        tokio::spawn(door.open(listener));
        address
    }

    async fn get(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        // A visitor that finds no place is hung up on.
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    #[tokio::test]
    async fn silent_connections_do_not_keep_the_few_places() {
        let address = door(4, Duration::from_mins(10)).await;
        let mut silent = Vec::new();
        for _ in 0..20 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let visit = async {
            while !get(address).await.ends_with("here") {
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(Duration::from_mins(1), visit).await.expect("a newcomer gets in");
    }

    #[tokio::test]
    async fn an_idle_visit_ends_within_seconds_before_and_after_a_request() {
        let address = door(8, Duration::from_mins(10)).await;
        let (mut silent, mut idle) =
            (TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap());
        idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let closed =
            async { (silent.read(&mut [0; 10]).await.unwrap_or(0), idle.read_to_end(&mut answer).await.is_ok()) };
        let closed = timeout(Duration::from_mins(1), closed).await.expect("both are closed");
        assert_eq!(closed, (0, true));
        assert!(answer.ends_with(b"here"));
    }

    #[tokio::test]
    async fn a_visit_ends_however_busy_it_is() {
        let address = door(8, Duration::from_millis(200)).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut answer = [0; 1000];
        let busy = async {
            loop {
                let sent = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.is_ok();
                if !sent || !stream.read(&mut answer).await.is_ok_and(|n| n > 0) {
                    return;
                }
            }
        };
        timeout(Duration::from_mins(1), busy).await.expect("the visit is ended");
    }
}

//! A door: connections are accepted, counted and greeted; TLS first, then HTTP/2 or HTTP/1.1.

use crate::identity::fingerprint;
use crate::message::BLOCK_BYTES;
use crate::routes::REQUEST_TIME_MAX;
use axum::Router;
use axum::extract::Extension;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(20);

/// Whose certificate a connection came with.
#[derive(Clone, Debug)]
pub(crate) struct Peer(pub Option<String>);

/// Accepts connections for ever. One too many waits in the system's queue.
pub(crate) async fn accept(listener: TcpListener, n_max: usize, tls: Option<TlsAcceptor>, routes: Router) {
    let places = Arc::new(Semaphore::new(n_max));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let (tls, routes) = (tls.clone(), routes.clone());
                tokio::spawn(async move {
                    serve_connection(stream, peer, tls, routes).await;
                    drop(place);
                });
            }
            Err(error) => {
                // Out of file descriptors, most likely: some come back when connections end.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, peer: SocketAddr, tls: Option<TlsAcceptor>, routes: Router) {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(REQUEST_TIME_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_mins(1))
        .max_concurrent_streams(16)
        // What the server holds of each node's transfers: enough for 5 MB/s over a line of 50 ms.
        .initial_stream_window_size(1 << 18)
        .initial_connection_window_size(1 << 19)
        .max_send_buf_size(BLOCK_BYTES);
    let served = match tls {
        Some(tls) => {
            let stream = match tokio::time::timeout(HANDSHAKE_TIME_MAX, tls.accept(stream)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return tracing::warn!(%peer, %error, "handshake refused"),
                Err(_) => return tracing::warn!(%peer, "handshake refused: it took too long"),
            };
            let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
            let routes = routes.layer(Extension(Peer(certificate.map(|c| fingerprint(c)))));
            builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes)).await
        }
        None => builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes)).await,
    };
    if let Err(error) = served {
        tracing::debug!(%peer, error, "connection ended");
    }
}

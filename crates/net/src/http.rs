//! HTTPS for the [`Desk`]: TLS 1.3 with certificates on both sides, HTTP/2 or HTTP/1.1, and limits on everything.
//!
//! Three doors: one for nodes, where the handshake fails without a certificate of this federation; one for enrolment,
//! open only if the configuration says so; one for the status page.

use crate::config::ServerConfig;
use crate::desk::Desk;
use crate::door::accept;
use crate::error::{Error, Result};
use crate::identity::Authority;
use crate::registry::Registry;
use crate::routes::{enrol_routes, node_routes};
use crate::status::{self, Status};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// What all requests need.
#[derive(Debug)]
pub struct Server {
    /// Tasks and contributions.
    pub desk: Arc<Desk>,
    /// Who belongs here.
    pub registry: Registry,
    /// Who signs.
    pub authority: Authority,
    /// Limits and addresses.
    pub config: ServerConfig,
    /// What the status page shows.
    pub status: Arc<Status>,
    /// Requests that each client may still make.
    buckets: Mutex<BTreeMap<u32, (f64, Instant)>>,
}

/// Where a server can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Addresses {
    /// By nodes.
    pub listen: SocketAddr,
    /// By strangers with a token.
    pub enrol: Option<SocketAddr>,
    /// By browsers.
    pub status: Option<SocketAddr>,
}

impl Server {
    /// A server that does not listen yet.
    pub fn new(
        desk: Arc<Desk>,
        registry: Registry,
        authority: Authority,
        config: ServerConfig,
        status: Arc<Status>,
    ) -> Self {
        Self { desk, registry, authority, config, status, buckets: Mutex::new(BTreeMap::new()) }
    }

    /// Opens the doors and serves in the background until the runtime ends.
    ///
    /// # Errors
    /// If an address is taken or a certificate cannot be made.
    pub async fn listen(self: &Arc<Self>) -> Result<Addresses> {
        let bind = async |address: SocketAddr| {
            let bound = TcpListener::bind(address).await.and_then(|l| Ok((l.local_addr()?, l)));
            bound.map_err(|e| Error::config(format!("cannot listen on {address}: {e}")))
        };
        let (listen, nodes) = bind(self.config.listen).await?;
        let tls = TlsAcceptor::from(self.authority.server_tls(&self.config.names, true)?);
        tokio::spawn(accept(nodes, self.config.connections_max, Some(tls), node_routes(self)));
        let mut addresses = Addresses { listen, enrol: None, status: None };
        if let Some(address) = self.config.enrol {
            let (address, listener) = bind(address).await?;
            let tls = TlsAcceptor::from(self.authority.server_tls(&self.config.names, false)?);
            tokio::spawn(accept(listener, 16, Some(tls), enrol_routes(self)));
            addresses.enrol = Some(address);
        }
        if let Some(address) = self.config.status {
            let (address, listener) = bind(address).await?;
            tokio::spawn(accept(listener, 16, None, status::routes(&self.status, &self.desk)));
            addresses.status = Some(address);
        }
        Ok(addresses)
    }

    /// Whether a client may make another request now: a bucket that holds two seconds' worth.
    pub(crate) fn has_time(&self, client: u32) -> bool {
        let (rate, now) = (self.config.requests_per_s, Instant::now());
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, at) = buckets.entry(client).or_insert((2.0 * rate, now));
        *left = (*left + rate * now.duration_since(*at).as_secs_f64()).min((2.0 * rate).max(1.0));
        *at = now;
        let may = *left >= 1.0;
        if may {
            *left -= 1.0;
        }
        may
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Protocol(_) => StatusCode::BAD_REQUEST,
            Self::NotNow(reason) => return (StatusCode::SERVICE_UNAVAILABLE, reason.clone()).into_response(),
            // A full disk, for one: the node keeps what it has and tries again.
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        if status == StatusCode::SERVICE_UNAVAILABLE {
            tracing::error!(error = %self, "request failed");
            return (status, "the server cannot do this now; its log says why").into_response();
        }
        (status, self.to_string()).into_response()
    }
}

//! HTTPS for the [`Desk`]: TLS 1.3 with certificates on both sides, HTTP/2 or HTTP/1.1, and limits on everything.
//!
//! Three doors: for nodes, where the handshake fails without a certificate of this federation; for enrolment; and for the
//! status page. The last two open only if the configuration gives their addresses.

use super::desk::Desk;
use super::door::{Door, VISIT_TIME_MAX, Visitors};
use super::limit::{Bucket, Warnings};
use super::routes::{enrol_routes, node_routes};
use super::status::{self, Status};
use super::{Authority, Registry, ServerConfig, lock};
use crate::error::{Error, Result};
use axum::Router;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Connections at a time that are not nodes.
const VISITORS_MAX: usize = 16;

/// Enrolments per second, and at once: each costs a signature and several syncs.
const ENROLMENTS_PER_S: f64 = 10.0;
const ENROLMENTS_AT_ONCE: f64 = 100.0;

/// What all requests need.
#[derive(Debug)]
pub struct Server {
    /// Tasks and contributions.
    pub desk: Arc<Desk>,
    /// The members.
    pub registry: Registry,
    /// Signs certificates.
    pub authority: Authority,
    /// Limits and addresses.
    pub config: ServerConfig,
    /// What the status page shows.
    pub status: Arc<Status>,
    /// Certificates whose enrolment is in the journal.
    pub(crate) enrolled: Mutex<BTreeSet<String>>,
    /// The rate limit of enrolments.
    pub(crate) enrolments: Mutex<Bucket>,
    /// The rate limit of each client.
    buckets: Mutex<BTreeMap<u32, Bucket>>,
    /// Limits the log lines that strangers can cause.
    pub(crate) warnings: Arc<Warnings>,
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
    /// A server that does not listen yet. `enrolled` are the certificates whose enrolment is in the journal.
    pub fn new(
        desk: Arc<Desk>,
        registry: Registry,
        authority: Authority,
        config: ServerConfig,
        status: Arc<Status>,
        enrolled: BTreeSet<String>,
    ) -> Self {
        Self {
            desk,
            registry,
            authority,
            config,
            status,
            enrolled: Mutex::new(enrolled),
            enrolments: Mutex::new(Bucket::new(ENROLMENTS_PER_S, ENROLMENTS_AT_ONCE)),
            buckets: Mutex::default(),
            warnings: Arc::new(Warnings::new()),
        }
    }

    /// Opens the doors and serves in the background until the runtime ends.
    ///
    /// # Errors
    /// If an address is taken or a certificate cannot be made.
    pub async fn listen(self: &Arc<Self>) -> Result<Addresses> {
        let bind = async |address: SocketAddr| {
            let bound = TcpListener::bind(address).await.and_then(|l| Ok((l.local_addr()?, l)));
            bound.map_err(|source| Error::Listen { address, source })
        };
        let (listen, nodes) = bind(self.config.listen).await?;
        let tls = TlsAcceptor::from(self.authority.server_tls(&self.config.names, true)?);
        self.open(nodes, Visitors::Nodes(tls, self.registry.clone()), self.config.connections_max, node_routes(self));
        let mut addresses = Addresses { listen, enrol: None, status: None };
        if let Some(address) = self.config.enrol {
            let (address, listener) = bind(address).await?;
            let tls = TlsAcceptor::from(self.authority.server_tls(&self.config.names, false)?);
            self.open(listener, Visitors::Strangers(tls), VISITORS_MAX, enrol_routes(self));
            addresses.enrol = Some(address);
        }
        if let Some(address) = self.config.status {
            let (address, listener) = bind(address).await?;
            self.open(listener, Visitors::Browsers, VISITORS_MAX, status::routes(&self.status, &self.desk));
            addresses.status = Some(address);
        }
        Ok(addresses)
    }

    fn open(&self, listener: TcpListener, visitors: Visitors, connections_max: usize, routes: Router) {
        let warnings = Arc::clone(&self.warnings);
        let door = Door { visitors, connections_max, visit_time_max: VISIT_TIME_MAX, warnings, routes };
        tokio::spawn(door.open(listener));
    }

    /// Whether a client may make another request now. It may use two seconds' worth at once.
    pub(crate) fn has_time(&self, client: u32) -> bool {
        let per_s = self.config.requests_per_s;
        lock(&self.buckets).entry(client).or_insert_with(|| Bucket::new(per_s, 2.0 * per_s)).take(Instant::now())
    }
}

impl Error {
    /// The response to the other side.
    pub(crate) fn response(&self) -> Response {
        let status = match self {
            Self::Protocol(_) => StatusCode::BAD_REQUEST,
            Self::NotAMember(_) => StatusCode::FORBIDDEN,
            Self::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::NotNow(_) => StatusCode::SERVICE_UNAVAILABLE,
            // For example a full disk: the node keeps its contribution and tries again.
            _ => {
                tracing::error!(error = %self, "request failed");
                let told = "the server cannot do this now; see its log";
                return (StatusCode::SERVICE_UNAVAILABLE, told).into_response();
            }
        };
        (status, self.to_string()).into_response()
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        self.response()
    }
}

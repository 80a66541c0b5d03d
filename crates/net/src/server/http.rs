//! HTTPS for the [`Desk`]: TLS 1.3 with certificates on both sides, HTTP/2 or HTTP/1.1, and limits on everything.
//!
//! Three doors: for nodes, where the handshake fails without a certificate of this federation; for enrolment; and for the
//! status page. The last two open only if the configuration gives their addresses.

use super::descriptors::{Shares, raise_limit};
use super::desk::Desk;
use super::door::{Door, VISIT_TIME_MAX, Visitors};
use super::host::only_our_hosts;
use super::limit::{Bucket, Buckets, Warnings};
use super::refusals::Refusals;
use super::routes::{enrol_routes, node_routes};
use super::status::{self, Status};
use super::strangers::Strangers;
use super::{Authority, Registry, ServerConfig};
use crate::error::{Error, Result};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock, Mutex};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Enrolments per second, and at once: each costs a signature and several syncs.
const ENROLMENTS_PER_S: f64 = 10.0;
const ENROLMENTS_AT_ONCE: f64 = 100.0;

/// Wrong or repeated tokens per second and address, and at once.
const WRONG_TOKENS_PER_S: f64 = 1.0;
const WRONG_TOKENS_AT_ONCE: f64 = 20.0;

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
    /// The rate limit of enrolments with an open invitation.
    pub(crate) enrolments: Mutex<Bucket>,
    /// The rate limit of each address that tries other tokens.
    pub(crate) wrong_tokens: Buckets<IpAddr>,
    /// The rate limit of each client. It may use two seconds' worth at once.
    pub(crate) requests: Buckets<u32>,
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
        let requests = Buckets::new(config.requests_per_s, 2.0 * config.requests_per_s);
        Self {
            desk,
            registry,
            authority,
            config,
            status,
            enrolled: Mutex::new(enrolled),
            enrolments: Mutex::new(Bucket::new(ENROLMENTS_PER_S, ENROLMENTS_AT_ONCE)),
            wrong_tokens: Buckets::new(WRONG_TOKENS_PER_S, WRONG_TOKENS_AT_ONCE),
            requests,
            warnings: Arc::new(Warnings::new()),
        }
    }

    /// Opens the doors and serves in the background until the runtime ends.
    ///
    /// # Errors
    /// If an address is taken, a certificate cannot be made, or the system allows too few open files.
    pub async fn listen(self: &Arc<Self>) -> Result<Addresses> {
        let shares = Shares::of(raise_limit(), self.config.connections_max)?;
        let strangers = Arc::new(Strangers::new(shares.strangers));
        let refusals = Arc::new(Refusals::default());
        tokio::spawn(Arc::clone(&refusals).record(Arc::clone(&self.desk)));
        let open = |listener, visitors, routes| {
            let (strangers, warnings) = (Arc::clone(&strangers), Arc::clone(&self.warnings));
            let (members_max, visit_time_max, refusals) = (shares.members, VISIT_TIME_MAX, Arc::clone(&refusals));
            let door = Door { visitors, strangers, members_max, visit_time_max, warnings, refusals, routes };
            tokio::spawn(door.open(listener));
        };
        let bind = async |address: SocketAddr| {
            let bound = TcpListener::bind(address).await.and_then(|l| Ok((l.local_addr()?, l)));
            bound.map_err(|source| Error::Listen { address, source })
        };
        let (listen, nodes) = bind(self.config.listen).await?;
        let tls = TlsAcceptor::from(self.authority.server_tls(&self.config.names, true)?);
        open(nodes, Visitors::Nodes(tls, self.registry.clone()), node_routes(self));
        let mut addresses = Addresses { listen, enrol: None, status: None };
        if let Some(address) = self.config.enrol {
            let (address, listener) = bind(address).await?;
            let tls = TlsAcceptor::from(self.authority.server_tls(&self.config.names, false)?);
            open(listener, Visitors::Strangers(tls), enrol_routes(self));
            addresses.enrol = Some(address);
        }
        if let Some(address) = self.config.status {
            let (address, listener) = bind(address).await?;
            let routes = only_our_hosts(status::routes(&self.status, &self.desk, &self.registry), &self.config.names);
            open(listener, Visitors::Browsers, routes);
            addresses.status = Some(address);
        }
        Ok(addresses)
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
                // A node repeats such a request at once.
                static FAILURES: LazyLock<Warnings> = LazyLock::new(Warnings::new);
                if let Some(left_out) = FAILURES.next() {
                    tracing::error!(error = %self, left_out, "request failed");
                }
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

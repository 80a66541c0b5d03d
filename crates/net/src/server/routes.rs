//! The requests of nodes, and of strangers with a token.

use super::door::{From, Peer};
use super::http::Server;
use super::journal::Event;
use super::{NodeEntry, lock};
use crate::error::{Error, Result};
use crate::wire::{
    Announce, BLOCK_BYTES, Beat, Blob, Contribution, Decline, EnrolReply, EnrolRequest, Heartbeat, Instruction,
    InstructionKind, PIECE_BYTES, RenewRequest, Request as WireRequest, RevealFor, SharesFor, VERSION, Work, WorkKind,
    WorkRequest, decode,
};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Extension, FromRequest, Path, Request, State};
use axum::handler::Handler;
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt;
use prost::Message;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the server holds a request for work when there is none.
const LONG_POLL: Duration = Duration::from_secs(25);

/// How long a request may take, long polls included.
pub(crate) const REQUEST_TIME_MAX: Duration = Duration::from_mins(2);

type TheServer = State<Arc<Server>>;
type Node = Extension<NodeEntry>;

pub(crate) fn node_routes(server: &Arc<Server>) -> Router {
    let routes = on::<WorkRequest, _>(Router::new(), work);
    let routes = on::<Heartbeat, _>(routes, heartbeat);
    let routes = on::<Decline, _>(routes, decline);
    let routes = on::<RenewRequest, _>(routes, renew);
    let routes = on::<Announce, _>(routes, announce);
    let routes = on::<SharesFor, _>(routes, share);
    let routes = on::<RevealFor, _>(routes, reveal);
    on::<Contribution, _>(routes, contribute)
        // The body is read in blocks, up to a piece.
        .route("/v1/blob/{hash}/{from}", get(fetch).put(receive))
        .layer(middleware::from_fn_with_state(Arc::clone(server), only_nodes))
        .with_state(Arc::clone(server))
}

pub(crate) fn enrol_routes(server: &Arc<Server>) -> Router {
    on::<EnrolRequest, _>(Router::new(), enrol).with_state(Arc::clone(server))
}

/// Adds a request's route.
fn on<R: WireRequest, T: 'static>(
    routes: Router<Arc<Server>>,
    handler: impl Handler<T, Arc<Server>>,
) -> Router<Arc<Server>> {
    routes.route(R::PATH, post(handler).layer(DefaultBodyLimit::max(R::BYTES_MAX)))
}

/// The message in a request's body.
struct Proto<M>(M);

impl<M: Message + Default> FromRequest<Arc<Server>> for Proto<M> {
    type Rejection = Response;

    async fn from_request(request: Request, server: &Arc<Server>) -> std::result::Result<Self, Response> {
        let body = Bytes::from_request(request, server).await.map_err(IntoResponse::into_response)?;
        decode(&body).map(Self).map_err(IntoResponse::into_response)
    }
}

/// Admits members that do not exceed their rate, and counts bytes. Each request is checked: a node may have been revoked
/// since it connected.
async fn only_nodes(
    State(server): TheServer,
    Extension(peer): Extension<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let reject = |error: Error, left_out: Option<u64>| {
        if let Some(left_out) = left_out {
            tracing::warn!(fingerprint = peer.0, %error, left_out, "request rejected");
        }
        error.into_response()
    };
    let node = match server.registry.admit(&peer.0) {
        Ok(node) => node,
        Err(error) => return reject(error, server.warnings.next()),
    };
    if !server.requests.take(node.client) {
        let left_out = server.desk.warnings.next(node.client);
        return reject(Error::TooMany("too many requests; wait a second"), left_out);
    }
    let up = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    server.desk.bytes_up.fetch_add(up.unwrap_or(0).min(PIECE_BYTES as u64), Ordering::Relaxed);
    request.extensions_mut().insert(node);
    match tokio::time::timeout(REQUEST_TIME_MAX, next.run(request)).await {
        Ok(response) => response,
        Err(_) => (StatusCode::REQUEST_TIMEOUT, "the request took too long").into_response(),
    }
}

async fn work(State(server): TheServer, Extension(node): Node, Proto(request): Proto<WorkRequest>) -> Result<Response> {
    if request.version != VERSION {
        let theirs = request.version;
        let problem = format!("the server has protocol version {VERSION}, the node {theirs}; use the same release");
        return Err(Error::protocol(problem));
    }
    let _poll = server.desk.presence.poll(node.client);
    let mut changes = server.desk.changes();
    let end = tokio::time::Instant::now() + LONG_POLL;
    loop {
        let work: Work = server.desk.work(node.client);
        let waits = matches!(work.kind, Some(WorkKind::Wait(_)));
        if !waits || !matches!(tokio::time::timeout_at(end, changes.changed()).await, Ok(Ok(()))) {
            return Ok(reply(&server, &work));
        }
    }
}

async fn announce(
    State(server): TheServer,
    Extension(node): Node,
    Proto(announce): Proto<Announce>,
) -> Result<Response> {
    let _poll = server.desk.presence.poll(node.client);
    let mut changes = server.desk.changes();
    let end = tokio::time::Instant::now() + LONG_POLL;
    loop {
        let kind = server.desk.next_instruction(&node, &announce)?;
        let waits = matches!(kind, InstructionKind::Wait(_));
        if !waits || !matches!(tokio::time::timeout_at(end, changes.changed()).await, Ok(Ok(()))) {
            return Ok(reply(&server, &Instruction::from(kind)));
        }
    }
}

async fn share(State(server): TheServer, Extension(node): Node, Proto(shares): Proto<SharesFor>) -> StatusCode {
    server.desk.share(node.client, shares);
    StatusCode::NO_CONTENT
}

async fn reveal(State(server): TheServer, Extension(node): Node, Proto(reveal): Proto<RevealFor>) -> StatusCode {
    server.desk.reveal(node.client, reveal);
    StatusCode::NO_CONTENT
}

async fn heartbeat(State(server): TheServer, Extension(node): Node, Proto(beat): Proto<Heartbeat>) -> Result<Response> {
    server.desk.presence.heard(node.client, beat.round);
    if node.is_due(&server.authority, server.config.certificate_days) {
        return Ok(reply(&server, &Beat { renew: true }));
    }
    if node.replaces.is_some() {
        blocking(move || server.registry.retire_replaced(&node)).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn renew(
    State(server): TheServer,
    Extension(node): Node,
    Proto(RenewRequest { request }): Proto<RenewRequest>,
) -> Result<Response> {
    let for_reply = Arc::clone(&server);
    let renewed = blocking(move || {
        let days = server.config.certificate_days;
        let (node, certificate) = server.registry.renew(&server.authority, &node, &request, days)?;
        enter(&server, &node)?;
        Ok(certificate_reply(&server, node, certificate))
    });
    Ok(reply(&for_reply, &renewed.await?))
}

fn certificate_reply(server: &Server, node: NodeEntry, certificate: String) -> EnrolReply {
    EnrolReply { name: node.name, client: node.client, certificate, authority: server.authority.bundle() }
}

async fn contribute(
    State(server): TheServer,
    Extension(node): Node,
    Proto(contribution): Proto<Contribution>,
) -> Result<Response> {
    server.desk.presence.heard(node.client, Some(contribution.round));
    let desk = Arc::clone(&server.desk);
    let verdict = blocking(move || desk.submit(node.client, &contribution)).await?;
    Ok(reply(&server, &verdict))
}

async fn decline(
    State(server): TheServer,
    Extension(node): Node,
    Proto(decline): Proto<Decline>,
) -> Result<StatusCode> {
    blocking(move || server.desk.decline(node.client, decline)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn fetch(State(server): TheServer, Path((hash, from)): Path<(String, u64)>) -> Result<Response> {
    let hash = Blob::parse_hex(&hash).ok_or_else(|| Error::protocol("not a hash"))?;
    let end = from.saturating_add(PIECE_BYTES as u64);
    let block = async move |server: Arc<Server>, hash: Vec<u8>, at: u64| {
        let n_max = BLOCK_BYTES.min(end.saturating_sub(at) as usize);
        let desk = Arc::clone(&server.desk);
        let read = blocking(move || desk.blobs.read(&hash, at, n_max)).await?;
        server.desk.bytes_down.fetch_add(read.as_ref().map_or(0, |(bytes, _)| bytes.len()) as u64, Ordering::Relaxed);
        Ok::<_, Error>(read)
    };
    let first = match block(Arc::clone(&server), hash.clone(), from).await? {
        Some((first, len)) if from <= len => first,
        Some(_) => return Ok((StatusCode::RANGE_NOT_SATISFIABLE, "the blob is shorter than that").into_response()),
        None => return Ok((StatusCode::NOT_FOUND, "there is no such blob (any more)").into_response()),
    };
    let blocks = futures_util::stream::try_unfold((first, from), move |(bytes, at)| {
        let (server, hash, next) = (Arc::clone(&server), hash.clone(), at + bytes.len() as u64);
        async move {
            if bytes.is_empty() {
                return Ok(None);
            }
            let following = block(server, hash, next).await?.map(|(bytes, _)| bytes).unwrap_or_default();
            Ok::<_, Error>(Some((bytes, (following, next))))
        }
    });
    Ok(Body::from_stream(blocks).into_response())
}

async fn receive(
    State(server): TheServer,
    Extension(node): Node,
    Path((hash, from)): Path<(String, u64)>,
    body: Body,
) -> Result<Response> {
    let hash = Blob::parse_hex(&hash).ok_or_else(|| Error::protocol("not a hash"))?;
    let (mut at, mut block, mut frames) = (from, Vec::with_capacity(BLOCK_BYTES), body.into_data_stream());
    loop {
        let frame = frames.next().await.transpose();
        let frame = frame.map_err(|e| Error::protocol(format!("the piece broke off: {e}")))?;
        if let Some(frame) = &frame {
            block.extend_from_slice(frame);
        }
        if block.len() < BLOCK_BYTES && frame.is_some() {
            continue;
        }
        if at - from + block.len() as u64 > PIECE_BYTES as u64 {
            return Err(Error::protocol(format!("a piece of more than {PIECE_BYTES} bytes")));
        }
        let (desk, hash) = (Arc::clone(&server.desk), hash.clone());
        let work = move || desk.receive(node.client, &hash, at, &block).map(|received| (received, block));
        let (received, emptied) = blocking(work).await?;
        at += emptied.len() as u64;
        block = emptied;
        block.clear();
        // After a gap, nothing that follows can be stored.
        if frame.is_none() || received.have < at {
            return Ok(reply(&server, &received));
        }
    }
}

async fn enrol(
    State(server): TheServer,
    Extension(From(origin)): Extension<From>,
    Proto(request): Proto<EnrolRequest>,
) -> Result<Response> {
    let EnrolRequest { secret, request } = request;
    // The secret first: wrong ones use up what their own address may try, never what those with an invitation share.
    let may_try = if server.registry.is_invited(&secret) {
        lock(&server.enrolments).take(Instant::now())
    } else {
        server.wrong_tokens.take(origin)
    };
    if !may_try {
        return Err(Error::TooMany("too many enrolments at present; try again in a minute"));
    }
    let for_reply = Arc::clone(&server);
    let enrolled = blocking(move || {
        let days = server.config.certificate_days;
        let (node, certificate) = server.registry.enrol(&server.authority, &secret, &request, days)?;
        let is_new = enter(&server, &node)?;
        Ok((certificate_reply(&server, node, certificate), is_new))
    });
    let enrolled = enrolled.await;
    if !matches!(enrolled, Ok((_, true))) {
        // Slows down guessing, even though a secret has 256 bits, and repeated requests.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    if let Err(error) = &enrolled
        && let Some(left_out) = for_reply.warnings.next()
    {
        tracing::warn!(%error, left_out, "enrolment rejected");
    }
    enrolled.map(|(enrolled, _)| reply(&for_reply, &enrolled))
}

/// Enters a new certificate in the journal and returns true, unless it is already there: a node whose answer was lost
/// repeats its request, and is entered once.
fn enter(server: &Server, node: &NodeEntry) -> Result<bool> {
    let mut enrolled = lock(&server.enrolled);
    if enrolled.contains(&node.fingerprint) {
        return Ok(false);
    }
    let NodeEntry { name, client, fingerprint, replaces, .. } = node.clone();
    let (node, of, is_renewed) = (name.clone(), fingerprint.clone(), replaces.is_some());
    let event = match replaces {
        Some(replaces) => Event::Renewed { node, client, fingerprint, replaces },
        None => Event::Enrolled { node, client, fingerprint },
    };
    tracing::info!(node = name, client, is_renewed, "enrolled");
    server.desk.log(event)?;
    Ok(enrolled.insert(of))
}

fn reply(server: &Server, message: &impl Message) -> Response {
    let bytes = message.encode_to_vec();
    server.desk.bytes_down.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    ([(header::CONTENT_TYPE, "application/x-protobuf")], bytes).into_response()
}

/// Runs disk access and hashing on threads that may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)?
}

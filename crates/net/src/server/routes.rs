//! What the doors of [`crate::server::http`] lead to: the requests of nodes, and of strangers with a token.

use crate::error::{Error, Result};
use crate::server::door::Peer;
use crate::server::http::Server;
use crate::server::journal::Event;
use crate::server::registry::NodeEntry;
use crate::wire::message::{
    BLOCK_BYTES, Blob, Contribution, Decline, EnrolReply, EnrolRequest, Heartbeat, PIECE_BYTES, VERSION, Wait, Work,
    WorkRequest, decode, work,
};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Extension, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use futures_util::StreamExt;
use prost::Message;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How long a request for work is held where there is none.
const LONG_POLL: Duration = Duration::from_secs(25);

/// How long a request may take, long polls included.
pub(crate) const REQUEST_TIME_MAX: Duration = Duration::from_mins(2);

/// Bodies of small messages, and of a contribution: a few names and hashes.
const SMALL: usize = 1 << 12;
const CONTRIBUTION: usize = 1 << 16;

pub(crate) fn node_routes(server: &Arc<Server>) -> Router {
    let at_most = DefaultBodyLimit::max;
    Router::new()
        .route("/v1/work", post(work_for).layer(at_most(SMALL)))
        .route("/v1/heartbeat", post(heartbeat).layer(at_most(SMALL)))
        .route("/v1/contribute", post(contribute).layer(at_most(CONTRIBUTION)))
        .route("/v1/decline", post(decline).layer(at_most(SMALL)))
        .route("/v1/blob/{hash}/{from}", get(fetch))
        // Taken in blocks, up to a piece.
        .route("/v1/blob/{hash}/{from}", put(receive))
        .layer(middleware::from_fn_with_state(Arc::clone(server), only_nodes))
        .with_state(Arc::clone(server))
}

/// Lets nodes in that belong here and are not too busy, and counts what goes through. A node that was let in may have been
/// shut out since: each request is looked at.
async fn only_nodes(
    State(server): State<Arc<Server>>,
    Extension(peer): Extension<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let admitted = server.registry.admit(&peer.0).and_then(|node| {
        let has_time = server.has_time(node.client);
        if has_time { Ok(node) } else { Err(Error::TooMany("too many requests; wait a second")) }
    });
    let node = match admitted {
        Ok(node) => node,
        Err(error) => {
            if let Some(left_out) = server.warnings.next() {
                tracing::warn!(fingerprint = peer.0, %error, left_out, "request refused");
            }
            return error.into_response();
        }
    };
    let up = request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    server.desk.bytes_up.fetch_add(up.unwrap_or(0).min(PIECE_BYTES as u64), Ordering::Relaxed);
    request.extensions_mut().insert(node);
    match tokio::time::timeout(REQUEST_TIME_MAX, next.run(request)).await {
        Ok(response) => response,
        Err(_) => (StatusCode::REQUEST_TIMEOUT, "the request took too long").into_response(),
    }
}

async fn work_for(
    State(server): State<Arc<Server>>,
    Extension(node): Extension<NodeEntry>,
    body: Bytes,
) -> Result<Response> {
    let request: WorkRequest = decode(&body)?;
    if request.version != VERSION {
        let problem =
            format!("this server speaks version {VERSION}, the node {}; use the same release", request.version);
        return Err(Error::protocol(problem));
    }
    let _poll = server.desk.presence.poll(node.client);
    let mut changes = server.desk.changes();
    let end = tokio::time::Instant::now() + LONG_POLL;
    loop {
        let work = server.desk.work(node.client);
        let waits = matches!(work.kind, Some(work::Kind::Wait(_)));
        if !waits {
            return Ok(reply(&server, &work));
        }
        match tokio::time::timeout_at(end, changes.changed()).await {
            Ok(Ok(())) => (),
            _ => return Ok(reply(&server, &Work { kind: Some(work::Kind::Wait(Wait {})) })),
        }
    }
}

async fn heartbeat(
    State(server): State<Arc<Server>>,
    Extension(node): Extension<NodeEntry>,
    body: Bytes,
) -> Result<StatusCode> {
    let beat: Heartbeat = decode(&body)?;
    server.desk.presence.heard(node.client, beat.round);
    Ok(StatusCode::NO_CONTENT)
}

async fn contribute(
    State(server): State<Arc<Server>>,
    Extension(node): Extension<NodeEntry>,
    body: Bytes,
) -> Result<Response> {
    let contribution: Contribution = decode(&body)?;
    server.desk.presence.heard(node.client, Some(contribution.round));
    let desk = Arc::clone(&server.desk);
    let verdict = blocking(move || desk.submit(node.client, &contribution)).await?;
    Ok(reply(&server, &verdict))
}

async fn decline(
    State(server): State<Arc<Server>>,
    Extension(node): Extension<NodeEntry>,
    body: Bytes,
) -> Result<StatusCode> {
    let Decline { run, round, reason } = decode(&body)?;
    let desk = Arc::clone(&server.desk);
    blocking(move || desk.decline(node.client, &run, round, &reason)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn fetch(State(server): State<Arc<Server>>, Path((hash, from)): Path<(String, u64)>) -> Result<Response> {
    let hash = Blob::parse_hex(&hash).ok_or_else(|| Error::protocol("not a hash"))?;
    let end = from.saturating_add(PIECE_BYTES as u64);
    let block = async move |server: Arc<Server>, hash: Vec<u8>, at: u64| {
        let n_max = BLOCK_BYTES.min(end.saturating_sub(at) as usize);
        let desk = Arc::clone(&server.desk);
        let read = blocking(move || desk.fetch(&hash, at, n_max)).await?;
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
    State(server): State<Arc<Server>>,
    Extension(node): Extension<NodeEntry>,
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
        // A gap cannot be filled by what follows it.
        if frame.is_none() || received.have < at {
            return Ok(reply(&server, &received));
        }
    }
}

pub(crate) fn enrol_routes(server: &Arc<Server>) -> Router {
    let routes = Router::new().route("/v1/enrol", post(enrol));
    routes.layer(DefaultBodyLimit::max(1 << 14)).with_state(Arc::clone(server))
}

async fn enrol(State(server): State<Arc<Server>>, body: Bytes) -> Result<Response> {
    let EnrolRequest { secret, request } = decode(&body)?;
    let may = server.enrolments.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
    if !may {
        return Err(Error::TooMany("too many enrolments at present; try again in a minute"));
    }
    let for_reply = Arc::clone(&server);
    let enrolled = blocking(move || {
        let days = server.config.certificate_days;
        let (node, certificate) = server.registry.enrol(&server.authority, &secret, &request, days)?;
        let is_new = enter(&server, &node)?;
        let NodeEntry { name, client, .. } = node;
        Ok((EnrolReply { name, client, certificate, authority: server.authority.certificate().to_owned() }, is_new))
    });
    match enrolled.await {
        Ok((enrolled, true)) => Ok(reply(&for_reply, &enrolled)),
        repeated_or_refused => {
            // Guessing takes time, even though a secret has 256 bits; and so does asking for the same again.
            tokio::time::sleep(Duration::from_millis(500)).await;
            let refused = |error: Error| {
                if let Some(left_out) = for_reply.warnings.next() {
                    tracing::warn!(%error, left_out, "enrolment refused");
                }
                error
            };
            repeated_or_refused.map(|(enrolled, _)| reply(&for_reply, &enrolled)).map_err(refused)
        }
    }
}

/// Enters an enrolment in the journal, if it is not there: a node that repeats its request, because the answer was lost on
/// its way, is enrolled once. Whether it was new.
fn enter(server: &Server, node: &NodeEntry) -> Result<bool> {
    let mut enrolled = server.enrolled.lock().unwrap_or_else(PoisonError::into_inner);
    if enrolled.contains(&node.fingerprint) {
        return Ok(false);
    }
    let NodeEntry { name, client, fingerprint, .. } = node.clone();
    tracing::info!(node = name, client, "enrolled");
    server.desk.log(Event::Enrolled { node: name, client, fingerprint: fingerprint.clone() })?;
    Ok(enrolled.insert(fingerprint))
}

fn reply(server: &Server, message: &impl Message) -> Response {
    let bytes = message.encode_to_vec();
    server.desk.bytes_down.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    ([(header::CONTENT_TYPE, "application/x-protobuf")], bytes).into_response()
}

/// Disk and hashing are for threads that may wait.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Error::config(format!("a request failed: {e}")))?
}

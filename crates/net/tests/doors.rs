//! The server's doors: membership, number and duration of connections, sizes and rates.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod scene;

use axum::http::Version;
use fedproj_net::node::{Home, enrol_tls, node_request, node_tls};
use fedproj_net::server::journal::Event;
use fedproj_net::server::{Authority, INVITATION_LASTS, Registry};
use fedproj_net::wire::{EnrolRequest, Heartbeat, WorkRequest};
use fedproj_net::{Error, Link};
use scene::{Http, Scene, task_of};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

#[tokio::test(flavor = "multi_thread")]
async fn strangers_do_not_get_past_the_door() {
    let scene = Scene::new(1, &["federation.rounds=1"], |_| ()).await;
    let authority = Authority::open(&scene.server_dir()).unwrap();
    let foreign_dir = tempfile::tempdir().unwrap();
    let foreign = Authority::open(&foreign_dir.path().join("federation")).unwrap();
    let (key, request) = node_request().unwrap();
    let try_with = async |certificate: &str| {
        let tls = node_tls(authority.certificate(), certificate, &key).unwrap();
        Link::new(&scene.address(), tls).unwrap().send(&WorkRequest::current()).await.unwrap_err()
    };
    // Another authority's certificate, and one of ours that has expired.
    let error = try_with(&foreign.sign(&request, "n0", 10).unwrap()).await;
    assert!(matches!(error, Error::Unreachable(_)), "{error}");
    let error = try_with(&authority.sign(&request, "n0", -1).unwrap()).await;
    assert!(matches!(error, Error::Unreachable(_)), "{error}");
    // Signed by this authority, but never entered in the registry: the handshake passes, the door stays shut.
    let error = try_with(&authority.sign(&request, "n0", 10).unwrap()).await;
    assert!(matches!(error, Error::Rejected { status: 403, .. }), "{error}");
    // No certificate at all, and no TLS at all.
    let without = Link::new(&scene.address(), enrol_tls(authority.fingerprint().unwrap()).unwrap());
    let error = without.unwrap().send(&WorkRequest::current()).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable(_)), "{error}");
    let mut plain = TcpStream::connect(scene.addresses.listen).await.unwrap();
    plain.write_all(b"POST /v1/work HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
    // A node does not talk to a server of another federation.
    let tls = node_tls(foreign.certificate(), &foreign.sign(&request, "n0", 10).unwrap(), &key).unwrap();
    let error = Link::new(&scene.address(), tls).unwrap().send(&WorkRequest::current()).await.unwrap_err();
    assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    let is_expected =
        |e: &Event| matches!(e, Event::RoundOpened { .. } | Event::Enrolled { .. } | Event::HandshakesRejected { .. });
    assert!(scene.journal().iter().all(is_expected));
    scene.serving.abort();
}

/// A silent connection with a certificate of the federation.
async fn silent(scene: &Scene, tls: fedproj_net::Result<rustls::ClientConfig>) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect(scene.addresses.listen).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    tokio_rustls::TlsConnector::from(Arc::new(tls.unwrap())).connect(name, stream).await.unwrap()
}

/// Waits until the server closes the connection.
async fn is_closed(mut connection: TlsStream<TcpStream>) -> bool {
    let mut rest = Vec::new();
    let closed = tokio::time::timeout(Duration::from_mins(2), connection.read_to_end(&mut rest)).await;
    closed.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_node_is_out_at_once_and_its_connections_are_closed() {
    let scene = Scene::new(2, &["federation.rounds=1"], |_| ()).await;
    let link = scene.attacker(0);
    task_of(&link).await;
    let tls = |client| Home::new(&scene.home(client)).tls();
    let (live, other) = (silent(&scene, tls(0)).await, silent(&scene, tls(1)).await);
    Registry::open(&scene.server_dir()).unwrap().revoke("n0").unwrap();
    let error = link.send(&WorkRequest::current()).await.unwrap_err();
    assert!(matches!(&error, Error::Rejected { status: 403, reason } if reason.contains("revoked")), "{error}");
    assert!(is_closed(live).await);
    // A new connection gets the reason and is closed.
    let error = scene.attacker(0).send(&Heartbeat::default()).await.unwrap_err();
    assert!(matches!(&error, Error::Rejected { status: 403, reason } if reason.contains("revoked")), "{error}");
    assert!(is_closed(silent(&scene, tls(0)).await).await);
    // Other nodes are not affected.
    let mut other = other;
    other.write_all(b"POST /v1/heartbeat HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    let mut answer = [0; 12];
    other.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 204");
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_expires_ends_its_open_connection() {
    let scene = Scene::new(1, &["federation.rounds=1"], |_| ()).await;
    let link = scene.attacker(0);
    task_of(&link).await;
    let live = silent(&scene, Home::new(&scene.home(0)).tls()).await;
    let node = Registry::open(&scene.server_dir()).unwrap().nodes().unwrap().remove(0);
    let path = scene.server_dir().join(format!("nodes/{}.toml", node.fingerprint));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace(&format!("expires = {}", node.expires), "expires = 1")).unwrap();
    let error = link.send(&WorkRequest::current()).await.unwrap_err();
    assert!(matches!(&error, Error::Rejected { status: 403, reason } if reason.contains("expired")), "{error}");
    assert!(is_closed(live).await);
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connections_per_certificate_are_limited() {
    let scene = Scene::new(2, &["federation.rounds=1"], |_| ()).await;
    let tls = || Home::new(&scene.home(0)).tls();
    let mut open = Vec::new();
    // Each has its own connection. Sixteen are accepted.
    for _ in 0..20 {
        let link = scene.attacker(0);
        open.extend(link.send(&Heartbeat::default()).await.is_ok().then_some(link));
    }
    assert!((14..=16).contains(&open.len()), "{}", open.len());
    assert!(is_closed(silent(&scene, tls()).await).await);
    // Other nodes are not affected; when some connections end, there is room again.
    scene.attacker(1).send(&Heartbeat::default()).await.unwrap();
    open.clear();
    while scene.attacker(0).send(&Heartbeat::default()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_enrolment_is_answered_and_journaled_once() {
    let scene = Scene::new(1, &["federation.rounds=1"], |_| ()).await;
    let dir = scene.server_dir();
    let (authority, registry) = (Authority::open(&dir).unwrap(), Registry::open(&dir).unwrap());
    let (token, _) = registry.invite(&authority, "again", None, INVITATION_LASTS).unwrap();
    let enrol = format!("https://{}", scene.addresses.enrol.unwrap());
    let link = Link::new(&enrol, enrol_tls(authority.fingerprint().unwrap()).unwrap()).unwrap();
    let ask = EnrolRequest { secret: token.secret.to_vec(), request: node_request().unwrap().1 };
    let first = link.send(&ask).await.unwrap();
    for _ in 0..3 {
        assert_eq!(link.send(&ask).await.unwrap(), first);
    }
    let entered = |e: &&Event| matches!(e, Event::Enrolled { node, .. } if node == "again");
    assert_eq!(scene.journal().iter().filter(entered).count(), 1);
    // And rejected after it was revoked.
    registry.revoke("again").unwrap();
    let error = link.send(&ask).await.unwrap_err();
    assert!(error.to_string().contains("has been used"), "{error}");
    assert_eq!(scene.journal().iter().filter(entered).count(), 1);
    // A flood is rejected without a look at its content.
    let links: Vec<Link> =
        (0..8).map(|_| Link::new(&enrol, enrol_tls(authority.fingerprint().unwrap()).unwrap()).unwrap()).collect();
    // Each opens its connection before many requests need one at the same time.
    futures_util::future::join_all(links.iter().map(|link| link.send(&ask))).await;
    let flood: Vec<_> = (0..320)
        .map(|n| {
            let (link, ask) = (links[n % 8].clone(), ask.clone());
            tokio::spawn(async move { link.send(&ask).await.unwrap_err() })
        })
        .collect();
    let mut n_too_many = 0;
    for answer in flood {
        n_too_many += u32::from(matches!(answer.await.unwrap(), Error::Rejected { status: 429, .. }));
    }
    assert!(n_too_many > 0);
    scene.serving.abort();
}

/// A silent connection to the enrolment's door from this address of the machine.
async fn silent_stranger(from: [u8; 4], to: std::net::SocketAddr) -> Option<TcpStream> {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(to).await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_and_random_tokens_do_not_starve_an_honest_enrolment() {
    let scene = Scene::new(1, &["federation.rounds=1"], |_| ()).await;
    let door = scene.addresses.enrol.unwrap();
    // Half of the places from one address, half from another.
    let mut idle = Vec::new();
    for n in 0..600 {
        idle.extend(silent_stranger([127, 0, 0, 2 + (n % 2) as u8], door).await);
    }
    let authority = Authority::open(&scene.server_dir()).unwrap();
    let guess = EnrolRequest { secret: vec![7; 32], request: node_request().unwrap().1 };
    let links: Vec<Link> = (0..8)
        .map(|_| {
            let tls = enrol_tls(authority.fingerprint().unwrap()).unwrap();
            Link::new(&format!("https://{door}"), tls).unwrap()
        })
        .collect();
    let guesses = (0..160).map(|n| links[n % 8].send(&guess));
    let answers = futures_util::future::join_all(guesses).await;
    let n_of = |wanted: u16| {
        let is = |a: &fedproj_net::Result<_>| matches!(a, Err(Error::Rejected { status, .. }) if *status == wanted);
        answers.iter().filter(|answer| is(answer)).count()
    };
    assert!(n_of(400) >= 1 && n_of(429) >= 100, "{} wrong, {} too many", n_of(400), n_of(429));
    // From the same address as the guesses, with a valid token, at once.
    let registry = Registry::open(&scene.server_dir()).unwrap();
    let (token, _) = registry.invite(&authority, "honest", None, INVITATION_LASTS).unwrap();
    let ask = EnrolRequest { secret: token.secret.to_vec(), ..guess };
    assert_eq!(links[0].send(&ask).await.unwrap().name, "honest");
    drop(idle);
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_page_answers_only_under_our_names_and_shows_nothing_secret() {
    let status = Some("127.0.0.1:0".parse().unwrap());
    let scene = Scene::new(1, &["federation.rounds=1"], |server| {
        (server.status, server.names) = (status, vec!["fed.example.org".into(), "127.0.0.1".into()]);
    })
    .await;
    task_of(&scene.attacker(0)).await;
    let address = scene.addresses.status.unwrap();
    let visit = async |host: &str, path: &str| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\n{host}connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    for host in ["host: evil.example\r\n", "host: 127.0.0.1.evil.example\r\n", ""] {
        let answer = visit(host, "/status.json").await;
        assert!(!answer.contains(" 200 ") && !answer.contains("fedavg"), "{host}: {answer}");
    }
    let node = Registry::open(&scene.server_dir()).unwrap().nodes().unwrap().remove(0);
    let authority = Authority::open(&scene.server_dir()).unwrap();
    let (token, _) =
        Registry::open(&scene.server_dir()).unwrap().invite(&authority, "b", None, INVITATION_LASTS).unwrap();
    let folder = scene.server_dir().display().to_string();
    for path in ["/", "/status.json", "/metrics"] {
        for host in ["localhost:9000", "fed.example.org", "127.0.0.1"] {
            let answer = visit(&format!("host: {host}\r\n"), path).await;
            assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("cache-control: no-store"), "{answer}");
            assert!(answer.contains("x-frame-options: DENY"), "{answer}");
            for secret in
                [&node.fingerprint, &node.fingerprint[..16], &folder, "PRIVATE KEY", &token.to_string()[9..25]]
            {
                assert!(!answer.contains(secret), "{path} shows {secret}: {answer}");
            }
        }
    }
    // A node that never connected is listed; a revoked one is, until another has its place.
    scene.enrol(2).await;
    // The page is made anew twice per second.
    let shows = async |told: &str| {
        let look = async {
            loop {
                let page = visit("host: localhost\r\n", "/").await;
                if page.contains(told) {
                    return page;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), look).await.expect(told)
    };
    shows("not heard from yet").await;
    let registry = Registry::open(&scene.server_dir()).unwrap();
    registry.revoke("n0").unwrap();
    assert!(shows("revoked").await.contains("n0"));
    let (token, _) = registry.invite(&authority, "heir", Some(0), INVITATION_LASTS).unwrap();
    let enrol = format!("https://{}", scene.addresses.enrol.unwrap());
    fedproj_net::enrol(&scene.dir.path().join("heir"), &enrol, &token.to_string()).await.unwrap();
    assert!(!shows("heir").await.contains("revoked"));
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_too_much_and_too_often_are_rejected() {
    let scene = Scene::new(1, &["federation.rounds=1"], |server| server.requests_per_s = 5.0).await;
    let tls = Home::new(&scene.home(0)).tls().unwrap();
    let client = Http::new(tls);
    let post = async |path: &str, body: Vec<u8>| {
        client.send("POST", &(scene.address() + path), body).await.map(|r| r.status().as_u16())
    };
    assert_eq!(post("/v1/work", vec![0xff; 40]).await.unwrap(), 400);
    assert_eq!(post("/v1/contribute", vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]).await.unwrap(), 400);
    assert_eq!(post("/v1/nothing", Vec::new()).await.unwrap(), 404);
    let address = scene.address() + "/v1/blob/..%2f..%2fca.key/0";
    let get = client.send("GET", &address, Vec::new()).await.unwrap();
    assert_eq!(get.status().as_u16(), 400);
    // Small messages have a small limit.
    assert_eq!(post("/v1/heartbeat", vec![0; 5000]).await.unwrap(), 413);
    assert_eq!(post("/v1/decline", vec![0; 5000]).await.unwrap(), 413);
    assert_eq!(post("/v1/contribute", vec![0; 70_000]).await.unwrap(), 413);
    // A body beyond the limit is not read to its end.
    match post("/v1/contribute", vec![0; 3 << 20]).await {
        Ok(status) => assert_eq!(status, 413),
        Err(error) => assert!(!error.is_connect(), "{error}"),
    }
    let mut refused = 0;
    for _ in 0..40 {
        // The connection that sent too much may still be closing.
        refused += u32::from(post("/v1/heartbeat", Vec::new()).await.is_ok_and(|status| status == 429));
    }
    assert!(refused > 0, "40 requests at once against a limit of 5 a second");
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_is_not_longer_than_it_is() {
    let scene = Scene::new(1, &["federation.rounds=1"], |_| ()).await;
    let task = task_of(&scene.attacker(0)).await;
    let tls = Home::new(&scene.home(0)).tls().unwrap();
    let client = Http::new(tls);
    let get = async |from: u64| {
        let address = format!("{}/v1/blob/{}/{from}", scene.address(), task.weights.hex());
        client.send("GET", &address, Vec::new()).await.unwrap()
    };
    let n = task.weights.len;
    for (from, expected) in [(0, (200, n)), (n - 4, (200, 4)), (n, (200, 0))] {
        let answer = get(from).await;
        assert_eq!((answer.status().as_u16(), answer.body().len() as u64), expected, "{from}");
    }
    for from in [n + 1, u64::MAX] {
        assert_eq!(get(from).await.status().as_u16(), 416, "{from}");
    }
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_use_http_2_or_http_1_1_and_the_status_page_is_read_only() {
    let scene =
        Scene::new(1, &["federation.rounds=1"], |server| server.status = Some("127.0.0.1:0".parse().unwrap())).await;
    let mut tls = Home::new(&scene.home(0)).tls().unwrap();
    let heartbeat = scene.address() + "/v1/heartbeat";
    let response = Http::new(tls.clone()).send("POST", &heartbeat, Vec::new()).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (204, Version::HTTP_2));
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let client = Http::new(tls);
    let response = client.send("POST", &heartbeat, Vec::new()).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (204, Version::HTTP_11));
    let status = format!("http://{}", scene.addresses.status.unwrap());
    task_of(&scene.attacker(0)).await;
    let page = client.send("GET", &status, Vec::new()).await.unwrap();
    assert!(page.headers()["content-security-policy"].to_str().unwrap().contains("default-src 'none'"));
    let text = String::from_utf8_lossy(page.body());
    assert!(text.contains("Round 1 of 1: 0 of 1 contributions") && !text.contains("<script>"), "{text}");
    let metrics = client.send("GET", &format!("{status}/metrics"), Vec::new()).await.unwrap();
    let metrics = String::from_utf8_lossy(metrics.body());
    assert!(metrics.contains("\nfedproj_nodes_alive 1\n"), "{metrics}");
    let taken = client.send("POST", &status, Vec::new()).await.unwrap();
    assert_eq!(taken.status().as_u16(), 405);
    scene.serving.abort();
}

//! Which requests the status page answers. It has no password. Another site could point its own name at this machine, so that
//! its pages could read this one. The browser then sends that name as `Host`, and the page does not answer.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header, uri::Authority};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;

/// Answers only visits under an address, under `localhost`, or under one of the server's names.
pub(crate) fn only_our_hosts(routes: Router, names: &[String]) -> Router {
    routes.layer(middleware::from_fn_with_state(Arc::<[String]>::from(names), check))
}

async fn check(State(names): State<Arc<[String]>>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    if !host.is_some_and(|host| is_ours(host, &names)) {
        let told = "this server is not known by that name; add it to server.names, or use the address";
        return (StatusCode::MISDIRECTED_REQUEST, told).into_response();
    }
    let mut response = next.run(request).await;
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

fn is_ours(host: &str, names: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|ours| ours.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_localhost_and_our_names_are_ours_and_nothing_else() {
        let names = ["fed.example.org".to_owned()];
        for host in ["127.0.0.1:7445", "127.0.0.1", "[::1]:7445", "localhost:80", "LocalHost", "FED.example.org:1"] {
            assert!(is_ours(host, &names), "{host}");
        }
        for host in ["evil.example", "fed.example.org.evil.example", "127.0.0.1.evil.example", "", "a b", "localhost@x"]
        {
            assert!(!is_ours(host, &names), "{host}");
        }
    }
}

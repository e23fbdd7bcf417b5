//! What can be asked of the TCP port. Nothing here changes anything: that is on the Unix socket.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLock};

use axum::extract::{Request, State};
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::json;
use tracing::Instrument;

use crate::http::access::Access;
use crate::http::page;
use crate::metrics::{self, Format};
use crate::node::Node;
use crate::status::{HealthState, NodeState, Status};
use crate::telemetry::{TraceContext, request_span};

type Current<T> = Arc<RwLock<Arc<T>>>;

pub(super) fn router(node: &Node, access: &Current<Access>) -> Router {
    let guarded = Router::new()
        .route("/", get(status_page))
        .route("/live", get(live))
        .route("/status.json", get(status_json))
        .route("/metrics", get(scrape))
        .layer(from_fn_with_state((node.clone(), Arc::clone(access)), guard));
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .merge(guarded)
        .layer(from_fn_with_state(node.clone(), observe))
        .with_state(node.clone())
}

/// Counts a request, gives it a span, and says what holds for every answer.
async fn observe(State(node): State<Node>, request: Request, next: Next) -> Response {
    let parent = request.headers().get("traceparent").and_then(|header| header.to_str().ok());
    let operation = match request.uri().path() {
        "/metrics" => "http metrics",
        "/healthz" | "/readyz" => "http health",
        _ => "http status",
    };
    let span = request_span(operation, "", parent.and_then(TraceContext::parse));
    let mut response = next.run(request).instrument(span).await;
    node.traffic().http.requests.fetch_add(1, Relaxed);
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Lets through who may look.
async fn guard(
    State((node, access)): State<(Node, Current<Access>)>,
    request: Request,
    next: Next,
) -> Response {
    let access = Arc::clone(&access.read().unwrap_or_else(PoisonError::into_inner));
    let Err(status) = access.check(request.headers()) else {
        return next.run(request).await;
    };
    node.traffic().http.refused.fetch_add(1, Relaxed);
    if status == StatusCode::UNAUTHORIZED {
        let reason = json!({"error": "this needs the node's token, as `Authorization: Bearer`"});
        let mut response = (status, Json(reason)).into_response();
        let headers = response.headers_mut();
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"cascade\""));
        // For people: a browser asks for the token as the password of any user.
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"cascade\""));
        return response;
    }
    let reason = json!({"error": "ask by address or as localhost, not by another name"});
    (status, Json(reason)).into_response()
}

/// The process lives: it answers.
async fn healthz() -> Json<serde_json::Value> {
    Json(json!({"healthy": true}))
}

/// The node serves, or why it does not.
async fn readyz(State(node): State<Node>) -> Response {
    match unready(&node) {
        None => Json(json!({"ready": true})).into_response(),
        Some(reason) => {
            let body = json!({"ready": false, "reason": reason});
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}

fn unready(node: &Node) -> Option<&'static str> {
    match node.state() {
        NodeState::Starting => return Some("starting"),
        NodeState::Draining => return Some("draining"),
        NodeState::Serving => {}
    }
    let status = node.status();
    let Some(tenant) = status.tenants.first() else { return Some("no store") };
    let is_open = |state: HealthState| state != HealthState::Healthy;
    let mut tiers = tenant.tiers.iter().filter(|tier| tier.capacity_bytes > 0).peekable();
    let none_serves = tiers.peek().is_some()
        && tiers.all(|tier| tier.health.as_ref().is_some_and(|health| is_open(health.state)));
    none_serves.then_some("no tier serves")
}

/// A status, remembered for the plots.
fn look(node: &Node) -> Status {
    let status = node.status();
    node.samples().note(&status);
    status
}

async fn status_json(State(node): State<Node>) -> Json<Status> {
    Json(look(&node))
}

async fn scrape(State(node): State<Node>, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::accepted(accept);
    let text = metrics::encode(look(&node), format);
    ([(CONTENT_TYPE, format.content_type())], text).into_response()
}

/// The part of the page that changes.
async fn live(State(node): State<Node>) -> Html<String> {
    let status = look(&node);
    Html(page::live(&status, &node.samples().series()).into_string())
}

async fn status_page(State(node): State<Node>) -> Response {
    let mut nonce = [0; 16];
    if SystemRandom::new().fill(&mut nonce).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let nonce = format!("{:032x}", u128::from_le_bytes(nonce));
    let status = look(&node);
    let page = page::page(&status, &node.samples().series(), &nonce).into_string();
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    );
    let headers = [(CONTENT_SECURITY_POLICY, policy), (REFERRER_POLICY, "no-referrer".to_owned())];
    (headers, Html(page)).into_response()
}

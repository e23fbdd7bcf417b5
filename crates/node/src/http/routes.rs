//! The routes of the HTTP server. All are read-only: commands go through the node's own socket.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::body::Bytes;
use axum::extract::{Extension, Request, State};
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::json;
use tracing::{Instrument, Span};

use crate::http::ReloadableAccess;
use crate::http::access::Caller;
use crate::http::responses::{ResponseKind, ResponseQueue};
use crate::http::runbooks::runbook;
use crate::metrics::MetricsFormat;
use crate::node::Node;
use crate::status::StatusView;
use crate::telemetry::{TraceContext, request_span};

const HTML: &str = "text/html; charset=utf-8";

/// All routes.
pub(super) fn router(node: &Node, access: &ReloadableAccess) -> Router {
    let guarded = Router::new()
        .route("/", get(status_page))
        .route("/live", get(page_body))
        .route("/status.json", get(status_json))
        .route("/metrics", get(scrape))
        .layer(from_fn_with_state((node.clone(), access.clone()), guard))
        .with_state(ResponseQueue::new(node));
    let runbooks = Router::new().route("/runbooks/{alert}", get(runbook));
    health(node).merge(runbooks).merge(guarded).layer(from_fn_with_state(node.clone(), observe))
}

/// Only the health checks, for connections above the limit.
pub(super) fn health_router(node: &Node) -> Router {
    let observe = from_fn_with_state(node.clone(), observe);
    health(node).fallback(connection_limit_reached).layer(observe)
}

fn health(node: &Node) -> Router {
    // A separate queue, so that readiness does not wait for a status that is being taken.
    let readiness =
        Router::new().route("/readyz", get(readyz)).with_state(ResponseQueue::new(node));
    Router::new().route("/healthz", get(healthz)).merge(readiness)
}

async fn connection_limit_reached() -> Response {
    let reason = "connection limit reached: this connection serves only /healthz and /readyz; \
                  retry";
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error": reason}))).into_response()
}

/// Counts a request, and sets the headers that all responses have.
async fn observe(State(node): State<Node>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    node.traffic().http.requests.fetch_add(1, Relaxed);
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Determines what the caller may see, or refuses the request.
async fn guard(
    State((node, access)): State<(Node, ReloadableAccess)>,
    mut request: Request,
    next: Next,
) -> Response {
    if !node.has_stores() {
        let reason = json!({"error": node.progress_of_start()});
        return (StatusCode::SERVICE_UNAVAILABLE, Json(reason)).into_response();
    }
    let access = access.current();
    let caller = request.extensions().get().copied();
    let caller = caller.unwrap_or(Caller::Tcp { has_certificate: false });
    let view_of_token = |token: &[u8]| {
        // With a token, the user does not matter.
        let tenant = node.tenants().identify(u32::MAX, Some(token)).ok()?;
        Some(StatusView::of_tenant(&tenant))
    };
    let view_of_peer = |user, group| StatusView::of_peer(node.tenants(), user, group);
    let status = match access.check(caller, request.headers(), view_of_token, view_of_peer) {
        Ok(view) => {
            request.extensions_mut().insert(view);
            // Only requests with access have spans: others could fill the queue to the collector.
            let span = span_of(&request);
            return next.run(request).instrument(span).await;
        }
        Err(status) => status,
    };
    node.traffic().http.refused.fetch_add(1, Relaxed);
    if status == StatusCode::UNAUTHORIZED {
        let reason = json!({"error": "token required, as `Authorization: Bearer TOKEN`"});
        let mut response = (status, Json(reason)).into_response();
        let headers = response.headers_mut();
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"cascade\""));
        // Makes a browser prompt for the token, as the password of any user name.
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"cascade\""));
        return response;
    }
    let reason = json!({"error": "wrong Host header: use the IP address or localhost in the URL"});
    (status, Json(reason)).into_response()
}

fn span_of(request: &Request) -> Span {
    let parent = request.headers().get("traceparent").and_then(|header| header.to_str().ok());
    let operation = if request.uri().path() == "/metrics" { "http metrics" } else { "http status" };
    request_span(operation, "", parent.and_then(TraceContext::parse))
}

/// Liveness: succeeds while the process responds.
async fn healthz() -> Json<serde_json::Value> {
    Json(json!({"healthy": true}))
}

/// Readiness, with the reason if the node is not ready.
async fn readyz(State(responses): State<Arc<ResponseQueue>>) -> Response {
    let reason = match responses.request(StatusView::Totals, ResponseKind::Readiness).await {
        Some(reason) if reason.is_empty() => return Json(json!({"ready": true})).into_response(),
        Some(reason) => String::from_utf8_lossy(&reason).into_owned(),
        None => "the store does not respond".to_owned(),
    };
    let body = json!({"ready": false, "reason": reason});
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

/// A response with its content type, or the error of a time-out.
fn with_type(content_type: &'static str, response: Option<Bytes>) -> Response {
    if let Some(text) = response {
        ([(CONTENT_TYPE, content_type)], text).into_response()
    } else {
        let reason = json!({"error": "the status is not available in time; see the node's log"});
        (StatusCode::SERVICE_UNAVAILABLE, Json(reason)).into_response()
    }
}

async fn status_json(
    State(responses): State<Arc<ResponseQueue>>,
    Extension(view): Extension<StatusView>,
) -> Response {
    with_type("application/json", responses.request(view, ResponseKind::Json).await)
}

async fn scrape(
    State(responses): State<Arc<ResponseQueue>>,
    Extension(view): Extension<StatusView>,
    headers: HeaderMap,
) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = MetricsFormat::accepted(accept);
    let response = responses.request(view, ResponseKind::Metrics(format)).await;
    with_type(format.content_type(), response)
}

/// The part of the page that changes.
async fn page_body(
    State(responses): State<Arc<ResponseQueue>>,
    Extension(view): Extension<StatusView>,
) -> Response {
    with_type(HTML, responses.request(view, ResponseKind::PageBody).await)
}

async fn status_page(
    State(responses): State<Arc<ResponseQueue>>,
    Extension(view): Extension<StatusView>,
) -> Response {
    let mut nonce = [0; 16];
    if SystemRandom::new().fill(&mut nonce).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let nonce = format!("{:032x}", u128::from_le_bytes(nonce));
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    );
    let headers = [(CONTENT_SECURITY_POLICY, policy), (REFERRER_POLICY, "no-referrer".to_owned())];
    let page = with_type(HTML, responses.request(view, ResponseKind::Page { nonce }).await);
    (headers, page).into_response()
}

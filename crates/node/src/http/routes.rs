//! What can be asked over HTTP. Nothing here changes anything: that is on the node's own socket.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLock};

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
use tracing::Instrument;

use crate::http::access::{Access, Caller};
use crate::http::answers::{Answers, Wish};
use crate::http::runbooks::runbook;
use crate::metrics::Format;
use crate::node::Node;
use crate::status::View;
use crate::telemetry::{TraceContext, request_span};

type Current<T> = Arc<RwLock<Arc<T>>>;

const HTML: &str = "text/html; charset=utf-8";

/// Everything.
pub(super) fn router(node: &Node, access: &Current<Access>) -> Router {
    let guarded = Router::new()
        .route("/", get(status_page))
        .route("/live", get(live))
        .route("/status.json", get(status_json))
        .route("/metrics", get(scrape))
        .layer(from_fn_with_state((node.clone(), Arc::clone(access)), guard))
        .with_state(Answers::new(node));
    let runbooks = Router::new().route("/runbooks/{alert}", get(runbook));
    health(node).merge(runbooks).merge(guarded).layer(from_fn_with_state(node.clone(), observe))
}

/// Health alone, for connections beyond those that there are places for.
pub(super) fn health_router(node: &Node) -> Router {
    let observe = from_fn_with_state(node.clone(), observe);
    health(node).fallback(too_many).layer(observe)
}

fn health(node: &Node) -> Router {
    // Answers of its own: it does not wait for a status that is being taken.
    let readiness = Router::new().route("/readyz", get(readyz)).with_state(Answers::new(node));
    Router::new().route("/healthz", get(healthz)).merge(readiness)
}

async fn too_many() -> Response {
    let reason =
        "all connections are busy, and this one gets /healthz and /readyz alone; ask again";
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error": reason}))).into_response()
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

/// Finds out how much the caller may see, or refuses.
async fn guard(
    State((node, access)): State<(Node, Current<Access>)>,
    mut request: Request,
    next: Next,
) -> Response {
    let access = Arc::clone(&access.read().unwrap_or_else(PoisonError::into_inner));
    let caller = request.extensions().get().copied().unwrap_or(Caller::Tcp);
    let of_token = |token: &[u8]| {
        // The token decides, whoever the user is.
        let tenant = node.tenants().identify(u32::MAX, Some(token)).ok()?;
        Some(View::of_tenant(&tenant))
    };
    let of_user = |user| View::of_user(&node, user);
    let status = match access.check(caller, request.headers(), of_token, of_user) {
        Ok(view) => {
            request.extensions_mut().insert(view);
            return next.run(request).await;
        }
        Err(status) => status,
    };
    node.traffic().http.refused.fetch_add(1, Relaxed);
    if status == StatusCode::UNAUTHORIZED {
        let reason = json!({"error": "this needs a token, as `Authorization: Bearer TOKEN`"});
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
async fn readyz(State(answers): State<Arc<Answers>>) -> Response {
    let reason = match answers.ask(View::Totals, Wish::Unready).await {
        Some(reason) if reason.is_empty() => return Json(json!({"ready": true})).into_response(),
        Some(reason) => String::from_utf8_lossy(&reason).into_owned(),
        None => "the store does not answer".to_owned(),
    };
    let body = json!({"ready": false, "reason": reason});
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

/// An answer with its type, or that there is none in time.
fn typed(content_type: &'static str, answer: Option<Bytes>) -> Response {
    if let Some(text) = answer {
        ([(CONTENT_TYPE, content_type)], text).into_response()
    } else {
        let reason = json!({"error": "the node's figures could not be had; see its log"});
        (StatusCode::SERVICE_UNAVAILABLE, Json(reason)).into_response()
    }
}

async fn status_json(
    State(answers): State<Arc<Answers>>,
    Extension(view): Extension<View>,
) -> Response {
    typed("application/json", answers.ask(view, Wish::Json).await)
}

async fn scrape(
    State(answers): State<Arc<Answers>>,
    Extension(view): Extension<View>,
    headers: HeaderMap,
) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::accepted(accept);
    typed(format.content_type(), answers.ask(view, Wish::Metrics(format)).await)
}

/// The part of the page that changes.
async fn live(State(answers): State<Arc<Answers>>, Extension(view): Extension<View>) -> Response {
    typed(HTML, answers.ask(view, Wish::Live).await)
}

async fn status_page(
    State(answers): State<Arc<Answers>>,
    Extension(view): Extension<View>,
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
    let page = typed(HTML, answers.ask(view, Wish::Page { nonce }).await);
    (headers, page).into_response()
}

//! Builds responses from the node's status, on a separate thread.
//!
//! A status takes the locks of all stores and milliseconds of computing. The thread that serves
//! connections does neither, so that a health check never waits for a scrape. All requests that
//! wait when a status is taken share it: a thousand requests cost about as much as one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use cascade_runtime::{Clock as _, SystemClock};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::http::page;
use crate::metrics::{self, MetricsFormat};
use crate::node::Node;
use crate::samples::Samples;
use crate::status::{HealthState, NodeState, Status, StatusView, TenantStatus};

/// Time limit of a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

/// What a request wants.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum ResponseKind {
    Json,
    Metrics(MetricsFormat),
    /// The part of the page that changes.
    PageBody,
    /// The whole page, with this nonce for its script and style.
    Page {
        nonce: String,
    },
    /// The reason why the node is not ready. Empty if it is ready.
    Readiness,
}

/// Builds responses in batches while requests wait.
#[derive(Debug)]
pub(super) struct ResponseQueue {
    node: Node,
    queue: Mutex<Queue>,
    /// The history of each tenant that requested its page. The history of the whole node is in
    /// the node.
    samples_by_tenant: Mutex<HashMap<String, Arc<Samples>>>,
}

#[derive(Debug, Default)]
struct Queue {
    pending: Vec<PendingRequest>,
    is_running: bool,
}

#[derive(Debug)]
struct PendingRequest {
    view: StatusView,
    kind: ResponseKind,
    response: oneshot::Sender<Bytes>,
}

/// After a panic of the worker thread, lets the next request start another one.
struct WorkerGuard<'a>(&'a ResponseQueue);

impl Drop for WorkerGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = lock(&self.0.queue);
            queue.is_running = false;
            // Dropping their senders fails all pending requests at once.
            queue.pending.clear();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each critical section is a single update, so a panic cannot leave it half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ResponseQueue {
    pub(super) fn new(node: &Node) -> Arc<Self> {
        Arc::new(Self {
            node: node.clone(),
            queue: Mutex::default(),
            samples_by_tenant: Mutex::default(),
        })
    }

    /// A response built from a status that is taken after this call. `None` after a time-out.
    pub(super) async fn request(
        self: &Arc<Self>,
        view: StatusView,
        kind: ResponseKind,
    ) -> Option<Bytes> {
        let (response, result) = oneshot::channel();
        let must_start = {
            let mut queue = lock(&self.queue);
            queue.pending.push(PendingRequest { view, kind, response });
            !std::mem::replace(&mut queue.is_running, true)
        };
        if must_start {
            let responses = Arc::clone(self);
            // Not awaited: the worker also serves requests that arrive later.
            drop(tokio::task::spawn_blocking(move || responses.run_worker()));
        }
        timeout(RESPONSE_TIMEOUT, result).await.ok()?.ok()
    }

    /// Serves batches until no request is pending.
    fn run_worker(&self) {
        let _guard = WorkerGuard(self);
        loop {
            let batch = {
                let mut queue = lock(&self.queue);
                // Under the same lock as a new request, so that no request is left without a
                // worker.
                if queue.pending.is_empty() {
                    queue.is_running = false;
                    return;
                }
                std::mem::take(&mut queue.pending)
            };
            self.respond(batch);
        }
    }

    /// Takes one status for the batch, and builds each different response once.
    fn respond(&self, batch: Vec<PendingRequest>) {
        let mut status = None;
        let mut views: HashMap<StatusView, Status> = HashMap::new();
        let mut built: HashMap<(StatusView, ResponseKind), Bytes> = HashMap::new();
        for PendingRequest { view, kind, response } in batch {
            let text = built.entry((view, kind)).or_insert_with_key(|(view, kind)| {
                if *kind == ResponseKind::Readiness {
                    return unready_reason(&self.node).unwrap_or_default().into();
                }
                let status = status.get_or_insert_with(|| {
                    let status = self.node.status();
                    self.node.samples().record(&status);
                    status
                });
                let visible = views
                    .entry(view.clone())
                    .or_insert_with(|| status.clone().seen_by(view, self.node.clients()));
                self.build(visible, kind).into()
            });
            if response.send(text.clone()).is_err() {
                tracing::trace!("a client disconnected before its response was ready");
            }
        }
    }

    fn build(&self, status: &Status, kind: &ResponseKind) -> String {
        match kind {
            ResponseKind::Json => serde_json::to_string(status).expect("all map keys are strings"),
            ResponseKind::Metrics(format) => metrics::encode(status.clone(), *format),
            ResponseKind::PageBody => page::body(status, &self.series(status)).into_string(),
            ResponseKind::Page { nonce } => {
                page::page(status, &self.series(status), nonce).into_string()
            }
            ResponseKind::Readiness => unreachable!("readiness needs no status"),
        }
    }

    /// The history for a status: a tenant has its own.
    fn series(&self, status: &Status) -> crate::samples::Series {
        let StatusView::Tenant(name) = &status.view else { return self.node.samples().series() };
        let samples = Arc::clone(lock(&self.samples_by_tenant).entry(name.clone()).or_default());
        samples.record(status);
        samples.series()
    }
}

fn unready_reason(node: &Node) -> Option<String> {
    match node.state() {
        NodeState::Starting if node.has_stores() => return Some("starting".to_owned()),
        NodeState::Starting => return Some(node.progress_of_start()),
        NodeState::Draining => return Some("draining".to_owned()),
        NodeState::Serving => {}
    }
    let tenant = TenantStatus::of("", &node.store().stats(), SystemClock.unix_ms());
    let is_open = |state: HealthState| state != HealthState::Healthy;
    let mut tiers = tenant.tiers.iter().filter(|tier| tier.capacity_bytes > 0).peekable();
    let none_serves = tiers.peek().is_some()
        && tiers.all(|tier| tier.health.as_ref().is_some_and(|health| is_open(health.state)));
    none_serves.then(|| "no tier serves".to_owned())
}

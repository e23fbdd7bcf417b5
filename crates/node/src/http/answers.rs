//! Answers that are made from the node's figures, on a thread of their own.
//!
//! Taking a status waits for the stores' locks and takes milliseconds. The thread that serves
//! connections does neither, so that a health check never waits for a scrape. All who wait when a
//! status is taken share it: a thousand callers cost about as much as one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use cascade_block::{Clock as _, SystemClock};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::http::page;
use crate::metrics::{self, Format};
use crate::node::Node;
use crate::samples::Samples;
use crate::status::{HealthState, NodeState, Status, TenantStatus, View};

/// How long a caller waits for its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// What a caller asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Wish {
    Json,
    Metrics(Format),
    /// The part of the page that changes.
    Live,
    /// The whole page, for a script and style of this nonce.
    Page {
        nonce: String,
    },
    /// Why the node does not serve; nothing if it does.
    Unready,
}

/// Makes answers, one batch after another, while anybody waits for one.
#[derive(Debug)]
pub(super) struct Answers {
    node: Node,
    queue: Mutex<Queue>,
    /// The past of each tenant that looked at itself; of the whole node it is the node's.
    samples_of_tenants: Mutex<HashMap<String, Arc<Samples>>>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<Waiting>,
    is_running: bool,
}

#[derive(Debug)]
struct Waiting {
    view: View,
    wish: Wish,
    answer: oneshot::Sender<Bytes>,
}

/// Lets the next caller start a thread again, however this one ends.
struct Running<'a>(&'a Answers);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = lock(&self.0.queue);
            queue.is_running = false;
            // Whoever waits is told at once.
            queue.waiting.clear();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these guard changes in single steps.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Answers {
    pub(super) fn new(node: &Node) -> Arc<Self> {
        Arc::new(Self {
            node: node.clone(),
            queue: Mutex::default(),
            samples_of_tenants: Mutex::default(),
        })
    }

    /// An answer from a status that is taken after this call; none if that takes too long.
    pub(super) async fn ask(self: &Arc<Self>, view: View, wish: Wish) -> Option<Bytes> {
        let (answer, answered) = oneshot::channel();
        let must_start = {
            let mut queue = lock(&self.queue);
            queue.waiting.push(Waiting { view, wish, answer });
            !std::mem::replace(&mut queue.is_running, true)
        };
        if must_start {
            let answers = Arc::clone(self);
            // Not awaited: whoever asks next meanwhile is answered by it too.
            drop(tokio::task::spawn_blocking(move || answers.work()));
        }
        timeout(ANSWER_TIMEOUT, answered).await.ok()?.ok()
    }

    fn work(&self) {
        let _running = Running(self);
        loop {
            let batch = {
                let mut queue = lock(&self.queue);
                if queue.waiting.is_empty() {
                    queue.is_running = false;
                    return;
                }
                std::mem::take(&mut queue.waiting)
            };
            self.answer(batch);
        }
    }

    fn answer(&self, batch: Vec<Waiting>) {
        let mut status = None;
        let mut seen: HashMap<View, Status> = HashMap::new();
        let mut made: HashMap<(View, Wish), Bytes> = HashMap::new();
        for Waiting { view, wish, answer } in batch {
            let text = made.entry((view, wish)).or_insert_with_key(|(view, wish)| {
                if *wish == Wish::Unready {
                    return unready(&self.node).unwrap_or_default().into();
                }
                let status = status.get_or_insert_with(|| {
                    let status = self.node.status();
                    self.node.samples().note(&status);
                    status
                });
                let seen = seen
                    .entry(view.clone())
                    .or_insert_with(|| status.clone().seen_by(view, &self.node));
                self.make(seen, wish).into()
            });
            if answer.send(text.clone()).is_err() {
                tracing::trace!("a caller went before its answer was made");
            }
        }
    }

    fn make(&self, seen: &Status, wish: &Wish) -> String {
        match wish {
            Wish::Json => serde_json::to_string(seen).expect("a status has names for keys"),
            Wish::Metrics(format) => metrics::encode(seen.clone(), *format),
            Wish::Live => page::live(seen, &self.samples(seen)).into_string(),
            Wish::Page { nonce } => page::page(seen, &self.samples(seen), nonce).into_string(),
            Wish::Unready => unreachable!("it needs no status"),
        }
    }

    /// The past that belongs to a status: a tenant sees its own.
    fn samples(&self, seen: &Status) -> crate::samples::Series {
        let View::Tenant(name) = &seen.view else { return self.node.samples().series() };
        let samples = Arc::clone(lock(&self.samples_of_tenants).entry(name.clone()).or_default());
        samples.note(seen);
        samples.series()
    }
}

fn unready(node: &Node) -> Option<&'static str> {
    match node.state() {
        NodeState::Starting => return Some("starting"),
        NodeState::Draining => return Some("draining"),
        NodeState::Serving => {}
    }
    let tenant = TenantStatus::of("", &node.store().stats(), SystemClock.unix_ms());
    let is_open = |state: HealthState| state != HealthState::Healthy;
    let mut tiers = tenant.tiers.iter().filter(|tier| tier.capacity_bytes > 0).peekable();
    let none_serves = tiers.peek().is_some()
        && tiers.all(|tier| tier.health.as_ref().is_some_and(|health| is_open(health.state)));
    none_serves.then_some("no tier serves")
}

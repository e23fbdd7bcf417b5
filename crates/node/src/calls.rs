//! What clients ask, counted by kind, and how long the node takes to answer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cascade_block::{Clock, SystemClock};
use cascade_wire::Call;

/// Kinds of calls, by the names that figures give them.
pub const KINDS: [&str; 18] = [
    "hello",
    "ping",
    "prepare",
    "reserve",
    "seal",
    "release",
    "settled",
    "lease",
    "acquire",
    "lookup",
    "hint",
    "ask",
    "clear",
    "register",
    "manifests",
    "flush",
    "admin",
    "forget",
];

/// Upper bounds of the buckets, in microseconds; a last one has no bound.
pub const BOUNDS_US: [u64; 15] = [
    5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 200_000, 1_000_000,
    10_000_000,
];

/// One kind of calls.
#[derive(Debug, Default)]
struct Kind {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    nanos: AtomicU64,
}

/// All calls since the node started.
#[derive(Debug, Default)]
pub(crate) struct Calls([Kind; KINDS.len()]);

/// What is known of one kind of calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFigures {
    /// Its name.
    pub kind: &'static str,
    /// Calls that took at most each of [`BOUNDS_US`], and all others, not added up.
    pub buckets: Vec<u64>,
    /// Time that all of them took.
    pub nanos: u64,
}

impl CallFigures {
    /// How many there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// A call that is being answered; its time ends when this is dropped.
pub(crate) struct Timer<'a> {
    kind: &'a Kind,
    began: Duration,
}

impl Calls {
    pub(crate) fn begin(&self, call: &Call) -> Timer<'_> {
        let place = KINDS.iter().position(|kind| *kind == call.name());
        let kind = &self.0[place.expect("every kind of call is in the list")];
        Timer { kind, began: SystemClock.monotonic() }
    }

    pub(crate) fn figures(&self) -> Vec<CallFigures> {
        let figures = |(kind, name): (&Kind, &&'static str)| CallFigures {
            kind: name,
            // Relaxed, here and below: each figure stands for itself.
            buckets: kind.buckets.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            nanos: kind.nanos.load(Ordering::Relaxed),
        };
        self.0.iter().zip(&KINDS).map(figures).collect()
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let took = SystemClock.monotonic().saturating_sub(self.began);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < micros);
        self.kind.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.kind.nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

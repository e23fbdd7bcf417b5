//! Between a span's end and the collector: a bound on what waits, and a count of what was lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};

use crate::status::TraceStatus;

/// Spans by what became of them.
#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    waiting: AtomicU64,
    exported: AtomicU64,
    lost: AtomicU64,
}

impl SpanCounts {
    pub(super) fn status(&self) -> TraceStatus {
        TraceStatus {
            exported_spans: self.exported.load(Relaxed),
            lost_spans: self.lost.load(Relaxed),
        }
    }
}

/// Lets so many spans wait and no more.
#[derive(Debug)]
pub(super) struct Bounded<P> {
    inner: P,
    counts: Arc<SpanCounts>,
    waiting_max: u64,
}

impl<P> Bounded<P> {
    pub(super) fn new(inner: P, counts: Arc<SpanCounts>, waiting_max: usize) -> Self {
        Self { inner, counts, waiting_max: waiting_max as u64 }
    }
}

impl<P: SpanProcessor> SpanProcessor for Bounded<P> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.counts.waiting.fetch_add(1, Relaxed) < self.waiting_max {
            self.inner.on_end(span);
        } else {
            self.counts.waiting.fetch_sub(1, Relaxed);
            self.counts.lost.fetch_add(1, Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        let result = self.inner.shutdown_with_timeout(timeout);
        let left = self.counts.waiting.swap(0, Relaxed);
        self.counts.lost.fetch_add(left, Relaxed);
        result
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Counts what the collector took and what it did not.
#[derive(Debug)]
pub(super) struct Counted<E> {
    inner: E,
    counts: Arc<SpanCounts>,
}

impl<E> Counted<E> {
    pub(super) fn new(inner: E, counts: Arc<SpanCounts>) -> Self {
        Self { inner, counts }
    }
}

impl<E: SpanExporter> SpanExporter for Counted<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let result = self.inner.export(batch).await;
        let outcome = if result.is_ok() { &self.counts.exported } else { &self.counts.lost };
        outcome.fetch_add(spans, Relaxed);
        self.counts.waiting.fetch_sub(spans, Relaxed);
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

//! Limits the spans that wait for the collector, and counts exported and dropped ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};

use crate::status::TraceStatus;

/// Counts of spans by state.
#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    /// Ended, and neither exported nor dropped yet.
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

/// Passes spans to another processor, and drops those above a limit.
#[derive(Debug)]
pub(super) struct BoundedProcessor<P> {
    inner: P,
    counts: Arc<SpanCounts>,
    waiting_max: u64,
}

impl<P> BoundedProcessor<P> {
    pub(super) fn new(inner: P, counts: Arc<SpanCounts>, waiting_max: usize) -> Self {
        Self { inner, counts, waiting_max: waiting_max as u64 }
    }
}

impl<P: SpanProcessor> SpanProcessor for BoundedProcessor<P> {
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
        // The inner processor exports no more after this, so spans that still wait are lost.
        let dropped = self.counts.waiting.swap(0, Relaxed);
        self.counts.lost.fetch_add(dropped, Relaxed);
        result
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Passes batches to another exporter, and counts their spans by outcome.
#[derive(Debug)]
pub(super) struct CountingExporter<E> {
    inner: E,
    counts: Arc<SpanCounts>,
}

impl<E> CountingExporter<E> {
    pub(super) fn new(inner: E, counts: Arc<SpanCounts>) -> Self {
        Self { inner, counts }
    }
}

impl<E: SpanExporter> SpanExporter for CountingExporter<E> {
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

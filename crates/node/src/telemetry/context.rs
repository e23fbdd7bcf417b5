//! Whose request a request is part of: the W3C trace context, and the span made under it.

use cascade_wire::TraceContext;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The target of spans that go to a collector.
pub(super) const SPAN_TARGET: &str = "cascade::request";

fn span_context(of: TraceContext) -> SpanContext {
    let flags = if of.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let trace_id = TraceId::from_bytes(of.trace);
    let span_id = SpanId::from_bytes(of.span);
    SpanContext::new(trace_id, span_id, flags, true, TraceState::default())
}

/// The span of one request: enter it for as long as the request is worked on. Costs next to
/// nothing while no collector is configured. `blocks` and `hit_blocks` can be recorded on it.
pub fn request_span(operation: &'static str, tenant: &str, parent: Option<TraceContext>) -> Span {
    let span = tracing::info_span!(
        target: SPAN_TARGET,
        "request",
        otel.name = operation,
        otel.kind = "server",
        tenant,
        blocks = tracing::field::Empty,
        hit_blocks = tracing::field::Empty,
    );
    if let Some(parent) = parent.filter(|_| !span.is_disabled()) {
        let parent = opentelemetry::Context::new().with_remote_span_context(span_context(parent));
        if let Err(error) = span.set_parent(parent) {
            tracing::debug!(%error, "a span stays without its caller's");
        }
    }
    span
}

//! Spans of requests, as children of the client's span (W3C trace context).

use cascade_wire::TraceContext;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The target of spans that are exported.
pub(super) const SPAN_TARGET: &str = "cascade::request";

fn span_context(context: TraceContext) -> SpanContext {
    let flags = if context.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let trace_id = TraceId::from_bytes(context.trace);
    let span_id = SpanId::from_bytes(context.span);
    SpanContext::new(trace_id, span_id, flags, true, TraceState::default())
}

/// The span of one request. Enter it while the request is processed. It costs almost nothing
/// without a collector. `blocks` and `hit_blocks` can be recorded on it.
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
            tracing::debug!(%error, "cannot set the parent of a span");
        }
    }
    span
}

//! Whose request a request is part of: the W3C trace context, and the span made under it.

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The target of spans that go to a collector.
pub(super) const SPAN_TARGET: &str = "cascade::request";

/// The caller's span, as it came with the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace.
    pub trace_id: [u8; 16],
    /// The caller's span in it.
    pub span_id: [u8; 8],
    /// Whether the caller records it; if not, neither do we.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Reads a `traceparent` header; none if it is not one, as the standard asks.
    pub fn parse(traceparent: &str) -> Option<Self> {
        let mut fields = traceparent.trim().split('-');
        let version = hex::<1>(fields.next()?)?[0];
        let trace_id = hex::<16>(fields.next()?)?;
        let span_id = hex::<8>(fields.next()?)?;
        let flags = hex::<1>(fields.next()?)?[0];
        let has_more = fields.next().is_some();
        let is_valid = version != 0xff
            && (version != 0 || !has_more)
            && trace_id != [0; 16]
            && span_id != [0; 8];
        is_valid.then_some(Self { trace_id, span_id, is_sampled: flags & 1 == 1 })
    }

    fn span_context(self) -> SpanContext {
        let flags = if self.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
        let trace_id = TraceId::from_bytes(self.trace_id);
        let span_id = SpanId::from_bytes(self.span_id);
        SpanContext::new(trace_id, span_id, flags, true, TraceState::default())
    }
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
        let parent = opentelemetry::Context::new().with_remote_span_context(parent.span_context());
        if let Err(error) = span.set_parent(parent) {
            tracing::debug!(%error, "a span stays without its caller's");
        }
    }
    span
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_hex = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    if text.len() != 2 * N || !text.bytes().all(is_hex) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    #[test]
    fn a_traceparent_names_trace_span_and_whether_to_record() {
        let context = TraceContext::parse(&format!("00-{TRACE}-{SPAN}-01")).unwrap();
        assert_eq!(context.trace_id[..2], [0x4b, 0xf9]);
        assert_eq!(context.span_id[6..], [0x02, 0xb7]);
        assert!(context.is_sampled);
        assert!(!TraceContext::parse(&format!("00-{TRACE}-{SPAN}-00")).unwrap().is_sampled);
        let of_tomorrow = format!("cc-{TRACE}-{SPAN}-01-what-else");
        assert!(TraceContext::parse(&of_tomorrow).is_some(), "a later version may say more");
    }

    #[test]
    fn what_is_no_traceparent_is_nobodys() {
        let zero = "0".repeat(32);
        for wrong in [
            String::new(),
            "00".to_owned(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{zero}-{SPAN}-01"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}é-{SPAN}-01", &TRACE[..30]),
        ] {
            assert_eq!(TraceContext::parse(&wrong), None, "{wrong:?}");
        }
    }
}

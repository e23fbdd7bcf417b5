//! What a node says of itself while it runs: log lines to standard error, spans to a collector.

mod context;
mod export;

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};
use thiserror::Error;
use tracing::Subscriber;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::config::LogConfig;
use crate::status::TraceStatus;

pub use cascade_wire::TraceContext;
pub use context::request_span;

use context::SPAN_TARGET;
use export::{Bounded, Counted, SpanCounts};

/// Spans that may wait for the collector; one more is lost and counted.
const SPANS_MAX: usize = 2048;
/// How long the collector may take for a batch.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a span waits for company.
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Why logs or traces cannot be written, by what the operator can change.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TelemetryError {
    /// The filter makes no sense.
    #[error(
        "log_filter {filter:?} is no filter; write a level such as info, or module=level pairs"
    )]
    Filter {
        /// What was given.
        filter: String,
        /// What is wrong with it.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// The collector's address makes no sense.
    #[error("traces_endpoint {endpoint:?}: {reason}")]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// What is wrong and what would be right.
        reason: &'static str,
    },
    /// The exporter could not be made.
    #[error("cannot send traces to {endpoint:?}")]
    Exporter {
        /// Where to.
        endpoint: String,
        /// Why.
        #[source]
        source: opentelemetry_otlp::ExporterBuildError,
    },
    /// The log is no longer written.
    #[error("the log's filter cannot be changed")]
    Gone(#[source] reload::Error),
    /// Somebody else in this process writes the logs already.
    #[error("this process has a log already")]
    Taken(#[source] tracing::subscriber::SetGlobalDefaultError),
}

/// Spans on their way to a collector. Clones are handles on the same.
#[derive(Debug, Clone)]
pub struct Spans {
    provider: SdkTracerProvider,
    counts: Arc<SpanCounts>,
}

impl Spans {
    /// Starts sending spans to an OTLP collector over HTTP, such as `http://127.0.0.1:4318`.
    ///
    /// Serving never waits for the collector: what it does not take in time is lost and counted.
    pub fn open(endpoint: &str) -> Result<Self, TelemetryError> {
        let endpoint = traces_url(endpoint)?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_endpoint(&endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|source| TelemetryError::Exporter { endpoint, source })?;
        let counts = Arc::new(SpanCounts::default());
        // The queue holds every span that `Bounded` lets in, so that none is dropped uncounted.
        let batch = BatchConfigBuilder::default()
            .with_max_queue_size(SPANS_MAX)
            .with_max_export_batch_size(SPANS_MAX / 4)
            .with_scheduled_delay(EXPORT_INTERVAL)
            .build();
        let exporter = Counted::new(exporter, Arc::clone(&counts));
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(batch).build();
        let resource = Resource::builder_empty()
            .with_attribute(KeyValue::new("service.name", "cascade"))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
            .with_resource(resource)
            .with_span_processor(Bounded::new(processor, Arc::clone(&counts), SPANS_MAX))
            .build();
        Ok(Self { provider, counts })
    }

    /// What became of the spans so far.
    pub fn status(&self) -> TraceStatus {
        self.counts.status()
    }

    /// Sends what waits and stops. What the collector does not take in this time is lost.
    pub fn close(&self, timeout: Duration) {
        if let Err(error) = self.provider.shutdown_with_timeout(timeout) {
            tracing::warn!(%error, lost_spans = self.status().lost_spans, "some spans were lost");
        }
    }

    fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let tracer: SdkTracer = self.provider.tracer("cascade");
        let of_requests = tracing_subscriber::filter::filter_fn(|metadata| {
            metadata.is_span() && metadata.target() == SPAN_TARGET
        });
        tracing_opentelemetry::layer().with_tracer(tracer).with_filter(of_requests)
    }
}

/// Starts writing logs to standard error and spans to `spans`, for the whole process.
///
/// # Errors
/// If the filter makes no sense, or the process has a log already.
pub fn start(log: &LogConfig, spans: Option<&Spans>) -> Result<LogFilter, TelemetryError> {
    let colour = io::stderr().is_terminal();
    let (subscriber, filter) = changeable(log, spans, colour, io::stderr)?;
    tracing::subscriber::set_global_default(subscriber).map_err(TelemetryError::Taken)?;
    Ok(filter)
}

/// What decides which lines are logged. It can change while the process runs.
#[derive(Debug, Clone)]
pub struct LogFilter(reload::Handle<EnvFilter, Registry>);

impl LogFilter {
    /// Logs by another filter from now on.
    ///
    /// # Errors
    /// If it is no filter; then the one before stays.
    pub fn set(&self, filter: &str) -> Result<(), TelemetryError> {
        self.0.reload(parse_filter(filter)?).map_err(TelemetryError::Gone)
    }
}

fn parse_filter(filter: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::builder()
        .parse(filter)
        .map_err(|source| TelemetryError::Filter { filter: filter.to_owned(), source })
}

/// What [`start`] installs, writing to a place of the caller's.
///
/// # Errors
/// If the filter makes no sense.
pub fn subscriber<W>(
    log: &LogConfig,
    spans: Option<&Spans>,
    colour: bool,
    writer: W,
) -> Result<impl Subscriber + Send + Sync + use<W>, TelemetryError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    changeable(log, spans, colour, writer).map(|(subscriber, _)| subscriber)
}

fn changeable<W>(
    log: &LogConfig,
    spans: Option<&Spans>,
    colour: bool,
    writer: W,
) -> Result<(impl Subscriber + Send + Sync + use<W>, LogFilter), TelemetryError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = parse_filter(log.filter.as_deref().unwrap_or("info"))?;
    let (filter, handle) = reload::Layer::new(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines: Box<dyn Layer<_> + Send + Sync> = if log.json {
        Box::new(lines.json().flatten_event(true).with_filter(filter))
    } else {
        Box::new(lines.with_ansi(colour).with_target(false).with_filter(filter))
    };
    let spans = spans.map(Spans::layer);
    Ok((tracing_subscriber::registry().with(lines).with(spans), LogFilter(handle)))
}

/// The collector's address with the path that traces go to.
fn traces_url(endpoint: &str) -> Result<String, TelemetryError> {
    let bad = |reason| TelemetryError::Endpoint { endpoint: endpoint.to_owned(), reason };
    let rest = endpoint.strip_prefix("http://").ok_or_else(|| {
        bad("write http://HOST:PORT of a collector on this host or in this network; for one \
             behind TLS, run a collector beside the node")
    })?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(bad("the host is missing; write http://HOST:PORT"));
    }
    let path = if path.is_empty() { "v1/traces" } else { path };
    Ok(format!("http://{host}/{path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_named_by_host_and_port_or_in_full() {
        let url = |endpoint| traces_url(endpoint).unwrap();
        assert_eq!(url("http://127.0.0.1:4318"), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(url("http://collector:4318/"), "http://collector:4318/v1/traces");
        assert_eq!(url("http://collector/otlp/v1/traces"), "http://collector/otlp/v1/traces");
        for wrong in ["collector:4318", "https://collector:4318", "http://", "http:// a"] {
            let error = traces_url(wrong).unwrap_err().to_string();
            assert!(error.contains("traces_endpoint"), "{error}");
        }
    }

    #[test]
    fn a_filter_that_is_none_is_refused_by_name() {
        let log = LogConfig { json: false, filter: Some("cascade=loud".to_owned()) };
        let error = subscriber(&log, None, false, io::sink).err().unwrap().to_string();
        assert!(error.contains("log_filter") && error.contains("cascade=loud"), "{error}");
    }
}

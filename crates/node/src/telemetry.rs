//! Telemetry of a node: log lines on standard error, and spans to a trace collector.

mod collector;
mod context;
mod export;

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};
use thiserror::Error;
use tracing::Subscriber;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry, reload};

use crate::config::LogConfig;
use crate::status::TraceStatus;

pub use cascade_wire::TraceContext;
pub use context::request_span;

use collector::CollectorClient;
use context::SPAN_TARGET;
use export::{BoundedProcessor, CountingExporter, SpanCounts};

/// Limit of spans that wait for the collector. Further ones are dropped and counted.
const SPANS_MAX: usize = 2048;
/// Time limit of the collector for one batch.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a span waits for others of its batch.
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);

/// An error of the log or of the traces. Each variant names what the operator can change.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TelemetryError {
    /// The filter is invalid.
    #[error(
        "log_filter {filter:?} is not valid: {reason}; use a level such as info, or module=level \
         pairs with commas between them"
    )]
    Filter {
        /// The filter.
        filter: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The endpoint of the collector is invalid.
    #[error("traces_endpoint {endpoint:?}: {reason}")]
    Endpoint {
        /// The endpoint.
        endpoint: String,
        /// What is wrong, and the expected form.
        reason: &'static str,
    },
    /// The exporter could not be created.
    #[error("cannot send traces to {endpoint:?}")]
    Exporter {
        /// The endpoint.
        endpoint: String,
        /// The cause.
        #[source]
        source: opentelemetry_otlp::ExporterBuildError,
    },
    /// The client of the collector could not be created.
    #[error("cannot create the client that sends traces")]
    Client(#[source] io::Error),
    /// The log is closed.
    #[error("cannot change the log filter")]
    LogClosed(#[source] reload::Error),
    /// Another part of this process has set up logging.
    #[error("logging is already set up in this process")]
    AlreadyStarted(#[source] tracing::subscriber::SetGlobalDefaultError),
}

/// The export of spans to a collector. Clones share it.
#[derive(Debug, Clone)]
pub struct Spans {
    provider: SdkTracerProvider,
    counts: Arc<SpanCounts>,
}

impl Spans {
    /// Starts the export to an OTLP collector over HTTP, such as `http://127.0.0.1:4318`.
    ///
    /// Requests never wait for the collector: spans that it does not accept in time are dropped
    /// and counted.
    pub fn open(endpoint: &str) -> Result<Self, TelemetryError> {
        let endpoint = traces_url(endpoint)?;
        let client = CollectorClient::new(EXPORT_TIMEOUT).map_err(TelemetryError::Client)?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_endpoint(&endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|source| TelemetryError::Exporter { endpoint, source })?;
        let counts = Arc::new(SpanCounts::default());
        // As long as the limit of `BoundedProcessor`, so that this queue never drops a span, which
        // would not be counted.
        let batch = BatchConfigBuilder::default()
            .with_max_queue_size(SPANS_MAX)
            .with_max_export_batch_size(SPANS_MAX / 4)
            .with_scheduled_delay(EXPORT_INTERVAL)
            .build();
        let exporter = CountingExporter::new(exporter, Arc::clone(&counts));
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(batch).build();
        let resource = Resource::builder_empty()
            .with_attribute(KeyValue::new("service.name", "cascade"))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
            .with_resource(resource)
            .with_span_processor(BoundedProcessor::new(processor, Arc::clone(&counts), SPANS_MAX))
            .build();
        Ok(Self { provider, counts })
    }

    /// The counts of exported and dropped spans.
    pub fn status(&self) -> TraceStatus {
        self.counts.status()
    }

    /// Sends waiting spans and stops. Spans that the collector does not accept within `timeout`
    /// are dropped.
    pub fn close(&self, timeout: Duration) {
        if let Err(error) = self.provider.shutdown_with_timeout(timeout) {
            tracing::warn!(%error, lost_spans = self.status().lost_spans, "spans were dropped");
        }
    }

    fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let tracer: SdkTracer = self.provider.tracer("cascade");
        let only_requests = tracing_subscriber::filter::filter_fn(|metadata| {
            metadata.is_span() && metadata.target() == SPAN_TARGET
        });
        tracing_opentelemetry::layer().with_tracer(tracer).with_filter(only_requests)
    }
}

/// Starts writing logs to standard error and spans to `spans`, for the whole process.
///
/// # Errors
/// If the filter is invalid, or logging is already set up in this process.
pub fn start(log: &LogConfig, spans: Option<&Spans>) -> Result<LogFilter, TelemetryError> {
    let colour = io::stderr().is_terminal();
    let (subscriber, filter) = subscriber_with_filter(log, spans, colour, io::stderr)?;
    tracing::subscriber::set_global_default(subscriber).map_err(TelemetryError::AlreadyStarted)?;
    Ok(filter)
}

/// A line of the log as JSON, for what is printed beside it.
pub fn json_line(level: &str, message: &str) -> String {
    let mut timestamp = String::new();
    // A clock that cannot be formatted leaves the time empty, as in the log.
    if SystemTime.format_time(&mut Writer::new(&mut timestamp)).is_err() {
        timestamp.clear();
    }
    serde_json::json!({
        "timestamp": timestamp, "level": level, "message": message,
        "target": "cascade_node",
    })
    .to_string()
}

/// Makes panics lines of the log as well, for a log that programs read.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("without a name");
        tracing::error!(thread, "{panic}");
    }));
}

/// The log filter, which can change while the process runs.
#[derive(Debug, Clone)]
pub struct LogFilter(reload::Handle<Targets, Registry>);

impl LogFilter {
    /// Replaces the filter.
    ///
    /// # Errors
    /// If the new filter is invalid. The old one then stays in use.
    pub fn set(&self, filter: &str) -> Result<(), TelemetryError> {
        self.0.reload(parse_filter(filter)?).map_err(TelemetryError::LogClosed)
    }
}

fn parse_filter(filter: &str) -> Result<Targets, TelemetryError> {
    let invalid = |reason| TelemetryError::Filter { filter: filter.to_owned(), reason };
    let parts: Vec<_> = filter.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    // `Targets` would take such a part for the name of a module, which selects nothing.
    let is_no_name = |character: char| character.is_whitespace() || character == '[';
    if let Some(part) = parts.iter().find(|part| part.contains(is_no_name)) {
        return Err(invalid(format!("{part:?} has a space or a bracket")));
    }
    parts.join(",").parse().map_err(|error: ParseError| invalid(error.to_string()))
}

/// The subscriber that [`start`] installs, with another writer.
///
/// # Errors
/// If the filter is invalid.
pub fn subscriber<W>(
    log: &LogConfig,
    spans: Option<&Spans>,
    colour: bool,
    writer: W,
) -> Result<impl Subscriber + Send + Sync + use<W>, TelemetryError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    subscriber_with_filter(log, spans, colour, writer).map(|(subscriber, _)| subscriber)
}

fn subscriber_with_filter<W>(
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

/// The URL for traces: the endpoint, with the default path if it has none.
fn traces_url(endpoint: &str) -> Result<String, TelemetryError> {
    let invalid = |reason| TelemetryError::Endpoint { endpoint: endpoint.to_owned(), reason };
    let rest = endpoint.strip_prefix("http://").ok_or_else(|| {
        invalid(
            "use http://HOST:PORT; TLS is not supported, so send to a collector on this host \
             that forwards over TLS",
        )
    })?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(invalid("the host is missing; use http://HOST:PORT"));
    }
    if host.contains('@') {
        return Err(invalid(
            "a user in the URL is not supported; set OTEL_EXPORTER_OTLP_HEADERS to an \
             Authorization header",
        ));
    }
    let path = if path.is_empty() { "v1/traces" } else { path };
    Ok(format!("http://{host}/{path}"))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn an_endpoint_without_a_path_gets_the_default_path() {
        let url = |endpoint| traces_url(endpoint).unwrap();
        assert_eq!(url("http://127.0.0.1:4318"), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(url("http://collector:4318/"), "http://collector:4318/v1/traces");
        assert_eq!(url("http://collector/otlp/v1/traces"), "http://collector/otlp/v1/traces");
        for wrong in
            ["collector:4318", "https://collector:4318", "http://", "http:// a", "http://u:p@c"]
        {
            let error = traces_url(wrong).unwrap_err().to_string();
            assert!(error.contains("traces_endpoint"), "{error}");
        }
    }

    #[test]
    fn a_log_filter_takes_a_level_and_the_levels_of_modules() {
        let filter = parse_filter("info, cascade_node::http=debug,").unwrap();
        let enabled = |target, level| filter.would_enable(target, &level);
        assert!(enabled("cascade_node::http::metrics", Level::DEBUG));
        assert!(!enabled("cascade_node::http", Level::TRACE));
        assert!(enabled("cascade_store", Level::INFO));
        assert!(!enabled("cascade_store", Level::DEBUG));
    }

    #[test]
    fn an_invalid_log_filter_is_refused_by_name() {
        for wrong in ["cascade=loud", "info cascade_node=debug", "[request]=debug"] {
            let log = LogConfig { json: false, filter: Some(wrong.to_owned()) };
            let error = subscriber(&log, None, false, io::sink).err().unwrap().to_string();
            assert!(error.contains("log_filter") && error.contains(wrong), "{error}");
        }
    }
}

//! Metrics for Prometheus: formats a status as metric families.

mod of_node;
mod of_store;

use std::fmt::{self, Write};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::status::{Histogram, Status, StatusView};

/// Every family, in the order of a scrape.
pub fn families() -> impl Iterator<Item = &'static MetricFamily> + Clone {
    of_node::FAMILIES.iter().chain(of_store::FAMILIES)
}

/// One metric family: its name with the unit, its description, and how to read its values.
#[derive(Debug, Clone, Copy)]
pub struct MetricFamily {
    /// The name, without the suffix `_total` of counters.
    pub name: &'static str,
    /// The type of the metric.
    pub kind: MetricKind,
    /// The description, without a full stop.
    pub help: &'static str,
    /// The label names, in order.
    pub labels: &'static [&'static str],
    read: fn(&Status, &mut FamilySamples),
}

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only increases, from 0 at the start of the process.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts of values by bucket.
    Histogram,
}

impl MetricKind {
    /// The name of the type in the formats of Prometheus.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The values of one family, each with its label values.
#[derive(Debug, Default)]
struct FamilySamples(Vec<(Vec<String>, SampleValue)>);

#[derive(Debug)]
enum SampleValue {
    Integer(u64),
    Float(f64),
    Histogram(Histogram),
}

impl FamilySamples {
    fn add(&mut self, labels: &[&str], value: u64) {
        self.push(labels, SampleValue::Integer(value));
    }

    fn add_float(&mut self, labels: &[&str], value: f64) {
        self.push(labels, SampleValue::Float(value));
    }

    fn add_histogram(&mut self, labels: &[&str], histogram: &Histogram) {
        self.push(labels, SampleValue::Histogram(histogram.clone()));
    }

    fn push(&mut self, labels: &[&str], value: SampleValue) {
        self.0.push((labels.iter().map(|label| (*label).to_owned()).collect(), value));
    }
}

/// A text format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetricsFormat {
    /// `OpenMetrics` 1.0, which Prometheus requests.
    OpenMetrics,
    /// The Prometheus text format 0.0.4, which every scraper reads.
    Text,
}

impl MetricsFormat {
    /// The format that an `Accept` header requests.
    pub fn accepted(accept: Option<&str>) -> Self {
        let open = accept.is_some_and(|accept| accept.contains("application/openmetrics-text"));
        if open { Self::OpenMetrics } else { Self::Text }
    }

    /// The `Content-Type` of the format.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Formats a status as metrics.
///
/// # Panics
/// Never: writing to a `String` cannot fail.
pub fn encode(status: Status, format: MetricsFormat) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(StatusCollector(Arc::new(status))));
    let mut open_metrics = String::new();
    text::encode(&mut open_metrics, &registry).expect("writing to a String cannot fail");
    match format {
        MetricsFormat::OpenMetrics => open_metrics,
        MetricsFormat::Text => prometheus_text(&open_metrics),
    }
}

/// Converts `OpenMetrics` to the older text format. There, `HELP` and `TYPE` lines of counters have
/// the suffix `_total`, and there is no end marker.
fn prometheus_text(open_metrics: &str) -> String {
    let is_counter = |name: &str| {
        families().any(|family| family.name == name && family.kind == MetricKind::Counter)
    };
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(keyword), Some(name), Some(rest)) if is_counter(name) => {
                writeln!(text, "# {keyword} {name}_total {rest}")
                    .expect("writing to a String cannot fail");
            }
            _ => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

#[derive(Debug)]
struct StatusCollector(Arc<Status>);

impl Collector for StatusCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in families() {
            let kind = match family.kind {
                MetricKind::Counter => MetricType::Counter,
                MetricKind::Gauge => MetricType::Gauge,
                MetricKind::Histogram => MetricType::Histogram,
            };
            let metric = encoder.encode_descriptor(family.name, family.help, None, kind)?;
            let mut samples = FamilySamples::default();
            (family.read)(&self.0, &mut samples);
            write_samples(family, &samples, self.0.view == StatusView::Totals, metric)?;
        }
        Ok(())
    }
}

fn write_samples(
    family: &MetricFamily,
    samples: &FamilySamples,
    are_totals: bool,
    mut metric: MetricEncoder<'_>,
) -> Result<(), fmt::Error> {
    for (labels, value) in &samples.0 {
        assert_eq!(labels.len(), family.labels.len(), "{}: a value for each label", family.name);
        let labels = family.labels.iter().copied().zip(labels.iter().map(String::as_str));
        // Totals are sums over all tenants, so they have no label `tenant`.
        let labels = labels.filter(|(name, _)| !(are_totals && *name == "tenant"));
        let labels: Vec<(&str, &str)> = labels.collect();
        if labels.is_empty() {
            write_value(family, value, &mut metric)?;
        } else {
            write_value(family, value, &mut metric.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn write_value(
    family: &MetricFamily,
    value: &SampleValue,
    metric: &mut MetricEncoder<'_>,
) -> Result<(), fmt::Error> {
    match (family.kind, value) {
        (MetricKind::Counter, SampleValue::Integer(count)) => {
            metric.encode_counter::<NoLabelSet, _, u64>(count, None)
        }
        (MetricKind::Counter, SampleValue::Float(count)) => {
            metric.encode_counter::<NoLabelSet, _, u64>(count, None)
        }
        (MetricKind::Gauge, SampleValue::Integer(level)) => metric.encode_gauge(level),
        (MetricKind::Gauge, SampleValue::Float(level)) => metric.encode_gauge(level),
        (MetricKind::Histogram, SampleValue::Histogram(histogram)) => {
            // A default histogram has no buckets, but the format requires the infinite one.
            let bounds = histogram.bounds.iter().copied().chain([f64::INFINITY]);
            let counts = histogram.counts.iter().copied().chain([0]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
            metric.encode_histogram::<NoLabelSet>(histogram.sum, histogram.count(), &buckets, None)
        }
        (kind, value) => unreachable!("{}: {value:?} is not a {}", family.name, kind.name()),
    }
}

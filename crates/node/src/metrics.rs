//! Metrics for Prometheus: a status, family by family, in the text formats it reads.

mod of_node;
mod of_store;

use std::fmt::{self, Write};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::status::{Histogram, Status, View};

/// Every family, in the order of a scrape.
pub fn families() -> impl Iterator<Item = &'static Family> + Clone {
    of_node::FAMILIES.iter().chain(of_store::FAMILIES)
}

/// One metric family: a name with its unit, what it means, and where its values come from.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// Its name, without the `_total` that a counter's samples end in.
    pub name: &'static str,
    /// What kind of figure it is.
    pub kind: Kind,
    /// What it means, without a full stop.
    pub help: &'static str,
    /// Its labels, in order.
    pub labels: &'static [&'static str],
    read: fn(&Status, &mut Samples),
}

/// What kind of figure a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows until the node ends.
    Counter,
    /// It goes up and down.
    Gauge,
    /// How often values fell between bounds.
    Histogram,
}

impl Kind {
    /// Its name in the formats of Prometheus.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The values of one family.
#[derive(Debug, Default)]
struct Samples(Vec<(Vec<String>, Value)>);

#[derive(Debug)]
enum Value {
    Whole(u64),
    Real(f64),
    Spread(Histogram),
}

impl Samples {
    fn add(&mut self, labels: &[&str], value: u64) {
        self.push(labels, Value::Whole(value));
    }

    fn add_real(&mut self, labels: &[&str], value: f64) {
        self.push(labels, Value::Real(value));
    }

    fn add_histogram(&mut self, labels: &[&str], histogram: &Histogram) {
        self.push(labels, Value::Spread(histogram.clone()));
    }

    fn push(&mut self, labels: &[&str], value: Value) {
        self.0.push((labels.iter().map(|label| (*label).to_owned()).collect(), value));
    }
}

/// The two text formats that scrapers ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// `OpenMetrics` 1.0, which Prometheus asks for.
    OpenMetrics,
    /// The older text format, which everything reads.
    Text,
}

impl Format {
    /// The format that an `Accept` header asks for.
    pub fn accepted(accept: Option<&str>) -> Self {
        let open = accept.is_some_and(|accept| accept.contains("application/openmetrics-text"));
        if open { Self::OpenMetrics } else { Self::Text }
    }

    /// Its `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// A status as metrics.
///
/// # Panics
/// Never: a string takes whatever is written to it.
pub fn encode(status: Status, format: Format) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(OfStatus(Arc::new(status))));
    let mut open = String::new();
    text::encode(&mut open, &registry).expect("a string takes whatever is written to it");
    match format {
        Format::OpenMetrics => open,
        Format::Text => older(&open),
    }
}

/// The older format differs in the names that describe counters and in what follows the samples.
fn older(open: &str) -> String {
    let is_counter =
        |name: &str| families().any(|family| family.name == name && family.kind == Kind::Counter);
    let mut text = String::with_capacity(open.len());
    for line in open.lines().filter(|line| *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what), Some(name), Some(rest)) if is_counter(name) => {
                writeln!(text, "# {what} {name}_total {rest}")
                    .expect("a string takes whatever is written to it");
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
struct OfStatus(Arc<Status>);

impl Collector for OfStatus {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in families() {
            let kind = match family.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let metric = encoder.encode_descriptor(family.name, family.help, None, kind)?;
            let mut samples = Samples::default();
            (family.read)(&self.0, &mut samples);
            write_samples(family, &samples, self.0.view == View::Totals, metric)?;
        }
        Ok(())
    }
}

fn write_samples(
    family: &Family,
    samples: &Samples,
    are_totals: bool,
    mut metric: MetricEncoder<'_>,
) -> Result<(), fmt::Error> {
    for (labels, value) in &samples.0 {
        assert_eq!(labels.len(), family.labels.len(), "{}: a value for each label", family.name);
        let labels = family.labels.iter().copied().zip(labels.iter().map(String::as_str));
        // Sums over all tenants belong to none of them.
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
    family: &Family,
    value: &Value,
    metric: &mut MetricEncoder<'_>,
) -> Result<(), fmt::Error> {
    match (family.kind, value) {
        (Kind::Counter, Value::Whole(count)) => {
            metric.encode_counter::<NoLabelSet, _, u64>(count, None)
        }
        (Kind::Counter, Value::Real(count)) => {
            metric.encode_counter::<NoLabelSet, _, u64>(count, None)
        }
        (Kind::Gauge, Value::Whole(level)) => metric.encode_gauge(level),
        (Kind::Gauge, Value::Real(level)) => metric.encode_gauge(level),
        (Kind::Histogram, Value::Spread(spread)) => {
            let bounds = spread.bounds.iter().copied().chain([f64::INFINITY]);
            let counts = spread.counts.iter().copied().chain([0]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
            metric.encode_histogram::<NoLabelSet>(spread.sum, spread.count(), &buckets, None)
        }
        (kind, value) => unreachable!("{}: {value:?} is no {}", family.name, kind.name()),
    }
}

//! One measured figure: its samples, its limit, the share of the limit, and its target.

use serde::Serialize;

use crate::transfer::TransferRow;
use crate::transport::TransportRow;

/// A figure, as in the JSON output.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// Its name, such as `put/128KiB/1-thread`.
    pub name: String,
    /// Median of the samples.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// Median of the limit's samples, in the same unit; none if no physical limit applies.
    pub limit: Option<f64>,
    /// The share of the limit that was reached; 1 is the limit, also for costs.
    pub share: Option<f64>,
    /// The samples, one per round.
    pub samples: Vec<f64>,
    /// The samples of the limit.
    pub limit_samples: Vec<f64>,
    /// How the limit was measured.
    pub limit_is: String,
    /// The target.
    pub target: Target,
    /// Whether the target was met; none without a target.
    pub is_reached: Option<bool>,
    /// What is known of the worst sample.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// What the plan of the copies says, in figures of planned copies.
    #[serde(flatten)]
    pub planned: Option<Planned>,
    /// The fields of a row of a transport.
    #[serde(flatten)]
    pub transport: Option<TransportRow>,
    /// The fields of a row of a transfer.
    #[serde(flatten)]
    pub transfer: Option<TransferRow>,
    /// The GPU that was measured, in figures of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Whether that GPU is a fake one, whose figures mean nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fake: Option<bool>,
}

/// What the plan of copies to or from a GPU says.
#[derive(Debug, Clone, Serialize)]
pub struct Planned {
    /// Its ways.
    pub ways: Vec<&'static str>,
    /// The value by the table of costs, in the figure's unit; none without a table.
    pub predicted: Option<f64>,
    /// Predicted time over measured time, less one: negative if it took longer than predicted.
    pub time_error: Option<f64>,
}

impl Planned {
    fn text(&self) -> String {
        let ways = self.ways.join("+");
        match (self.predicted, self.time_error) {
            (Some(predicted), Some(error)) => {
                let (predicted, percent) = (number(predicted), error * 100.0);
                format!("  by {ways}, predicted {predicted} (time {percent:+.0} %)")
            }
            _ => format!("  by {ways}"),
        }
    }
}

/// The target of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// No target.
    None,
    /// At least this share of the limit.
    ShareAtLeast(f64),
    /// At least this value.
    AtLeast(f64),
    /// At most this value.
    AtMost(f64),
}

impl Figure {
    /// A rate: more is better.
    pub fn rate(
        name: String,
        unit: &'static str,
        samples: Vec<f64>,
        limit: (Vec<f64>, &str),
        target: Target,
    ) -> Self {
        Self::new(name, unit, samples, limit, (target, |value, limit| value / limit))
    }

    /// A cost: less is better.
    pub fn cost(
        name: String,
        unit: &'static str,
        samples: Vec<f64>,
        limit: (Vec<f64>, &str),
        target: Target,
    ) -> Self {
        Self::new(name, unit, samples, limit, (target, |value, limit| limit / value))
    }

    fn new(
        name: String,
        unit: &'static str,
        samples: Vec<f64>,
        (limit_samples, limit_is): (Vec<f64>, &str),
        (target, share_of): (Target, fn(f64, f64) -> f64),
    ) -> Self {
        let value = median(&samples);
        let limit = (!limit_samples.is_empty()).then(|| median(&limit_samples));
        let share = limit.map(|limit| share_of(value, limit));
        let is_reached = match target {
            Target::None => None,
            Target::ShareAtLeast(least) => Some(share.is_some_and(|share| share >= least)),
            Target::AtLeast(least) => Some(value >= least),
            Target::AtMost(most) => Some(value <= most),
        };
        let limit_is = limit_is.to_owned();
        Self {
            name,
            value,
            unit,
            limit,
            share,
            samples,
            limit_samples,
            limit_is,
            target,
            is_reached,
            detail: String::new(),
            planned: None,
            transport: None,
            transfer: None,
            device: None,
            fake: None,
        }
    }

    /// The figure of a GPU.
    pub(super) fn on_device(self, device: &str, is_fake: bool) -> Self {
        Self { device: Some(device.to_owned()), fake: Some(is_fake), ..self }
    }

    /// The figure of a transport.
    pub(super) fn of_transport(self, row: TransportRow) -> Self {
        Self { transport: Some(row), ..self }
    }

    /// The figure of a transfer.
    pub(super) fn of_transfer(self, row: TransferRow) -> Self {
        Self { transfer: Some(row), ..self }
    }

    /// The figure with what is known of its worst sample. A row says it if the target was missed.
    pub fn with_detail(self, detail: String) -> Self {
        Self { detail, ..self }
    }

    /// The figure as a row under [`table_header`].
    pub fn row(&self) -> String {
        let limit = self.limit.map_or("-".to_owned(), number);
        let share = self.share.map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0));
        let target = match self.target {
            Target::None => String::new(),
            Target::ShareAtLeast(least) => format!(">= {:.0} %", least * 100.0),
            Target::AtLeast(least) => format!(">= {}", number(least)),
            Target::AtMost(most) => format!("<= {}", number(most)),
        };
        let (low, high) = spread(&self.samples);
        let is_missed = self.is_reached == Some(false) && !self.detail.is_empty();
        let detail = if is_missed { format!("\n  {}", self.detail) } else { String::new() };
        let planned = self.planned.as_ref().map(Planned::text).unwrap_or_default();
        let range = format!("{}..{}", number(low), number(high));
        let transport = self.transport.as_ref().map(TransportRow::columns);
        let columns = transport.or_else(|| self.transfer.as_ref().map(TransferRow::columns));
        let end = columns.map_or_else(|| range.clone(), |columns| format!("{range:<16}{columns}"));
        let fake = if self.fake == Some(true) { "  FAKE" } else { "" };
        format!(
            "{:<34}{:>9} {:<7}{:>9}{:>8}  {:<10}{:<9}{end}{planned}{fake}{detail}",
            self.name,
            number(self.value),
            self.unit,
            limit,
            share,
            target,
            self.verdict(),
        )
    }

    /// `met`, `MISSED`, or nothing.
    pub fn verdict(&self) -> &'static str {
        match self.is_reached {
            None => "",
            Some(true) => "met",
            Some(false) => "MISSED",
        }
    }
}

/// The header of the table of figures. `columns` are those of the rows of one benchmark.
pub fn table_header(columns: &str) -> String {
    format!(
        "{:<34}{:>9} {:<7}{:>9}{:>8}  {:<10}{:<9}{}{columns}",
        "figure", "median", "unit", "limit", "share", "target", "verdict", "range of samples"
    )
}

fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn spread(samples: &[f64]) -> (f64, f64) {
    let low = samples.iter().copied().fold(f64::MAX, f64::min);
    let high = samples.iter().copied().fold(f64::MIN, f64::max);
    (low, high)
}

/// The median of the samples.
pub(super) fn median(samples: &[f64]) -> f64 {
    assert!(!samples.is_empty(), "a figure has samples");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted[middle]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_limit_is_computed_for_rates_and_for_costs() {
        let target = Target::ShareAtLeast(0.8);
        let limit = || (vec![10.0, 10.0, 11.0], "memcpy");
        let rate = Figure::rate("r".into(), "GiB/s", vec![9.0, 7.0, 8.0], limit(), target);
        assert_eq!((rate.value, rate.share, rate.is_reached), (8.0, Some(0.8), Some(true)));
        let cost = Figure::cost("c".into(), "ns", vec![40.0], limit(), target);
        assert_eq!((cost.share, cost.is_reached), (Some(0.25), Some(false)));
        let free = Figure::cost("f".into(), "s", vec![3.0, 1.0], (vec![], ""), Target::AtMost(2.0));
        assert_eq!((free.value, free.limit, free.is_reached), (2.0, None, Some(true)));
        let least = |least| {
            Figure::rate("l".into(), "GiB/s", vec![8.0], limit(), Target::AtLeast(least)).is_reached
        };
        assert_eq!((least(8.0), least(8.1)), (Some(true), Some(false)));
    }
}

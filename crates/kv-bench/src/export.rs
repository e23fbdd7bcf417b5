//! The spreadsheet of a run: the original's sheets and columns, filled from the result file.

use serde_json::Value;

use crate::spreadsheet::{Cell, Sheet};

/// Columns from a latency of `summary`: the name, the key, and how many of the percentiles.
const REQUESTS: [(&str, &str, usize); 3] = [
    ("E2E Latency", "end_to_end_latency_ms", 6),
    ("Storage Latency", "storage_io_latency_ms", 6),
    ("Gen Latency", "generation_latency_ms", 4),
];
const PERCENTILES: [(&str, &str); 6] = [
    ("Mean", "mean"),
    ("P50", "p50"),
    ("P95", "p95"),
    ("P99", "p99"),
    ("P99.9", "p999"),
    ("P99.99", "p9999"),
];
/// Columns from a latency of `cache_stats`.
const STORAGE: [(&str, &str); 6] = [
    ("Read Total", "storage_read"),
    ("Write Total", "storage_write"),
    ("Read Device", "storage_read_device"),
    ("Write Device", "storage_write_device"),
    ("Read Host", "storage_read_host"),
    ("Write Host", "storage_write_host"),
];
const TIERS: [(&str, &str); 3] = [("GPU", "gpu"), ("CPU", "cpu"), ("Storage", "storage")];

type Row = (String, Cell);

/// The sheets of a run with these parameters and this result file.
pub fn sheets(parameters: &[(&'static str, Value)], result: &Value) -> Vec<Sheet> {
    let parameters: Vec<Row> =
        parameters.iter().map(|(name, value)| ((*name).to_owned(), value.into())).collect();
    let metrics = metrics(&result["summary"]);
    let profile = parameters.iter().find(|(name, _)| name == "Performance Profile");
    let has_limits = profile.is_none_or(|(_, value)| *value != "throughput".into());
    let (names, values): (Vec<Cell>, Vec<Cell>) = parameters
        .iter()
        .chain(&metrics)
        .map(|(name, value)| (name.as_str().into(), value.clone()))
        .unzip();
    vec![
        Sheet { name: "Summary", rows: vec![names, values] },
        pairs("Run Parameters", "Parameter", parameters),
        pairs("Performance Metrics", "Metric", metrics),
        Sheet { name: "QoS Metrics", rows: classes(&result["summary"]["qos_metrics"], has_limits) },
        pairs("Validity", "Reason", validity(&result["cascade"])),
    ]
}

fn pairs(name: &'static str, column: &str, rows: Vec<Row>) -> Sheet {
    let head = vec![column.into(), "Value".into()];
    let rows = rows.into_iter().map(|(name, value)| vec![name.as_str().into(), value]);
    Sheet { name, rows: std::iter::once(head).chain(rows).collect() }
}

fn metrics(summary: &Value) -> Vec<Row> {
    let cache = &summary["cache_stats"];
    let mut all = Vec::new();
    let mut add = |name: String, value: &Value| all.push((name, Cell::from(value)));
    for (name, key) in [
        ("Total Requests", "total_requests"),
        ("Total Tokens", "total_tokens"),
        ("Elapsed Time (s)", "elapsed_time"),
        ("Avg Throughput (tok/s)", "avg_throughput_tokens_per_sec"),
        ("Storage Throughput (tok/s)", "storage_throughput_tokens_per_sec"),
        ("Requests/sec", "requests_per_second"),
    ] {
        add(name.to_owned(), &summary[key]);
    }
    for (name, key, count) in REQUESTS {
        for (percentile, field) in PERCENTILES.iter().take(count) {
            add(format!("{name} {percentile} (ms)"), &summary[key][*field]);
        }
    }
    for (name, key) in STORAGE {
        for (percentile, field) in &PERCENTILES[1..] {
            let value = &cache[format!("{key}_{field}_ms")];
            add(format!("Storage Tier {name} {percentile} (ms)"), value);
        }
    }
    for (name, key) in [
        ("Cache Hit Rate", "cache_hit_rate"),
        ("Read/Write Ratio", "read_write_ratio"),
        ("Total Read (GiB)", "total_read_gb"),
        ("Total Write (GiB)", "total_write_gb"),
    ] {
        add(name.to_owned(), &cache[key]);
    }
    for direction in ["Written", "Read"] {
        for (tier, key) in TIERS {
            let name = format!("Tier {tier} KV Bytes {direction} (GiB)");
            add(name, &cache[format!("tier_{key}_kv_bytes_{}_gb", direction.to_lowercase())]);
        }
    }
    for (tier, key) in TIERS {
        for direction in ["Read", "Write"] {
            let name = format!("Tier {tier} {direction} Bandwidth (GiB/s)");
            add(name, &cache[format!("tier_{key}_{}_bandwidth_gbps", direction.to_lowercase())]);
        }
    }
    for (tier, key) in TIERS {
        add(format!("{tier} Entries"), &cache[format!("{key}_entries")]);
    }
    add("Multi-turn Hit Rate".to_owned(), &summary["multi_turn_stats"]["hit_rate"]);
    all
}

/// A row for each class of service that has answered requests.
fn classes(metrics: &Value, has_limits: bool) -> Vec<Vec<Cell>> {
    let columns = [
        "QoS Level",
        "Total Requests",
        "Latency P95 (ms)",
        "Latency P99 (ms)",
        "SLA Met",
        "SLA Compliance",
    ];
    let answered = metrics.as_object().into_iter().flatten();
    let answered = answered.filter(|(_, class)| class["no_data"] != Value::Bool(true));
    let rows = answered.map(|(name, class)| {
        let (latency, sla) = (&class["latency_ms"], &class["sla"]);
        let limit = |key: &str| {
            if has_limits { Cell::from(&sla[key]) } else { "N/A (throughput mode)".into() }
        };
        let figures = [&class["total_requests"], &latency["p95"], &latency["p99"]];
        let figures = figures.map(Cell::from).into_iter();
        let limits = [limit("met"), limit("compliance")];
        std::iter::once(name.as_str().into()).chain(figures).chain(limits).collect()
    });
    std::iter::once(columns.map(Cell::from).to_vec()).chain(rows).collect()
}

/// What the original does not have: the mode, and why the run is not valid.
fn validity(ours: &Value) -> Vec<Row> {
    let reasons = ours["validity"]["reasons"].as_array().into_iter().flatten();
    let reasons = reasons.map(|reason| {
        (reason["code"].as_str().unwrap_or_default().to_owned(), Cell::from(&reason["text"]))
    });
    let facts = [
        ("Mode", &ours["mode"]),
        ("Valid", &ours["validity"]["is_valid"]),
        ("Partial", &ours["is_partial"]),
    ];
    let facts = facts.map(|(name, value)| (name.to_owned(), Cell::from(value)));
    facts.into_iter().chain(reasons).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The names of columns are those that programs look for.
    #[test]
    fn the_summary_has_the_columns_of_the_original() {
        let class = json!({
            "total_requests": 3, "no_data": false,
            "latency_ms": { "p95": 7.0, "p99": 9.0 },
            "sla": { "met": true, "compliance": 1.0 },
        });
        let result = json!({
            "summary": {
                "total_requests": 3,
                "cache_stats": { "storage_read_device_p9999_ms": 2.5, "gpu_entries": 1 },
                "qos_metrics": { "batch": class, "responsive": { "no_data": true } },
            },
            "cascade": {
                "mode": "compatible",
                "validity": { "is_valid": false, "reasons": [{ "code": "x", "text": "why" }] },
            },
        });
        for (profile, met) in
            [("latency", Cell::Truth(true)), ("throughput", "N/A (throughput mode)".into())]
        {
            let parameters = vec![("Num Users", json!(5)), ("Performance Profile", json!(profile))];
            let all = sheets(&parameters, &result);
            let names: Vec<_> = all.iter().map(|sheet| sheet.name).collect();
            assert_eq!(names[..3], ["Summary", "Run Parameters", "Performance Metrics"]);
            assert_eq!(names[3..], ["QoS Metrics", "Validity"]);
            let value = |name: &str| {
                let at = all[0].rows[0].iter().position(|cell| *cell == name.into());
                all[0].rows[1][at.unwrap()].clone()
            };
            assert_eq!(value("Num Users"), Cell::from(&json!(5)));
            assert_eq!(value("Storage Tier Read Device P99.99 (ms)"), Cell::from(&json!(2.5)));
            assert_eq!(value("GPU Entries"), Cell::from(&json!(1)));
            assert_eq!(value("Gen Latency P99 (ms)"), Cell::Empty);
            // Two parameters and the 72 metrics of the original.
            assert_eq!((all[0].rows[0].len(), all[1].rows.len(), all[2].rows.len()), (74, 3, 73));
            assert_eq!(all[3].rows.len(), 2);
            assert_eq!((&all[3].rows[1][0], &all[3].rows[1][4]), (&"batch".into(), &met));
            assert_eq!(all[4].rows[4], ["x".into(), Cell::from("why")]);
        }
    }
}

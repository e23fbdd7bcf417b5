//! Takes out of a result file what a run that only logged its operations did not measure.

use serde_json::Value;

/// Parts that are of latencies, rates, processor time or compared bytes as a whole.
const WHOLE: [&str; 8] = [
    "/total_storage_io_latency",
    "/total_generation_latency",
    "/summary/total_storage_io_time",
    "/summary/cache_stats/storage_health",
    "/cascade/assessment",
    "/cascade/cpu",
    "/cascade/verification",
    "/cascade/timeline",
];

/// Leaves all keys. What has no figure is null, and lists are empty.
pub(super) fn hide(json: &mut Value) {
    hide_measured(json);
    for part in WHOLE {
        if let Some(value) = json.pointer_mut(part) {
            blank(value);
        }
    }
}

fn hide_measured(value: &mut Value) {
    let Value::Object(fields) = value else { return };
    for (name, field) in fields {
        if is_measured(name) { blank(field) } else { hide_measured(field) }
    }
}

fn is_measured(name: &str) -> bool {
    let is_target = name.starts_with("target_");
    name.contains("latenc")
        || name.contains("throughput")
        || name.contains("per_sec")
        || name.contains("bandwidth")
        || (name.ends_with("_ms") && !is_target)
        || ["compliance", "met"].contains(&name)
}

fn blank(value: &mut Value) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(blank),
        Value::Array(items) => items.clear(),
        other => *other = Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_stay_and_what_is_measured_is_null() {
        let mut all = json!({
            "requests_completed": 5,
            "storage_latencies": [0.0],
            "summary": {
                "latency_ms": { "p95": 0.0 },
                "cache_stats": { "cache_hits": 7, "storage_health": { "overall_status": "PASS" } },
                "sla": { "target_p95_ms": 50, "actual_p95_ms": 0.0, "met": true },
                "requests_per_second": 3.0,
            },
        });
        hide(&mut all);
        let expected = json!({
            "requests_completed": 5,
            "storage_latencies": [],
            "summary": {
                "latency_ms": { "p95": null },
                "cache_stats": { "cache_hits": 7, "storage_health": { "overall_status": null } },
                "sla": { "target_p95_ms": 50, "actual_p95_ms": null, "met": null },
                "requests_per_second": null,
            },
        });
        assert_eq!(all, expected);
    }
}

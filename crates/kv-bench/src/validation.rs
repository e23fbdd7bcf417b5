//! Compares a run's hit rate with that of a real trace, as the original's option does.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::KvBenchError;

/// Limit of the size of the file.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Most percent by which the rates may differ.
const ERROR_PERCENT_MAX: f64 = 5.0;

/// Fields that are numbers.
const NUMBERS: [&str; 4] = ["read_bytes", "write_bytes", "context_tokens", "generation_tokens"];

/// Figures of a real trace.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidationTrace {
    requests: u64,
    hit_rate: f64,
    read_write_ratio: f64,
    context_tokens_mean: f64,
    generation_tokens_mean: f64,
}

impl ValidationTrace {
    /// Reads a JSON array of entries with `cache_hit`, `read_bytes`, `write_bytes`,
    /// `context_tokens` and `generation_tokens`.
    ///
    /// # Errors
    /// The file cannot be read, has no such entries, or no hit to compare with.
    pub fn read(path: &Path) -> Result<Self, KvBenchError> {
        let refused = |what: String| {
            KvBenchError::usage(
                format!("--validation-trace {}: {what}", path.display()),
                "give a JSON array of objects with `cache_hit` (true or false), `read_bytes`, \
                 `write_bytes`, `context_tokens` and `generation_tokens`",
            )
        };
        let mut text = Vec::new();
        let file = File::open(path).map_err(|error| refused(error.to_string()))?;
        let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text);
        read.map_err(|error| refused(error.to_string()))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(refused(format!("it has more than {FILE_BYTES_MAX} bytes")));
        }
        Self::parse(&text).map_err(refused)
    }

    fn parse(text: &[u8]) -> Result<Self, String> {
        let entries: Vec<Map<String, Value>> =
            serde_json::from_slice(text).map_err(|error| format!("not such JSON ({error})"))?;
        let (mut hits, mut sums) = (0_u64, [0.0; 4]);
        for (index, entry) in entries.iter().enumerate() {
            let wrong = |field: &str, expected: &str| {
                let found = entry.get(field).map_or("nothing".to_owned(), ToString::to_string);
                format!("entry {index}: field `{field}`: expected {expected}, found {found}")
            };
            let hit = entry.get("cache_hit").and_then(Value::as_bool);
            hits += u64::from(hit.ok_or_else(|| wrong("cache_hit", "true or false"))?);
            for (field, sum) in NUMBERS.iter().zip(&mut sums) {
                let number = entry.get(*field).and_then(Value::as_f64).filter(|it| *it >= 0.0);
                *sum += number.ok_or_else(|| wrong(field, "a number from 0 up"))?;
            }
        }
        if hits == 0 {
            let what = if entries.is_empty() { "it has no entries" } else { "it has no hit" };
            return Err(format!("{what} to compare with"));
        }
        let count = entries.len() as f64;
        let [read, written, context, generated] = sums;
        Ok(Self {
            requests: entries.len() as u64,
            hit_rate: hits as f64 / count,
            read_write_ratio: read / written.max(1.0),
            context_tokens_mean: context / count,
            generation_tokens_mean: generated / count,
        })
    }

    /// The comparison with a run's hit rate: the original's `validation`.
    pub fn compare(&self, hit_rate: f64) -> Value {
        let error_percent = (hit_rate - self.hit_rate).abs() / self.hit_rate * 100.0;
        let is_within = error_percent <= ERROR_PERCENT_MAX;
        json!({
            "passed": is_within,
            "avg_error_pct": error_percent,
            "comparison": {
                "cache_hit_rate": {
                    "benchmark": hit_rate,
                    "trace": self.hit_rate,
                    "error_pct": error_percent,
                    "within_5pct": is_within,
                },
            },
            "trace_stats": {
                "total_requests": self.requests,
                "cache_hit_rate": self.hit_rate,
                "read_write_ratio": self.read_write_ratio,
                "context_tokens_mean": self.context_tokens_mean,
                "generation_tokens_mean": self.generation_tokens_mean,
            },
        })
    }

    /// The comparison in a line.
    pub fn text(&self, hit_rate: f64) -> String {
        let verdict = &self.compare(hit_rate)["avg_error_pct"];
        format!(
            "validation: hit rate {:.1} %, {:.1} % in the trace: {:.1} % apart, at most \
             {ERROR_PERCENT_MAX} % is a pass",
            hit_rate * 100.0,
            self.hit_rate * 100.0,
            verdict.as_f64().unwrap_or(0.0),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(is_hit: bool) -> String {
        format!(
            "{{\"timestamp\": 0.5, \"request_id\": \"a\", \"cache_hit\": {is_hit}, \"read_bytes\": \
             300, \"write_bytes\": 100, \"context_tokens\": 10, \"generation_tokens\": 4}}"
        )
    }

    #[test]
    fn a_trace_is_compared_as_in_the_original() {
        let text = format!("[{}, {}, {}, {}]", entry(true), entry(false), entry(true), entry(true));
        let trace = ValidationTrace::parse(text.as_bytes()).unwrap();
        let close = trace.compare(0.72);
        assert_eq!(close["passed"], true);
        assert_eq!(close["trace_stats"]["read_write_ratio"], 3.0);
        assert_eq!(close["trace_stats"]["context_tokens_mean"], 10.0);
        assert_eq!(close["comparison"]["cache_hit_rate"]["trace"], 0.75);
        let far = trace.compare(1.0);
        assert_eq!(
            (&far["passed"], &far["comparison"]["cache_hit_rate"]["within_5pct"]),
            (&Value::Bool(false), &Value::Bool(false))
        );
        assert!((far["avg_error_pct"].as_f64().unwrap() - 100.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_file_without_a_hit_or_with_wrong_entries_is_refused() {
        let refusal = |text: &str| ValidationTrace::parse(text.as_bytes()).unwrap_err();
        assert_eq!(refusal("[]"), "it has no entries to compare with");
        assert_eq!(refusal(&format!("[{}]", entry(false))), "it has no hit to compare with");
        assert!(refusal("{}").starts_with("not such JSON ("));
        let wrong = format!("[{}, {}]", entry(true), entry(true).replace("300", "\"300\""));
        assert_eq!(
            refusal(&wrong),
            "entry 1: field `read_bytes`: expected a number from 0 up, found \"300\""
        );
        let missing = format!("[{}]", entry(true).replace("cache_hit", "hit"));
        assert!(refusal(&missing).contains("`cache_hit`: expected true or false, found nothing"));
    }
}

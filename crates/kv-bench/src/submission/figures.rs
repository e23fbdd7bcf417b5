//! The figures of an option: what its ranks report, summed over ranks, averaged over trials.

use serde::Serialize;
use serde_json::{Value, json};

/// What the summary needs of a rank's result file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankFigures {
    read_gib: f64,
    written_gib: f64,
    tokens: f64,
    storage_tokens: f64,
    storage_io_ms_p95: f64,
    device_read_ms_p95: Option<f64>,
    device_write_ms_p95: Option<f64>,
    /// Whether files gave and took nothing.
    is_only_memory: bool,
    window_read_gib: f64,
    window_written_gib: f64,
    tail_seconds: f64,
    is_partial: bool,
    /// Why its figures cannot be trusted.
    invalid: Vec<String>,
}

impl RankFigures {
    /// Reads a rank's result file. `None` if it is not one.
    pub fn of(result: &Value) -> Option<Self> {
        let (summary, ours) = (result.get("summary")?, result.get("cascade")?);
        let cache = summary.get("cache_stats")?;
        let reasons = ours["validity"]["reasons"].as_array()?;
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        Some(Self {
            read_gib: cache["tier_storage_read_bandwidth_gbps"].as_f64()?,
            written_gib: cache["tier_storage_write_bandwidth_gbps"].as_f64()?,
            tokens: number(&summary["avg_throughput_tokens_per_sec"]),
            storage_tokens: number(&summary["storage_throughput_tokens_per_sec"]),
            storage_io_ms_p95: number(&summary["storage_io_latency_ms"]["p95"]),
            device_read_ms_p95: cache["storage_read_device_p95_ms"].as_f64(),
            device_write_ms_p95: cache["storage_write_device_p95_ms"].as_f64(),
            is_only_memory: cache["storage_entries"] == 0,
            window_read_gib: number(&ours["rates"]["storage_read_gib_per_second"]),
            window_written_gib: number(&ours["rates"]["storage_written_gib_per_second"]),
            tail_seconds: number(&ours["window"]["tail_seconds"]),
            is_partial: ours["is_partial"] == true,
            invalid: reasons
                .iter()
                .filter_map(|reason| reason["text"].as_str().map(str::to_owned))
                .collect(),
        })
    }
}

/// A rank of a trial.
#[derive(Debug, Clone)]
pub struct RankOfTrial {
    /// The file with its result, or its directory if there is none.
    pub path: String,
    /// What it reports. `None` if it left no result.
    pub figures: Option<RankFigures>,
    /// How it failed, if it did.
    pub failure: Option<String>,
    /// Whether something else than an unoptimised build speaks against its figures.
    pub is_invalid: bool,
}

/// The figures of an option.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OptionFigures {
    /// Read from storage in GiB a second, as the original counts.
    pub read_gib_per_second: f64,
    /// Written to storage.
    pub written_gib_per_second: f64,
    /// Generated tokens a second.
    pub tokens_per_second: f64,
    /// Tokens for each second of storage I/O.
    pub storage_tokens_per_second: f64,
    /// P95 of all storage I/O of a request, of the slowest rank.
    pub storage_io_ms_p95: Option<f64>,
    /// P95 of reading a file, of the slowest rank.
    pub device_read_ms_p95: Option<f64>,
    /// P95 of syncing a file, of the slowest rank.
    pub device_write_ms_p95: Option<f64>,
    /// Read from storage within the window.
    pub window_read_gib_per_second: f64,
    /// Written to storage within the window.
    pub window_written_gib_per_second: f64,
    /// How long requests went on after the window, in the slowest rank.
    pub tail_seconds_max: f64,
}

/// All trials of an option.
#[derive(Debug, Clone)]
pub struct OptionRun {
    /// 1, 2 or 3.
    pub option: u8,
    /// The ranks of each trial.
    pub trials: Vec<Vec<RankOfTrial>>,
}

impl OptionRun {
    /// Sums of the ranks, averaged over the trials; latencies are those of the slowest rank.
    pub fn figures(&self) -> OptionFigures {
        let of = |value: fn(&RankFigures) -> f64| {
            let sums = self.trials.iter().map(|ranks| {
                ranks.iter().filter_map(|rank| rank.figures.as_ref()).map(value).sum::<f64>()
            });
            sums.sum::<f64>() / self.trials.len().max(1) as f64
        };
        let most = |value: fn(&RankFigures) -> Option<f64>| {
            self.reporting().filter_map(value).reduce(f64::max)
        };
        OptionFigures {
            read_gib_per_second: of(|it| it.read_gib),
            written_gib_per_second: of(|it| it.written_gib),
            tokens_per_second: of(|it| it.tokens),
            storage_tokens_per_second: of(|it| it.storage_tokens),
            storage_io_ms_p95: most(|it| Some(it.storage_io_ms_p95)),
            device_read_ms_p95: most(|it| it.device_read_ms_p95),
            device_write_ms_p95: most(|it| it.device_write_ms_p95),
            window_read_gib_per_second: of(|it| it.window_read_gib),
            window_written_gib_per_second: of(|it| it.window_written_gib),
            tail_seconds_max: most(|it| Some(it.tail_seconds)).unwrap_or(0.0),
        }
    }

    fn ranks(&self) -> impl Iterator<Item = &RankOfTrial> {
        self.trials.iter().flatten()
    }

    fn reporting(&self) -> impl Iterator<Item = &RankFigures> {
        self.ranks().filter_map(|rank| rank.figures.as_ref())
    }

    /// Ranks without a result.
    pub fn missing(&self) -> Vec<&str> {
        let missing = self.ranks().filter(|rank| rank.figures.is_none());
        missing.map(|rank| rank.path.as_str()).collect()
    }

    /// Whether a rank failed, left no result, or was stopped.
    pub fn is_partial(&self) -> bool {
        self.ranks().any(|rank| rank.figures.is_none() || rank.failure.is_some())
            || self.reporting().any(|figures| figures.is_partial)
    }

    /// Whether something else than an unoptimised build speaks against the figures of a rank.
    pub fn has_invalid(&self) -> bool {
        self.ranks().any(|rank| rank.is_invalid)
    }

    /// Why ranks are not valid, each reason once.
    pub fn invalid(&self) -> Vec<&str> {
        let mut reasons: Vec<&str> =
            self.reporting().flat_map(|it| it.invalid.iter().map(String::as_str)).collect();
        reasons.sort_unstable();
        reasons.dedup();
        reasons
    }

    /// How ranks failed, by trial and rank.
    pub fn failures(&self) -> Vec<String> {
        let mut all = Vec::new();
        for (trial, ranks) in self.trials.iter().enumerate() {
            for (rank, it) in ranks.iter().enumerate() {
                let failure = it.failure.as_ref();
                all.extend(failure.map(|why| format!("trial {trial}, rank {rank}: {why}")));
            }
        }
        all
    }

    /// The option in `summary.json`, or in the run summary of later versions, which has the P95
    /// of the device in the place of the one of storage I/O.
    pub(super) fn to_json(&self, has_device_latencies: bool) -> Value {
        let figures = self.figures();
        let memory =
            self.ranks().filter(|it| it.figures.as_ref().is_some_and(|it| it.is_only_memory));
        let mut all = json!({
            "option": self.option,
            "aggregated_read_bandwidth_gbps": figures.read_gib_per_second,
            "aggregated_write_bandwidth_gbps": figures.written_gib_per_second,
            "aggregated_avg_throughput_tokens_per_sec": figures.tokens_per_second,
            "aggregated_storage_throughput_tokens_per_sec": figures.storage_tokens_per_second,
            "rank_count": self.trials.first().map_or(0, Vec::len),
            "trial_count": self.trials.len(),
            "partial_failure": self.is_partial(),
            "missing_files": self.missing(),
            "cpu_tier_ranks": memory.map(|rank| rank.path.as_str()).collect::<Vec<_>>(),
            "cascade": {
                "read_gib_per_second_in_window": figures.window_read_gib_per_second,
                "written_gib_per_second_in_window": figures.window_written_gib_per_second,
                "tail_seconds_max": figures.tail_seconds_max,
                "invalid": self.invalid(),
                "failures": self.failures(),
            },
        });
        if has_device_latencies {
            all["aggregated_device_read_p95_ms"] = json!(figures.device_read_ms_p95);
            all["aggregated_device_write_p95_ms"] = json!(figures.device_write_ms_p95);
        } else {
            all["aggregated_p95_latency_ms"] = json!(figures.storage_io_ms_p95);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(read: f64, p95: f64, device: Option<f64>) -> RankOfTrial {
        let result = json!({
            "summary": {
                "avg_throughput_tokens_per_sec": 10.0,
                "storage_throughput_tokens_per_sec": 5.0,
                "storage_io_latency_ms": { "p95": p95 },
                "cache_stats": {
                    "tier_storage_read_bandwidth_gbps": read,
                    "tier_storage_write_bandwidth_gbps": 1.0,
                    "storage_read_device_p95_ms": device,
                    "storage_entries": 3,
                },
            },
            "cascade": {
                "rates": { "storage_read_gib_per_second": read / 2.0 },
                "window": { "tail_seconds": p95 / 10.0 },
                "validity": { "reasons": [{ "code": "a", "text": "a reason" }] },
            },
        });
        let figures = Some(RankFigures::of(&result).unwrap());
        RankOfTrial { path: "rank_0".to_owned(), figures, failure: None, is_invalid: false }
    }

    #[test]
    fn rates_are_sums_of_ranks_and_means_of_trials_and_latencies_those_of_the_slowest() {
        let trials = vec![
            vec![rank(1.0, 10.0, Some(3.0)), rank(2.0, 40.0, None)],
            vec![rank(3.0, 20.0, Some(4.0)), rank(4.0, 30.0, Some(1.0))],
        ];
        let run = OptionRun { option: 1, trials };
        let figures = run.figures();
        assert_eq!((figures.read_gib_per_second, figures.written_gib_per_second), (5.0, 2.0));
        assert_eq!((figures.tokens_per_second, figures.storage_tokens_per_second), (20.0, 10.0));
        assert_eq!(figures.storage_io_ms_p95, Some(40.0));
        assert_eq!((figures.device_read_ms_p95, figures.device_write_ms_p95), (Some(4.0), None));
        assert_eq!((figures.window_read_gib_per_second, figures.tail_seconds_max), (2.5, 4.0));
        assert!(!run.is_partial() && run.missing().is_empty());
        assert_eq!(run.invalid(), ["a reason"]);
        assert_eq!(run.to_json(false)["aggregated_p95_latency_ms"], 40.0);
        assert_eq!(run.to_json(true)["aggregated_device_read_p95_ms"], 4.0);
    }

    #[test]
    fn a_rank_without_a_result_is_named_and_counts_as_nothing() {
        let lost = RankOfTrial {
            path: "trial_0/rank_1".to_owned(),
            figures: None,
            failure: Some("killed".to_owned()),
            is_invalid: false,
        };
        let run = OptionRun { option: 2, trials: vec![vec![rank(1.0, 1.0, None), lost]] };
        let json = run.to_json(false);
        assert_eq!((&json["partial_failure"], &json["rank_count"]), (&true.into(), &2.into()));
        assert_eq!(json["missing_files"], json!(["trial_0/rank_1"]));
        assert_eq!(run.failures(), ["trial 0, rank 1: killed"]);
        assert_eq!(json["aggregated_read_bandwidth_gbps"], 1.0);
        assert!(RankFigures::of(&json!({ "summary": {} })).is_none());
    }
}

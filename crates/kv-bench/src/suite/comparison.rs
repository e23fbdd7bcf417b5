//! What the runs of a suite have reported, side by side.

use cascade_replay::environment::Environment;
use serde_json::{Value, json};

use crate::suite::plan::SuiteRun;

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunState {
    /// It left a result that can be trusted, or that only an unoptimised build speaks against.
    Done,
    /// It left a result that cannot be trusted.
    Invalid,
    /// It was interrupted; its figures are those until then.
    Interrupted,
    /// It failed, and this is why.
    Failed(String),
    /// It was not started.
    NotRun,
}

impl RunState {
    /// The name in results.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Invalid => "invalid",
            Self::Interrupted => "interrupted",
            Self::Failed(_) => "failed",
            Self::NotRun => "not run",
        }
    }
}

/// A run with what it has reported.
#[derive(Debug, Clone)]
pub struct RunOutcome {
    /// The run.
    pub run: SuiteRun,
    /// How it ended.
    pub state: RunState,
    /// Seconds from its start to its end.
    pub seconds: f64,
    /// Its figures, if it left a result.
    pub figures: Option<RunFigures>,
    /// Its result file.
    pub result_file: String,
    /// Its command line.
    pub command: String,
}

/// Latencies in ms. None without samples.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Latencies {
    /// Mean.
    pub mean: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// 95th percentile.
    pub p95: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
}

/// The figures of a result file that are compared.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunFigures {
    /// Requests that were answered.
    pub requests: u64,
    /// Generated tokens a second.
    pub tokens_per_second: f64,
    /// Read from all tiers, as the run's mode counts it.
    pub read_gib_per_second: f64,
    /// Written, as the run's mode counts it.
    pub written_gib_per_second: f64,
    /// Bytes read from the simulated GPU, DRAM and files, in GiB.
    pub read_gib: [f64; 3],
    /// Blocks found over blocks read. None if nothing was read.
    pub hit_rate: Option<f64>,
    /// From when a request was due to its answer.
    pub end_to_end: Latencies,
    /// All storage calls of a request.
    pub storage: Latencies,
    /// Waiting for a thread.
    pub queue: Latencies,
    /// `PASS`, `FAIL` or `NOT JUDGED`, with the criteria that pass and those that have samples.
    pub assessment: (String, u64, u64),
    /// Criteria that fail, with their figures.
    pub failed_criteria: Vec<String>,
    /// What autoscaling found.
    pub scaling: Option<String>,
    /// Parts that are simulated.
    pub simulated: Vec<String>,
    /// Why its figures cannot be trusted.
    pub invalid: Vec<String>,
    /// Whether it ended early.
    pub is_partial: bool,
}

/// All runs of a suite.
#[derive(Debug)]
pub struct Comparison {
    /// The runs in their order.
    pub outcomes: Vec<RunOutcome>,
    /// Whether it was interrupted.
    pub is_interrupted: bool,
    /// The machine and the build.
    pub environment: Environment,
}

impl Latencies {
    fn of(value: &Value) -> Self {
        if value["count"] == 0 {
            return Self::default();
        }
        let at = |name: &str| value[name].as_f64();
        Self { mean: at("mean"), p50: at("p50"), p95: at("p95"), p99: at("p99") }
    }

    fn to_json(self) -> Value {
        json!({ "mean": self.mean, "p50": self.p50, "p95": self.p95, "p99": self.p99 })
    }
}

impl RunFigures {
    /// Reads a result file. None if it is not one.
    pub fn of(result: &Value) -> Option<Self> {
        let (summary, ours) = (result.get("summary")?, result.get("cascade")?);
        let cache = summary.get("cache_stats")?;
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let rates = if ours["rates_with_tail"].is_object() { "rates_with_tail" } else { "rates" };
        let tier = |name: &str| number(&cache[format!("tier_{name}_kv_bytes_read_gb")]);
        let reads = number(&cache["cache_hits"]) + number(&cache["cache_misses"]);
        let assessment = &ours["assessment"];
        let count = |name: &str| assessment[name].as_u64().unwrap_or(0);
        Some(Self {
            requests: result["requests_completed"].as_u64()?,
            tokens_per_second: number(&summary["avg_throughput_tokens_per_sec"]),
            read_gib_per_second: number(&ours[rates]["read_gib_per_second"]),
            written_gib_per_second: number(&ours[rates]["written_gib_per_second"]),
            read_gib: ["gpu", "cpu", "storage"].map(tier),
            hit_rate: cache["cache_hit_rate"].as_f64().filter(|_| reads > 0.0),
            end_to_end: Latencies::of(&summary["end_to_end_latency_ms"]),
            storage: Latencies::of(&summary["storage_io_latency_ms"]),
            queue: Latencies::of(&ours["latency_ms"]["queue"]),
            assessment: (
                assessment["overall_status"].as_str()?.to_owned(),
                count("passed_count"),
                count("total_count").saturating_sub(count("not_judged_count")),
            ),
            failed_criteria: failed_criteria(&assessment["criteria"]),
            scaling: scaling(&summary["autoscaling_summary"]),
            simulated: texts(&ours["simulated"], Value::as_str),
            invalid: texts(&ours["validity"]["reasons"], |it| it["text"].as_str()),
            is_partial: ours["is_partial"] == true,
        })
    }

    /// Whether requests wait for a thread during more than half of their time.
    pub fn is_queue_bound(&self) -> bool {
        match (self.queue.mean, self.end_to_end.mean) {
            (Some(queue), Some(all)) => queue > all / 2.0,
            _ => false,
        }
    }

    /// The share of each tier in the bytes that were read. None if nothing was read.
    pub fn read_shares(&self) -> Option<[f64; 3]> {
        let all: f64 = self.read_gib.iter().sum();
        (all > 0.0).then(|| self.read_gib.map(|gib| gib / all))
    }

    fn to_json(&self) -> Value {
        let (status, passed_count, judged_count) = &self.assessment;
        let [gpu, cpu, files] = self.read_gib;
        json!({
            "requests_completed": self.requests,
            "tokens_per_second": self.tokens_per_second,
            "read_gib_per_second": self.read_gib_per_second,
            "written_gib_per_second": self.written_gib_per_second,
            "read_gib": { "gpu": gpu, "cpu": cpu, "storage": files },
            "hit_rate": self.hit_rate,
            "end_to_end_latency_ms": self.end_to_end.to_json(),
            "storage_io_latency_ms": self.storage.to_json(),
            "queue_latency_ms": self.queue.to_json(),
            "assessment": {
                "overall_status": status,
                "passed_count": passed_count,
                "judged_count": judged_count,
            },
            "failed_criteria": self.failed_criteria,
            "is_queue_bound": self.is_queue_bound(),
            "autoscaling": self.scaling,
            "simulated": self.simulated,
            "invalid": self.invalid,
        })
    }
}

impl Comparison {
    /// Whether each run left a result that can be trusted.
    pub fn is_good(&self) -> bool {
        self.outcomes.iter().all(|outcome| outcome.state == RunState::Done)
    }

    /// The comparison as JSON. The result files of the runs have all figures.
    pub fn to_json(&self) -> Value {
        let runs: Vec<Value> = self.outcomes.iter().map(RunOutcome::to_json).collect();
        json!({
            "schema_version": "1.0",
            "is_interrupted": self.is_interrupted,
            "is_good": self.is_good(),
            "runs": runs,
            "environment": self.environment,
        })
    }
}

impl RunOutcome {
    fn to_json(&self) -> Value {
        let run = &self.run;
        let failure = match &self.state {
            RunState::Failed(why) => Some(why),
            _ => None,
        };
        json!({
            "workload": run.workload.name(),
            "name": run.name,
            "state": self.state.name(),
            "failure": failure,
            "mode": if run.is_compatible { "compatible" } else { "cascade" },
            "users": run.users,
            "gpu": { "gib": run.gpu_gib, "is_simulated": true },
            "cpu_gib": run.cpu_gib,
            "window_seconds": run.seconds,
            "seconds": self.seconds,
            "result_file": self.result_file,
            "command": self.command,
            "figures": self.figures.as_ref().map(RunFigures::to_json),
        })
    }
}

/// The texts in a list.
fn texts(list: &Value, text: impl Fn(&Value) -> Option<&str>) -> Vec<String> {
    let all = list.as_array().into_iter().flatten();
    all.filter_map(|it| text(it).map(str::to_owned)).collect()
}

fn failed_criteria(criteria: &Value) -> Vec<String> {
    let failed = criteria.as_array().into_iter().flatten().filter(|it| it["passed"] == false);
    let text = |it: &Value| {
        let (name, actual) = (it["name"].as_str()?, it["actual"].as_f64()?);
        Some(match it["unit"].as_str()? {
            "ratio" => format!("{name}: {:.1}%", actual * 100.0),
            "ms" => format!("{name}: {actual:.1}ms"),
            unit => format!("{name}: {actual:.2} {unit}"),
        })
    };
    failed.filter_map(text).collect()
}

fn scaling(summary: &Value) -> Option<String> {
    let (first, last) = (summary["initial_users"].as_u64()?, summary["final_users"].as_u64()?);
    let peak = match (summary["peak_gib_per_second"].as_f64(), summary["peak_user_count"].as_u64())
    {
        (Some(gib), Some(users)) => format!("; the peak was {gib:.2} GiB/s with {users} users"),
        _ => String::new(),
    };
    Some(format!("{first} users at first, {last} at last{peak}"))
}

#[cfg(test)]
pub(super) mod tests {
    use cascade_replay::environment::{Build, Environment};

    use super::*;
    use crate::suite::parse_list;
    use crate::suite::plan::{Lengths, SuiteOptions};

    /// A result file with what is compared.
    pub(in crate::suite) fn result() -> Value {
        json!({
            "requests_completed": 1200,
            "summary": {
                "avg_throughput_tokens_per_sec": 321.5,
                "end_to_end_latency_ms": {
                    "count": 2, "mean": 100.0, "p50": 90.0, "p95": 2500.0, "p99": 3000.0
                },
                "storage_io_latency_ms": { "count": 0, "mean": 0.0, "p50": 0.0 },
                "autoscaling_summary": null,
                "cache_stats": {
                    "cache_hits": 9, "cache_misses": 1, "cache_hit_rate": 0.9,
                    "tier_gpu_kv_bytes_read_gb": 0.0,
                    "tier_cpu_kv_bytes_read_gb": 1.0,
                    "tier_storage_kv_bytes_read_gb": 3.0,
                },
            },
            "cascade": {
                "rates": { "read_gib_per_second": 1.5, "written_gib_per_second": 0.25 },
                "rates_with_tail": null,
                "latency_ms": { "queue": { "count": 2, "mean": 60.0 } },
                "assessment": {
                    "overall_status": "FAIL", "passed_count": 2, "total_count": 4,
                    "not_judged_count": 1,
                    "criteria": [
                        { "name": "A", "passed": true, "actual": 1.0, "unit": "ms" },
                        { "name": "Read < 1ms", "passed": false, "actual": 2.5, "unit": "ms" },
                        { "name": "Hits > 90%", "passed": false, "actual": 0.5, "unit": "ratio" },
                        { "name": "B", "passed": null, "actual": null, "unit": "ms" },
                    ],
                },
                "simulated": ["token generation: time passes, nothing is computed"],
                "validity": { "reasons": [{ "code": "x", "text": "a reason" }] },
                "is_partial": false,
            },
        })
    }

    /// Four runs: with a result, failed, not run, and one of a submission.
    pub(in crate::suite) fn comparison() -> Comparison {
        let options = SuiteOptions {
            model: "tiny-1b".to_owned(),
            ranks: 1,
            memory_gib: 8.0,
            gpu_gib: None,
            users: None,
            many_users: None,
            documents: None,
            lengths: Lengths::default(),
            is_compatible: false,
            seed: 42,
        };
        let chosen = parse_list("gpu-only,cpu-only,production,mlperf").unwrap();
        let mut runs = options.runs(&chosen);
        runs.truncate(4);
        let mut states = [
            RunState::Done,
            RunState::Failed("exit code 2".to_owned()),
            RunState::NotRun,
            RunState::Invalid,
        ]
        .into_iter();
        let outcome = |run: SuiteRun| {
            let state = states.next().unwrap();
            let has_figures = matches!(state, RunState::Done | RunState::Invalid);
            RunOutcome {
                result_file: run.file.to_owned(),
                command: run.arguments.join(" "),
                run,
                state,
                seconds: 125.0,
                figures: has_figures.then(|| RunFigures::of(&result()).unwrap()),
            }
        };
        let outcomes = runs.into_iter().map(outcome).collect();
        let build = Build {
            commit: "unknown".to_owned(),
            profile: "debug".to_owned(),
            opt_level: "0".to_owned(),
            has_debug_assertions: true,
        };
        let environment = Environment::capture(build, None);
        Comparison { outcomes, is_interrupted: false, environment }
    }

    #[test]
    fn figures_are_read_from_a_result_file() {
        let figures = RunFigures::of(&result()).unwrap();
        assert_eq!((figures.requests, figures.hit_rate), (1200, Some(0.9)));
        assert_eq!((figures.read_gib_per_second, figures.written_gib_per_second), (1.5, 0.25));
        assert_eq!(figures.read_shares(), Some([0.0, 0.25, 0.75]));
        assert_eq!(figures.failed_criteria, ["Read < 1ms: 2.5ms", "Hits > 90%: 50.0%"]);
        assert!(figures.is_queue_bound());
        assert_eq!(figures.storage, Latencies::default(), "no samples are no latency of 0");
        assert_eq!(figures.scaling, None);

        let mut compatible = result();
        compatible["cascade"]["rates_with_tail"] = json!({ "read_gib_per_second": 2.5 });
        compatible["summary"]["cache_stats"]["cache_hits"] = json!(0);
        compatible["summary"]["cache_stats"]["cache_misses"] = json!(0);
        compatible["summary"]["autoscaling_summary"] = json!({
            "initial_users": 20, "final_users": 48,
            "peak_gib_per_second": 1.25, "peak_user_count": 40,
        });
        let figures = RunFigures::of(&compatible).unwrap();
        assert_eq!((figures.read_gib_per_second, figures.hit_rate), (2.5, None));
        let scaling = "20 users at first, 48 at last; the peak was 1.25 GiB/s with 40 users";
        assert_eq!(figures.scaling.as_deref(), Some(scaling));
        assert!(RunFigures::of(&json!({ "summary": {} })).is_none());
    }

    #[test]
    fn the_comparison_says_how_each_run_ended() {
        let comparison = comparison();
        assert!(!comparison.is_good());
        let json = comparison.to_json();
        let runs = json["runs"].as_array().unwrap();
        let states: Vec<_> = runs.iter().map(|run| run["state"].as_str().unwrap()).collect();
        assert_eq!(states, ["done", "failed", "not run", "invalid"]);
        assert_eq!(runs[0]["gpu"], json!({ "gib": 2.0, "is_simulated": true }));
        assert_eq!(runs[0]["figures"]["end_to_end_latency_ms"]["p95"], 2500.0);
        assert_eq!(
            (&runs[1]["failure"], &runs[1]["figures"]),
            (&json!("exit code 2"), &json!(null))
        );
        assert_eq!(runs[3]["mode"], "compatible");
        let good = Comparison { outcomes: comparison.outcomes[..1].to_vec(), ..comparison };
        assert!(good.is_good());
    }
}

//! The files of a submission: `summary.json`, the run summary and the metadata.

use serde_json::{Map, Value, json};

use super::figures::OptionRun;
use super::{Division, OPTIONS};

/// What was run, for its files.
#[derive(Debug)]
pub struct SubmissionRun {
    /// The division.
    pub division: Division,
    /// Its start, as in names of files: see [`run_datetime`].
    pub run_datetime: String,
    /// Ranks on one host.
    pub ranks_of_host: u32,
    /// Hosts.
    pub hosts: u32,
    /// All ranks.
    pub ranks: u32,
    /// Trials of each option that were to be run.
    pub trials: u32,
    /// Length of a trial.
    pub duration_seconds: u64,
    /// The options that were run.
    pub options: Vec<OptionRun>,
    /// Why it is no valid closed submission.
    pub deviations: Vec<String>,
    /// The arguments that each rank got in the first option, by name.
    pub parameters: Map<String, Value>,
    /// The command line.
    pub command: String,
    /// Where the results are.
    pub results_dir: String,
    /// Seconds from start to end.
    pub seconds: f64,
    /// Whether it was interrupted.
    pub is_interrupted: bool,
}

impl SubmissionRun {
    /// Whether a rank failed, left no result, or was stopped.
    pub fn is_partial(&self) -> bool {
        self.is_interrupted || self.options.iter().any(OptionRun::is_partial)
    }

    /// Why it is no valid closed submission: the sequence, and what ranks report.
    pub fn reasons(&self) -> Vec<String> {
        let mut all = self.deviations.clone();
        if self.division != Division::Closed {
            all.push(format!("the division is {}", self.division.name()));
        }
        if self.is_partial() {
            all.push("ranks failed, or were stopped".to_owned());
        }
        for option in &self.options {
            let reasons = option.invalid();
            all.extend(reasons.iter().map(|why| format!("option {}: {why}", option.option)));
        }
        all
    }

    /// `summary.json` as published, or the run summary of later versions.
    pub fn summary(&self, has_device_latencies: bool) -> Value {
        let options: Map<String, Value> = self
            .options
            .iter()
            .map(|it| (it.option.to_string(), it.to_json(has_device_latencies)))
            .collect();
        let failed = self.options.iter().filter(|it| !it.failures().is_empty());
        let failures: Map<String, Value> =
            failed.map(|it| (it.option.to_string(), json!(it.failures()))).collect();
        let reasons = self.reasons();
        json!({
            "schema_version": "1.0",
            "run_datetime": self.run_datetime,
            "npernode": self.ranks_of_host,
            "host_count": self.hosts,
            "total_ranks": self.ranks,
            "trials_per_option": self.trials,
            "options": options,
            "partial_failure": self.is_partial(),
            "trial_failures": failures,
            "cascade": {
                "division": self.division.name(),
                "is_valid_closed_submission": reasons.is_empty(),
                "reasons": reasons,
                "is_interrupted": self.is_interrupted,
                "mode": "compatible",
            },
        })
    }

    /// The metadata: without it, the original's report leaves the run out.
    pub fn metadata(&self) -> Value {
        let first = self.options.first().map_or(1, |it| it.option);
        let first = OPTIONS.iter().find(|it| it.number == first);
        let model = self.parameters.get("model").cloned();
        let model = model.unwrap_or_else(|| json!(first.map(|it| it.model)));
        let mut all = json!({
            "benchmark_type": "kv_cache",
            "model": model,
            "kvcache_model": model,
            "command": "run",
            "mode": self.division.name(),
            "run_datetime": self.run_datetime,
            "num_processes": self.ranks,
            "accelerator": null,
            "result_dir": self.results_dir,
            "parameters": self.parameters,
            "override_parameters": {},
            "system_info": null,
            "runtime": self.seconds,
            "verification": null,
            "executed_command": self.command,
            "command_output_files": [],
        });
        for (name, value) in &self.parameters {
            all[name] = value.clone();
        }
        all
    }
}

/// A time as in the names of the original's files: `20260102_030405`, in UTC.
pub fn run_datetime(unix_seconds: u64) -> String {
    let (days, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
    // Days since 0000-03-01, so that a leap day ends a year; 400 years have 146,097 days.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}{month:02}{day:02}_{hour:02}{minute:02}{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(run_datetime(0), "19700101_000000");
        assert_eq!(run_datetime(951_782_400), "20000229_000000");
        assert_eq!(run_datetime(1_767_323_045), "20260102_030405");
        assert_eq!(run_datetime(4_102_444_799), "20991231_235959");
    }

    fn run(deviations: Vec<String>) -> SubmissionRun {
        SubmissionRun {
            division: Division::Closed,
            run_datetime: run_datetime(0),
            ranks_of_host: 2,
            hosts: 1,
            ranks: 2,
            trials: 3,
            duration_seconds: 300,
            options: vec![OptionRun { option: 3, trials: Vec::new() }],
            deviations,
            parameters: Map::from_iter([("num_users".to_owned(), json!(70))]),
            command: "cascade bench kv".to_owned(),
            results_dir: "results".to_owned(),
            seconds: 1.5,
            is_interrupted: false,
        }
    }

    #[test]
    fn a_run_that_differs_from_the_rules_is_no_valid_submission() {
        let valid = run(Vec::new()).summary(false);
        assert_eq!(valid["cascade"]["is_valid_closed_submission"], true);
        assert_eq!(valid["schema_version"], "1.0");
        assert_eq!(valid["options"]["3"]["option"], 3);
        let short = run(vec!["short".to_owned()]).summary(true);
        assert_eq!(short["cascade"]["is_valid_closed_submission"], false);
        assert_eq!(short["cascade"]["reasons"], json!(["short"]));
        let open = SubmissionRun { division: Division::Open, ..run(Vec::new()) };
        assert_eq!(open.reasons(), ["the division is open"]);
        let stopped = SubmissionRun { is_interrupted: true, ..run(Vec::new()) };
        assert!(stopped.summary(true)["partial_failure"] == true);
    }

    #[test]
    fn the_metadata_have_the_workload_twice_as_the_original_has_it() {
        let metadata = run(Vec::new()).metadata();
        assert_eq!(metadata["benchmark_type"], "kv_cache");
        assert_eq!(metadata["model"], "llama3.1-70b-instruct");
        assert_eq!(
            (&metadata["num_users"], &metadata["parameters"]["num_users"]),
            (&70.into(), &70.into())
        );
    }
}

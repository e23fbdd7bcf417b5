//! `MLPerf` Storage submissions of the KV cache benchmark: the rules, and the figures of a run.

pub mod figures;
pub mod files;

/// Trials of each option in a closed submission.
pub const TRIALS: u32 = 3;
/// Length of a trial in a closed submission.
pub const DURATION_SECONDS: u64 = 300;
/// Wait before and after each trial, and between two options.
pub const SETTLE_SECONDS: u64 = 90;
/// Seed of rank 0; rank N has this plus N.
pub const SEED: u64 = 42;

/// Which rules a submission follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// The workload is fixed.
    Closed,
    /// The workload may be changed, the number of allocations at once may not.
    Open,
    /// A rehearsal: everything may be changed.
    WhatIf,
}

impl Division {
    /// The name in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::WhatIf => "whatif",
        }
    }
}

/// A workload of the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubmissionOption {
    /// 1, 2 or 3.
    pub number: u8,
    /// Its name in the rules.
    pub name: &'static str,
    /// The model.
    pub model: &'static str,
    /// Users of each rank.
    pub users: u32,
    /// GiB of the DRAM tier.
    pub cpu_gib: u32,
    /// Prefills that may write at once.
    pub allocations: u32,
}

/// The three workloads of the rules.
pub const OPTIONS: [SubmissionOption; 3] = [
    SubmissionOption {
        number: 1,
        name: "Max Storage Stress",
        model: "llama3.1-8b",
        users: 200,
        cpu_gib: 0,
        allocations: 16,
    },
    SubmissionOption {
        number: 2,
        name: "Storage Throughput",
        model: "llama3.1-8b",
        users: 100,
        cpu_gib: 4,
        allocations: 16,
    },
    SubmissionOption {
        number: 3,
        name: "Large Model",
        model: "llama3.1-70b-instruct",
        users: 70,
        cpu_gib: 0,
        allocations: 4,
    },
];

impl SubmissionOption {
    /// The options of `cascade bench kv` that it stands for, without the seed and directories.
    pub fn arguments(&self, duration_seconds: u64) -> Vec<(&'static str, String)> {
        vec![
            ("model", self.model.to_owned()),
            ("num-users", self.users.to_string()),
            ("duration", duration_seconds.to_string()),
            ("gpu-mem-gb", "0".to_owned()),
            ("cpu-mem-gb", self.cpu_gib.to_string()),
            ("max-concurrent-allocs", self.allocations.to_string()),
            ("generation-mode", "none".to_owned()),
        ]
    }
}

/// How a run is to be done, as far as the rules of a closed submission say it.
#[derive(Debug, Clone, Copy)]
pub struct Sequence {
    /// Options that are run.
    pub options: usize,
    /// Trials of each.
    pub trials: u32,
    /// Length of a trial.
    pub duration_seconds: u64,
    /// Wait before and after a trial.
    pub settle_seconds: u64,
    /// Whether results go to another file system than the KV.
    pub has_own_file_system: bool,
}

impl Sequence {
    /// Where this run leaves the rules of a closed submission, a sentence each.
    pub fn deviations(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.options < OPTIONS.len() {
            all.push(format!("{} of 3 options run; leave out --option", self.options));
        }
        if self.trials != TRIALS {
            all.push(format!("--trials is {}, the rules say {TRIALS}", self.trials));
        }
        if self.duration_seconds != DURATION_SECONDS {
            let seconds = self.duration_seconds;
            all.push(format!("--duration is {seconds} s, the rules say {DURATION_SECONDS} s"));
        }
        if self.settle_seconds != SETTLE_SECONDS {
            let seconds = self.settle_seconds;
            all.push(format!("--settle-seconds is {seconds}, the rules say {SETTLE_SECONDS}"));
        }
        if !self.has_own_file_system {
            all.push(
                "--results-dir and --cache-dir are on one file system; the rules want two"
                    .to_owned(),
            );
        }
        all
    }

    /// Seconds that the whole run takes at least.
    pub fn seconds(&self) -> u64 {
        let options = self.options as u64;
        let trial = self.duration_seconds + 2 * self.settle_seconds;
        options * u64::from(self.trials) * trial + options.saturating_sub(1) * self.settle_seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_sequence_of_the_rules_has_no_deviations() {
        let rules = Sequence {
            options: 3,
            trials: TRIALS,
            duration_seconds: DURATION_SECONDS,
            settle_seconds: SETTLE_SECONDS,
            has_own_file_system: true,
        };
        assert!(rules.deviations().is_empty());
        assert_eq!(rules.seconds(), 9 * (300 + 180) + 2 * 90);
        let short = Sequence { options: 1, trials: 1, duration_seconds: 30, ..rules };
        assert_eq!(short.deviations().len(), 3, "{:?}", short.deviations());
        assert_eq!(short.seconds(), 210);
        let other = Sequence { settle_seconds: 0, has_own_file_system: false, ..rules };
        assert_eq!(other.deviations().len(), 2);
    }

    #[test]
    fn the_three_options_are_those_of_the_rules() {
        let facts = OPTIONS.map(|it| (it.number, it.users, it.cpu_gib, it.allocations));
        assert_eq!(facts, [(1, 200, 0, 16), (2, 100, 4, 16), (3, 70, 0, 4)]);
    }
}

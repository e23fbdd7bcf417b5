//! The options of a submission, and which options a command line has.

use std::ffi::OsString;
use std::path::PathBuf;

use cascade_kv_bench::submission::Division;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches, ValueEnum};

/// A submission to `MLPerf` Storage.
#[derive(Debug, Args)]
pub(super) struct MlperfArgs {
    /// Run as `MLPerf` Storage's wrapper does, with --compatible: trials, waits, ranks and result
    /// folders. closed fixes the workload, open lets you change most of it, whatif all.
    #[arg(long, value_enum, value_name = "DIVISION", help_heading = "Submission")]
    pub(super) mlperf: Option<DivisionChoice>,
    /// Run only option 1 (Max Storage Stress), 2 (Storage Throughput) or 3 (Large Model)
    /// [default: all three].
    #[arg(long, value_name = "N", help_heading = "Submission", requires = "mlperf")]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=3))]
    pub(super) option: Option<u8>,
    /// Trials of each option [default: 3].
    #[arg(long, value_name = "N", help_heading = "Submission", requires = "mlperf")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) trials: Option<u32>,
    /// Processes of this host, each with all users of the option [default: 1; under srun or mpirun,
    /// each process is a rank].
    #[arg(long, value_name = "N", help_heading = "Submission", requires = "mlperf")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) ranks: Option<u32>,
    /// Seconds to wait before and after each trial and between options [default: 90].
    #[arg(long, value_name = "SECONDS", help_heading = "Submission", requires = "mlperf")]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub(super) settle_seconds: Option<u64>,
    /// Directory of the results, new or without results. Ranks of several hosts share it.
    #[arg(long, value_name = "DIR", help_heading = "Submission", requires = "mlperf")]
    pub(super) results_dir: Option<PathBuf>,
    /// Ranks of this host, which divide its memory: for a process that another one starts.
    #[arg(long, hide = true, default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) memory_shares: u64,
    /// Ranks that divide the free space of the file system, likewise.
    #[arg(long, hide = true, default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) disk_shares: u64,
    /// End when standard input ends: for a process that another one starts.
    #[arg(long, hide = true)]
    pub(super) ends_with_input: bool,
}

/// `--mlperf`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DivisionChoice {
    Closed,
    Open,
    #[value(name = "whatif")]
    WhatIf,
}

impl DivisionChoice {
    pub(super) fn division(self) -> Division {
        match self {
            Self::Closed => Division::Closed,
            Self::Open => Division::Open,
            Self::WhatIf => Division::WhatIf,
        }
    }
}

/// The options that a command line has, with their values, without defaults.
#[derive(Debug, Default)]
pub(super) struct GivenOptions(pub(super) Vec<(String, Vec<OsString>)>);

impl GivenOptions {
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(given, _)| given == name)
    }
}

impl Args for GivenOptions {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for GivenOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let of_command_line =
            |id: &&str| matches.value_source(id) == Some(ValueSource::CommandLine);
        // Groups of options are named as their types are.
        let ids =
            matches.ids().map(clap::Id::as_str).filter(|id| id.starts_with(char::is_lowercase));
        let given = ids.filter(of_command_line).map(|id| {
            let values = matches.get_raw(id).into_iter().flatten().map(ToOwned::to_owned);
            // A flag has the value that clap gives it.
            let values: Vec<OsString> = values.filter(|value| value != "true").collect();
            (id.replace('_', "-"), values)
        });
        Ok(Self(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

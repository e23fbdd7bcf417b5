//! `cascade doctor`: checks whether this host can run a node with a configuration.
//!
//! Each check reports what it found, why that matters and what to do. Checks access the host
//! through the trait [`Machine`], so that a test can inject any fault.

mod devices;
mod driver_process;
mod files;
mod gpu_answer;
mod gpus;
mod machine;
mod memory;
mod network;
mod pools;
mod rdma;
mod running;
mod space;

use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{fmt, thread};

use cascade_block::with_causes;
use cascade_runtime::{Deadline, SystemClock};
use serde::{Deserialize, Serialize};

use crate::NodeConfig;
use crate::config::ConfigError;
pub use gpu_answer::{GpuAnswer, GpuDevice, GpuReport};
pub use machine::{Machine, ProbeFile, ThisMachine};
pub use running::RunningNode;
pub use space::{DiskSpace, FileSystem};

/// The usual time limit for all checks together. A check that takes longer (a dead mount) has
/// failed.
pub const TIME_LIMIT: Duration = Duration::from_secs(10);

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckState {
    /// No problem.
    Ok,
    /// A node works, but is slower or keeps less than it could.
    Warning,
    /// A node does not start, or does not work as intended.
    Failed,
    /// Not configured, or the host has no such device.
    Absent,
}

impl fmt::Display for CheckState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Absent => "absent",
        })
    }
}

/// The finding of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The check, such as `shared_memory`.
    pub id: String,
    /// The result.
    pub state: CheckState,
    /// What was found on the host.
    pub found: String,
    /// Why it matters.
    pub why: String,
    /// What to do, as a command if there is one.
    pub remedy: Option<String>,
    /// The driver and its devices, in the finding `cuda` of a host that has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<GpuReport>,
}

/// The findings of all checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this program.
    pub version: String,
    /// Whether no check failed.
    pub is_ready: bool,
    /// The findings, in the order of the documentation.
    pub checks: Vec<Finding>,
}

/// The outcome of a check, without its name and reason.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CheckOutcome {
    state: CheckState,
    found: String,
    remedy: Option<String>,
    gpus: Option<Box<GpuReport>>,
}

impl CheckOutcome {
    fn ok(found: impl Into<String>) -> Self {
        Self { state: CheckState::Ok, found: found.into(), remedy: None, gpus: None }
    }

    fn absent(found: impl Into<String>) -> Self {
        Self { state: CheckState::Absent, ..Self::ok(found) }
    }

    fn warning(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { state: CheckState::Warning, remedy: Some(remedy.into()), ..Self::ok(found) }
    }

    fn failed(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { state: CheckState::Failed, remedy: Some(remedy.into()), ..Self::ok(found) }
    }
}

/// A check: its name, why it matters, and its code.
struct Check {
    id: &'static str,
    why: &'static str,
    run: fn(&NodeConfig, &dyn Machine) -> CheckOutcome,
}

const CONFIGURATION: Check = Check {
    id: "configuration",
    why: "a node refuses to start with a configuration that is contradictory or unsafe",
    run: |config, _| {
        let names = config.tenants.iter().map(|tenant| tenant.name.as_str());
        let names: Vec<&str> = std::iter::once("default").chain(names).collect();
        CheckOutcome::ok(format!("accepted; tenants: {}", names.join(", ")))
    },
};

/// All checks, in the order of the report.
const CHECKS: &[Check] = &[
    CONFIGURATION,
    devices::KERNEL,
    memory::MEMORY,
    memory::MEMLOCK,
    memory::HUGE_PAGES,
    memory::SHARED_MEMORY,
    pools::LEFT_POOLS,
    files::DIRECTORY,
    files::SPACE,
    files::FILE_SYSTEM,
    files::DIRECT_IO,
    files::IO_URING,
    network::OPEN_FILES,
    network::SOCKET,
    network::PORT,
    network::EXPOSURE,
    devices::CLOCK,
    gpus::CUDA,
    rdma::RDMA,
    devices::VALKEY,
];

/// Names of all checks, in the order of a report.
pub fn check_ids() -> impl Iterator<Item = &'static str> {
    CHECKS.iter().map(|check| check.id)
}

/// Checks the host against a configuration, within a time limit.
///
/// If the configuration was refused, that is the only finding, because the other checks depend on
/// the configuration.
pub fn examine(
    config: Result<NodeConfig, ConfigError>,
    machine: &Arc<dyn Machine>,
    time_limit: Duration,
) -> Report {
    let checks = match config {
        Ok(config) => run_all(&Arc::new(config), machine, time_limit),
        Err(error) => {
            let remedy = "correct the configuration; `cascade serve --print-config` prints it";
            vec![finding(&CONFIGURATION, CheckOutcome::failed(with_causes(&error), remedy))]
        }
    };
    let is_ready = checks.iter().all(|finding| finding.state != CheckState::Failed);
    Report { version: env!("CARGO_PKG_VERSION").to_owned(), is_ready, checks }
}

/// Runs all checks in parallel, each on its own thread, so that one that hangs delays no other.
fn run_all(
    config: &Arc<NodeConfig>,
    machine: &Arc<dyn Machine>,
    time_limit: Duration,
) -> Vec<Finding> {
    let deadline = Deadline::after(&SystemClock, time_limit);
    let started = CHECKS.iter().map(|check| {
        let (sender, answer) = mpsc::sync_channel(1);
        let (config, machine) = (Arc::clone(config), Arc::clone(machine));
        let run = check.run;
        let thread = thread::Builder::new().name(format!("doctor-{}", check.id));
        let spawned = thread.spawn(move || {
            // Sending fails if the time limit has passed.
            drop(sender.send(run(&config, machine.as_ref())));
        });
        (check, spawned.map(|_| answer))
    });
    let started: Vec<_> = started.collect();
    let findings = started.into_iter().map(|(check, answer)| {
        let outcome = match answer {
            Ok(answer) => answer.recv_timeout(deadline.remaining(&SystemClock)).ok(),
            Err(error) => Some(CheckOutcome::failed(format!("cannot start a thread ({error})"), {
                "raise the limit on processes: ulimit -u"
            })),
        };
        let outcome = outcome.unwrap_or_else(|| {
            let found = format!("no answer within {} s", time_limit.as_secs_f64());
            CheckOutcome::failed(found, "look for a mount or device that hangs: dmesg, mount")
        });
        finding(check, outcome)
    });
    findings.collect()
}

fn finding(check: &Check, outcome: CheckOutcome) -> Finding {
    Finding {
        id: check.id.to_owned(),
        state: outcome.state,
        found: outcome.found,
        why: check.why.to_owned(),
        remedy: outcome.remedy,
        gpus: outcome.gpus.map(|report| *report),
    }
}

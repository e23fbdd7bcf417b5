//! `cascade doctor`: checks whether this machine is ready for a node.

use std::path::Path;
use std::sync::Arc;

use cascade_node::doctor::{self, CheckState, Finding, GpuAnswer, Machine, Report, ThisMachine};
use clap::Args;

use crate::key_flags::Settings;
use crate::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// The configuration to check the machine for.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade doctor
      Check this machine for a node with default settings.
  cascade doctor --dram 64GiB --files /var/lib/cascade --files-capacity 2TiB
      Check that memory, shared memory and disk are sufficient for these settings.
  cascade doctor --config /etc/cascade/cascade.toml --json
      Check this machine for a configuration file, with output as JSON.

It creates and removes a probe file in the directories of file tiers and changes nothing else. It
loads the CUDA driver, if there is one, in a process of its own: a machine without a GPU is fine.
After a warning a node can serve, but slower or with less than it could. After a failure it cannot
start or does not work as intended, and the exit code is 1. docs/doctor.md describes each check.")]
pub(super) struct DoctorArgs {
    #[command(flatten)]
    settings: Settings,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The hidden command that loads the CUDA driver and prints what it says.
pub(super) const GPU_COMMAND: &str = "gpu-report";

pub(super) fn run(args: &DoctorArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let program = std::env::current_exe();
    let program = program.map_err(|error| Failure::other("find this program", error))?;
    let gpu_command = vec![program.into_os_string(), GPU_COMMAND.into()];
    let machine: Arc<dyn Machine> = Arc::new(ThisMachine { gpu_command });
    let report = doctor::examine(args.settings.load(), &machine, doctor::TIME_LIMIT);
    if args.json {
        write_json(Path::new("-"), &report, screen)?;
    } else {
        show(&report, screen)?;
    }
    Ok(if report.is_ready { EXIT_OK } else { EXIT_FAILED })
}

/// Runs as the process of its own in which the doctor has the CUDA driver loaded.
pub(super) fn print_gpus(screen: &mut Screen) -> Result<i32, Failure> {
    let answer = serde_json::to_string(&GpuAnswer::of_this_process());
    screen.line(answer.map_err(|error| Failure::other("print what the driver says", error))?)?;
    Ok(EXIT_OK)
}

fn show(report: &Report, screen: &mut Screen) -> Result<(), Failure> {
    for finding in &report.checks {
        show_finding(finding, screen)?;
    }
    let count = |state| report.checks.iter().filter(|finding| finding.state == state).count();
    let (failed, warnings) = (count(CheckState::Failed), count(CheckState::Warning));
    let verdict = match (failed, warnings) {
        (0, 0) => "this machine is ready".to_owned(),
        (0, warnings) => format!("this machine is ready; warnings: {warnings}"),
        _ => format!("NOT READY: failed: {failed}, warnings: {warnings}"),
    };
    let verdict = screen.verdict(report.is_ready, &verdict);
    screen.line("")?;
    screen.line(verdict)
}

fn show_finding(finding: &Finding, screen: &mut Screen) -> Result<(), Failure> {
    let state = format!("{:<8}", finding.state);
    let state = match finding.state {
        CheckState::Ok => screen.verdict(true, &state),
        CheckState::Failed => screen.verdict(false, &state),
        CheckState::Warning => screen.bold(&state),
        CheckState::Absent => screen.dim(&state),
    };
    screen.line(format!("{state} {:<16} {}", finding.id, finding.found))?;
    if let Some(remedy) = &finding.remedy {
        let (why, indent) = (screen.dim(&format!("why: {}", finding.why)), " ".repeat(26));
        screen.line(format!("{indent}{why}"))?;
        screen.line(format!("{indent}do:  {remedy}"))?;
    }
    Ok(())
}

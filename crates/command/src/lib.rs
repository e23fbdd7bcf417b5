//! The command `cascade`: its subcommands, its help and its exit codes.
#![expect(clippy::cast_precision_loss, reason = "53 bits are enough for printed figures")]

mod bench;
mod blocks;
mod built;
mod config;
mod connection;
mod doctor;
mod explain;
mod failure;
mod hbm;
mod help;
mod inspect;
mod interrupt;
mod key_flags;
mod key_list;
mod keys;
mod maintenance;
mod operator_files;
mod ping;
mod reference;
mod replay;
mod screen;
mod serve;
mod sim;
mod size;
mod status;
mod tenant;
mod top;
mod vllm_config;

use std::ffi::OsString;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;

pub use crate::replay::args::ReplayArgs;
pub use failure::Failure;
pub use reference::reference;
pub(crate) use screen::PendingFile;
pub use screen::{Screen, write_file, write_json};
pub use size::{Count, WarmUp, parse_bytes, parse_time};
pub use status::render as render_status;

/// The command succeeded.
pub const EXIT_OK: i32 = 0;
/// A check failed, a block had wrong bytes, or the command could not do its work.
pub const EXIT_FAILED: i32 = 1;
/// The command line is not valid, or a file that it names cannot be used.
pub const EXIT_USAGE: i32 = 2;
/// Interrupted; the results up to then were reported.
pub const EXIT_INTERRUPTED: i32 = 130;

/// Keeps the KV cache of LLM inference engines in DRAM and files, and measures what it saves.
#[derive(Debug, Parser)]
#[command(name = "cascade", version = built::version(), propagate_version = true)]
#[command(arg_required_else_help = true, subcommand_required = true)]
#[command(after_help = "\
Examples:
  cascade serve --dram 64GiB --files /var/lib/cascade
      Serve 64 GiB of DRAM to all engine processes on this host, with a file tier.
  cascade status
      Show the tiers, hit rate and clients of the running node.
  cascade replay trace.jsonl --dram 256MiB
      Replay a trace through a cache of 256 MiB and show its hit rate. Every byte is checked.
  cascade replay trace.jsonl --files /var/tmp/cache --report report.html
      The same with a file tier and an HTML report.
  cascade bench core
      Compare this build with memcpy and with the disk of this machine.
  cascade inspect /var/tmp/cache --verify
      Show what the directory of a file tier contains, and check every block.

Exit codes: 0 success; 1 a check failed, a block had wrong bytes, or the work could not be done;
2 the command line is not valid, or a file that it names cannot be used; 130 interrupted.")]
struct Command {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run a node: one KV cache for all processes of this host.
    Serve(Box<serve::ServeArgs>),
    /// Check whether this machine is ready to run a node.
    Doctor(Box<doctor::DoctorArgs>),
    /// Load the CUDA driver and print what it says about GPUs, for `doctor`.
    #[command(hide = true, name = doctor::GPU_COMMAND)]
    GpuReport,
    /// Replay a request trace through a store, check every byte, and show the hit rate.
    Replay(Box<ReplayArgs>),
    /// Measure this build against the limits of this machine.
    Bench(bench::BenchArgs),
    /// Simulate stores on virtual time with a seed, and check what they promise.
    Sim(sim::SimArgs),
    /// Show the state of a running node.
    Status(status::StatusArgs),
    /// Show the state of a running node, updated live.
    Top(top::TopArgs),
    /// Print the value of vLLM's --kv-transfer-config for this machine.
    #[command(name = "vllm-config")]
    VllmConfig(vllm_config::VllmConfigArgs),
    /// Check whether a node answers.
    Ping(ping::PingArgs),
    /// Print the versions of this command and of a running node.
    Version(ping::VersionArgs),
    /// Show a block of a running node, or write its bytes to a file.
    Get(blocks::GetArgs),
    /// Store the bytes of a file as a block in a running node.
    Put(blocks::PutArgs),
    /// Delete blocks of a running node.
    Delete(blocks::DeleteArgs),
    /// Write all pending blocks to the lower tiers.
    Flush(maintenance::FlushArgs),
    /// Remove every block of a tenant.
    Clear(maintenance::ClearArgs),
    /// Refuse new clients and blocks and write all pending blocks, before the node is stopped.
    Drain(maintenance::DrainArgs),
    /// Make a running node reload its configuration file.
    Reload(maintenance::ReloadArgs),
    /// Show or change settings of a running node.
    #[command(subcommand)]
    Config(config::ConfigVerb),
    /// Explain which blocks of a chain hit, and why the next one misses.
    Explain(explain::ExplainArgs),
    /// List the keys of the blocks of a running node.
    Keys(key_list::KeysArgs),
    /// Show or give back the memory of a GPU that a node has taken.
    #[command(subcommand)]
    Hbm(hbm::HbmVerb),
    /// Manage the data of one tenant.
    #[command(subcommand)]
    Tenant(tenant::TenantVerb),
    /// Show what the directory of a file tier contains, and check it.
    Inspect(inspect::InspectArgs),
    /// List or write the files for operators: systemd, configuration, Prometheus, Grafana.
    Files(operator_files::FilesArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "\
Examples:
  cascade completions bash > /etc/bash_completion.d/cascade
  cascade completions zsh  > ~/.zfunc/_cascade
  cascade completions fish > ~/.config/fish/completions/cascade.fish")]
    Completions {
        /// The shell to print the script for.
        shell: Shell,
    },
}

/// Runs one command line (its first element is the program's name) and returns the exit code.
/// `commit` is what the program was built from, if that is known.
pub fn main(args: impl Iterator<Item = OsString>, commit: Option<&'static str>) -> i32 {
    commit.into_iter().for_each(built::set_commit);
    let parsed = definition().try_get_matches_from(args);
    let parsed = parsed.and_then(|matches| Command::from_arg_matches(&matches));
    let command = match parsed {
        Ok(command) => command,
        Err(usage) => {
            let is_printed = usage.print().is_ok();
            let code = if usage.use_stderr() { EXIT_USAGE } else { EXIT_OK };
            return if is_printed { code } else { EXIT_FAILED };
        }
    };
    let mut screen = Screen::of_process();
    match run(command.verb, &mut screen) {
        Ok(code) => code,
        Err(failure) => {
            let code = failure.exit_code();
            let printed = screen.failure(&failure);
            if printed.is_ok() { code } else { EXIT_FAILED }
        }
    }
}

/// The command line as a clap definition, for the reference page and for completions.
pub fn definition() -> clap::Command {
    help::fit(Command::command())
}

fn run(verb: Verb, screen: &mut Screen) -> Result<i32, Failure> {
    match verb {
        Verb::Serve(args) => serve::run(*args, screen),
        Verb::Doctor(args) => doctor::run(&args, screen),
        Verb::GpuReport => doctor::print_gpus(screen),
        Verb::Replay(args) => replay::run(&args, screen),
        Verb::Bench(args) => bench::run(&args, screen),
        Verb::Sim(args) => sim::run(&args, screen),
        Verb::Status(args) => status::run(&args, screen),
        Verb::Top(args) => top::run(&args, screen),
        Verb::VllmConfig(args) => vllm_config::run(&args, screen),
        Verb::Ping(args) => ping::ping(&args, screen),
        Verb::Version(args) => ping::version(&args, screen),
        Verb::Get(args) => blocks::get(&args, screen),
        Verb::Put(args) => blocks::put(&args, screen),
        Verb::Delete(args) => blocks::delete(&args, screen),
        Verb::Flush(args) => maintenance::flush(&args, screen),
        Verb::Clear(args) => maintenance::clear(&args, screen),
        Verb::Drain(args) => maintenance::drain(&args, screen),
        Verb::Reload(args) => maintenance::reload(&args, screen),
        Verb::Config(verb) => config::run(&verb, screen),
        Verb::Explain(args) => explain::run(&args, screen),
        Verb::Keys(args) => key_list::run(&args, screen),
        Verb::Hbm(verb) => hbm::run(&verb, screen),
        Verb::Tenant(verb) => tenant::run(&verb, screen),
        Verb::Inspect(args) => inspect::run(&args, screen),
        Verb::Files(args) => operator_files::run(&args, screen),
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut definition(), "cascade", &mut script);
            screen.line(String::from_utf8_lossy(&script).trim_end())?;
            Ok(EXIT_OK)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }
}

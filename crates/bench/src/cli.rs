//! The command `cascade`: what it understands, what it answers, and its exit codes.

mod args;
mod bench;
mod blocks;
mod config;
mod doctor;
mod eviction;
mod explain;
mod failure;
mod inspect;
mod interrupt;
mod key_flags;
mod orders;
mod ping;
mod reach;
mod reference;
mod replay;
mod screen;
mod serve;
mod shadow;
mod size;
mod status;
mod tenant;
mod top;
mod vllm;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

pub use args::ReplayArgs;
pub use failure::Failure;
pub use reference::reference;
pub use screen::{Screen, write_file, write_json};
pub use size::{Count, WarmUp, parse_bytes, parse_time};
pub use status::render as render_status;

/// Everything went well.
pub const EXIT_OK: i32 = 0;
/// A byte was wrong, a check failed, or the work could not be done.
pub const EXIT_FAILED: i32 = 1;
/// The command line makes no sense, or names a file that cannot be used.
pub const EXIT_USAGE: i32 = 2;
/// Interrupted; what was done until then was reported.
pub const EXIT_INTERRUPTED: i32 = 130;

/// Cascade keeps the KV cache of LLM inference in DRAM and on disk, and shows what that is worth.
#[derive(Debug, Parser)]
#[command(name = "cascade", version, propagate_version = true, max_term_width = 100)]
#[command(arg_required_else_help = true, subcommand_required = true)]
#[command(after_help = "\
Examples:
  cascade serve --dram 64GiB --files /var/lib/cascade
      Share 64 GiB among all workers of this host, with files below.
  cascade replay trace.jsonl --dram 256MiB
      What would a cache of 256 MiB have done for this traffic? Real bytes, each one checked.
  cascade replay trace.jsonl --files /var/tmp/cache --report report.html
      The same with a file tier below, and a page of plots.
  cascade bench core
      How close does this machine come to memcpy and to its disk?
  cascade inspect /var/tmp/cache --verify
      What does this directory hold, and is all of it intact?

Exit codes: 0 all is well; 1 a byte was wrong, a check failed or the work could not be done;
2 the command line or a file that it names makes no sense; 130 interrupted.")]
struct Command {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Serve a node: one pool of KV for all processes of this host.
    Serve(Box<serve::ServeArgs>),
    /// Say what is wrong with this machine, and what to do, before a node serves on it.
    Doctor(Box<doctor::DoctorArgs>),
    /// Replay a request trace through a store, check every byte, and show what the cache did.
    Replay(Box<ReplayArgs>),
    /// Measure this machine and this build against the physical limits.
    #[command(subcommand)]
    Bench(bench::BenchVerb),
    /// Show what a running node holds and does.
    Status(status::StatusArgs),
    /// Watch a running node, live in the terminal.
    Top(top::TopArgs),
    /// Ask whether a node answers.
    Ping(ping::PingArgs),
    /// Print the versions of this command and of a running node.
    Version(ping::VersionArgs),
    /// Look at a block of a running node, or write its bytes to a file.
    Get(blocks::GetArgs),
    /// Put a file's bytes into a running node as a block.
    Put(blocks::PutArgs),
    /// Delete blocks of a running node.
    Delete(blocks::DeleteArgs),
    /// Write down what waits for the lower tiers.
    Flush(orders::FlushArgs),
    /// Remove every block of a tenant.
    Clear(orders::ClearArgs),
    /// Take nothing new and write everything down, so that the node may be stopped.
    Drain(orders::DrainArgs),
    /// Make a running node read its configuration again.
    Reload(orders::ReloadArgs),
    /// Show or change settings of a running node.
    #[command(subcommand)]
    Config(config::ConfigVerb),
    /// Tell why a chain of blocks hits as far as it does.
    Explain(explain::ExplainArgs),
    /// Do something to one tenant's data.
    #[command(subcommand)]
    Tenant(tenant::TenantVerb),
    /// Show what a file tier's directory holds, and check it.
    Inspect(inspect::InspectArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "\
Examples:
  cascade completions bash > /etc/bash_completion.d/cascade
  cascade completions zsh  > ~/.zfunc/_cascade
  cascade completions fish > ~/.config/fish/completions/cascade.fish")]
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// Runs one command line (its first element is the program's name) and returns the exit code.
///
/// `interpreter` is the Python that runs this program, if one does: measurements of an engine
/// prefer it to others.
pub fn main(args: impl Iterator<Item = OsString>, interpreter: Option<PathBuf>) -> i32 {
    let command = match Command::try_parse_from(args) {
        Ok(command) => command,
        Err(usage) => {
            let is_printed = usage.print().is_ok();
            let code = if usage.use_stderr() { EXIT_USAGE } else { EXIT_OK };
            return if is_printed { code } else { EXIT_FAILED };
        }
    };
    let mut screen = Screen::of_process();
    match run(command.verb, interpreter, &mut screen) {
        Ok(code) => code,
        Err(failure) => {
            let code = failure.exit_code();
            let said = screen.remark(failure.explain());
            if said.is_ok() { code } else { EXIT_FAILED }
        }
    }
}

/// The command line as clap knows it, for the reference page and for completions.
pub fn definition() -> clap::Command {
    Command::command()
}

fn run(verb: Verb, interpreter: Option<PathBuf>, screen: &mut Screen) -> Result<i32, Failure> {
    match verb {
        Verb::Serve(args) => serve::run(*args, screen),
        Verb::Doctor(args) => doctor::run(&args, screen),
        Verb::Replay(args) => replay::run(&args, screen),
        Verb::Bench(args) => bench::run(&args, interpreter, screen),
        Verb::Status(args) => status::run(&args, screen),
        Verb::Top(args) => top::run(&args, screen),
        Verb::Ping(args) => ping::ping(&args, screen),
        Verb::Version(args) => ping::version(&args, screen),
        Verb::Get(args) => blocks::get(&args, screen),
        Verb::Put(args) => blocks::put(&args, screen),
        Verb::Delete(args) => blocks::delete(&args, screen),
        Verb::Flush(args) => orders::flush(&args, screen),
        Verb::Clear(args) => orders::clear(&args, screen),
        Verb::Drain(args) => orders::drain(&args, screen),
        Verb::Reload(args) => orders::reload(&args, screen),
        Verb::Config(verb) => config::run(&verb, screen),
        Verb::Explain(args) => explain::run(&args, screen),
        Verb::Tenant(verb) => tenant::run(&verb, screen),
        Verb::Inspect(args) => inspect::run(&args, screen),
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

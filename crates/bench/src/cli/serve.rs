//! `cascade serve`: the node as a process that all workers of this host share.

use cascade_node::{config, process};
use clap::Args;

use crate::cli::key_flags::Settings;
use crate::cli::{EXIT_OK, Failure, Screen};

/// What to serve, and where.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade serve
      256 MiB of DRAM for processes of this user, on the default socket; no TCP port.
  cascade serve --dram 64GiB --files /var/lib/cascade --files-capacity 2TiB
      With a file tier below, which a restart finds again.
  cascade serve --dram 64GiB --listen 127.0.0.1:9000
      With metrics, health and a status page at http://127.0.0.1:9000/.
  cascade serve --config /etc/cascade/cascade.toml --print-config
      What would it serve with? Every key, and whether file, environment or flag set it.
  cascade doctor --config /etc/cascade/cascade.toml
      Can this machine carry that?

It prints a line with `ready` once it serves. SIGTERM ends it cleanly: calls under way finish, what
waits for the file tier is written. SIGHUP makes it read its configuration again. Every key of the
file can also be set in the environment: files_capacity is CASCADE_FILES_CAPACITY. All keys:
docs/configuration.md.")]
pub(super) struct ServeArgs {
    #[command(flatten)]
    settings: Settings,
    /// Print every key as it is set, and what set it, and exit.
    #[arg(long)]
    print_config: bool,
    /// Print the reference page of the configuration.
    #[arg(long, hide = true)]
    print_reference: bool,
    /// Print a configuration file with every key at its default.
    #[arg(long, hide = true)]
    print_example: bool,
}

pub(super) fn run(args: ServeArgs, screen: &mut Screen) -> Result<i32, Failure> {
    if args.print_reference || args.print_example {
        let page = if args.print_reference { config::reference() } else { config::example() };
        screen.line(page.trim_end())?;
        return Ok(EXIT_OK);
    }
    let config = args.settings.load().map_err(Failure::Config)?;
    if args.print_config {
        screen.line(config.settings.print())?;
        return Ok(EXIT_OK);
    }
    process::run(config, move || args.settings.load()).map_err(Failure::Node)?;
    Ok(EXIT_OK)
}

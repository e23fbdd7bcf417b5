//! `cascade serve`: runs a node in this process.

use cascade_node::{STOP_WITH_INPUT, config, process};
use clap::Args;

use crate::key_flags::Settings;
use crate::{EXIT_OK, Failure, Screen};

/// The configuration of the node.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command")]
#[command(after_help = "\
Examples:
  cascade serve
      256 MiB of DRAM on the default socket, for processes of this user. No TCP port.
  cascade serve --dram 64GiB --files /var/lib/cascade --files-capacity 2TiB
      With a file tier, whose blocks are still there after a restart.
  cascade serve --dram 64GiB --listen 127.0.0.1:9000
      With metrics, health checks and a status page at http://127.0.0.1:9000/.
  cascade serve --dram 64GiB --gpu GPU-UUID --hbm 16GiB
      With 16 GiB of a GPU's memory as the tier above DRAM, in a process of its own.
  cascade serve --config /etc/cascade/cascade.toml --print-config
      Print every key with its value and its source: file, environment, flag or default.
  cascade doctor --config /etc/cascade/cascade.toml
      Check whether this machine is ready for that configuration.

The node prints a line with `ready` when it serves, as JSON if log_format is json. SIGTERM stops it:
calls in flight finish and pending blocks are written to the file tier. SIGHUP reloads the
configuration. Every key of the file can also be set in the environment: files_capacity is
CASCADE_FILES_CAPACITY. docs/configuration.md describes all keys.")]
pub(super) struct ServeArgs {
    #[command(flatten)]
    settings: Settings,
    /// Print every key with its value and its source, and exit.
    #[arg(long)]
    print_config: bool,
    /// Print the reference page of the configuration, and exit.
    #[arg(long, hide = true)]
    print_reference: bool,
    /// Print a configuration file with every key at its default, and exit.
    #[arg(long, hide = true)]
    print_example: bool,
    /// Stop when the standard input ends, as the node of a GPU does with the node that started it.
    #[arg(long = STOP_WITH_INPUT, hide = true)]
    stop_with_input: bool,
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
    let stop_with_input = args.stop_with_input;
    let reload = move || args.settings.load();
    screen.has_json_notices = config.log.json;
    process::run(config, stop_with_input, reload).map_err(Failure::Node)?;
    Ok(EXIT_OK)
}

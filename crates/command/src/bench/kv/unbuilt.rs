//! Options of the original that this command does not have yet: each is refused by name.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::Failure;

/// Options without a value.
const FLAGS: [&str; 1] = ["enable-latency-tracing"];

/// Options with a value.
const VALUES: [&str; 1] = ["log-level"];

/// The first of these options that was given.
#[derive(Debug, Default)]
pub(super) struct UnbuiltOptions {
    given: Option<&'static str>,
}

impl UnbuiltOptions {
    /// Refuses a run with one of these options: without it, the run would be another.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let Some(name) = self.given else { return Ok(()) };
        Err(Failure::usage(
            format!("--{name} is not built yet, so the run is refused"),
            "leave it out; `cascade bench kv --help` lists what there is",
        ))
    }
}

fn names() -> impl Iterator<Item = (&'static str, bool)> {
    let flags = FLAGS.into_iter().map(|name| (name, false));
    flags.chain(VALUES.into_iter().map(|name| (name, true)))
}

impl Args for UnbuiltOptions {
    fn augment_args(command: Command) -> Command {
        command.args(names().map(|(name, has_value)| {
            let arg = Arg::new(name).long(name).hide(true);
            if has_value { arg.num_args(1) } else { arg.action(ArgAction::SetTrue) }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for UnbuiltOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given = |(name, has_value): &(&'static str, bool)| {
            if *has_value { matches.contains_id(name) } else { matches.get_flag(name) }
        };
        Ok(Self { given: names().find(is_given).map(|(name, _)| name) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

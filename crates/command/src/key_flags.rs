//! The flags of `serve` and `doctor` that set keys of the configuration, made from its key table.

use std::path::Path;

use cascade_node::NodeConfig;
use cascade_node::config::{
    self, ConfigError, ConfigSources, Environment, KEYS, SettingKey, ValueKind,
};
use clap::builder::{PossibleValuesParser, ValueParser};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

/// The configuration from the command line: a file, and flags that override its keys.
#[derive(Debug, Clone, Args)]
pub(super) struct Settings {
    /// Configuration file (TOML) [default: the value of `CASCADE_CONFIG`, if set].
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    config: Option<std::path::PathBuf>,
    #[command(flatten)]
    flags: KeyFlags,
}

impl Settings {
    /// Loads the configuration from the file, the environment and the flags.
    pub(super) fn load(&self) -> Result<NodeConfig, ConfigError> {
        let sources = ConfigSources { file: self.config.clone(), flags: self.flags.0.clone() };
        config::load(&sources, &Environment::of_process())
    }
}

/// The keys that were set by flags, each with its text.
#[derive(Debug, Clone, Default)]
struct KeyFlags(Vec<(&'static SettingKey, String)>);

fn flags() -> impl Iterator<Item = (&'static SettingKey, &'static str)> {
    KEYS.iter().filter_map(|key| key.flag.map(|flag| (key, flag)))
}

impl FromArgMatches for KeyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = flags().filter_map(|(key, flag)| Some((key, matches.get_one::<String>(flag)?)));
        Ok(Self(given.map(|(key, text)| (key, text.clone())).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for KeyFlags {
    fn augment_args(command: Command) -> Command {
        command.args(flags().map(|(key, flag)| {
            let meaning = key.meaning.trim_end_matches('.').replace('`', "");
            let default = match key.default_text() {
                "not set" => String::new(),
                text => format!(" [default: {}]", text.replace('`', "")),
            };
            Arg::new(flag)
                .long(flag)
                .value_name(key.kind.placeholder())
                .help(format!("{meaning}{default}"))
                .help_heading(if key.is_advanced() { "Advanced" } else { "Configuration" })
                .hide_short_help(key.is_advanced())
                .value_parser(parser(key))
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// The parser of a flag: it checks the value as the configuration does.
fn parser(key: &'static SettingKey) -> ValueParser {
    match key.kind {
        ValueKind::Choice(words) => PossibleValuesParser::new(words).into(),
        ValueKind::Path => ValueParser::new(|text: &str| {
            // A relative path counts from the working directory of the command, not of the node.
            let path = std::path::absolute(Path::new(text)).map_err(|error| error.to_string())?;
            path.into_os_string().into_string().map_err(|_| "is not UTF-8".to_owned())
        }),
        _ => ValueParser::new(|text: &str| key.parse(text).map(|_| text.to_owned())),
    }
}

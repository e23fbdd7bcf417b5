//! Looking at and changing single settings of a node that runs.

use serde::{Deserialize, Serialize};

use super::build;
use super::environment::Environment;
use super::error::ConfigError;
use super::keys::{KEYS, nearest};
use super::settings::Source;
use super::{Key, NodeConfig};

/// One setting as an administrator sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownKey {
    /// Its key, such as `dram`.
    pub key: String,
    /// Its value as text; nothing where it has none.
    pub value: Option<String>,
    /// What set it.
    pub source: String,
    /// Whether it can change while the node runs.
    pub is_live: bool,
    /// What it is.
    pub meaning: String,
}

/// The settings whose keys are `wanted`, or lie in the sections named there; all without names.
///
/// # Errors
/// The first name that is neither a key nor a section.
pub fn shown(config: &NodeConfig, wanted: &[String]) -> Result<Vec<ShownKey>, String> {
    let is_meant = |name: &String, key: &Key| name == key.path || name == key.section();
    if let Some(name) = wanted.iter().find(|name| !KEYS.iter().any(|key| is_meant(name, key))) {
        return Err(unknown(name));
    }
    let meant = KEYS
        .iter()
        .filter(|key| wanted.is_empty() || wanted.iter().any(|name| is_meant(name, key)));
    let show = |key: &Key| ShownKey {
        key: key.path.to_owned(),
        value: config.settings.node.text(key.path),
        source: config.settings.node.source(key.path).to_string(),
        is_live: key.is_live,
        meaning: key.meaning.to_owned(),
    };
    Ok(meant.map(show).collect())
}

/// The configuration with one more value, checked as if it had been read so.
///
/// # Errors
/// If there is no such key, its value makes no sense, or it cannot change while a node runs.
pub fn with_value(config: &NodeConfig, path: &str, text: &str) -> Result<NodeConfig, String> {
    let key = KEYS.iter().find(|key| key.path == path).ok_or_else(|| unknown(path))?;
    let value = key.parse(text).map_err(|reason| format!("{path}: {reason}"))?;
    if !key.is_live {
        let live: Vec<&str> = KEYS.iter().filter(|key| key.is_live).map(|key| key.path).collect();
        return Err(format!(
            "{path} needs a restart: set it in the configuration file and start the node again; \
             what can change while it runs: {}",
            live.join(", ")
        ));
    }
    let mut settings = config.settings.clone();
    settings.node.set(key, value, Source::Administrator);
    let said = |error: ConfigError| error.to_string();
    let new = build::node_config(settings, &Environment::of_process()).map_err(said)?;
    new.check().map_err(said)?;
    Ok(new)
}

fn unknown(name: &str) -> String {
    let sections = KEYS.iter().map(super::key::Key::section);
    let hint = nearest(name, KEYS.iter().map(|key| key.path).chain(sections));
    let hint = hint.map_or_else(
        || "cascade config get prints all that there are".to_owned(),
        |nearest| format!("did you mean {nearest:?}?"),
    );
    format!("there is no setting {name:?}; {hint}")
}

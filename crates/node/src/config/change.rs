//! Reads and changes single settings of a running node.

use cascade_block::with_causes;
use serde::{Deserialize, Serialize};

use super::build;
use super::environment::Environment;
use super::error::ConfigError;
use super::keys::{KEYS, nearest_name};
use super::settings::SettingSource;
use super::{NodeConfig, SettingKey};
use crate::resize::FILES_CAPACITY;

/// One setting, as `cascade config get` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingInfo {
    /// The key, such as `dram`.
    pub key: String,
    /// The value as text, if the key is set.
    pub value: Option<String>,
    /// Where the value comes from.
    pub source: String,
    /// Whether it can change while the node runs.
    pub is_live: bool,
    /// Description of the key.
    pub meaning: String,
}

/// The settings with these keys, or in these sections. All settings if `names` is empty.
///
/// # Errors
/// The first name that is neither a key nor a section.
pub fn list_settings(config: &NodeConfig, names: &[String]) -> Result<Vec<SettingInfo>, String> {
    let matches = |name: &String, key: &SettingKey| name == key.path || name == key.section();
    if let Some(name) = names.iter().find(|name| !KEYS.iter().any(|key| matches(name, key))) {
        return Err(unknown_setting(name));
    }
    let selected =
        KEYS.iter().filter(|key| names.is_empty() || names.iter().any(|name| matches(name, key)));
    let show = |key: &SettingKey| SettingInfo {
        key: key.path.to_owned(),
        value: config.settings.node.text(key.path),
        source: config.settings.node.source(key.path).to_string(),
        is_live: key.is_live,
        meaning: key.meaning.to_owned(),
    };
    Ok(selected.map(show).collect())
}

/// The configuration with one value replaced, and checked like a loaded one.
///
/// # Errors
/// If the key does not exist, the value is invalid, or the key cannot change while a node runs.
pub fn with_value(config: &NodeConfig, path: &str, text: &str) -> Result<NodeConfig, String> {
    let key = KEYS.iter().find(|key| key.path == path).ok_or_else(|| unknown_setting(path))?;
    let value = key.parse(text).map_err(|reason| format!("{path}: {reason}"))?;
    if !key.is_live {
        let live: Vec<&str> = KEYS.iter().filter(|key| key.is_live).map(|key| key.path).collect();
        return Err(format!(
            "{path} needs a restart: set it in the configuration file and restart the node; \
             settings that can change while the node runs: {}",
            live.join(", ")
        ));
    }
    let mut settings = config.settings.clone();
    settings.node.set(key, value, SettingSource::Administrator);
    let message = |error: ConfigError| with_causes(&error);
    let new = build::node_config(settings, &Environment::of_process()).map_err(message)?;
    new.check().map_err(message)?;
    if path == FILES_CAPACITY && new.store.files.is_none() {
        return Err(format!(
            "{path}: the node has no file tier; set files in the configuration file and restart \
             the node"
        ));
    }
    Ok(new)
}

fn unknown_setting(name: &str) -> String {
    let sections = KEYS.iter().map(SettingKey::section);
    let hint = nearest_name(name, KEYS.iter().map(|key| key.path).chain(sections));
    let hint = hint.map_or_else(
        || "`cascade config get` lists all settings".to_owned(),
        |nearest| format!("did you mean {nearest:?}?"),
    );
    format!("there is no setting {name:?}; {hint}")
}

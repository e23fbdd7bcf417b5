//! Compares two configurations: which keys differ, and which changes a running node can apply.

use super::NodeConfig;
use super::key::SettingKey;
use super::keys::{KEYS, TENANT_KEYS};

/// Names of keys that differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigDifference {
    /// A running node applies these.
    pub live: Vec<String>,
    /// These need a restart.
    pub restart: Vec<String>,
}

/// Compares two configurations key by key.
///
/// A key that neither configuration sets is never a difference. Its derived value may change by
/// itself, such as a share of the free space, or follows from another key, which is reported. A
/// change of the contents of a file that a key names is not a difference.
///
/// Works only for configurations that were loaded ([`super::load`]): others have no settings.
pub fn difference(old: &NodeConfig, new: &NodeConfig) -> ConfigDifference {
    let mut found = ConfigDifference::default();
    let (old, new) = (&old.settings, &new.settings);
    let is_given = |key: &&SettingKey| old.node.is_given(key.path) || new.node.is_given(key.path);
    let changed = KEYS.iter().filter(|key| old.node.get(key.path) != new.node.get(key.path));
    for key in changed.filter(is_given) {
        let list = if key.is_live { &mut found.live } else { &mut found.restart };
        list.push(key.path.to_owned());
    }
    let name = |tenant: &super::settings::Values| tenant.text("tenant.name").unwrap_or_default();
    for tenant in &new.tenants {
        match old.tenants.iter().find(|other| name(other) == name(tenant)) {
            Some(other) => {
                let keys = TENANT_KEYS.iter();
                let changed = keys.filter(|key| other.get(key.path) != tenant.get(key.path));
                let named = changed.map(|key| format!("{} of {:?}", key.path, name(tenant)));
                found.restart.extend(named);
            }
            None => found.restart.push(format!("tenant {:?} (new)", name(tenant))),
        }
    }
    let is_removed = |tenant: &&super::settings::Values| {
        !new.tenants.iter().any(|other| name(other) == name(tenant))
    };
    let removed = old.tenants.iter().filter(is_removed);
    found.restart.extend(removed.map(|tenant| format!("tenant {:?} (removed)", name(tenant))));
    found
}

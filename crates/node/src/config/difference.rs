//! What changed between two configurations, and which of it a running node can take.

use super::NodeConfig;
use super::key::Key;
use super::keys::{KEYS, TENANT_KEYS};

/// Names of keys that differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Difference {
    /// A running node takes these.
    pub live: Vec<String>,
    /// These wait for a restart.
    pub restart: Vec<String>,
}

/// Compares by key. What nobody gave is no difference: a share of the free room changes all the
/// time, and what follows from another key is named by that key. A file that is named and whose
/// contents changed is no difference.
///
/// Only configurations that were loaded ([`super::load`]) know their keys.
pub fn difference(old: &NodeConfig, new: &NodeConfig) -> Difference {
    let mut found = Difference::default();
    let (old, new) = (&old.settings, &new.settings);
    let is_given = |key: &&Key| old.node.is_given(key.path) || new.node.is_given(key.path);
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
    let is_gone = |tenant: &&super::settings::Values| {
        !new.tenants.iter().any(|other| name(other) == name(tenant))
    };
    let gone = old.tenants.iter().filter(is_gone);
    found.restart.extend(gone.map(|tenant| format!("tenant {:?} (removed)", name(tenant))));
    found
}

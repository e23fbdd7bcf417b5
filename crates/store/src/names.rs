//! Names that arrive as text and are held as static ones: tiers and operations of another process.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Deserializer};

use crate::TierName;

/// Names that are kept for good at most; those of a build are a few dozen.
const NAMES_MAX: usize = 1024;

/// What a name beyond the limit becomes.
const UNKNOWN: &str = "other";

/// The static name that reads like `name`. Each new one is kept for good, up to a limit that only
/// somebody who makes names up can reach; further ones are all `"other"`.
pub fn intern(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    if names.len() >= NAMES_MAX {
        return UNKNOWN;
    }
    let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.insert(kept);
    kept
}

/// Reads the name of a tier.
pub(crate) fn tier_name<'de, D: Deserializer<'de>>(from: D) -> Result<TierName, D::Error> {
    String::deserialize(from).map(|name| intern(&name))
}

/// Reads figures that stand beside the names of their tiers.
pub(crate) fn by_tier<'de, T, D>(from: D) -> Result<Vec<(TierName, T)>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let figures = Vec::<(String, T)>::deserialize(from)?;
    Ok(figures.into_iter().map(|(name, figure)| (intern(&name), figure)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once() {
        let first = intern("files");
        assert_eq!(first, "files");
        assert!(std::ptr::eq(first, intern(&["fi", "les"].concat())));
    }
}

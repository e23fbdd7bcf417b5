//! Names of tiers, and interned names that another process sends as text.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use cascade_runtime::LeafMutex;
use serde::{Deserialize, Deserializer};

/// The name of a tier in results and statistics: `dram`, `files`, or the name of another stage.
pub type TierName = &'static str;

/// Most tiers of a store: memory, and those below it. The wire protocol and the store have a byte
/// with a bit for each.
pub const TIERS_MAX: usize = 8;

const _: () = assert!(TIERS_MAX <= u8::BITS as usize, "a byte has a bit for each tier");

/// Maximum number of interned names, which are never freed. A build has a few dozen.
const NAMES_MAX: usize = 1024;

/// The result for every new name beyond the limit.
const UNKNOWN: &str = "other";

/// Interns a name. Interned names are never freed, so that their number is limited: beyond the
/// limit, which only a peer that invents names reaches, the result is `"other"`.
///
/// ```
/// let first = cascade_tier::intern("files");
/// assert_eq!(first, "files");
/// assert!(std::ptr::eq(first, cascade_tier::intern(&["fi", "les"].concat())));
/// ```
pub fn intern(name: &str) -> &'static str {
    static NAMES: LeafMutex<BTreeSet<&'static str>> = LeafMutex::new(BTreeSet::new());
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

/// Deserializes the name of a tier.
pub(crate) fn tier_name<'de, D: Deserializer<'de>>(from: D) -> Result<TierName, D::Error> {
    String::deserialize(from).map(|name| intern(&name))
}

/// Deserializes a list of values, each with the name of its tier.
pub(crate) fn by_tier<'de, T, D>(from: D) -> Result<Vec<(TierName, T)>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let values = Vec::<(String, T)>::deserialize(from)?;
    Ok(values.into_iter().map(|(name, value)| (intern(&name), value)).collect())
}

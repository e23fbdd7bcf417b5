//! The names under which a record may be read that is written under another key.

use std::collections::HashMap;

use cascade_block::{BlockKey, Digest};
use cascade_tier::tier::Address;

/// What the store reported about an alias. Decides whether a record with another key is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrustedName {
    /// Its bytes have this digest.
    Content(Digest),
    /// Its bytes are those of this block.
    Origin(BlockKey),
}

/// The aliases, with the address of each: a key that was deleted and added again has two for a
/// while.
#[derive(Debug, Default)]
pub(super) struct TrustedNames(HashMap<BlockKey, (Address, TrustedName)>);

impl TrustedNames {
    pub(super) fn add(&mut self, key: BlockKey, address: Address, name: TrustedName) {
        self.0.insert(key, (address, name));
    }

    pub(super) fn find(&self, key: &BlockKey) -> Option<TrustedName> {
        self.0.get(key).map(|(_, name)| *name)
    }

    /// The bytes of an alias have another address from now on.
    pub(super) fn set_address(&mut self, key: &BlockKey, old: Address, new: Address) {
        if let Some((address, _)) = self.0.get_mut(key).filter(|(address, _)| *address == old) {
            *address = new;
        }
    }

    /// Removes an alias, unless it is at another address.
    pub(super) fn remove(&mut self, key: &BlockKey, address: Address) {
        if self.0.get(key).is_some_and(|(at, _)| *at == address) {
            self.0.remove(key);
        }
    }

    /// Removes a key that is stored with bytes of its own.
    pub(super) fn remove_key(&mut self, key: &BlockKey) {
        self.0.remove(key);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

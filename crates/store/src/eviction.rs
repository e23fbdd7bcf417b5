//! Eviction: which blocks leave a tier first. (Interface shim until the policies land.)

mod hints;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::PolicyKind;
pub use hints::{Hints, Priority, StopReason};

/// Dense index of a resident block inside the mechanism.
pub type Slot = u32;

/// One block of a request.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// Uniform hash of its key.
    pub fingerprint: u64,
    /// Its slot while resident.
    pub resident: Option<Slot>,
}

/// Why a block leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Evicted.
    Evicted,
    /// Deleted.
    Deleted,
}

/// Shim.
#[derive(Debug, Default)]
pub struct Eviction {
    owners: BTreeMap<u64, (Slot, u32)>,
    stamps: Vec<u64>,
    next: u64,
}

impl Eviction {
    /// Shim.
    pub fn new(_kind: PolicyKind, _capacity_blocks: u64, _protected_percent: u8) -> Self {
        Self::default()
    }
    /// Shim.
    pub fn len(&self) -> usize {
        self.owners.len()
    }
    /// Shim.
    pub fn insert(
        &mut self,
        owner: u32,
        _fp: u64,
        _parent: Option<Slot>,
        _b: u32,
        _p: bool,
    ) -> Slot {
        let slot = self.stamps.len() as Slot;
        self.next += 1;
        self.stamps.push(self.next);
        self.owners.insert(self.next, (slot, owner));
        slot
    }
    /// Shim.
    pub fn remove(&mut self, slot: Slot, _why: Removal) {
        self.owners.remove(&self.stamps[slot as usize]);
    }
    /// Shim.
    pub fn request(&mut self, now: Duration, chain: &[Asked], _partial: bool, _hints: &Hints) {
        for asked in chain.iter().rev() {
            if let Some(slot) = asked.resident {
                self.touch(slot, now);
            }
        }
    }
    /// Shim.
    pub fn touch(&mut self, slot: Slot, _now: Duration) {
        let owner = self.owners.remove(&self.stamps[slot as usize]);
        self.next += 1;
        self.stamps[slot as usize] = self.next;
        self.owners.extend(owner.map(|owner| (self.next, owner)));
    }
    /// Shim: the owner of the victim, which stays until it is removed.
    pub fn victim(&mut self, _now: Duration, usable: &mut dyn FnMut(u32) -> bool) -> Option<Slot> {
        self.owners.values().find(|(_, owner)| usable(*owner)).map(|(slot, _)| *slot)
    }
    /// Shim.
    pub fn owner(&self, slot: Slot) -> u32 {
        self.owners[&self.stamps[slot as usize]].1
    }
}

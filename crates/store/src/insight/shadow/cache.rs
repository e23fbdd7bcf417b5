//! A shadow of DRAM: the store's own eviction over a sample's names, at another size.

use std::time::Duration;

use cascade_tier::Hints;

use super::Sample;
use crate::PolicyKind;
use crate::core::catalog::KeyTable;
use crate::core::eviction::{
    ChainHint, ChainRequest, Eviction, EvictionChoice, EvictionLimits, Incoming, Policy,
    PrefixCost, RemovalReason, RequestedBlock, Slot, Visits, policy,
};

/// Cells of prefix-cost in a shadow: a quarter of a megabyte instead of four.
const COUNTS_MAX: usize = 256;

/// Describes an incoming block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) fingerprint: u64,
    /// The previous block of its chain in the sample.
    pub(super) parent: Option<u64>,
    pub(super) bytes: u32,
    pub(super) is_protected: bool,
    /// Whether the policy may decline it: only without a lower tier that it must be written to.
    pub(super) may_decline: bool,
}

#[derive(Debug)]
pub(super) struct DramShadow {
    eviction: Eviction,
    table: KeyTable,
    capacity_bytes: u64,
    capacity_blocks: u64,
}

impl DramShadow {
    pub(super) fn new(kind: PolicyKind, limits: EvictionLimits, capacity_blocks: u64) -> Self {
        let policy: Box<dyn Policy> = match kind {
            PolicyKind::PrefixCost => Box::new(PrefixCost::with_counts(COUNTS_MAX)),
            other => policy(other),
        };
        Self {
            eviction: Eviction::new(policy, limits),
            table: KeyTable::new(),
            capacity_bytes: limits.capacity_bytes,
            capacity_blocks,
        }
    }

    fn find(&self, fingerprint: u64) -> Option<Slot> {
        let blocks = self.eviction.blocks();
        let is_it =
            |raw| Slot::some(raw).is_some_and(|slot| blocks.fingerprint(slot) == fingerprint);
        self.table.find(fingerprint, is_it).and_then(Slot::some)
    }

    pub(super) fn holds(&self, fingerprint: u64) -> bool {
        self.find(fingerprint).is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.eviction.blocks().len()
    }

    pub(super) fn promotes_hits(&self) -> bool {
        self.eviction.policy().promotes_hits()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.eviction.memory_bytes() + self.table.memory_bytes()
    }

    /// Looks up the blocks of a chain behind those that were looked up already. Returns whether
    /// none is left.
    pub(super) fn find_chain(
        &self,
        fingerprints: &[u64],
        requested: &mut Vec<RequestedBlock>,
        visits: &mut Visits,
    ) -> bool {
        while let Some(fingerprint) = fingerprints.get(requested.len()).copied() {
            if !visits.take(1) {
                return false;
            }
            requested.push(RequestedBlock { fingerprint, resident: self.find(fingerprint) });
        }
        true
    }

    /// A chain is requested. Once the policy knows of all of it, returns the number of leading
    /// blocks held.
    pub(super) fn continue_request(
        &mut self,
        report: &mut Option<ChainRequest>,
        chain: &mut [RequestedBlock],
        (now, partial_tail, hints): (Duration, bool, &Hints),
        visits: &mut Visits,
    ) -> Option<usize> {
        let begin = || self.eviction.begin_request(now, chain, partial_tail);
        let report = report.get_or_insert_with(begin);
        let is_done = self.eviction.continue_request(report, chain, hints, visits);
        is_done.then(|| report.leading())
    }

    /// Hints for a chain arrived. Returns whether the policy knows of all of it.
    pub(super) fn continue_hint(
        &mut self,
        hint: &mut Option<ChainHint>,
        chain: &mut [RequestedBlock],
        (now, hints): (Duration, &Hints),
        visits: &mut Visits,
    ) -> bool {
        let hint = hint.get_or_insert_with(|| self.eviction.begin_hint(now));
        self.eviction.continue_hint(hint, chain, hints, visits)
    }

    /// Inserts a block, unless it is present or the policy declines it.
    pub(super) fn insert(&mut self, now: Duration, arrival: &Arrival) {
        let fingerprint = arrival.fingerprint;
        if let Some(slot) = self.find(fingerprint) {
            // Protection is decided at the insertion, so a block that becomes protected is inserted
            // again.
            let is_settled = !arrival.is_protected || self.eviction.blocks().is_protected(slot);
            if is_settled {
                return;
            }
            self.remove(fingerprint);
        }
        let parent = arrival.parent.and_then(|parent| self.find(parent));
        // As in the store, children of a declined block are not admitted.
        let lacks_parent = arrival.parent.is_some() && parent.is_none();
        if u64::from(arrival.bytes) > self.capacity_bytes || (lacks_parent && arrival.may_decline) {
            return;
        }
        let incoming = Incoming {
            owner: 0,
            fingerprint,
            parent,
            bytes: arrival.bytes,
            is_protected: arrival.is_protected,
        };
        while self.is_full_for(arrival.bytes) {
            let victim = if arrival.may_decline {
                match self.eviction.victim_for(now, &incoming, &mut |_| true) {
                    EvictionChoice::Evict(slot) => Some(slot),
                    EvictionChoice::Decline => None,
                }
            } else {
                self.eviction.victim(now, &mut |_| true)
            };
            let Some(victim) = victim else { return };
            self.drop_slot(victim, RemovalReason::Evicted);
        }
        // Making room may have evicted the parent.
        let parent = parent.filter(|slot| self.eviction.blocks().is_resident(*slot));
        let slot = self.eviction.insert(now, &Incoming { parent, ..incoming });
        self.table.insert(fingerprint, Slot::raw(Some(slot)));
    }

    fn is_full_for(&self, bytes: u32) -> bool {
        let blocks = self.eviction.blocks();
        blocks.bytes() + u64::from(bytes) > self.capacity_bytes
            || blocks.len() as u64 >= self.capacity_blocks
    }

    pub(super) fn remove(&mut self, fingerprint: u64) {
        if let Some(slot) = self.find(fingerprint) {
            self.drop_slot(slot, RemovalReason::Deleted);
        }
    }

    fn drop_slot(&mut self, slot: Slot, why: RemovalReason) {
        let fingerprint = self.eviction.blocks().fingerprint(slot);
        self.table.remove(fingerprint, Slot::raw(Some(slot)));
        self.eviction.remove(slot, why);
    }

    /// Drops blocks outside a sample half as large, and halves the capacity.
    pub(super) fn thin(&mut self, sample: Sample) {
        let blocks = self.eviction.blocks();
        let resident = (0..blocks.slots()).filter_map(|at| Slot::some(u32::try_from(at).ok()?));
        let outside: Vec<Slot> = resident
            .filter(|slot| blocks.is_resident(*slot) && !sample.holds(blocks.fingerprint(*slot)))
            .collect();
        // Deleted, not evicted: the policy must not remember them as ghosts.
        for slot in outside {
            self.drop_slot(slot, RemovalReason::Deleted);
        }
        self.capacity_bytes = (self.capacity_bytes / 2).max(1);
        self.capacity_blocks = (self.capacity_blocks / 2).max(1);
    }
}

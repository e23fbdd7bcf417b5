//! Searches for a victim, each over one or more holds of the store's lock.

#[cfg(test)]
mod tests;

use std::time::Duration;

use super::visits::VISITS_PER_HOLD;
use super::{Eviction, EvictionChoice, Incoming, ParkReason, RemovalReason, Search, Slot};

/// Most blocks that one search for an ancestor visits.
const ANCESTORS_MAX: usize = 4096;

/// Whether a candidate may be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Evict,
    /// Not before [`Eviction::release`] is called for it.
    Park(ParkReason),
}

/// Result of a search for a victim in one hold of the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VictimSearch {
    /// The victim. It stays until it is removed.
    Found(Slot),
    /// The policy values every candidate more than the incoming block.
    AllWorthMore,
    /// The hold has visited enough blocks: release the lock and call again.
    Unfinished,
    /// No block may be evicted before one is released.
    None,
}

/// Progress of a search for an ancestor of leaves in use; kept by the caller between holds.
#[derive(Debug, Default)]
pub(crate) struct AncestorSearch {
    /// Place of the current leaf among the parked blocks.
    place: usize,
    /// The block above which the search goes on.
    at: Option<Slot>,
    visits: usize,
    /// Whether the search met an ancestor of the incoming block.
    met_spared: bool,
    /// Count of changes when the search began.
    changes: u64,
}

/// A search that found no ancestor: it need not be repeated before a change.
#[derive(Debug, Clone, Copy)]
pub(super) struct NoAncestor {
    changes: u64,
    /// The incoming block's parent, if the search met it.
    spared: Option<Slot>,
}

impl Eviction {
    /// Call when the store's lock was acquired: searches may visit candidates again.
    pub(crate) fn begin_hold(&mut self) {
        self.begin_search();
        self.policy.begin_hold();
    }

    /// Searches may visit candidates again.
    fn begin_search(&mut self) {
        self.visits.left = VISITS_PER_HOLD;
    }

    /// A block may be evictable again: it is not pinned, not held or not dirty any more.
    pub(crate) fn release(&mut self, slot: Slot) {
        self.changes += 1;
        if self.blocks.unpark(slot) {
            if self.blocks.is_protected(slot) {
                self.protected.push_newest(&mut self.blocks, slot);
            } else {
                self.policy.unpark(&mut self.blocks, slot);
            }
        }
    }

    /// Whether blocks that wait to be written will be evictable then.
    pub(crate) fn waits_for_write(&self) -> bool {
        self.blocks.waits_for_write()
    }

    /// One hold's part of a search for a victim. With an incoming block: never its parent, and none
    /// if the policy values the incoming block less than every candidate. A protected block,
    /// incoming or victim, skips that comparison. Parks the candidates that `usable` refuses.
    pub(crate) fn search(
        &mut self,
        now: Duration,
        incoming: Option<&Incoming>,
        usable: &mut dyn FnMut(u32) -> Verdict,
    ) -> VictimSearch {
        self.advance(now);
        let spared = incoming.and_then(|incoming| incoming.parent);
        let victim = loop {
            match self.next_candidate(spared) {
                Search::Found(slot) => match usable(self.blocks.owner(slot)) {
                    Verdict::Evict => break slot,
                    Verdict::Park(why) => self.park(slot, why),
                },
                Search::Unfinished => return VictimSearch::Unfinished,
                Search::None => return VictimSearch::None,
            }
        };
        let is_worth_it = incoming.is_none_or(|incoming| {
            let is_protected = incoming.is_protected || self.blocks.is_protected(victim);
            is_protected || self.policy.should_evict_for(&self.blocks, self.now, victim, incoming)
        });
        if is_worth_it { VictimSearch::Found(victim) } else { VictimSearch::AllWorthMore }
    }

    fn next_candidate(&mut self, spared: Option<Slot>) -> Search {
        if self.blocks.has_candidate(false, spared) {
            let policy = &mut self.policy;
            let search = policy.victim(&mut self.blocks, self.now, spared, &mut self.visits);
            if search != Search::None {
                return search;
            }
        }
        // Parents of deleted blocks may be candidates once their slots are freed.
        while self.blocks.has_unfinished() {
            if !self.visits.take(1) {
                return Search::Unfinished;
            }
            self.free_unfinished();
            if self.blocks.has_candidate(false, spared) {
                return Search::Unfinished;
            }
        }
        // A block that waits to be written is evictable soon: rather wait for it than evict a
        // protected block.
        if self.blocks.waits_for_write() || !self.blocks.has_candidate(true, spared) {
            return Search::None;
        }
        let mut among = usize::MAX;
        self.protected.oldest_candidate(&mut self.blocks, spared, &mut among, &mut self.visits)
    }

    fn park(&mut self, slot: Slot, why: ParkReason) {
        // The policy first, as in a removal: a parked block is in none of its lists.
        if self.blocks.is_protected(slot) {
            self.protected.remove(&mut self.blocks, slot);
        } else {
            self.policy.park(&mut self.blocks, slot);
        }
        self.blocks.park(slot, why);
        self.changes += 1;
    }

    /// One hold's part of a search above parked leaves, for when no leaf is a candidate: the
    /// nearest usable ancestor of one. Otherwise a lease on the last block of a chain would keep
    /// the whole chain in the tier. Never a protected block, and never an ancestor of the incoming
    /// block: no lookup would reach the incoming block without it.
    pub(crate) fn search_above(
        &mut self,
        incoming: Option<&Incoming>,
        usable: &mut dyn FnMut(u32) -> Verdict,
        search: &mut AncestorSearch,
    ) -> VictimSearch {
        let spared = incoming.and_then(|incoming| incoming.parent);
        // What an earlier search found is still true without a change.
        let is_known = self.no_ancestor.is_some_and(|none| {
            none.changes == self.changes && (none.spared.is_none() || none.spared == spared)
        });
        if is_known {
            return VictimSearch::None;
        }
        if search.changes != self.changes {
            // The slots may belong to other blocks now. `visits` goes on, so that the search ends
            // although other calls change blocks.
            let visits = search.visits;
            *search = AncestorSearch { visits, changes: self.changes, ..AncestorSearch::default() };
        }
        // One limit for the whole search: many leaves may share a long chain of ancestors in use.
        while search.visits < ANCESTORS_MAX {
            let Some(at) = search.at else {
                search.visits += 1;
                match self.blocks.parked_leaf(&mut search.place, &mut self.visits) {
                    Search::Found(leaf) if Some(leaf) == spared => {
                        search.met_spared = true;
                        search.place += 1;
                    }
                    Search::Found(leaf) => search.at = Some(leaf),
                    Search::Unfinished => return VictimSearch::Unfinished,
                    Search::None => break,
                }
                continue;
            };
            if !self.visits.take(1) {
                return VictimSearch::Unfinished;
            }
            search.visits += 1;
            let above = self.blocks.next_ancestor(at);
            search.met_spared |= above.is_some() && above == spared;
            // All further ancestors of the incoming block's parent are its ancestors, too.
            let may_go = |slot: &Slot| Some(*slot) != spared && !self.blocks.is_protected(*slot);
            let Some(slot) = above.filter(may_go) else {
                search.at = None;
                search.place += 1;
                continue;
            };
            // The slot of a deleted block still links to its parent, so the walk goes on through
            // it.
            if self.blocks.is_resident(slot) && usable(self.blocks.owner(slot)) == Verdict::Evict {
                search.visits = 0;
                return VictimSearch::Found(slot);
            }
            search.at = Some(slot);
        }
        let spared = spared.filter(|_| search.met_spared);
        self.no_ancestor = Some(NoAncestor { changes: self.changes, spared });
        *search = AncestorSearch::default();
        VictimSearch::None
    }

    /// The first leaf in the order of eviction with an owner that `usable` accepts. The victim
    /// stays until it is removed.
    pub fn victim(&mut self, now: Duration, usable: &mut dyn FnMut(u32) -> bool) -> Option<Slot> {
        match self.search_to_the_end(now, None, usable) {
            VictimSearch::Found(slot) => Some(slot),
            _ => None,
        }
    }

    /// The victim to evict for an incoming block: never the block's own parent, and none if the
    /// policy values the incoming block less than every candidate. A protected block, incoming or
    /// victim, skips that comparison.
    pub fn victim_for(
        &mut self,
        now: Duration,
        incoming: &Incoming,
        usable: &mut dyn FnMut(u32) -> bool,
    ) -> EvictionChoice {
        let search = self.search_to_the_end(now, Some(incoming), usable);
        self.count_declined(search);
        match search {
            VictimSearch::Found(slot) => EvictionChoice::Evict(slot),
            _ => EvictionChoice::Decline,
        }
    }

    /// Counts an incoming block that is not admitted.
    pub(crate) fn count_declined(&mut self, search: VictimSearch) {
        let is_declined = matches!(search, VictimSearch::AllWorthMore | VictimSearch::None);
        self.stats.declined += u64::from(is_declined);
    }

    /// A whole search, for callers without a lock. The owners that `usable` accepts may differ from
    /// those of the search before.
    fn search_to_the_end(
        &mut self,
        now: Duration,
        incoming: Option<&Incoming>,
        usable: &mut dyn FnMut(u32) -> bool,
    ) -> VictimSearch {
        for slot in self.blocks.parked() {
            self.release(slot);
        }
        loop {
            self.begin_search();
            let search = self.search(now, incoming, &mut |owner| verdict(usable(owner)));
            if search != VictimSearch::Unfinished {
                return search;
            }
        }
    }

    /// The victim when the last search found no usable leaf: the nearest usable ancestor of an
    /// unusable leaf. Never a protected block, and never an ancestor of the incoming block.
    pub fn victim_above_used_leaf(
        &mut self,
        incoming: Option<&Incoming>,
        usable: &mut dyn FnMut(u32) -> bool,
    ) -> Option<Slot> {
        let mut progress = AncestorSearch::default();
        // The owners that `usable` accepts may have changed without a release.
        self.changes += 1;
        loop {
            self.begin_search();
            let mut usable = |owner: u32| verdict(usable(owner));
            match self.search_above(incoming, &mut usable, &mut progress) {
                VictimSearch::Found(slot) => return Some(slot),
                VictimSearch::Unfinished => {}
                VictimSearch::AllWorthMore | VictimSearch::None => return None,
            }
        }
    }

    /// Evicts until `bytes_needed` bytes are freed or no candidate is left. Appends the owners of
    /// the evicted blocks and returns the number of bytes freed.
    pub fn victims(
        &mut self,
        now: Duration,
        bytes_needed: u64,
        usable: &mut dyn FnMut(u32) -> bool,
        owners: &mut Vec<u32>,
    ) -> u64 {
        let mut bytes = 0;
        while bytes < bytes_needed {
            let Some(slot) = self.victim(now, usable) else { break };
            bytes += u64::from(self.blocks.bytes_of(slot));
            // Before the removal, after which the slot holds no block.
            owners.push(self.blocks.owner(slot));
            self.remove(slot, RemovalReason::Evicted);
        }
        bytes
    }
}

fn verdict(is_usable: bool) -> Verdict {
    if is_usable { Verdict::Evict } else { Verdict::Park(ParkReason::Busy) }
}

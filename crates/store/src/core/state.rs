//! The state of a store under its one lock, and the operations that keep its parts consistent.
//!
//! Invariants while the lock is free:
//! - A key has a slot in the eviction policy exactly if DRAM is a tier, its content has a slab, and
//!   the key itself brought the slab to DRAM or used it since.
//! - `resident_keys` of a content is the number of its keys that have a slot.
//! - Every content is in at least one tier, and every key has a content.
//! - A content with a dirty bit is in the queue of that stage or is being written by its mover, and
//!   keeps its slab until then.

mod additions;
mod changes;
mod circuits;
mod clear;
mod cost;
mod release;

use std::time::Duration;

use cascade_block::{BlockKey, FingerprintSeed};
use cascade_memory::Slab;
use cascade_runtime::Clock;
use cascade_tier::tier::{Address, BlockFacts, TierError};
use cascade_tier::{PutOutcome, StoreCounters};

use crate::HealthConfig;
use crate::core::awaited::AwaitedWrites;
use crate::core::catalog::{Catalog, ContentIndex, ExpectedAccess, KeyIndex, LOWER_STAGES_MAX};
use crate::core::eviction::{AncestorSearch, Incoming, RemovalReason, VictimSearch};
use crate::core::fetching::Fetching;
use crate::core::flush_mark::FlushMark;
use crate::core::history::{History, Loss};
use crate::core::lower_tier::LowerTier;
use crate::core::memory_tier::MemoryTier;
use crate::core::pending::{KeyChange, PendingWrite};
use crate::core::usable::verdict;
use crate::durable::ledger::{Ledger, unknown_namespace};
use crate::hold_recorder::HoldRecorder;

/// What an eviction costs a hold of the lock, in keys looked up.
const EVICTION_COST: u32 = 4;
/// What the removal of a key costs beyond the lookup of the key: it touches the key, its content,
/// its block and unit in the eviction policy with their neighbours, and the history.
const REMOVAL_COST: u32 = 3;
/// Names of a content that are walked for the price of one key.
const NAMES_PER_KEY: u32 = 8;

/// Result of an attempt to evict one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvictionResult {
    /// A block was evicted.
    Evicted,
    /// The policy values every evictable block more than the incoming one.
    AllWorthMore,
    /// This hold of the lock has visited enough blocks: release it and call again.
    Searching,
    /// Every block is pinned, being read, or not written yet.
    NoneEvictable,
}

/// The state of a store.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts that do not exclude each other")]
pub(crate) struct StoreState {
    pub(crate) catalog: Catalog,
    /// The tier of the store's own memory, the fastest one.
    pub(crate) memory: MemoryTier,
    pub(crate) counters: StoreCounters,
    /// Why recent blocks are no longer in the store.
    pub(crate) history: History,
    /// Hits and bytes by tier: DRAM first, then the lower stages.
    pub(crate) tier_hits: [(u64, u64); 1 + LOWER_STAGES_MAX],
    /// Requested blocks that were matched, in the same order.
    pub(crate) tier_matches: [u64; 1 + LOWER_STAGES_MAX],
    /// As `tier_hits` and `tier_matches`, for the sources that have any.
    pub(crate) source_hits: Vec<(u64, u64)>,
    pub(crate) source_matches: Vec<u64>,
    /// Blocks that calls fetch from sources.
    pub(crate) fetching: Fetching,
    /// The stages below DRAM.
    pub(crate) lower: Vec<LowerTier>,
    pub(crate) awaited: AwaitedWrites,
    /// Blocks and key changes that each stage failed to store since the start.
    pub(crate) write_failures: FlushMark,
    /// Failures before the last erase: no flush reports these, because the blocks are erased.
    pub(crate) failures_before_erase: FlushMark,
    /// Failures that some flush has reported.
    pub(crate) reported_failures: FlushMark,
    /// Bit per lower stage: its read circuit is open.
    pub(crate) open_read_circuits: u8,
    /// Bit per lower stage: its write circuit is open.
    pub(crate) open_write_circuits: u8,
    /// Bit per lower stage: it keeps only keys, no bytes.
    pub(crate) key_only_stages: u8,
    /// The epoch of the next change log; the first one of a store is random.
    pub(crate) next_epoch: u64,
    pub(crate) content_bytes: u64,
    /// Blocks in the current step of the scrubber.
    pub(crate) blocks_in_scrub: u64,
    /// The latest time of a request that has one. The policy uses these instead of the clock.
    pub(crate) policy_time: Option<Duration>,
    /// The ledger of a named pool: lets the next process restore the blocks in DRAM.
    pub(crate) ledger: Option<Ledger>,
    /// What the current hold of the lock has done so far; see [`StoreState::charge`].
    pub(crate) cost: u32,
    /// Records the holds of the lock, if the configuration wants that.
    pub(crate) recorder: Option<HoldRecorder>,
    /// Puts and deletions are refused; queued blocks are still written.
    pub(crate) is_closing: bool,
    /// Puts are refused while the store is erased.
    pub(crate) is_erasing: bool,
    /// An erase has cancelled key changes, and has yet to erase the stages or to queue them again.
    pub(crate) are_removals_cancelled: bool,
    /// Number of erases that have begun.
    pub(crate) erases: u64,
    /// Every call is refused, and the threads end.
    pub(crate) is_closed: bool,
}

impl StoreState {
    pub(crate) fn new(
        memory: MemoryTier,
        lower_stages: usize,
        history: History,
        (health, seed): (HealthConfig, FingerprintSeed),
        clock: &dyn Clock,
    ) -> Self {
        let (now, now_unix_ms) = (clock.monotonic(), clock.unix_ms());
        Self {
            catalog: Catalog::new(seed),
            memory,
            counters: StoreCounters::default(),
            history,
            tier_hits: [(0, 0); 1 + LOWER_STAGES_MAX],
            tier_matches: [0; 1 + LOWER_STAGES_MAX],
            source_hits: Vec::new(),
            source_matches: Vec::new(),
            fetching: Fetching::default(),
            lower: (0..lower_stages).map(|_| LowerTier::new(health, now, now_unix_ms)).collect(),
            awaited: AwaitedWrites::default(),
            write_failures: FlushMark::default(),
            failures_before_erase: FlushMark::default(),
            reported_failures: FlushMark::default(),
            open_read_circuits: 0,
            open_write_circuits: 0,
            key_only_stages: 0,
            next_epoch: 0,
            content_bytes: 0,
            blocks_in_scrub: 0,
            policy_time: None,
            ledger: None,
            cost: 0,
            recorder: None,
            is_closing: false,
            is_erasing: false,
            are_removals_cancelled: false,
            erases: 0,
            is_closed: false,
        }
    }

    /// Memory of what is known of all blocks.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let slabs = self.memory.eviction.blocks().len() * Slab::STATE_BYTES;
        self.catalog.memory_bytes() + self.memory.eviction.memory_bytes() + slabs
    }

    /// The entry of a key that has not expired. Forgets an expired one.
    pub(crate) fn find_live(&mut self, key: &BlockKey, now_unix_ms: u64) -> Option<KeyIndex> {
        let found = self.catalog.find(key)?;
        if self.catalog.entry(found).has_expired(now_unix_ms) {
            self.forget(found, Loss::Expired);
            return None;
        }
        Some(found)
    }

    /// Gives a key a slot in the eviction policy, because its content is in DRAM.
    pub(crate) fn make_resident(&mut self, key: KeyIndex, now: Duration) {
        if !self.memory.keeps_blocks || self.catalog.entry(key).slot().is_some() {
            return;
        }
        let parent = self.catalog.parent_of(key);
        let entry = self.catalog.entry(key);
        let content = entry.content;
        let incoming = Incoming {
            owner: key.0,
            fingerprint: self.catalog.fingerprint(&entry.key),
            parent: parent.and_then(|parent| self.catalog.entry(parent).slot()),
            bytes: self.catalog.content(content).bytes,
            is_protected: entry.is_prefix(),
        };
        let slot = self.memory.eviction.insert(now, &incoming);
        self.catalog.entry_mut(key).set_slot(Some(slot));
        self.catalog.content_mut(content).resident_keys += 1;
    }

    /// Notes that a chain lookup matched this block: its caller will read it.
    pub(crate) fn expect_read(&mut self, key: KeyIndex) {
        self.replace_expected_access(key, ExpectedAccess::ReportedAccess);
    }

    /// Replaces the access that is expected for a block, because the block is used.
    fn replace_expected_access(&mut self, key: KeyIndex, by: ExpectedAccess) -> ExpectedAccess {
        let entry = self.catalog.entry_mut(key);
        let awaited = std::mem::replace(&mut entry.expected_access, by);
        if awaited == ExpectedAccess::FirstUse {
            self.counters.prefetched_used += 1;
            self.release_key(key);
        }
        awaited
    }

    /// Reports an access to the policy, unless a chain lookup has reported it already.
    pub(crate) fn touch(&mut self, key: KeyIndex, now: Duration) {
        let awaited = self.replace_expected_access(key, ExpectedAccess::None);
        match self.catalog.entry(key).slot() {
            Some(_) if awaited == ExpectedAccess::ReportedAccess => {}
            Some(slot) => self.memory.eviction.touch(now, slot),
            None => self.make_resident(key, now),
        }
    }

    /// Evicts one block from DRAM. With an incoming block, evicts only a block that the policy
    /// values less. `ancestors` keeps the progress of a search between holds of the lock.
    pub(crate) fn evict_one(
        &mut self,
        now: Duration,
        incoming: Option<&Incoming>,
        ancestors: &mut AncestorSearch,
    ) -> EvictionResult {
        let catalog = &self.catalog;
        let mut usable = |owner: u32| verdict(catalog, KeyIndex(owner));
        let mut search = self.memory.eviction.search(now, incoming, &mut usable);
        if incoming.is_some() {
            self.memory.eviction.count_declined(search);
        }
        // Leaves that wait for write-back are usable soon. Leaves that are held are not.
        if search == VictimSearch::None && !self.memory.eviction.waits_for_write() {
            search = self.memory.eviction.search_above(incoming, &mut usable, ancestors);
        }
        self.charge(EVICTION_COST);
        let slot = match search {
            VictimSearch::Found(slot) => slot,
            VictimSearch::AllWorthMore => return EvictionResult::AllWorthMore,
            VictimSearch::Unfinished => return EvictionResult::Searching,
            VictimSearch::None => return EvictionResult::NoneEvictable,
        };
        let key = KeyIndex(self.memory.eviction.blocks().owner(slot));
        let is_protected = self.memory.eviction.blocks().is_protected(slot);
        self.release_slot(key, RemovalReason::Evicted);
        let content = self.catalog.entry(key).content;
        // The slab stays while another key of the content has a slot.
        if self.catalog.content(content).resident_keys == 0 {
            self.drop_slab(content);
            let evicted = self.catalog.content(content);
            let is_lost = !evicted.is_in_any_tier() && !evicted.was_fetched;
            self.counters.evicted_blocks += 1;
            self.counters.evicted_bytes += u64::from(evicted.bytes);
            self.counters.lost_blocks += u64::from(is_lost);
            self.forget_if_in_no_tier(content, self.eviction_loss(content, is_protected));
        }
        EvictionResult::Evicted
    }

    /// The reason to record if the evicted content is in no other tier.
    fn eviction_loss(&self, content: ContentIndex, is_protected: bool) -> Loss {
        let content = self.catalog.content(content);
        match content {
            _ if content.was_reclaimed => Loss::EvictedReclaimed,
            _ if !self.lower.is_empty() => Loss::EvictedUnwritten,
            _ if is_protected => Loss::EvictedProtected,
            _ if content.uses > 0 => Loss::EvictedRead,
            _ => Loss::EvictedUnread,
        }
    }

    /// Removes the slab of a content from DRAM. Views that are held keep the memory.
    pub(crate) fn drop_slab(&mut self, content: ContentIndex) {
        self.clear_records(content);
        let was_readable = self.is_readable(content);
        let entry = self.catalog.content_mut(content);
        if entry.slab.take().is_some() {
            self.memory.used_bytes -= u64::from(entry.bytes);
        }
        self.note_readability(content, was_readable);
    }

    /// Removes a content from DRAM because its bytes changed since the put. Copies in lower tiers
    /// stay; their checksums are compared when they are read.
    pub(crate) fn drop_damaged(&mut self, index: ContentIndex) {
        self.counters.damaged_blocks += 1;
        for key in self.catalog.keys_of(index) {
            self.release_slot(key, RemovalReason::Deleted);
        }
        // Movers that have it queued find no slab, and treat the block as deleted.
        self.catalog.content_mut(index).dirty = 0;
        self.drop_slab(index);
        self.forget_if_in_no_tier(index, Loss::Damaged);
    }

    /// Places the slab of a content in DRAM. `facts` describe the put that brought it, if any.
    pub(crate) fn put_slab(
        &mut self,
        index: ContentIndex,
        slab: cascade_memory::Slab,
        facts: Option<&BlockFacts>,
    ) {
        self.clear_records(index);
        let was_readable = self.is_readable(index);
        let content = self.catalog.content_mut(index);
        if content.slab.replace(slab).is_none() {
            self.memory.used_bytes += u64::from(content.bytes);
        } else {
            // The readers of the former slab do not hold the new one.
            self.release_content(index);
        }
        self.note_readability(index, was_readable);
        if let Some(ledger) = &mut self.ledger {
            for key in self.catalog.each_key_of(index) {
                let is_its = |facts: &&BlockFacts| facts.key == self.catalog.entry(key).key;
                record_key(ledger, &self.catalog, key, facts.filter(is_its));
            }
        }
    }

    /// Records a key in the ledger if its content is in DRAM. `facts` describe its put if it is
    /// being put now; otherwise the record is made from the catalog.
    pub(crate) fn record(&mut self, key: KeyIndex, facts: Option<&BlockFacts>) {
        if let Some(ledger) = &mut self.ledger {
            record_key(ledger, &self.catalog, key, facts);
        }
    }

    /// Clears the ledger records of a content. Must come before its slab is dropped: the memory may
    /// then belong to another content, and a record must not describe it.
    fn clear_records(&mut self, content: ContentIndex) {
        let Some(ledger) = &mut self.ledger else { return };
        for key in self.catalog.each_key_of(content) {
            ledger.clear(key);
        }
    }

    /// Records the address of a content in a stage.
    pub(crate) fn set_address(&mut self, index: ContentIndex, stage: usize, address: Address) {
        self.catalog.set_address(index, stage, Some(address));
        if let Some(ledger) = &mut self.ledger {
            for key in self.catalog.each_key_of(index) {
                ledger.note_stored(key, stage, address);
            }
        }
    }

    /// Removes the address of a content in a stage.
    pub(crate) fn clear_address(&mut self, index: ContentIndex, stage: usize) {
        let was_readable = self.is_readable(index);
        self.catalog.set_address(index, stage, None);
        self.note_readability(index, was_readable);
    }

    /// Forgets a content that is in no tier.
    pub(crate) fn forget_if_in_no_tier(&mut self, content: ContentIndex, why: Loss) {
        if self.catalog.content(content).is_in_any_tier() {
            return;
        }
        for key in self.catalog.keys_of(content) {
            self.forget(key, why);
        }
    }

    /// Removes a key, and with the last key its content, from every tier.
    pub(crate) fn forget(&mut self, key: KeyIndex, why: Loss) {
        let names = self.catalog.content(self.catalog.entry(key).content).key_count;
        self.charge(REMOVAL_COST + names / NAMES_PER_KEY);
        if let Some(ledger) = &mut self.ledger {
            ledger.clear(key);
        }
        self.release_slot(key, why.removal());
        let entry = self.catalog.entry(key);
        let (name, index) = (entry.key, entry.content);
        self.history.record(&name, why);
        let addresses: [_; LOWER_STAGES_MAX] =
            std::array::from_fn(|stage| self.catalog.address(index, stage));
        for (stage, address) in addresses.into_iter().enumerate() {
            if let Some(address) = address {
                self.push_key_change(stage, KeyChange::Remove(name, address));
            }
        }
        if let Some(content) = self.catalog.remove(key) {
            self.content_bytes -= u64::from(content.bytes);
            if let Some(slab) = content.slab {
                self.memory.used_bytes -= u64::from(content.bytes);
                self.catalog.discard(slab);
            }
            return;
        }
        // The content has other keys. If none has a slot, give one to the first, so that the
        // content stays evictable.
        let content = self.catalog.content(index);
        if self.memory.keeps_blocks && content.resident_keys == 0 && content.slab.is_some() {
            let successor = self.catalog.first_key_of(index);
            // The policy replaces a time in the past by the latest that it saw.
            self.make_resident(successor, Duration::ZERO);
        }
    }

    fn release_slot(&mut self, key: KeyIndex, why: RemovalReason) {
        let entry = self.catalog.entry_mut(key);
        let content = entry.content;
        let Some(slot) = entry.slot() else { return };
        entry.set_slot(None);
        entry.expected_access = ExpectedAccess::None;
        self.memory.eviction.remove(slot, why);
        self.catalog.content_mut(content).resident_keys -= 1;
    }

    /// Queues a key change for the mover of a stage.
    pub(crate) fn push_key_change(&mut self, stage: usize, change: KeyChange) {
        self.limit_key_changes(stage);
        self.lower[stage].key_changes.push_back(change);
        self.lower[stage].key_tickets.pushed += 1;
    }

    /// Whether key changes are queued for any stage.
    pub(crate) fn has_key_changes(&self) -> bool {
        self.lower.iter().any(|tier| !tier.key_changes.is_empty())
    }

    /// How many key changes each stage has been given so far.
    pub(crate) fn key_changes_pushed(&self) -> [u64; LOWER_STAGES_MAX] {
        let pushed = |stage: usize| self.lower.get(stage).map_or(0, |tier| tier.key_tickets.pushed);
        std::array::from_fn(pushed)
    }

    /// Queues a content for the mover of a stage; the content keeps its slab until it is written.
    /// While the write circuit is open, only lists it as missing in the stage.
    pub(crate) fn push_block(&mut self, stage: usize, facts: BlockFacts, content: ContentIndex) {
        self.push_block_with_tries(stage, facts, content, 0);
    }

    /// As `push_block`, for a block that the stage failed to store `tries` times.
    pub(crate) fn push_block_with_tries(
        &mut self,
        stage: usize,
        facts: BlockFacts,
        content: ContentIndex,
        tries: u8,
    ) {
        let is_shed = self.is_write_circuit_open(stage);
        let entry = self.catalog.content_mut(content);
        let generation = entry.generation;
        if is_shed {
            self.counters.shed_puts += 1;
            self.write_failures.count(stage, 1);
            return self.note_unstored(stage, PendingWrite { facts, content, generation, tries });
        }
        entry.dirty |= 1 << stage;
        self.lower[stage].pending_bytes += u64::from(facts.bytes);
        self.lower[stage].queue.push_back(PendingWrite { facts, content, generation, tries });
        self.lower[stage].block_tickets.pushed += 1;
    }

    /// Counts the outcome of one block's put, and records the reason if it was not stored.
    pub(crate) fn count_put(&mut self, key: &BlockKey, outcome: &PutOutcome) {
        self.counters.count_put(outcome);
        self.note_unstored_put(key, outcome);
    }

    /// Records the reason if a block was not stored.
    pub(crate) fn note_unstored_put(&mut self, key: &BlockKey, outcome: &PutOutcome) {
        match outcome {
            PutOutcome::Declined(why) => self.history.record(key, (*why).into()),
            PutOutcome::Failed(_) => self.history.record(key, Loss::PutFailed),
            PutOutcome::Stored
            | PutOutcome::Deduplicated
            | PutOutcome::Present
            | PutOutcome::Conflict => {}
        }
    }

    /// Records the last error of a stage.
    pub(crate) fn note_error(&mut self, stage: usize, error: TierError) {
        // An open circuit is the consequence of an earlier error, which says more.
        if !matches!(error, TierError::CircuitOpen) || self.lower[stage].last_error.is_none() {
            self.lower[stage].last_error = Some(error);
        }
    }

    /// Protects a prefetched block from eviction until its first use. Beyond `bytes_max` the oldest
    /// prefetched blocks lose their protection.
    pub(crate) fn protect_prefetched(&mut self, key: KeyIndex, bytes_max: u64) {
        let entry = self.catalog.entry_mut(key);
        entry.expected_access = ExpectedAccess::FirstUse;
        let (name, content) = (entry.key, entry.content);
        let bytes = u64::from(self.catalog.content(content).bytes);
        self.memory.prefetched.push_back((name, bytes));
        self.memory.prefetched_bytes += bytes;
        while self.memory.prefetched_bytes > bytes_max
            && let Some((oldest, bytes)) = self.memory.prefetched.pop_front()
        {
            self.memory.prefetched_bytes -= bytes;
            if let Some(key) = self.catalog.find(&oldest) {
                let entry = self.catalog.entry_mut(key);
                if entry.expected_access == ExpectedAccess::FirstUse {
                    entry.expected_access = ExpectedAccess::None;
                    self.release_key(key);
                }
            }
        }
    }

    /// The mean length of the contents; zero if there is none.
    pub(crate) fn mean_block_bytes(&self) -> u32 {
        let contents = self.catalog.content_count() as u64;
        let mean = self.content_bytes.checked_div(contents).unwrap_or(0);
        u32::try_from(mean).unwrap_or(u32::MAX)
    }

    /// The write backlog of all stages, in bytes.
    pub(crate) fn pending_total(&self) -> u64 {
        self.lower.iter().map(|tier| tier.pending_bytes).sum()
    }
}

/// See [`StoreState::record`].
fn record_key(ledger: &mut Ledger, catalog: &Catalog, key: KeyIndex, facts: Option<&BlockFacts>) {
    let entry = catalog.entry(key);
    let content = catalog.content(entry.content);
    let Some(slab) = &content.slab else { return };
    let known = || BlockFacts {
        key: entry.key,
        digest: None,
        parent: catalog.parent_of(key).map(|parent| catalog.entry(parent).key),
        namespace: unknown_namespace(),
        bytes: content.bytes,
        is_prefix: entry.is_prefix(),
        written_unix_ms: 0,
        expires_unix_ms: (entry.expires_unix_ms != 0).then_some(entry.expires_unix_ms),
    };
    let digest = catalog.digest_of(entry.content).copied();
    let record = BlockFacts { digest, ..facts.copied().unwrap_or_else(known) };
    let addresses = std::array::from_fn(|stage| catalog.address(entry.content, stage));
    ledger.record(key, &record, facts.is_some(), slab, addresses);
}

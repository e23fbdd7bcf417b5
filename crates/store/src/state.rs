//! A node's state under its one lock, and the steps that keep its parts in agreement.
//!
//! Invariants, whenever the lock is free:
//! - a key has a slot in the policy exactly while DRAM is a tier, its content has a slab there, and
//!   the key itself brought it there or used it since;
//! - `resident_keys` of a content counts the slots of its keys;
//! - a content that no tier has does not exist, and neither do its keys;
//! - a content with a dirty bit waits in that stage's queue or is being written by its mover, and
//!   keeps its slab until then.

use std::collections::VecDeque;
use std::time::Duration;

use cascade_block::{BlockKey, Clock, Seed};

use crate::HealthConfig;
use crate::catalog::{Address, Awaits, Catalog, ContentIndex, KeyIndex, LOWER_STAGES_MAX};
use crate::eviction::{Eviction, Incoming, Removal, Verdict};
use crate::flush::FlushMark;
use crate::health::Breaker;
use crate::history::{History, Loss};
use crate::ledger::{Ledger, unknown_namespace};
use crate::outcome::PutOutcome;
use crate::stage::{BlockFacts, StageError};
use crate::stats::Counters;

/// A block that waits to be written to a lower stage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    pub(crate) facts: BlockFacts,
    pub(crate) content: ContentIndex,
    pub(crate) generation: u32,
    /// How often the stage failed to take it.
    pub(crate) tries: u8,
}

/// A name that a stage has to learn or to forget. Only the stage's mover tells it, in this order
/// and before later blocks: a name that goes and comes back must not end up gone.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NameChange {
    /// Another name for a content that the stage has.
    Add(BlockFacts, Address),
    /// A name that is no longer valid.
    Remove(BlockKey, Address),
}

/// What an attempt to evict one block came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// A block is gone.
    One,
    /// All that may go is worth more than what wants to come.
    NothingWorthLess,
    /// Everything is pinned, being read, or still to be written down.
    NothingUsable,
}

/// Tickets of a queue: whoever wants to know when what is queued now is done keeps the number of
/// what was pushed, and waits until as much is settled.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tickets {
    pub(crate) pushed: u64,
    pub(crate) settled: u64,
}

/// Everything that a node decides from.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts that do not exclude each other")]
pub(crate) struct State {
    pub(crate) catalog: Catalog,
    pub(crate) eviction: Eviction,
    pub(crate) counters: Counters,
    /// What became of blocks that are gone.
    pub(crate) history: History,
    /// Hits and their bytes: DRAM first, then the lower stages.
    pub(crate) tier_hits: [(u64, u64); 1 + LOWER_STAGES_MAX],
    /// Requested blocks that were matched, in the same order.
    pub(crate) tier_matches: [u64; 1 + LOWER_STAGES_MAX],
    /// Blocks to be written, by stage.
    pub(crate) queues: [VecDeque<Pending>; LOWER_STAGES_MAX],
    pub(crate) blocks_tickets: [Tickets; LOWER_STAGES_MAX],
    pub(crate) names: [Vec<NameChange>; LOWER_STAGES_MAX],
    /// Blocks and names that each stage ever failed to take.
    pub(crate) unwritten: FlushMark,
    /// How many of these no flush tells of: an erasure made up for them.
    pub(crate) forgiven: FlushMark,
    /// How many some flush has told of.
    pub(crate) told: FlushMark,
    pub(crate) names_tickets: [Tickets; LOWER_STAGES_MAX],
    /// Why a stage failed last.
    pub(crate) last_errors: [Option<StageError>; LOWER_STAGES_MAX],
    /// Bytes in the queues or being written, by stage.
    pub(crate) pending_bytes: [u64; LOWER_STAGES_MAX],
    pub(crate) breakers: [Breaker; LOWER_STAGES_MAX],
    /// Bit per lower stage: its circuit for reads is open.
    pub(crate) shed: u8,
    /// Bit per lower stage: its circuit for writes is open.
    pub(crate) write_shed: u8,
    /// Bit per lower stage: it keeps names, and no bytes.
    pub(crate) names_only: u8,
    /// Blocks that a stage failed to take, oldest first: queued again when its breaker closes.
    pub(crate) lacking: [VecDeque<Pending>; LOWER_STAGES_MAX],
    /// How many of these are to be queued again now.
    pub(crate) retries: [usize; LOWER_STAGES_MAX],
    /// Blocks that prefetch brought up and that eviction spares until their first use, oldest
    /// first, with their bytes.
    pub(crate) prefetched: VecDeque<(BlockKey, u64)>,
    pub(crate) prefetched_bytes: u64,
    pub(crate) content_bytes: u64,
    pub(crate) dram_bytes: u64,
    /// Slabs given to puts and loads that are under way.
    pub(crate) slabs_out: u64,
    /// Blocks that are being compared with their checksums.
    pub(crate) scrubbing: u64,
    /// The latest time that a request gave; the policy then goes by these.
    pub(crate) policy_time: Option<Duration>,
    /// What the next run finds of the blocks in DRAM, if the pool outlives its process.
    pub(crate) ledger: Option<Ledger>,
    pub(crate) has_dram: bool,
    /// How many tiers stand below DRAM.
    pub(crate) lower_stages: usize,
    /// Nothing new is taken any more.
    pub(crate) is_closing: bool,
    /// Nothing is taken while everything is erased.
    pub(crate) is_erasing: bool,
    pub(crate) is_closed: bool,
}

impl State {
    pub(crate) fn new(
        eviction: Eviction,
        has_dram: bool,
        lower_stages: usize,
        history: History,
        (health, seed): (HealthConfig, Seed),
        clock: &dyn Clock,
    ) -> Self {
        let (now, now_unix_ms) = (clock.monotonic(), clock.unix_ms());
        Self {
            catalog: Catalog::new(seed),
            eviction,
            counters: Counters::default(),
            history,
            tier_hits: [(0, 0); 1 + LOWER_STAGES_MAX],
            tier_matches: [0; 1 + LOWER_STAGES_MAX],
            queues: Default::default(),
            blocks_tickets: Default::default(),
            names: Default::default(),
            unwritten: FlushMark::default(),
            forgiven: FlushMark::default(),
            told: FlushMark::default(),
            names_tickets: Default::default(),
            last_errors: Default::default(),
            pending_bytes: [0; LOWER_STAGES_MAX],
            breakers: std::array::from_fn(|_| Breaker::new(health, now, now_unix_ms)),
            shed: 0,
            write_shed: 0,
            names_only: 0,
            lacking: Default::default(),
            retries: [0; LOWER_STAGES_MAX],
            prefetched: VecDeque::new(),
            prefetched_bytes: 0,
            content_bytes: 0,
            dram_bytes: 0,
            slabs_out: 0,
            scrubbing: 0,
            policy_time: None,
            ledger: None,
            has_dram,
            lower_stages,
            is_closing: false,
            is_erasing: false,
            is_closed: false,
        }
    }

    /// The entry of a key, unless it has expired; an expired one is forgotten on the way.
    pub(crate) fn find_live(&mut self, key: &BlockKey, now_unix_ms: u64) -> Option<KeyIndex> {
        let found = self.catalog.find(key)?;
        if self.catalog.entry(found).has_expired(now_unix_ms) {
            self.forget(found, Loss::Expired);
            return None;
        }
        Some(found)
    }

    /// Tells the policy that a key's bytes are in DRAM and that it counts for them.
    pub(crate) fn make_resident(&mut self, key: KeyIndex, now: Duration) {
        if !self.has_dram || self.catalog.entry(key).slot().is_some() {
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
        let slot = self.eviction.insert(now, &incoming);
        self.catalog.entry_mut(key).set_slot(Some(slot));
        self.catalog.content_mut(content).resident_keys += 1;
    }

    /// A chain lookup found this block, and its caller is about to read it.
    pub(crate) fn announce(&mut self, key: KeyIndex) {
        let entry = self.catalog.entry_mut(key);
        let awaited = std::mem::replace(&mut entry.awaits, Awaits::AnnouncedAccess);
        self.counters.prefetched_used += u64::from(awaited == Awaits::FirstUse);
    }

    /// Tells the policy of an access, unless a chain lookup has told it already.
    pub(crate) fn touch(&mut self, key: KeyIndex, now: Duration) {
        let entry = self.catalog.entry_mut(key);
        let awaited = std::mem::replace(&mut entry.awaits, Awaits::Nothing);
        self.counters.prefetched_used += u64::from(awaited == Awaits::FirstUse);
        match entry.slot() {
            Some(_) if awaited == Awaits::AnnouncedAccess => {}
            Some(slot) => self.eviction.touch(now, slot),
            None => self.make_resident(key, now),
        }
    }

    /// Evicts one block from DRAM to make room. With an incoming block, nothing is evicted that
    /// the policy values more than it.
    pub(crate) fn evict_one(&mut self, now: Duration, incoming: Option<&Incoming>) -> Evicted {
        let catalog = &self.catalog;
        let (mut may_any_go, mut is_one_unwritten) = (false, false);
        let mut usable = |owner: u32| {
            let entry = catalog.entry(KeyIndex(owner));
            is_one_unwritten |= catalog.content(entry.content).dirty > 0;
            // Ordinary blocks are named first. One that is still to be written down will be free to
            // go soon: better wait for it than evict a protected one.
            let is_spared = entry.is_prefix() && is_one_unwritten;
            let may_go = !is_spared && is_evictable(catalog, KeyIndex(owner));
            may_any_go |= may_go;
            may_go
        };
        let victim = match incoming {
            None => self.eviction.victim(now, &mut usable),
            Some(incoming) => match self.eviction.victim_for(now, incoming, &mut usable) {
                Verdict::Evict(slot) => Some(slot),
                Verdict::Decline => None,
            },
        };
        let Some(slot) = victim else {
            return if may_any_go { Evicted::NothingWorthLess } else { Evicted::NothingUsable };
        };
        let key = KeyIndex(self.eviction.blocks().owner(slot));
        let is_protected = self.eviction.blocks().is_protected(slot);
        self.release_slot(key, Removal::Evicted);
        let content = self.catalog.entry(key).content;
        if self.catalog.content(content).resident_keys == 0 {
            self.drop_slab(content);
            let bytes = u64::from(self.catalog.content(content).bytes);
            self.counters.evicted_blocks += 1;
            self.counters.evicted_bytes += bytes;
            self.counters.lost_blocks += u64::from(!self.catalog.content(content).is_anywhere());
            self.forget_if_nowhere(content, self.why_evicted(content, is_protected));
        }
        Evicted::One
    }

    /// Why a content that DRAM lets go would be lost with it.
    fn why_evicted(&self, content: ContentIndex, is_protected: bool) -> Loss {
        let content = self.catalog.content(content);
        match content {
            _ if content.was_reclaimed => Loss::EvictedReclaimed,
            _ if self.lower_stages > 0 => Loss::EvictedUnwritten,
            _ if is_protected => Loss::EvictedProtected,
            _ if content.uses > 0 => Loss::EvictedRead,
            _ => Loss::EvictedUnread,
        }
    }

    /// Takes a content's bytes out of DRAM; views that are held keep theirs.
    pub(crate) fn drop_slab(&mut self, content: ContentIndex) {
        self.clear_records(content);
        let was_in_reach = self.is_in_reach(content);
        let entry = self.catalog.content_mut(content);
        if entry.slab.take().is_some() {
            self.dram_bytes -= u64::from(entry.bytes);
        }
        self.note_reach(content, was_in_reach);
    }

    /// The bytes of a content in DRAM are not those that were put. They go; what a tier below has
    /// is checked when it is read.
    pub(crate) fn drop_damaged(&mut self, index: ContentIndex) {
        self.counters.damaged_blocks += 1;
        for key in self.catalog.keys_of(index) {
            self.release_slot(key, Removal::Deleted);
        }
        // Whoever would write it down finds no slab, and takes it for deleted.
        self.catalog.content_mut(index).dirty = 0;
        self.drop_slab(index);
        self.forget_if_nowhere(index, Loss::Damaged);
    }

    /// Puts a content's bytes into DRAM; `facts` are those of a put that brought them.
    pub(crate) fn put_slab(
        &mut self,
        index: ContentIndex,
        slab: cascade_memory::Slab,
        facts: Option<&BlockFacts>,
    ) {
        self.clear_records(index);
        let was_in_reach = self.is_in_reach(index);
        let content = self.catalog.content_mut(index);
        if content.slab.replace(slab).is_none() {
            self.dram_bytes += u64::from(content.bytes);
        }
        self.note_reach(index, was_in_reach);
        if self.ledger.is_some() {
            let mut next = Some(self.catalog.first_key_of(index));
            while let Some(key) = next {
                let is_its = |facts: &&BlockFacts| facts.key == self.catalog.entry(key).key;
                self.record(key, facts.filter(is_its));
                next = self.catalog.next_key_of(key);
            }
        }
    }

    /// Enters a key into the ledger if its content is in DRAM. `facts` are those of its put, if it
    /// is put just now; what the catalog knows will do otherwise.
    pub(crate) fn record(&mut self, key: KeyIndex, facts: Option<&BlockFacts>) {
        let Some(ledger) = &mut self.ledger else { return };
        let entry = self.catalog.entry(key);
        let content = self.catalog.content(entry.content);
        let Some(slab) = &content.slab else { return };
        let known = || BlockFacts {
            key: entry.key,
            digest: None,
            parent: self.catalog.parent_of(key).map(|parent| self.catalog.entry(parent).key),
            namespace: unknown_namespace(),
            bytes: content.bytes,
            is_prefix: entry.is_prefix(),
            expires_unix_ms: (entry.expires_unix_ms != 0).then_some(entry.expires_unix_ms),
        };
        let digest = self.catalog.digest_of(entry.content).copied();
        let record = BlockFacts { digest, ..facts.copied().unwrap_or_else(known) };
        let addresses = std::array::from_fn(|stage| content.address(stage));
        ledger.record(key, &record, facts.is_some(), slab, addresses);
    }

    /// Before a content's slab goes: from then on its memory may be another's.
    fn clear_records(&mut self, content: ContentIndex) {
        let Some(ledger) = &mut self.ledger else { return };
        let mut next = Some(self.catalog.first_key_of(content));
        while let Some(key) = next {
            ledger.clear(key);
            next = self.catalog.next_key_of(key);
        }
    }

    /// A stage has a content there now.
    pub(crate) fn set_address(&mut self, index: ContentIndex, stage: usize, address: Address) {
        self.catalog.set_address(index, stage, Some(address));
        if let Some(ledger) = &self.ledger {
            let mut next = Some(self.catalog.first_key_of(index));
            while let Some(key) = next {
                ledger.note_stored(key, stage, address);
                next = self.catalog.next_key_of(key);
            }
        }
    }

    /// A stage does not have a content any more.
    pub(crate) fn clear_address(&mut self, index: ContentIndex, stage: usize) {
        let was_in_reach = self.is_in_reach(index);
        self.catalog.set_address(index, stage, None);
        self.note_reach(index, was_in_reach);
    }

    /// Forgets a content that no tier has any more.
    pub(crate) fn forget_if_nowhere(&mut self, content: ContentIndex, why: Loss) {
        if self.catalog.content(content).is_anywhere() {
            return;
        }
        for key in self.catalog.keys_of(content) {
            self.forget(key, why);
        }
    }

    /// Removes every key from every tier.
    pub(crate) fn forget_all(&mut self, why: Loss) {
        // Told as one change, not as one for each key.
        let log = self.catalog.changes_mut().take();
        for key in self.catalog.all_keys() {
            self.forget(key, why);
        }
        *self.catalog.changes_mut() = log;
        self.note_cleared();
    }

    /// Removes a key, and with the last key its content, from every tier.
    pub(crate) fn forget(&mut self, key: KeyIndex, why: Loss) {
        if let Some(ledger) = &mut self.ledger {
            ledger.clear(key);
        }
        self.release_slot(key, why.removal());
        let entry = self.catalog.entry(key);
        let (name, index) = (entry.key, entry.content);
        self.history.note(&name, why);
        let addresses: [_; LOWER_STAGES_MAX] =
            std::array::from_fn(|stage| self.catalog.content(index).address(stage));
        for (stage, address) in addresses.into_iter().enumerate() {
            if let Some(address) = address {
                self.push_name(stage, NameChange::Remove(name, address));
            }
        }
        if let Some(content) = self.catalog.remove(key) {
            self.content_bytes -= u64::from(content.bytes);
            if content.slab.is_some() {
                self.dram_bytes -= u64::from(content.bytes);
            }
            return;
        }
        // Its other keys hold the bytes, but perhaps none of them counts for DRAM.
        let content = self.catalog.content(index);
        if self.has_dram && content.resident_keys == 0 && content.slab.is_some() {
            let heir = self.catalog.first_key_of(index);
            // The policy takes a time that lies back for the latest that it saw.
            self.make_resident(heir, Duration::ZERO);
        }
    }

    fn release_slot(&mut self, key: KeyIndex, why: Removal) {
        let entry = self.catalog.entry_mut(key);
        let content = entry.content;
        let Some(slot) = entry.slot() else { return };
        entry.set_slot(None);
        entry.awaits = Awaits::Nothing;
        self.eviction.remove(slot, why);
        self.catalog.content_mut(content).resident_keys -= 1;
    }

    /// Queues a name for a stage's mover.
    pub(crate) fn push_name(&mut self, stage: usize, change: NameChange) {
        self.bound_names(stage);
        self.names[stage].push(change);
        self.names_tickets[stage].pushed += 1;
    }

    /// Queues a content for a stage's mover, which keeps its slab until then; for a stage that is
    /// shed, only notes that it lacks it.
    pub(crate) fn push_block(&mut self, stage: usize, facts: BlockFacts, content: ContentIndex) {
        self.push_again(stage, facts, content, 0);
    }

    /// As `push_block`, for a block that the stage failed to take so often.
    pub(crate) fn push_again(
        &mut self,
        stage: usize,
        facts: BlockFacts,
        content: ContentIndex,
        tries: u8,
    ) {
        let is_shed = self.is_write_shed(stage);
        let entry = self.catalog.content_mut(content);
        let generation = entry.generation;
        if is_shed {
            self.counters.shed_puts += 1;
            self.unwritten.count(stage, 1);
            return self.note_lacking(stage, Pending { facts, content, generation, tries });
        }
        entry.dirty |= 1 << stage;
        self.pending_bytes[stage] += u64::from(facts.bytes);
        self.queues[stage].push_back(Pending { facts, content, generation, tries });
        self.blocks_tickets[stage].pushed += 1;
    }

    /// Counts what a read requests beyond what lookups requested before it.
    ///
    /// A block that a lookup matched was requested there: this read is its load, whoever makes it
    /// and however often. Other blocks that are here are requests that match. Those that are not
    /// here are requests that miss, unless the read is such a load: then they were evicted since
    /// its lookup, or that lookup has counted them as missing.
    pub(crate) fn count_direct_requests(
        &mut self,
        found: &[Option<KeyIndex>],
        now_unix_ms: u64,
        memory_tier: usize,
    ) {
        let (mut direct, mut absent, mut is_load) = (0, 0, false);
        for found in found {
            let entry = found.map(|key| self.catalog.entry(key));
            let Some(entry) = entry.filter(|entry| !entry.has_expired(now_unix_ms)) else {
                absent += 1;
                continue;
            };
            if entry.was_matched() {
                is_load = true;
                continue;
            }
            let content = self.catalog.content(entry.content);
            let lower = content.fastest_lower_but(self.shed).map(|(stage, _)| 1 + stage);
            match if content.slab.is_some() { Some(memory_tier) } else { lower } {
                Some(tier) => {
                    direct += 1;
                    self.tier_matches[tier] += 1;
                }
                None => absent += 1,
            }
        }
        self.counters.direct_matched += direct;
        self.counters.direct_requested += direct + if is_load { 0 } else { absent };
    }

    /// One block's put is over.
    pub(crate) fn count_put(&mut self, key: &BlockKey, outcome: &PutOutcome) {
        self.counters.count_put(outcome);
        match outcome {
            PutOutcome::Declined(why) => self.history.note(key, (*why).into()),
            PutOutcome::Failed(_) => self.history.note(key, Loss::PutFailed),
            PutOutcome::Stored
            | PutOutcome::Deduplicated
            | PutOutcome::Present
            | PutOutcome::Conflict => {}
        }
    }

    /// A stage failed.
    pub(crate) fn note_error(&mut self, stage: usize, error: StageError) {
        // That a stage is shed follows from an earlier failure, which says more.
        if !matches!(error, StageError::Shed) || self.last_errors[stage].is_none() {
            self.last_errors[stage] = Some(error);
        }
    }

    /// A prefetched block is spared until its first use; within a limit, beyond which the oldest
    /// are spared no longer.
    pub(crate) fn spare_prefetched(&mut self, key: KeyIndex, bytes_max: u64) {
        let entry = self.catalog.entry_mut(key);
        entry.awaits = Awaits::FirstUse;
        let (name, content) = (entry.key, entry.content);
        let bytes = u64::from(self.catalog.content(content).bytes);
        self.prefetched.push_back((name, bytes));
        self.prefetched_bytes += bytes;
        while self.prefetched_bytes > bytes_max
            && let Some((oldest, bytes)) = self.prefetched.pop_front()
        {
            self.prefetched_bytes -= bytes;
            if let Some(key) = self.catalog.find(&oldest) {
                let entry = self.catalog.entry_mut(key);
                if entry.awaits == Awaits::FirstUse {
                    entry.awaits = Awaits::Nothing;
                }
            }
        }
    }

    /// The mean length of the contents; zero while there is none.
    pub(crate) fn typical_block_bytes(&self) -> u32 {
        let contents = self.catalog.content_count() as u64;
        let mean = self.content_bytes.checked_div(contents).unwrap_or(0);
        u32::try_from(mean).unwrap_or(u32::MAX)
    }

    /// Bytes that wait for lower stages, all together.
    pub(crate) fn pending_total(&self) -> u64 {
        self.pending_bytes.iter().sum()
    }
}

/// Whether a block may leave DRAM now: not pinned, not prefetched for somebody who is still to
/// come, not being read, and written where it has to be.
fn is_evictable(catalog: &Catalog, key: KeyIndex) -> bool {
    let entry = catalog.entry(key);
    let content = catalog.content(entry.content);
    let is_read = content.slab.as_ref().is_some_and(|slab| slab.holders() > 1);
    let is_spared = entry.awaits == Awaits::FirstUse;
    entry.pins == 0 && !is_spared && content.dirty == 0 && !is_read
}

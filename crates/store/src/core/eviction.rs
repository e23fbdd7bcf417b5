//! Eviction: which blocks leave a tier first.
//!
//! The mechanism ([`Eviction`]) enforces the rules of chains: a block is evicted only after all
//! blocks that follow it, a request's last partial block is not admitted, and protected prefixes
//! are evicted last, within a quota. A [`Policy`] decides the rest. Every policy runs behind the
//! same mechanism and passes [`conformance`]. `docs/eviction.md` compares them on real traces.

mod arc;
mod blocks;
pub(crate) mod chunks;
pub mod conformance;
mod ghosts;
mod lru;
pub(crate) mod policy_kind;
mod prefix_cost;
mod request;
mod s3_fifo;
mod search;
mod visits;
mod waterfall;

use std::fmt;
use std::time::Duration;

pub use cascade_tier::{Hints, Priority, StopReason};

use crate::PolicyKind;
pub use arc::Arc;
pub use blocks::{BLOCKS_MAX, BlockList, BlockTable, Incoming, ParkReason, Search, Slot};
pub use ghosts::Ghosts;
pub use lru::Lru;
pub use prefix_cost::PrefixCost;
pub(crate) use request::{ChainHint, ChainRequest};
pub use request::{ChainPart, ChainProgress};
pub use s3_fifo::S3Fifo;
use search::NoAncestor;
pub(crate) use search::{AncestorSearch, Verdict, VictimSearch};
pub use visits::Visits;
pub use waterfall::Waterfall;

/// One block of a requested chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestedBlock {
    /// Eight bytes of its key.
    pub fingerprint: u64,
    /// Its slot, if it is resident.
    pub resident: Option<Slot>,
}

/// Why a block was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovalReason {
    /// Evicted to make room: a policy may remember it.
    Evicted,
    /// Deleted by a caller or expired: a policy forgets it.
    Deleted,
}

/// What to do for a block that needs room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvictionChoice {
    /// Evict this block.
    Evict(Slot),
    /// Do not admit the block: every eviction candidate is worth more.
    Decline,
}

/// Decides the order of eviction. The mechanism calls it; each method says when.
///
/// Protected blocks are reported like all others, but a policy must neither link them into a list
/// nor return them as victims: [`BlockTable::is_protected`] identifies them. Neither must it return
/// parked blocks: [`BlockTable::is_parked`] identifies these.
pub trait Policy: fmt::Debug + Send {
    /// The name of the policy on the command line.
    fn name(&self) -> &'static str;

    /// A hold of the store's lock begins. Never called where no calls share the tier.
    fn begin_hold(&mut self) {}

    /// Work that is due before the next request, whatever its chain. Returns whether none is left;
    /// without visits left, the next call goes on. What is left, the request does at once.
    fn prepare(&mut self, _: Duration, _: &mut Visits) -> bool {
        true
    }

    /// A chain was requested. A partial tail that is not admitted is already cut off. Each block
    /// that is visited is counted in `visits`; returns false without visits left. Then the next
    /// call, after other ones, goes on with the same `progress`, which is the default at first.
    fn request(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &mut ChainPart<'_>,
        progress: &mut ChainProgress,
        visits: &mut Visits,
    ) -> bool;

    /// Hints for a chain arrived without a request for it. In parts, as `request`.
    fn hint(
        &mut self,
        _: &mut BlockTable,
        _: Duration,
        _: &mut ChainPart<'_>,
        _: &mut ChainProgress,
        _: &mut Visits,
    ) -> bool {
        true
    }

    /// One block was read outside a chain request.
    fn touch(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot);

    /// A block was inserted.
    fn insert(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot);

    /// A block is about to be removed; it is still in the table.
    fn remove(&mut self, blocks: &mut BlockTable, slot: Slot, why: RemovalReason);

    /// The last resident child of a block was removed: the block is a leaf now.
    fn became_leaf(&mut self, _: &mut BlockTable, _: Slot) {}

    /// A block that this policy has just returned cannot be evicted now. Called before it is marked
    /// as parked.
    fn park(&mut self, blocks: &mut BlockTable, slot: Slot);

    /// A parked block may be evicted again.
    fn unpark(&mut self, blocks: &mut BlockTable, slot: Slot);

    /// The first candidate for eviction other than `spared`: a leaf that is not parked. Called only
    /// while there is one. Each block that is visited is counted in `visits`; without visits left,
    /// the search is unfinished and the next call goes on with it.
    fn victim(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        spared: Option<Slot>,
        visits: &mut Visits,
    ) -> Search;

    /// Whether `victim`, which this policy has just returned, is worth less than `incoming`.
    fn should_evict_for(
        &mut self,
        _: &BlockTable,
        _: Duration,
        _victim: Slot,
        _incoming: &Incoming,
    ) -> bool {
        true
    }

    /// Whether a hit in a lower tier promotes the block.
    fn promotes_hits(&self) -> bool {
        true
    }

    /// Memory of the policy, without the table of blocks.
    fn memory_bytes(&self) -> usize;

    /// Panics if the policy's own counts contradict each other.
    #[cfg(test)]
    fn check(&self, _: &BlockTable) {}
}

/// Settings of one tier's eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvictionLimits {
    /// Size of the tier; the quota is a share of it.
    pub capacity_bytes: u64,
    /// Share of the tier that protected prefixes may hold, in percent.
    pub protected_percent: u8,
    /// Whether a request's last partial block is admitted.
    pub admit_partial: bool,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EvictionStats {
    /// Requests seen.
    pub requests: u64,
    /// Blocks inserted.
    pub inserted: u64,
    /// Blocks evicted to make room.
    pub evicted: u64,
    /// Blocks deleted or expired.
    pub deleted: u64,
    /// Blocks not admitted, because every eviction candidate was worth more.
    pub declined: u64,
    /// Protected blocks now.
    pub protected_blocks: u64,
    /// Their bytes.
    pub protected_bytes: u64,
    /// Blocks that exceeded the quota of protected blocks and are treated as ordinary ones.
    pub protection_refused: u64,
}

/// One tier's eviction: the mechanism around a policy.
#[derive(Debug)]
pub struct Eviction {
    blocks: BlockTable,
    policy: Box<dyn Policy>,
    /// Protected blocks by last use.
    protected: BlockList,
    limits: EvictionLimits,
    stats: EvictionStats,
    now: Duration,
    /// Candidates that searches may still visit in this hold of the store's lock.
    visits: Visits,
    /// Counts changes after which another block may be evictable.
    changes: u64,
    /// The last search for an ancestor that found none.
    no_ancestor: Option<NoAncestor>,
    /// Distinguishes this state from those that it has replaced.
    generation: u64,
    /// Empty between calls; kept to save allocations.
    chain: Vec<RequestedBlock>,
}

/// A policy by its kind.
pub fn policy(kind: PolicyKind) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Lru => Box::new(Lru::default()),
        PolicyKind::S3Fifo => Box::new(S3Fifo::default()),
        PolicyKind::Arc => Box::new(Arc::default()),
        PolicyKind::Waterfall => Box::new(Waterfall::default()),
        PolicyKind::PrefixCost => Box::new(PrefixCost::default()),
    }
}

impl Eviction {
    /// An empty tier.
    pub fn new(policy: Box<dyn Policy>, limits: EvictionLimits) -> Self {
        Self {
            blocks: BlockTable::default(),
            policy,
            protected: BlockList::default(),
            limits,
            stats: EvictionStats::default(),
            now: Duration::ZERO,
            visits: Visits::default(),
            changes: 0,
            no_ancestor: None,
            generation: 0,
            chain: Vec::new(),
        }
    }

    /// The resident blocks.
    pub fn blocks(&self) -> &BlockTable {
        &self.blocks
    }

    /// The policy.
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// Counts since the start.
    pub fn stats(&self) -> EvictionStats {
        self.stats
    }

    /// Memory of the table and the policy.
    pub fn memory_bytes(&self) -> usize {
        self.blocks.memory_bytes() + self.policy.memory_bytes()
    }

    /// Changes the size of the tier. Protected blocks above the new quota stay protected.
    pub fn set_capacity(&mut self, capacity_bytes: u64) {
        self.limits.capacity_bytes = capacity_bytes;
    }

    /// Whether a block may be admitted at all. A request's last partial block is almost never
    /// requested again, and would displace one that is.
    pub fn admits(&self, is_partial: bool) -> bool {
        self.limits.admit_partial || !is_partial
    }

    /// One block is read outside a chain request.
    pub fn touch(&mut self, now: Duration, slot: Slot) {
        self.advance(now);
        self.use_protected(slot);
        self.policy.touch(&mut self.blocks, self.now, slot);
    }

    /// Inserts a block; the caller has made room. Blocks of one request are inserted root first.
    pub fn insert(&mut self, now: Duration, incoming: &Incoming) -> Slot {
        self.advance(now);
        self.free_unfinished();
        let is_protected = incoming.is_protected && self.has_quota_for(incoming.bytes);
        let slot = self.blocks.insert(incoming, is_protected);
        self.stats.inserted += 1;
        if is_protected {
            self.protected.push_newest(&mut self.blocks, slot);
            self.stats.protected_blocks += 1;
            self.stats.protected_bytes += u64::from(incoming.bytes);
        } else if incoming.is_protected {
            self.stats.protection_refused += 1;
        }
        self.policy.insert(&mut self.blocks, self.now, slot);
        slot
    }

    /// Removes a block.
    ///
    /// # Panics
    /// If the slot holds no block.
    pub fn remove(&mut self, slot: Slot, why: RemovalReason) {
        assert!(self.blocks.is_resident(slot), "a block leaves once: slot {}", slot.index());
        self.free_unfinished();
        self.changes += 1;
        if self.blocks.is_protected(slot) {
            if !self.blocks.is_parked(slot) {
                self.protected.remove(&mut self.blocks, slot);
            }
            self.stats.protected_blocks -= 1;
            self.stats.protected_bytes -= u64::from(self.blocks.bytes_of(slot));
        }
        match why {
            RemovalReason::Evicted => self.stats.evicted += 1,
            RemovalReason::Deleted => self.stats.deleted += 1,
        }
        // The policy first: it reads the block's state, and a block leaves its list before the
        // table.
        self.policy.remove(&mut self.blocks, slot, why);
        if let Some(leaf) = self.blocks.remove(slot) {
            self.policy.became_leaf(&mut self.blocks, leaf);
        }
    }

    /// A protected block is used. Parked ones are in no list.
    fn use_protected(&mut self, slot: Slot) {
        if self.blocks.is_protected(slot) && !self.blocks.is_parked(slot) {
            self.protected.move_to_newest(&mut self.blocks, slot);
        }
    }

    fn advance(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// Frees some slots of deleted blocks that an earlier operation left.
    fn free_unfinished(&mut self) {
        if let Some(leaf) = self.blocks.free_unfinished() {
            self.policy.became_leaf(&mut self.blocks, leaf);
        }
    }

    fn has_quota_for(&self, bytes: u32) -> bool {
        // In 128 bits, because a capacity times a percentage may exceed 64.
        let percent = u128::from(self.limits.protected_percent.min(100));
        let quota = u128::from(self.limits.capacity_bytes) * percent / 100;
        u128::from(self.stats.protected_bytes) + u128::from(bytes) <= quota
    }
}

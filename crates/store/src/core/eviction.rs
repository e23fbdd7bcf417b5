//! Eviction: which blocks leave a tier first.
//!
//! The mechanism ([`Eviction`]) enforces the rules of chains: a block is evicted only after all
//! blocks that follow it, a request's last partial block is not admitted, and protected prefixes
//! are evicted last, within a quota. A [`Policy`] decides the rest. Every policy runs behind the
//! same mechanism and passes [`conformance`]. `docs/eviction.md` compares them on real traces.

mod arc;
mod blocks;
pub mod conformance;
mod ghosts;
mod lru;
pub(crate) mod policy_kind;
mod prefix_cost;
mod s3_fifo;
mod waterfall;

use std::fmt;
use std::time::Duration;

pub use cascade_tier::{Hints, Priority, StopReason};

use crate::PolicyKind;
pub use arc::Arc;
use blocks::Adoption;
pub use blocks::{BLOCKS_MAX, BlockList, BlockTable, Incoming, Slot};
pub use ghosts::Ghosts;
pub use lru::Lru;
pub use prefix_cost::PrefixCost;
pub use s3_fifo::S3Fifo;
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

/// Maximum number of leaves from which ancestors are searched when no leaf is usable.
const USED_LEAVES_MAX: usize = 16;

/// Maximum number of ancestors that one search visits: it runs under the store's lock.
const ANCESTORS_MAX: usize = 4096;

/// Whether a block may be evicted: it is a leaf, and neither pinned nor in use.
pub type EvictionFilter<'a> = dyn FnMut(&BlockTable, Slot) -> bool + 'a;

/// Decides the order of eviction. The mechanism calls it; each method says when.
///
/// Protected blocks are reported like all others, but a policy must neither link them into a list
/// nor return them as victims: [`BlockTable::is_protected`] identifies them.
pub trait Policy: fmt::Debug + Send {
    /// The name of the policy on the command line.
    fn name(&self) -> &'static str;

    /// A chain was requested; its first `leading` blocks are resident. A partial tail that is not
    /// admitted is already cut off.
    fn request(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &[RequestedBlock],
        leading: usize,
        hints: &Hints,
    );

    /// Hints for a chain arrived without a request for it.
    fn hint(&mut self, _: &mut BlockTable, _: Duration, _: &[RequestedBlock], _: &Hints) {}

    /// One block was read outside a chain request.
    fn touch(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot);

    /// A block was inserted.
    fn insert(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot);

    /// A block is about to be removed; it is still in the table.
    fn remove(&mut self, blocks: &mut BlockTable, slot: Slot, why: RemovalReason);

    /// The last resident child of a block was removed: the block is a leaf now.
    fn became_leaf(&mut self, _: &mut BlockTable, _: Slot) {}

    /// The first eviction candidate that `may_go` allows. It stays until [`Policy::remove`].
    fn victim(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        may_go: &mut EvictionFilter<'_>,
    ) -> Option<Slot>;

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
    /// Leaves that the last search for a victim could not use, in its order.
    used_leaves: Vec<Slot>,
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
            used_leaves: Vec::new(),
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

    /// Whether a block may be admitted at all. A request's last partial block is almost never
    /// requested again, and would displace one that is.
    pub fn admits(&self, is_partial: bool) -> bool {
        self.limits.admit_partial || !is_partial
    }

    /// A chain is requested, root first. Called once per lookup, before the missing blocks are
    /// inserted. `partial_tail` says that the last block is not full. Returns the number of leading
    /// resident blocks. A time that goes backwards counts as the latest one seen.
    pub fn request(
        &mut self,
        now: Duration,
        chain: &[RequestedBlock],
        partial_tail: bool,
        hints: &Hints,
    ) -> usize {
        self.advance(now);
        self.stats.requests += 1;
        // Recency is updated from the leaf to the root, so that the root is the newest and is
        // evicted last. The partial tail is left out of both, because it is not inserted.
        let is_cut = partial_tail && !self.limits.admit_partial;
        let full = chain.len() - usize::from(is_cut && !chain.is_empty());
        let (chain, leading) = self.leading(chain);
        // A contradiction may have cut the chain before its partial tail.
        let full = full.min(chain.len());
        for requested in chain[..leading].iter().rev() {
            let slot = requested.resident.filter(|slot| self.blocks.is_protected(*slot));
            slot.inspect(|slot| self.protected.move_to_newest(&mut self.blocks, *slot));
        }
        let leading_full = leading.min(full);
        // The policy must not count a tail that was cut off as a hit.
        self.policy.request(&mut self.blocks, self.now, &chain[..full], leading_full, hints);
        leading
    }

    /// Hints for a chain, after its request or before the next one.
    pub fn hint(&mut self, now: Duration, chain: &[RequestedBlock], hints: &Hints) {
        self.advance(now);
        self.policy.hint(&mut self.blocks, self.now, chain, hints);
    }

    /// One block is read outside a chain request.
    pub fn touch(&mut self, now: Duration, slot: Slot) {
        self.advance(now);
        if self.blocks.is_protected(slot) {
            self.protected.move_to_newest(&mut self.blocks, slot);
        }
        self.policy.touch(&mut self.blocks, self.now, slot);
    }

    /// Inserts a block; the caller has made room. Blocks of one request are inserted root first.
    pub fn insert(&mut self, now: Duration, incoming: &Incoming) -> Slot {
        self.advance(now);
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
        if self.blocks.is_protected(slot) {
            self.protected.remove(&mut self.blocks, slot);
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

    /// The first leaf in the order of eviction with an owner that `usable` accepts. The store
    /// accepts blocks that are neither pinned nor waiting for write-back. The victim stays until
    /// it is removed.
    pub fn victim(&mut self, now: Duration, usable: &mut dyn FnMut(u32) -> bool) -> Option<Slot> {
        self.advance(now);
        self.choose(None, usable)
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
        self.advance(now);
        let victim = self.choose(incoming.parent, usable).filter(|victim| {
            let is_protected = incoming.is_protected || self.blocks.is_protected(*victim);
            is_protected || self.policy.should_evict_for(&self.blocks, self.now, *victim, incoming)
        });
        self.stats.declined += u64::from(victim.is_none());
        victim.map_or(EvictionChoice::Decline, EvictionChoice::Evict)
    }

    /// The victim when the last search found no usable leaf: the nearest usable ancestor of an
    /// unusable leaf. Otherwise a lease on the last block of a chain would keep the whole chain in
    /// the tier. Never a protected block, and never an ancestor of the incoming block: no lookup
    /// would reach the incoming block without it.
    pub fn victim_above_used_leaf(
        &self,
        incoming: Option<&Incoming>,
        usable: &mut dyn FnMut(u32) -> bool,
    ) -> Option<Slot> {
        let spared = incoming.and_then(|incoming| incoming.parent);
        // One limit for the whole search: many leaves may share a long chain of ancestors in use.
        let mut steps = 0;
        for leaf in &self.used_leaves {
            let mut at = *leaf;
            while let Some(slot) = self.blocks.next_ancestor(at) {
                steps += 1;
                // All further ancestors are ancestors of this block, too.
                if Some(slot) == spared || self.blocks.is_protected(slot) {
                    break;
                }
                if steps > ANCESTORS_MAX {
                    return None;
                }
                // The slot of a deleted block still links to its parent, so the walk goes on
                // through it.
                if self.blocks.is_resident(slot) && usable(self.blocks.owner(slot)) {
                    return Some(slot);
                }
                at = slot;
            }
        }
        None
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

    fn advance(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// The number of leading resident blocks. Corrects parents on the way, because a parent may
    /// have been deleted and put again. Cuts the chain where it contradicts the known parents, so
    /// no block occurs twice among the leading ones.
    fn leading<'a>(&mut self, chain: &'a [RequestedBlock]) -> (&'a [RequestedBlock], usize) {
        let mut before = None;
        for (at, requested) in chain.iter().enumerate() {
            // A slot that is not resident any more counts as a miss.
            let resident = requested.resident.filter(|slot| self.blocks.is_resident(*slot));
            let Some(slot) = resident else { return (chain, at) };
            assert_eq!(
                self.blocks.fingerprint(slot),
                requested.fingerprint,
                "a slot of another block"
            );
            if let Some(parent) = before {
                match self.blocks.adopt(slot, parent) {
                    Adoption::Settled(None) => {}
                    Adoption::Settled(Some(leaf)) => {
                        self.policy.became_leaf(&mut self.blocks, leaf);
                    }
                    Adoption::Contradiction => return (&chain[..at], at),
                }
            }
            before = Some(slot);
        }
        (chain, chain.len())
    }

    fn has_quota_for(&self, bytes: u32) -> bool {
        // In 128 bits, because a capacity times a percentage may exceed 64.
        let percent = u128::from(self.limits.protected_percent.min(100));
        let quota = u128::from(self.limits.capacity_bytes) * percent / 100;
        u128::from(self.stats.protected_bytes) + u128::from(bytes) <= quota
    }

    fn choose(
        &mut self,
        parent: Option<Slot>,
        usable: &mut dyn FnMut(u32) -> bool,
    ) -> Option<Slot> {
        let used_leaves = &mut self.used_leaves;
        used_leaves.clear();
        let mut may_go = |blocks: &BlockTable, slot: Slot| {
            if !blocks.is_leaf(slot) || Some(slot) == parent {
                return false;
            }
            let is_usable = usable(blocks.owner(slot));
            // `victim_above_used_leaf` starts at these leaves. The parent of the incoming block is
            // not one of them.
            if !is_usable && used_leaves.len() < USED_LEAVES_MAX {
                used_leaves.push(slot);
            }
            is_usable
        };
        // Protected blocks are in no policy's list: they are candidates only when nothing else is.
        let chosen = self.policy.victim(&mut self.blocks, self.now, &mut may_go);
        chosen.or_else(|| self.protected.oldest_allowed(&mut self.blocks, &mut may_go, usize::MAX))
    }
}

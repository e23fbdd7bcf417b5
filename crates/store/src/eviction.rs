//! Eviction: which blocks leave a tier first.
//!
//! The mechanism ([`Eviction`]) knows chains: a block goes only after all that follow it, a
//! request's last partial block is not taken, and protected prefixes go last, within a quota. What
//! is left to decide is a [`Policy`]'s; each one runs behind the same mechanism and passes
//! [`conformance`]. How they compare on real traces is in `docs/eviction.md`.

mod arc;
mod blocks;
pub mod conformance;
mod ghosts;
mod hints;
mod lru;
mod prefix_cost;
mod s3_fifo;
mod waterfall;

use std::fmt;
use std::time::Duration;

pub use arc::Arc;
pub use blocks::{BLOCKS_MAX, Blocks, Incoming, List, Slot};
pub use ghosts::Ghosts;
pub use hints::{Hints, Priority, StopReason};
pub use lru::Lru;
pub use prefix_cost::PrefixCost;
pub use s3_fifo::S3Fifo;
pub use waterfall::Waterfall;

use blocks::Adoption;

use crate::PolicyKind;

/// One block of a chain that somebody asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// Eight bytes of its key.
    pub fingerprint: u64,
    /// Where it is, if it is resident.
    pub resident: Option<Slot>,
}

/// Why a block left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// To make room: a policy may remember it.
    Evicted,
    /// Because somebody said so, or because it expired: it is forgotten.
    Deleted,
}

/// What to do with a block that needs room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// This block goes for it.
    Evict(Slot),
    /// Nothing that may go is worth less than the block that wants to come.
    Decline,
}

/// Whether the mechanism lets a block go: a leaf that nobody holds.
pub type MayGo<'a> = dyn FnMut(&Blocks, Slot) -> bool + 'a;

/// Decides the order in which blocks go. The mechanism calls it; see each method for when.
///
/// Protected blocks come by like all others, but a policy must not link them into a list nor
/// name them as victims: [`Blocks::is_protected`] tells.
pub trait Policy: fmt::Debug + Send {
    /// What it is called on the command line.
    fn name(&self) -> &'static str;

    /// A chain was asked for; its first `leading` blocks are resident. Its partial tail is left
    /// out.
    fn request(
        &mut self,
        blocks: &mut Blocks,
        now: Duration,
        chain: &[Asked],
        leading: usize,
        hints: &Hints,
    );

    /// Something became known about a chain without a request for it.
    fn hint(&mut self, _: &mut Blocks, _: Duration, _: &[Asked], _: &Hints) {}

    /// One block was read without its chain.
    fn touch(&mut self, blocks: &mut Blocks, now: Duration, slot: Slot);

    /// A block came in.
    fn insert(&mut self, blocks: &mut Blocks, now: Duration, slot: Slot);

    /// A block is about to go; it is still in the table.
    fn remove(&mut self, blocks: &mut Blocks, slot: Slot, why: Removal);

    /// The last resident child of a block has gone: it is a leaf now.
    fn bared(&mut self, _: &mut Blocks, _: Slot) {}

    /// The block that should go first among those that may. It stays until [`Policy::remove`].
    fn victim(
        &mut self,
        blocks: &mut Blocks,
        now: Duration,
        may_go: &mut MayGo<'_>,
    ) -> Option<Slot>;

    /// Whether `victim`, which it has just named, should go for `incoming`.
    fn yields(&mut self, _: &Blocks, _: Duration, _victim: Slot, _incoming: &Incoming) -> bool {
        true
    }

    /// Whether a hit in a lower tier brings the block up.
    fn promotes_hits(&self) -> bool {
        true
    }

    /// Memory beyond the table of blocks.
    fn memory_bytes(&self) -> usize;
}

/// What the mechanism is told at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size of the tier; the quota is a share of it.
    pub capacity_bytes: u64,
    /// Share of the tier that protected prefixes may hold, in percent.
    pub protected_percent: u8,
    /// Whether a request's last partial block is taken.
    pub admit_partial: bool,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EvictionStats {
    /// Requests seen.
    pub requests: u64,
    /// Blocks that came in.
    pub inserted: u64,
    /// Blocks that went to make room.
    pub evicted: u64,
    /// Blocks that were deleted.
    pub deleted: u64,
    /// Blocks that wanted to come and were worth less than all that may go.
    pub declined: u64,
    /// Protected blocks now.
    pub protected_blocks: u64,
    /// Their bytes.
    pub protected_bytes: u64,
    /// Blocks that were to be protected, but the quota was full: they are ordinary.
    pub protection_refused: u64,
}

/// One tier's eviction: the mechanism around a policy.
#[derive(Debug)]
pub struct Eviction {
    blocks: Blocks,
    policy: Box<dyn Policy>,
    /// Protected blocks by last use.
    protected: List,
    limits: Limits,
    stats: EvictionStats,
    now: Duration,
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
    pub fn new(policy: Box<dyn Policy>, limits: Limits) -> Self {
        Self {
            blocks: Blocks::default(),
            policy,
            protected: List::default(),
            limits,
            stats: EvictionStats::default(),
            now: Duration::ZERO,
        }
    }

    /// The resident blocks.
    pub fn blocks(&self) -> &Blocks {
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

    /// Whether a block may come in at all: a request's last partial block is almost never asked
    /// for again, and would take the place of one that is.
    pub fn admits(&self, is_partial: bool) -> bool {
        self.limits.admit_partial || !is_partial
    }

    /// A chain is asked for, root first; called once per lookup, before what is missing comes in.
    /// `partial_tail` says that its last block is not full. Returns how many leading blocks are
    /// resident. Times that go back count as the latest one seen.
    pub fn request(
        &mut self,
        now: Duration,
        chain: &[Asked],
        partial_tail: bool,
        hints: &Hints,
    ) -> usize {
        self.advance(now);
        self.stats.requests += 1;
        let (chain, leading) = self.leading(chain);
        let is_cut = partial_tail && !self.limits.admit_partial;
        let full = chain.len() - usize::from(is_cut && !chain.is_empty());
        for asked in chain[..leading].iter().rev() {
            let slot = asked.resident.filter(|slot| self.blocks.is_protected(*slot));
            slot.inspect(|slot| self.protected.renew(&mut self.blocks, *slot));
        }
        let leading_full = leading.min(full);
        self.policy.request(&mut self.blocks, self.now, &chain[..full], leading_full, hints);
        leading
    }

    /// Something becomes known about a chain after its request, or before the next one.
    pub fn hint(&mut self, now: Duration, chain: &[Asked], hints: &Hints) {
        self.advance(now);
        self.policy.hint(&mut self.blocks, self.now, chain, hints);
    }

    /// One block is read without its chain.
    pub fn touch(&mut self, now: Duration, slot: Slot) {
        self.advance(now);
        if self.blocks.is_protected(slot) {
            self.protected.renew(&mut self.blocks, slot);
        }
        self.policy.touch(&mut self.blocks, self.now, slot);
    }

    /// A block comes in; room was made before. Blocks of one request come root first.
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

    /// A block goes.
    ///
    /// # Panics
    /// If the slot holds none.
    pub fn remove(&mut self, slot: Slot, why: Removal) {
        assert!(self.blocks.is_resident(slot), "a block leaves once: slot {}", slot.index());
        if self.blocks.is_protected(slot) {
            self.protected.remove(&mut self.blocks, slot);
            self.stats.protected_blocks -= 1;
            self.stats.protected_bytes -= u64::from(self.blocks.bytes_of(slot));
        }
        match why {
            Removal::Evicted => self.stats.evicted += 1,
            Removal::Deleted => self.stats.deleted += 1,
        }
        self.policy.remove(&mut self.blocks, slot, why);
        if let Some(bare) = self.blocks.remove(slot) {
            self.policy.bared(&mut self.blocks, bare);
        }
    }

    /// The block that should go first, among leaves whose owner is usable: neither pinned nor
    /// still to be written down. It stays until it is removed.
    pub fn victim(&mut self, now: Duration, usable: &mut dyn FnMut(u32) -> bool) -> Option<Slot> {
        self.advance(now);
        self.choose(None, usable)
    }

    /// What should go for a block that wants to come: never its own parent, and nothing at all if
    /// the policy values the block less than everything that may go. Protected blocks are always
    /// worth more.
    pub fn victim_for(
        &mut self,
        now: Duration,
        incoming: &Incoming,
        usable: &mut dyn FnMut(u32) -> bool,
    ) -> Verdict {
        self.advance(now);
        let victim = self.choose(incoming.parent, usable).filter(|victim| {
            let is_protected = incoming.is_protected || self.blocks.is_protected(*victim);
            is_protected || self.policy.yields(&self.blocks, self.now, *victim, incoming)
        });
        self.stats.declined += u64::from(victim.is_none());
        victim.map_or(Verdict::Decline, Verdict::Evict)
    }

    /// Evicts until that many bytes are gone or nothing more may go; appends the owners of what
    /// went, and returns how many bytes it was.
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
            owners.push(self.blocks.owner(slot));
            self.remove(slot, Removal::Evicted);
        }
        bytes
    }

    fn advance(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    /// How many leading blocks are resident. Repairs parents on the way (a parent may have been
    /// deleted and put again), and cuts the chain where it contradicts what is known: so no block
    /// comes twice among the leading ones.
    fn leading<'a>(&mut self, chain: &'a [Asked]) -> (&'a [Asked], usize) {
        let mut before = None;
        for (at, asked) in chain.iter().enumerate() {
            let resident = asked.resident.filter(|slot| self.blocks.is_resident(*slot));
            let Some(slot) = resident else { return (chain, at) };
            assert_eq!(self.blocks.fingerprint(slot), asked.fingerprint, "a slot of another block");
            if let Some(parent) = before {
                match self.blocks.adopt(slot, parent) {
                    Adoption::Settled(None) => {}
                    Adoption::Settled(Some(bare)) => self.policy.bared(&mut self.blocks, bare),
                    Adoption::Contradiction => return (&chain[..at], at),
                }
            }
            before = Some(slot);
        }
        (chain, chain.len())
    }

    fn has_quota_for(&self, bytes: u32) -> bool {
        let percent = u128::from(self.limits.protected_percent.min(100));
        let quota = u128::from(self.limits.capacity_bytes) * percent / 100;
        u128::from(self.stats.protected_bytes) + u128::from(bytes) <= quota
    }

    fn choose(
        &mut self,
        parent: Option<Slot>,
        usable: &mut dyn FnMut(u32) -> bool,
    ) -> Option<Slot> {
        let mut may_go = |blocks: &Blocks, slot: Slot| {
            blocks.is_leaf(slot) && Some(slot) != parent && usable(blocks.owner(slot))
        };
        let chosen = self.policy.victim(&mut self.blocks, self.now, &mut may_go);
        chosen.or_else(|| self.protected.oldest_that(&mut self.blocks, &mut may_go, usize::MAX))
    }
}

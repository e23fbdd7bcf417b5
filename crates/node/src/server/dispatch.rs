//! Executes the calls of clients: translates each call to the tenant's store and back to an answer.

use std::num::NonZeroU32;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace};
use cascade_memory::SlabMut;
use cascade_store::{
    CallOptions, DeclineReason, PrepareOutcome, Put, PutOutcome, PutSlab, Request, Store,
    StoreError, TierName, ViewOutcome, WriterId,
};
use cascade_wire::{
    Access, Answer, BLOCKS_MAX, BlockToPrepare, Call, ChainRequest, KEYS_MAX, KeyQuestion, Lease,
    LeasePurpose, PreparedBlock, SealedBlock,
};

use super::call_errors::{administer_only, draining, not_held, read_only, too_many_blocks};
use super::holds::{HeldMemory, counted_bytes};
use super::manifest_limits;
use super::session::{ClientSession, PendingGrants};
use super::wait_permits::{WaitPermit, WaitPermits, WaitPurpose};
use crate::status::NodeState;
use crate::{Node, admin};

/// Options of a store call that must not wait.
const NO_WAIT: CallOptions = CallOptions { timeout: Some(Duration::ZERO), writer: None };

/// Upper limit of a client's timeout, unless twice the store's own timeout is longer.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// Executes the calls of one session.
pub(super) struct Dispatch<'a> {
    pub(super) node: &'a Node,
    pub(super) session: &'a ClientSession,
    pub(super) wait_permits: &'a WaitPermits,
}

impl Dispatch<'_> {
    fn store(&self) -> &Store {
        self.session.tenant.store()
    }

    /// Executes a call. None for a call without an answer.
    pub(super) fn answer(&self, call: Call) -> Option<Answer> {
        if self.session.access == Access::Administer {
            return self.answer_administrator(call);
        }
        Some(match call {
            // The connection handles the first hello; a second one has no effect.
            Call::Hello(_) | Call::Ping => Answer::Done,
            Call::Prepare { timeout_ms, first_hold, blocks } => {
                self.prepare(self.options(timeout_ms), first_hold, &blocks)
            }
            Call::Reserve { timeout_ms, hold, bytes } => {
                self.reserve(self.options(timeout_ms), hold, bytes)
            }
            Call::Seal { timeout_ms, blocks } => {
                let writer =
                    NonZeroU32::new(self.session.peer.process.unsigned_abs()).map(WriterId);
                self.seal(CallOptions { writer, ..self.options(timeout_ms) }, &blocks)
            }
            Call::Release { holds } => {
                self.session.release(&holds);
                return None;
            }
            Call::Settled { present, conflicts, failures } => {
                self.count_completed_puts(present, conflicts, failures);
                return None;
            }
            Call::Lease { timeout_ms, first_hold, purpose, keys } => {
                self.lease(self.options(timeout_ms), first_hold, purpose, &keys)
            }
            Call::Acquire { timeout_ms, first_hold, request } => {
                self.acquire(self.options(timeout_ms), first_hold, &request)
            }
            Call::Lookup(request) => self.lookup(&request),
            Call::Hint(request) => {
                self.store().hint(&at_node_time(&request));
                Answer::Done
            }
            Call::Ask { question, keys } => self.query_keys(question, &keys),
            Call::Clear => self.clear(),
            Call::Register { timeout_ms, root, manifest } => {
                self.register(self.options(timeout_ms), root, manifest)
            }
            Call::Manifests { timeout_ms } => self.with_permit(
                || self.store().manifests(self.options(timeout_ms)),
                Answer::Manifests,
            ),
            Call::Flush { timeout_ms } => {
                self.with_permit(|| self.session.flush(self.options(timeout_ms)), |()| Answer::Done)
            }
            Call::Admin { timeout_ms, topic, arguments } => {
                self.administer(self.bounded_timeout(timeout_ms), &topic, &arguments)
            }
            Call::Changes { since, most } => {
                let changes = self.store().changes(since, (most as usize).min(KEYS_MAX));
                changes.map_or_else(Answer::Failed, Answer::Changes)
            }
            Call::Forget { epoch } => {
                self.session.release_earlier_holds(epoch);
                return None;
            }
        })
    }

    /// Executes a call of an administrator. It has no pool and no access to blocks, because an
    /// administrator need not be a user of the tenant.
    fn answer_administrator(&self, call: Call) -> Option<Answer> {
        match call {
            Call::Hello(_) | Call::Ping => Some(Answer::Done),
            Call::Admin { timeout_ms, topic, arguments } => {
                Some(self.administer(self.bounded_timeout(timeout_ms), &topic, &arguments))
            }
            // These calls never have an answer. The client would take one for the answer of its
            // next call, which has the same number.
            Call::Release { .. } | Call::Settled { .. } | Call::Forget { .. } => None,
            _ => Some(Answer::Failed(administer_only())),
        }
    }

    fn administer(&self, time: Duration, topic: &str, arguments: &str) -> Answer {
        let _permit = match self.acquire_permit() {
            Ok(permit) => permit,
            Err(error) => return Answer::Failed(error),
        };
        match admin::answer(self.node, &self.session.tenant, topic, arguments, time) {
            Ok(text) => Answer::Text(text),
            Err(reason) => Answer::Refused { reason },
        }
    }

    /// Acquires the permit of a call that may wait.
    fn acquire_permit(&self) -> Result<WaitPermit<'_>, StoreError> {
        self.wait_permits.try_acquire(self.session.account(), WaitPurpose::Other)
    }

    /// The client's timeout, but no longer than the node's limit: a call of a client that has
    /// exited must not keep a thread for long.
    fn bounded_timeout(&self, timeout_ms: u32) -> Duration {
        let limit = (2 * self.store().config().timeout).max(TIMEOUT_MAX);
        Duration::from_millis(u64::from(timeout_ms)).min(limit)
    }

    fn options(&self, timeout_ms: u32) -> CallOptions {
        CallOptions { timeout: Some(self.bounded_timeout(timeout_ms)), ..CallOptions::default() }
    }

    /// Executes a store call that may wait for a tier.
    fn with_permit<T>(
        &self,
        call: impl FnOnce() -> Result<T, StoreError>,
        answer: impl FnOnce(T) -> Answer,
    ) -> Answer {
        match self.acquire_permit().and_then(|_permit| call()) {
            Ok(value) => answer(value),
            Err(error) => Answer::Failed(error),
        }
    }

    fn register(&self, options: CallOptions, root: BlockKey, manifest: Manifest) -> Answer {
        if self.session.access == Access::Read {
            return Answer::Failed(read_only());
        }
        if let Err(error) = manifest_limits::check(&manifest) {
            return Answer::Failed(error);
        }
        let namespace = Namespace::from_root(root, manifest);
        let register = || {
            // With the permit: a call that gets none must not use up a namespace, which is never
            // released. The store keeps a manifest even if a tier cannot, so that the next attempt
            // reserves nothing.
            self.session.reserve_namespace(&namespace)?;
            self.store().register(&namespace, options)
        };
        self.with_permit(register, |()| Answer::Done)
    }

    /// The first phase of a put: for each block a slab to fill, or the outcome.
    ///
    /// All blocks are prepared without waiting first. If one would have to wait, it and all after
    /// it are prepared again with a permit to wait, unless the client got slabs: then it fills and
    /// seals these first and sends the others again, so that it never waits while holding slabs.
    fn prepare(&self, options: CallOptions, first: u64, blocks: &[BlockToPrepare]) -> Answer {
        if let Some(refused) = self.slab_refusal(blocks.len()) {
            return refused;
        }
        let grants = match self.session.begin_grants(first, blocks.len()) {
            Ok(grants) => grants,
            Err(error) => return Answer::Failed(error),
        };
        let puts: Vec<Put<'_>> = blocks.iter().map(put_request).collect();
        let lengths: Vec<usize> = blocks.iter().map(|block| block.bytes as usize).collect();
        // The holds are registered by now: a release that arrives on another connection during this
        // call finds their numbers.
        let mut prepared = self.store().prepare(&puts, &lengths, self.share_left(), NO_WAIT);
        let share_left = self.share_left();
        let mut granted: Vec<(usize, HeldMemory)> = Vec::new();
        let mut answers: Vec<PreparedBlock> = Vec::with_capacity(blocks.len());
        let mut settle = |prepared: Vec<PrepareOutcome>, answers: &mut Vec<PreparedBlock>| {
            for prepared in prepared {
                let index = answers.len();
                answers.push(match prepared {
                    PrepareOutcome::Slab(slab) => {
                        let offset = slab.offset() as u64;
                        granted.push((index, HeldMemory::Slab(slab)));
                        PreparedBlock::Slab { offset }
                    }
                    // The client's share is used up, not the pool.
                    PrepareOutcome::Settled(PutOutcome::Declined(DeclineReason::Full))
                        if lengths[index] > share_left =>
                    {
                        let error = self.session.bytes_limit_error();
                        PreparedBlock::Settled(PutOutcome::Failed(error))
                    }
                    PrepareOutcome::Settled(outcome) => PreparedBlock::Settled(outcome),
                    PrepareOutcome::Compare => PreparedBlock::Compare,
                    PrepareOutcome::Deferred => PreparedBlock::Later,
                });
            }
        };
        // The answer is in the order of the request, so everything from the first late block on is
        // prepared again, also blocks behind it that got slabs.
        let late = prepared.iter().position(timed_out);
        let rest = late.map(|at| prepared.split_off(at));
        settle(prepared, &mut answers);
        if let Some(rest) = rest {
            let at = answers.len();
            // Two clients that hold slabs while they wait for room could wait for each other.
            let has_slabs =
                answers.iter().any(|answer| matches!(answer, PreparedBlock::Slab { .. }));
            // Slabs behind the first block that has to wait return to the pool before the wait.
            drop(rest);
            let rest = if has_slabs {
                (at..blocks.len()).map(|_| PrepareOutcome::Deferred).collect()
            } else {
                self.prepare_with_permit(&puts[at..], &lengths[at..], options)
            };
            settle(rest, &mut answers);
        }
        // Granted last, when every outcome is known: the answer then tells the client exactly what
        // it holds.
        for (refused, error) in grants.grant(granted) {
            answers[refused] = PreparedBlock::Settled(PutOutcome::Failed(error));
        }
        // Sessions without a connection may hold memory. If they can be closed, the next call finds
        // more room.
        if answers.iter().any(found_no_room) {
            self.node.sessions().close_unmapped();
        }
        Answer::Prepared(answers)
    }

    fn prepare_with_permit(
        &self,
        puts: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<PrepareOutcome> {
        match self.acquire_permit() {
            Ok(_permit) => self.store().prepare(puts, lengths, self.share_left(), options),
            Err(error) => {
                let failed = || PrepareOutcome::Settled(PutOutcome::Failed(error.clone()));
                std::iter::repeat_with(failed).take(puts.len()).collect()
            }
        }
    }

    /// The bytes of its share that the client may still hold.
    fn share_left(&self) -> usize {
        usize::try_from(self.session.available_bytes()).unwrap_or(usize::MAX)
    }

    fn reserve(&self, options: CallOptions, hold: u64, bytes: u64) -> Answer {
        if let Some(refused) = self.slab_refusal(1) {
            return refused;
        }
        let grants = match self.session.begin_grants(hold, 1) {
            Ok(grants) => grants,
            Err(error) => return Answer::Failed(error),
        };
        // A length that does not fit into `usize` is larger than every pool.
        let needed_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // A length beyond the whole pool gets the store's error, as in an embedded store.
        // The share is checked before the pool: a client beyond its share must not evict blocks.
        let is_possible = needed_bytes as u64 <= self.store().memory_bytes();
        if is_possible && counted_bytes(needed_bytes) > self.session.available_bytes() {
            return Answer::Failed(self.session.bytes_limit_error());
        }
        // Without waiting first: most calls need no permit.
        let reserved = match self.store().reserve(needed_bytes, NO_WAIT) {
            Err(StoreError::Timeout { .. } | StoreError::Busy { .. }) => self
                .acquire_permit()
                .and_then(|_permit| self.store().reserve(needed_bytes, options)),
            reserved => reserved,
        };
        match reserved {
            Ok(slab) => {
                let offset = slab.offset() as u64;
                match grants.grant(vec![(0, HeldMemory::Slab(slab))]).pop() {
                    None => Answer::Slab { offset },
                    Some((_, error)) => Answer::Failed(error),
                }
            }
            Err(error) => Answer::Failed(error),
        }
    }

    /// The second phase of a put: publishes the slabs that the client has filled.
    ///
    /// The blocks are written already, so a seal without a permit is not refused: the store stores
    /// the blocks that need no waiting.
    fn seal(&self, options: CallOptions, blocks: &[SealedBlock]) -> Answer {
        if let Some(refused) = self.write_refusal(blocks.len()) {
            return refused;
        }
        let mut outcomes: Vec<Option<PutOutcome>> = Vec::with_capacity(blocks.len());
        let mut puts = Vec::with_capacity(blocks.len());
        // The slabs leave the holds of the session here. A release of their numbers during the seal
        // has no effect.
        for (block, slab) in blocks.iter().zip(self.session.take_slabs(blocks)) {
            match slab.filter(|slab| slab.len() >= block.bytes as usize) {
                Some(slab) => {
                    puts.push(sealed_put(block, slab));
                    outcomes.push(None);
                }
                None => outcomes.push(Some(PutOutcome::Failed(not_held()))),
            }
        }
        // A permit covers everything that can take long: hashing, comparing, waiting for tiers.
        let mut permit = None;
        let may_wait = || {
            let account = self.session.account();
            permit = self.wait_permits.try_acquire(account, WaitPurpose::Seal).ok();
            permit.is_some()
        };
        let stored = self.store().put_slabs_with(puts, options, may_wait);
        drop(permit);
        // The store has one outcome for each put; the blocks without a slab have theirs already.
        let mut stored = stored.into_iter();
        let outcome = |known: Option<PutOutcome>| {
            known.or_else(|| stored.next()).unwrap_or_else(|| PutOutcome::Failed(not_held()))
        };
        Answer::Puts(outcomes.into_iter().map(outcome).collect())
    }

    /// Counts the outcomes that a client determined itself.
    fn count_completed_puts(&self, present: u32, conflicts: u32, failures: u32) {
        // The client may send any numbers. They are bounded and affect only its own tenant.
        // One message covers at most `BLOCKS_MAX` blocks.
        let bounded = |count: u32| u64::from(count).min(BLOCKS_MAX as u64);
        self.store().count_completed_puts(bounded(present), bounded(conflicts), bounded(failures));
    }

    fn lease(
        &self,
        options: CallOptions,
        first: u64,
        purpose: LeasePurpose,
        keys: &[BlockKey],
    ) -> Answer {
        if keys.len() > BLOCKS_MAX {
            return Answer::Failed(too_many_blocks(keys.len()));
        }
        let grants = match self.session.begin_grants(first, keys.len()) {
            Ok(grants) => grants,
            Err(error) => return Answer::Failed(error),
        };
        let views = self.read(options, purpose, keys);
        self.lease_views(&grants, views)
    }

    /// Leases the blocks of these views.
    fn lease_views(&self, grants: &PendingGrants<'_>, views: Vec<ViewOutcome>) -> Answer {
        // An early check only: other sessions of the process use up the same share. `grant`
        // decides.
        let mut share_left = self.session.available_bytes();
        let mut granted = Vec::with_capacity(views.len());
        let mut leases = Vec::with_capacity(views.len());
        for (index, view) in views.into_iter().enumerate() {
            leases.push(match view {
                ViewOutcome::Hit { slab, .. } if counted_bytes(slab.len()) > share_left => {
                    Lease::Failed(self.session.bytes_limit_error())
                }
                ViewOutcome::Hit { slab, tier } => {
                    share_left -= counted_bytes(slab.len());
                    let bytes = u32::try_from(slab.len()).expect("blocks are shorter than 4 GiB");
                    let offset = slab.offset() as u64;
                    granted.push((index, HeldMemory::Lease(slab)));
                    Lease::Hit { offset, bytes, tier: self.tier_index(tier) }
                }
                ViewOutcome::Miss => Lease::Miss,
                ViewOutcome::Failed(error) => Lease::Failed(error),
            });
        }
        for (refused, error) in grants.grant(granted) {
            leases[refused] = Lease::Failed(error);
        }
        Answer::Leases(leases)
    }

    /// Reads blocks. Those in memory are read without a permit to wait.
    fn read(
        &self,
        options: CallOptions,
        purpose: LeasePurpose,
        keys: &[BlockKey],
    ) -> Vec<ViewOutcome> {
        // A comparison is not a use of the block, so it does not count as an access: hence `peek`.
        let mut views = match purpose {
            LeasePurpose::Use => self.store().view_resident(keys, options),
            LeasePurpose::Compare => self.store().own().peek(keys, options),
        };
        if views.len() < keys.len() {
            // The blocks that were read keep their leases meanwhile.
            views.extend(self.read_with_permit(options, purpose, &keys[views.len()..]));
        }
        views
    }

    /// Reads blocks from all tiers, with a permit to wait.
    fn read_with_permit(
        &self,
        options: CallOptions,
        purpose: LeasePurpose,
        keys: &[BlockKey],
    ) -> Vec<ViewOutcome> {
        match self.acquire_permit() {
            Ok(_permit) => match purpose {
                LeasePurpose::Use => self.store().view(keys, options),
                LeasePurpose::Compare => self.store().peek(keys, options),
            },
            Err(error) => keys.iter().map(|_| ViewOutcome::Failed(error.clone())).collect(),
        }
    }

    fn acquire(&self, options: CallOptions, first: u64, request: &ChainRequest) -> Answer {
        if request.keys.len() > BLOCKS_MAX {
            return Answer::Failed(too_many_blocks(request.keys.len()));
        }
        let grants = match self.session.begin_grants(first, request.keys.len()) {
            Ok(grants) => grants,
            Err(error) => return Answer::Failed(error),
        };
        let permit = self.permit_to_ask();
        let (request, asks) = (at_node_time(request), permit.is_some());
        let read_below = |keys: &[BlockKey]| match &permit {
            Some(_) => self.store().view(keys, options),
            None => self.read_with_permit(options, LeasePurpose::Use, keys),
        };
        let views = self.store().acquire_with(&request, options, asks, read_below);
        drop(permit);
        self.lease_views(&grants, views)
    }

    fn lookup(&self, request: &ChainRequest) -> Answer {
        let request = at_node_time(request);
        let matched = match self.permit_to_ask() {
            Some(_permit) => self.store().lookup_prefix(&request),
            None => self.store().own().lookup_prefix(&request),
        };
        Answer::Matched(matched.tiers.iter().map(|tier| self.tier_index(tier)).collect())
    }

    /// The permission to wait for other nodes. Without one, or without other nodes, a lookup finds
    /// what this node has: threads that wait for others would be missing for local blocks.
    fn permit_to_ask(&self) -> Option<WaitPermit<'_>> {
        let has_others = !self.store().config().sources.is_empty();
        has_others.then(|| self.acquire_permit().ok()).flatten()
    }

    fn clear(&self) -> Answer {
        if self.session.access == Access::Read {
            return Answer::Failed(read_only());
        }
        self.node.sessions().drop_pins(&self.session.tenant, None);
        self.store().clear();
        Answer::Done
    }

    fn query_keys(&self, question: KeyQuestion, keys: &[BlockKey]) -> Answer {
        let store = self.store();
        let changes = !matches!(question, KeyQuestion::Contains | KeyQuestion::Locate);
        if changes && self.session.access == Access::Read && question != KeyQuestion::Prefetch {
            return Answer::Failed(read_only());
        }
        match question {
            KeyQuestion::Contains => Answer::Flags(store.contains(keys)),
            KeyQuestion::Pin => Answer::Flags(self.session.pin(keys)),
            KeyQuestion::Unpin => Answer::Flags(self.session.unpin(keys)),
            KeyQuestion::Delete => {
                self.node.sessions().drop_pins(&self.session.tenant, Some(keys));
                Answer::Flags(store.delete(keys))
            }
            KeyQuestion::Prefetch => Answer::Count(store.prefetch(keys) as u64),
            KeyQuestion::Locate => {
                let bits = |tiers: Vec<TierName>| {
                    // One byte of the answer has one bit for each tier.
                    tiers.into_iter().fold(0, |bits, tier| bits | 1 << self.tier_index(tier))
                };
                Answer::Places(store.locate(keys).into_iter().map(bits).collect())
            }
        }
    }

    /// The index of a tier in the list of the welcome message.
    fn tier_index(&self, tier: TierName) -> u8 {
        let names = self.store().tier_names();
        let place = names.iter().position(|name| *name == tier).unwrap_or(0);
        u8::try_from(place).expect("a pipeline has a handful of tiers")
    }

    /// The refusal of a call for new slabs, if any. While the node drains it grants no new slabs;
    /// granted ones can still be sealed.
    fn slab_refusal(&self, blocks: usize) -> Option<Answer> {
        if self.node.state() == NodeState::Draining {
            return Some(Answer::Failed(draining()));
        }
        self.write_refusal(blocks)
    }

    /// The refusal of a call that writes, if any.
    fn write_refusal(&self, blocks: usize) -> Option<Answer> {
        if self.session.access == Access::Read {
            return Some(Answer::Failed(read_only()));
        }
        (blocks > BLOCKS_MAX).then(|| Answer::Failed(too_many_blocks(blocks)))
    }
}

fn put_request(block: &BlockToPrepare) -> Put<'static> {
    Put {
        parent: block.parent,
        is_prefix: block.is_prefix,
        is_partial: block.is_partial,
        ..Put::new(block.key, &[])
    }
}

fn sealed_put(block: &SealedBlock, mut slab: SlabMut) -> PutSlab {
    slab.truncate(block.bytes as usize);
    PutSlab {
        parent: block.parent,
        namespace: block.namespace,
        is_prefix: block.is_prefix,
        is_partial: block.is_partial,
        ttl_ms: block.ttl_ms,
        ..PutSlab::new(block.key, slab)
    }
}

/// The request with the node's own time. The store's clock never goes back and serves all clients:
/// a wrong time of one client would affect every other.
fn at_node_time(request: &ChainRequest) -> Request<'_> {
    Request { at: None, ..request.as_request() }
}

/// Whether a block found no room in the pool or in the client's share.
fn found_no_room(prepared: &PreparedBlock) -> bool {
    matches!(
        prepared,
        PreparedBlock::Settled(
            PutOutcome::Declined(DeclineReason::Full)
                | PutOutcome::Failed(StoreError::NoRoom { .. } | StoreError::Limit { .. })
        )
    )
}

/// Whether a block could not be prepared without waiting.
fn timed_out(prepared: &PrepareOutcome) -> bool {
    let PrepareOutcome::Settled(PutOutcome::Failed(error)) = prepared else { return false };
    matches!(error, StoreError::Timeout { .. } | StoreError::Busy { .. })
}

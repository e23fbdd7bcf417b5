//! What the node does for each call of a client.

use std::num::NonZeroU32;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace};
use cascade_memory::SlabMut;
use cascade_store::{
    CallOptions, DeclineReason, Prepared, Put, PutOutcome, PutSlab, Request, Store, StoreError,
    TierName, ViewOutcome, Writer,
};
use cascade_wire::{
    Access, Answer, AskedBlock, BLOCKS_MAX, Call, ChainRequest, KEYS_MAX, KeyQuestion, Lease,
    LeasePurpose, PreparedBlock, SealedBlock,
};

use super::holds::{Held, Note, counted};
use super::session::Session;
use super::waiters::{Purpose, Waiter, Waiters};
use crate::Node;
use crate::status::NodeState;

/// Longest name or value of a manifest's field, in bytes.
const FIELD_BYTES_MAX: usize = 4 << 10;
/// Most bytes of a manifest's names and values together.
const MANIFEST_BYTES_MAX: usize = 64 << 10;

/// A call that asks without time to wait.
const AT_ONCE: CallOptions = CallOptions { timeout: Some(Duration::ZERO), writer: None };

/// The least that the node lets calls wait at most, however short its store's own timeout is.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// One call being answered.
pub(super) struct Dispatch<'a> {
    pub(super) node: &'a Node,
    pub(super) session: &'a Session,
    pub(super) waiters: &'a Waiters,
}

impl Dispatch<'_> {
    fn store(&self) -> &Store {
        self.session.tenant.store()
    }

    /// The answer to a call; nothing for calls that have none.
    pub(super) fn answer(&self, call: Call) -> Option<Answer> {
        if self.session.access == Access::Administer {
            return self.answer_administrator(call);
        }
        Some(match call {
            // A connection says hello once; again is harmless.
            Call::Hello(_) | Call::Ping => Answer::Done,
            Call::Prepare { timeout_ms, first_hold, blocks } => {
                self.prepare(self.timeout(timeout_ms), first_hold, &blocks)
            }
            Call::Reserve { timeout_ms, hold, bytes } => {
                self.reserve(self.timeout(timeout_ms), hold, bytes)
            }
            Call::Seal { timeout_ms, blocks } => {
                let writer = NonZeroU32::new(self.session.peer.process.unsigned_abs()).map(Writer);
                self.seal(CallOptions { writer, ..self.timeout(timeout_ms) }, &blocks)
            }
            Call::Release { holds } => {
                self.session.release(&holds);
                return None;
            }
            Call::Settled { present, conflicts, failures } => {
                self.settled(present, conflicts, failures);
                return None;
            }
            Call::Lease { timeout_ms, first_hold, purpose, keys } => {
                self.lease(self.timeout(timeout_ms), first_hold, purpose, &keys)
            }
            Call::Acquire { timeout_ms, first_hold, request } => {
                self.acquire(self.timeout(timeout_ms), first_hold, &request)
            }
            Call::Lookup(request) => {
                let found = self.store().lookup_prefix(&arriving(&request));
                Answer::Matched(found.tiers.iter().map(|tier| self.tier(tier)).collect())
            }
            Call::Hint(request) => {
                self.store().hint(&arriving(&request));
                Answer::Done
            }
            Call::Ask { question, keys } => self.ask(question, &keys),
            Call::Clear if self.session.access == Access::Read => Answer::Failed(read_only()),
            Call::Clear => {
                self.node.sessions().forget_pins(&self.session.tenant, None);
                self.store().clear();
                Answer::Done
            }
            Call::Register { timeout_ms, root, manifest } => {
                self.register(self.timeout(timeout_ms), root, manifest)
            }
            Call::Manifests { timeout_ms } => {
                self.waiting(|| self.store().manifests(self.timeout(timeout_ms)), Answer::Manifests)
            }
            Call::Flush { timeout_ms } => {
                self.waiting(|| self.session.flush(self.timeout(timeout_ms)), |()| Answer::Done)
            }
            Call::Admin { timeout_ms, topic, arguments } => {
                self.administer(self.time(timeout_ms), &topic, &arguments)
            }
            Call::Changes { since, most } => {
                let told = self.store().changes(since, (most as usize).min(KEYS_MAX));
                told.map_or_else(Answer::Failed, Answer::Changes)
            }
            Call::Forget { epoch } => {
                self.session.forget_earlier(epoch);
                return None;
            }
        })
    }

    /// An administrator has no pool and no access to single blocks: one that is not a user of the
    /// tenant must not take its memory or read its keys.
    fn answer_administrator(&self, call: Call) -> Option<Answer> {
        match call {
            Call::Hello(_) | Call::Ping => Some(Answer::Done),
            Call::Admin { timeout_ms, topic, arguments } => {
                Some(self.administer(self.time(timeout_ms), &topic, &arguments))
            }
            Call::Release { .. } | Call::Settled { .. } | Call::Forget { .. } => None,
            _ => Some(Answer::Failed(administers_only())),
        }
    }

    fn administer(&self, time: Duration, topic: &str, arguments: &str) -> Answer {
        let _waiter = match self.wait() {
            Ok(waiter) => waiter,
            Err(error) => return Answer::Failed(error),
        };
        match self.node.administer(&self.session.tenant, topic, arguments, time) {
            Ok(text) => Answer::Text(text),
            Err(reason) => Answer::Refused { reason },
        }
    }

    /// The right to wait, if not too many calls do already.
    fn wait(&self) -> Result<Waiter<'_>, StoreError> {
        self.waiters.begin(self.session.account(), Purpose::Other)
    }

    /// What the caller has left, but no longer than the node lets anybody wait: a client that died
    /// meanwhile does not keep a thread for ever.
    fn time(&self, timeout_ms: u32) -> Duration {
        let most = (2 * self.store().config().timeout).max(TIMEOUT_MAX);
        Duration::from_millis(u64::from(timeout_ms)).min(most)
    }

    fn timeout(&self, timeout_ms: u32) -> CallOptions {
        CallOptions { timeout: Some(self.time(timeout_ms)), ..CallOptions::default() }
    }

    /// A call that may wait for a tier.
    fn waiting<T>(
        &self,
        call: impl FnOnce() -> Result<T, StoreError>,
        answer: impl FnOnce(T) -> Answer,
    ) -> Answer {
        match self.wait().and_then(|_waiter| call()) {
            Ok(value) => answer(value),
            Err(error) => Answer::Failed(error),
        }
    }

    fn register(&self, options: CallOptions, root: BlockKey, manifest: Manifest) -> Answer {
        if self.session.access == Access::Read {
            return Answer::Failed(read_only());
        }
        if is_too_long(&manifest) {
            return Answer::Failed(long_manifest());
        }
        let namespace = Namespace::from_root(root, manifest);
        if let Err(error) = self.session.may_register(&namespace) {
            return Answer::Failed(error);
        }
        self.waiting(|| self.store().register(&namespace, options), |()| Answer::Done)
    }

    fn prepare(&self, options: CallOptions, first: u64, blocks: &[AskedBlock]) -> Answer {
        if let Some(refused) = self.refuses_slabs(blocks.len()) {
            return refused;
        }
        let granting = match self.session.expect(first, blocks.len()) {
            Ok(granting) => granting,
            Err(error) => return Answer::Failed(error),
        };
        let puts: Vec<Put<'_>> = blocks.iter().map(put_of).collect();
        let lengths: Vec<usize> = blocks.iter().map(|block| block.bytes as usize).collect();
        let left = || usize::try_from(self.session.bytes_left()).unwrap_or(usize::MAX);
        let mut prepared = self.store().prepare(&puts, &lengths, left(), AT_ONCE);
        let bytes_left = left();
        let mut granted: Vec<(usize, Held)> = Vec::new();
        let mut answers: Vec<PreparedBlock> = Vec::with_capacity(blocks.len());
        let mut settle = |prepared: Vec<Prepared>, answers: &mut Vec<PreparedBlock>| {
            for prepared in prepared {
                let index = answers.len();
                answers.push(match prepared {
                    Prepared::Slab(slab) => {
                        let offset = slab.offset() as u64;
                        granted.push((index, Held::Slab(slab)));
                        PreparedBlock::Slab { offset }
                    }
                    // It is the client that has no room, not the pool.
                    Prepared::Settled(PutOutcome::Declined(DeclineReason::Full))
                        if lengths[index] > bytes_left =>
                    {
                        let error = self.session.bytes_limit();
                        PreparedBlock::Settled(PutOutcome::Failed(error))
                    }
                    Prepared::Settled(outcome) => PreparedBlock::Settled(outcome),
                    Prepared::Compare => PreparedBlock::Compare,
                    Prepared::Later => PreparedBlock::Later,
                });
            }
        };
        // What would have to wait, and all after it, is asked for again with time to wait, unless
        // the client has slabs now: it fills these first.
        let late = prepared.iter().position(is_late);
        let rest = late.map(|at| prepared.split_off(at));
        settle(prepared, &mut answers);
        if let Some(rest) = rest {
            let at = answers.len();
            let has_slabs =
                answers.iter().any(|answer| matches!(answer, PreparedBlock::Slab { .. }));
            // Slabs after the one that was late go back.
            drop(rest);
            let rest = if has_slabs {
                (at..blocks.len()).map(|_| Prepared::Later).collect()
            } else {
                match self.wait() {
                    Ok(_waiter) => {
                        self.store().prepare(&puts[at..], &lengths[at..], left(), options)
                    }
                    Err(error) => failed(&error, blocks.len() - at),
                }
            };
            settle(rest, &mut answers);
        }
        for (refused, error) in granting.grant(granted) {
            answers[refused] = PreparedBlock::Settled(PutOutcome::Failed(error));
        }
        if answers.iter().any(has_no_room) {
            self.node.sessions().end_unmapped();
        }
        Answer::Prepared(answers)
    }

    fn reserve(&self, options: CallOptions, hold: u64, bytes: u64) -> Answer {
        if let Some(refused) = self.refuses_slabs(1) {
            return refused;
        }
        let granting = match self.session.expect(hold, 1) {
            Ok(granting) => granting,
            Err(error) => return Answer::Failed(error),
        };
        let needed_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // What no pool of this size ever has room for is refused by the store, as an embedded one
        // refuses it.
        let is_possible = needed_bytes <= self.store().region().bytes();
        if is_possible && counted(needed_bytes) > self.session.bytes_left() {
            return Answer::Failed(self.session.bytes_limit());
        }
        let reserved = match self.store().reserve(needed_bytes, AT_ONCE) {
            Err(StoreError::Timeout { .. } | StoreError::Busy { .. }) => {
                self.wait().and_then(|_waiter| self.store().reserve(needed_bytes, options))
            }
            reserved => reserved,
        };
        match reserved {
            Ok(slab) => {
                let offset = slab.offset() as u64;
                match granting.grant(vec![(0, Held::Slab(slab))]).pop() {
                    None => Answer::Slab { offset },
                    Some((_, error)) => Answer::Failed(error),
                }
            }
            Err(error) => Answer::Failed(error),
        }
    }

    fn seal(&self, options: CallOptions, blocks: &[SealedBlock]) -> Answer {
        if let Some(refused) = self.refuses_to_write(blocks.len()) {
            return refused;
        }
        let mut outcomes: Vec<Option<PutOutcome>> = Vec::with_capacity(blocks.len());
        let mut puts = Vec::with_capacity(blocks.len());
        let mut notes = Vec::with_capacity(blocks.len());
        for (block, slab) in blocks.iter().zip(self.session.take_slabs(blocks)) {
            match slab.filter(|(slab, _)| slab.len() >= block.bytes as usize) {
                Some((slab, note)) => {
                    notes.extend(note);
                    puts.push(sealed(block, slab));
                    outcomes.push(None);
                }
                None => outcomes.push(Some(PutOutcome::Failed(not_held()))),
            }
        }
        let keys: Vec<BlockKey> = puts.iter().map(|put| put.key).collect();
        // Hashing, comparing and waiting for tiers are for threads that may.
        let writer = options.writer;
        let settled = if self.store().puts_at_once(&keys) {
            self.store().put_slabs(puts, options)
        } else {
            match self.waiters.begin(self.session.account(), Purpose::Seal) {
                Ok(_waiter) => self.store().put_slabs(puts, options),
                // What is written is taken if that needs no waiting after all: hashing needs none,
                // nor does a tier that keeps up.
                Err(_) => self.store().put_slabs(puts, CallOptions { writer, ..AT_ONCE }),
            }
        };
        Note::take_back(notes);
        let mut settled = settled.into_iter();
        let outcome = |known: Option<PutOutcome>| {
            known.or_else(|| settled.next()).unwrap_or(PutOutcome::Failed(not_held()))
        };
        Answer::Puts(outcomes.into_iter().map(outcome).collect())
    }

    fn settled(&self, present: u32, conflicts: u32, failures: u32) {
        // The counts come from the client and count only for its own tenant.
        let bounded = |count: u32| u64::from(count).min(BLOCKS_MAX as u64);
        self.store().count_settled(bounded(present), bounded(conflicts), bounded(failures));
    }

    fn lease(
        &self,
        options: CallOptions,
        first: u64,
        purpose: LeasePurpose,
        keys: &[BlockKey],
    ) -> Answer {
        if keys.len() > BLOCKS_MAX {
            return Answer::Failed(too_many(keys.len()));
        }
        let granting = match self.session.expect(first, keys.len()) {
            Ok(granting) => granting,
            Err(error) => return Answer::Failed(error),
        };
        let views = self.read(options, purpose, keys);
        let mut left = self.session.bytes_left();
        let mut granted = Vec::with_capacity(keys.len());
        let mut leases = Vec::with_capacity(keys.len());
        for (index, view) in views.into_iter().enumerate() {
            leases.push(match view {
                ViewOutcome::Hit { slab, .. } if counted(slab.len()) > left => {
                    Lease::Failed(self.session.bytes_limit())
                }
                ViewOutcome::Hit { slab, tier } => {
                    left -= counted(slab.len());
                    let bytes = u32::try_from(slab.len()).expect("blocks are shorter than 4 GiB");
                    let offset = slab.offset() as u64;
                    granted.push((index, Held::Lease(slab)));
                    Lease::Hit { offset, bytes, tier: self.tier(tier) }
                }
                ViewOutcome::Miss => Lease::Miss,
                ViewOutcome::Failed(error) => Lease::Failed(error),
            });
        }
        for (refused, error) in granting.grant(granted) {
            leases[refused] = Lease::Failed(error);
        }
        Answer::Leases(leases)
    }

    /// Reads without the right to wait what is in memory. What left it meanwhile, and all else, is
    /// read with that right.
    fn read(
        &self,
        options: CallOptions,
        purpose: LeasePurpose,
        keys: &[BlockKey],
    ) -> Vec<ViewOutcome> {
        let read = |keys: &[BlockKey], options| match purpose {
            LeasePurpose::Use => self.store().view(keys, options),
            LeasePurpose::Compare => self.store().inspect(keys, options),
        };
        let read_in_time = |keys: &[BlockKey]| match self.wait() {
            Ok(_waiter) => read(keys, options),
            Err(error) => keys.iter().map(|_| ViewOutcome::Failed(error.clone())).collect(),
        };
        if !self.store().reads_at_once(keys) {
            return read_in_time(keys);
        }
        let mut views = read(keys, AT_ONCE);
        let is_late =
            |view: &ViewOutcome| matches!(view, ViewOutcome::Failed(StoreError::Timeout { .. }));
        let late: Vec<usize> = (0..views.len()).filter(|at| is_late(&views[*at])).collect();
        if !late.is_empty() {
            let again: Vec<BlockKey> = late.iter().map(|at| keys[*at]).collect();
            for (at, view) in late.into_iter().zip(read_in_time(&again)) {
                views[at] = view;
            }
        }
        views
    }

    fn acquire(&self, options: CallOptions, first: u64, request: &ChainRequest) -> Answer {
        if request.keys.len() > BLOCKS_MAX {
            return Answer::Failed(too_many(request.keys.len()));
        }
        let found = self.store().lookup_prefix(&arriving(request)).tiers.len();
        self.lease(options, first, LeasePurpose::Use, &request.keys[..found])
    }

    fn ask(&self, question: KeyQuestion, keys: &[BlockKey]) -> Answer {
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
                self.node.sessions().forget_pins(&self.session.tenant, Some(keys));
                Answer::Flags(store.delete(keys))
            }
            KeyQuestion::Prefetch => Answer::Count(store.prefetch(keys) as u64),
            KeyQuestion::Locate => {
                let bits = |tiers: Vec<TierName>| {
                    tiers.into_iter().fold(0, |bits, tier| bits | 1 << self.tier(tier))
                };
                Answer::Places(store.locate(keys).into_iter().map(bits).collect())
            }
        }
    }

    /// A tier's place in the list that the client knows.
    fn tier(&self, tier: TierName) -> u8 {
        let names = self.store().tier_names();
        let place = names.iter().position(|name| *name == tier).unwrap_or(0);
        u8::try_from(place).expect("a pipeline has a handful of tiers")
    }

    /// While the node drains, it accepts blocks that have slabs already, and grants no new slabs.
    fn refuses_slabs(&self, blocks: usize) -> Option<Answer> {
        if self.node.state() == NodeState::Draining {
            return Some(Answer::Failed(draining()));
        }
        self.refuses_to_write(blocks)
    }

    fn refuses_to_write(&self, blocks: usize) -> Option<Answer> {
        if self.session.access == Access::Read {
            return Some(Answer::Failed(read_only()));
        }
        (blocks > BLOCKS_MAX).then(|| Answer::Failed(too_many(blocks)))
    }
}

fn put_of(block: &AskedBlock) -> Put<'static> {
    Put {
        parent: block.parent,
        is_prefix: block.is_prefix,
        is_partial: block.is_partial,
        ..Put::new(block.key, &[])
    }
}

fn sealed(block: &SealedBlock, mut slab: SlabMut) -> PutSlab {
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

/// The request at the node's own time: the store's clock is of all clients, and the time that one
/// of them gives, which never goes back, would be everybody's from then on.
fn arriving(request: &ChainRequest) -> Request<'_> {
    Request { at: None, ..request.as_request() }
}

/// Whether a block found no room: what a client without a connection holds may be in the way.
fn has_no_room(prepared: &PreparedBlock) -> bool {
    matches!(
        prepared,
        PreparedBlock::Settled(
            PutOutcome::Declined(DeclineReason::Full)
                | PutOutcome::Failed(StoreError::NoRoom { .. } | StoreError::Limit { .. })
        )
    )
}

fn is_late(prepared: &Prepared) -> bool {
    let Prepared::Settled(PutOutcome::Failed(error)) = prepared else { return false };
    matches!(error, StoreError::Timeout { .. } | StoreError::Busy { .. })
}

fn failed(error: &StoreError, count: usize) -> Vec<Prepared> {
    let one = || Prepared::Settled(PutOutcome::Failed(error.clone()));
    std::iter::repeat_with(one).take(count).collect()
}

fn not_held() -> StoreError {
    StoreError::Config {
        setting: "hold",
        reason: "the client seals a slab that it does not hold, or more of it than it has"
            .to_owned(),
    }
}

fn read_only() -> StoreError {
    StoreError::Config {
        setting: "access",
        reason: "this client connected for reading; connect with access to write".to_owned(),
    }
}

fn administers_only() -> StoreError {
    StoreError::Config {
        setting: "access",
        reason: "this client connected to administer; connect with access to read or write"
            .to_owned(),
    }
}

fn draining() -> StoreError {
    StoreError::Config {
        setting: "node",
        reason: "it is draining: it takes no new blocks, and goes on to serve those it has"
            .to_owned(),
    }
}

/// Every tier that survives restarts keeps a manifest in each place that has blocks of it.
fn is_too_long(manifest: &Manifest) -> bool {
    let lengths = || manifest.fields().flat_map(|(name, value)| [name.len(), value.len()]);
    lengths().any(|length| length > FIELD_BYTES_MAX)
        || lengths().sum::<usize>() > MANIFEST_BYTES_MAX
}

fn long_manifest() -> StoreError {
    StoreError::Config {
        setting: "manifest",
        reason: format!(
            "a node keeps names and values of {FIELD_BYTES_MAX} bytes each and \
             {MANIFEST_BYTES_MAX} bytes in all at most; name long things by a hash of them"
        ),
    }
}

fn too_many(blocks: usize) -> StoreError {
    StoreError::Config {
        setting: "batch",
        reason: format!("{blocks} blocks in one message; the most is {BLOCKS_MAX}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_are_bounded_by_field_and_in_all() {
        assert!(!is_too_long(
            &Manifest::new().with("weights", "w".repeat(FIELD_BYTES_MAX).as_str())
        ));
        let long = "w".repeat(FIELD_BYTES_MAX + 1);
        assert!(is_too_long(&Manifest::new().with("weights", long.as_str())));
        let many = (0..17).fold(Manifest::new(), |manifest, number| {
            manifest.with(format!("field {number}"), "w".repeat(FIELD_BYTES_MAX).as_str())
        });
        assert!(is_too_long(&many));
    }
}

//! Get and view: hits in DRAM at once, hits below DRAM with one read for all waiting callers.

use std::borrow::Cow;

use cascade_block::BlockKey;
use cascade_tier::{GetOutcome, StoreError, ViewOutcome};

use crate::calls::read_counters::{ReadResult, count_gets};
use crate::calls::read_flow::{ReadFlow, ReadPurpose};
use crate::calls::resident_views::ResidentViews;
use crate::core::catalog::KeyIndex;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::hold::KEYS_PER_HOLD;

/// The blocks of a step take at most DRAM divided by this.
const STEP_SHARE: usize = 8;
/// Maximum bytes of a step; the deadline is checked between steps.
const STEP_BYTES: usize = 256 << 20;

/// Reads blocks for one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reads<'a> {
    core: &'a StoreCore,
    call: CallContext,
}

impl<'a> Reads<'a> {
    pub(crate) fn new(core: &'a StoreCore, call: CallContext) -> Self {
        Self { core, call }
    }

    pub(crate) fn view(self, keys: &[BlockKey]) -> Vec<ViewOutcome> {
        let Self { core, call } = self;
        let mut views = ResidentViews(core).view(keys, ReadPurpose::Use, call);
        let rest = &keys[views.len()..];
        if rest.is_empty() {
            return views;
        }
        if !views.is_empty() && call.has_timed_out(&*core.clock) {
            let late = || ViewOutcome::Failed(call.timeout_error("read all blocks of a batch"));
            let late: Vec<ViewOutcome> = rest.iter().map(|_| late()).collect();
            count_gets(core, rest.len(), late.iter().map(ReadResult::from_view));
            views.extend(late);
        } else {
            views.extend(self.view_from_tiers(rest));
        }
        views
    }

    /// Views of blocks, also from lower tiers.
    pub(super) fn view_from_tiers(self, keys: &[BlockKey]) -> Vec<ViewOutcome> {
        let outcomes = self.read(keys, ReadPurpose::Use);
        count_gets(self.core, keys.len(), outcomes.iter().map(ReadResult::from_view));
        outcomes
    }

    /// Whether each block has these bytes. `None` if the store does not have the block. Does not
    /// count as an access, and promotes nothing.
    pub(crate) fn compare(
        self,
        blocks: &[(BlockKey, Cow<'_, [u8]>)],
    ) -> Vec<Result<Option<bool>, StoreError>> {
        let Self { core, call } = self;
        let mut results = Vec::with_capacity(blocks.len());
        while results.len() < blocks.len() {
            let rest = &blocks[results.len()..];
            if call.has_timed_out(&*core.clock) {
                let late = || Err(call.timeout_error("compare all blocks of a batch"));
                results.extend(rest.iter().map(|_| late()));
                break;
            }
            let keys: Vec<BlockKey> =
                rest.iter().take(KEYS_PER_HOLD).map(|(key, _)| *key).collect();
            let step = &keys[..self.step_keys(&keys)];
            for (view, (_, bytes)) in self.read(step, ReadPurpose::Compare).into_iter().zip(rest) {
                results.push(match view {
                    ViewOutcome::Hit { slab, .. } => slab
                        .bytes_or_copy()
                        .map(|stored| Some(*stored == **bytes))
                        .map_err(StoreError::Device),
                    ViewOutcome::Miss => Ok(None),
                    ViewOutcome::Failed(error) => Err(error),
                });
            }
        }
        results
    }

    pub(crate) fn get(self, keys: &[BlockKey], buffers: &mut [&mut [u8]]) -> Vec<GetOutcome> {
        assert_eq!(keys.len(), buffers.len(), "one buffer for each key");
        let outcomes = self.read_into(keys, buffers);
        count_gets(self.core, keys.len(), outcomes.iter().map(ReadResult::from_get));
        outcomes
    }

    /// The number of leading keys to read in one step, so that their blocks take at most a fixed
    /// share of DRAM; at least one, also if the deadline passes before it is known.
    pub(crate) fn step_keys(self, keys: &[BlockKey]) -> usize {
        let Self { core, call } = self;
        let keys = &keys[..keys.len().min(KEYS_PER_HOLD)];
        let most = (core.pool.capacity_bytes() / STEP_SHARE).min(STEP_BYTES);
        let mut found = Vec::with_capacity(keys.len());
        let Some(mut state) = core.lock_within(keys.len(), call) else { return 1 };
        state.charge_keys(keys);
        state.catalog.find_batch(keys, &mut found);
        let length = |found: &Option<KeyIndex>| {
            let content = found.map(|key| state.catalog.content(state.catalog.entry(key).content));
            content.map(|content| content.bytes as usize)
        };
        let lengths: Vec<Option<usize>> = found.iter().map(length).collect();
        core.unlock(state);
        let mut bytes = 0;
        let mut fits = |(key, length): &(&BlockKey, Option<usize>)| {
            bytes += length.or_else(|| core.sources.located_bytes(key, &*core.clock)).unwrap_or(0);
            bytes <= most
        };
        keys.iter().zip(lengths).take_while(|block| fits(block)).count().max(1)
    }

    /// Reads blocks and returns their slabs.
    pub(crate) fn read(self, keys: &[BlockKey], purpose: ReadPurpose) -> Vec<ViewOutcome> {
        let mut flow = ReadFlow::new(self.core, keys, self.call, purpose);
        flow.run(self.core);
        flow.into_views()
    }

    /// Reads blocks and copies them to the caller's buffers.
    fn read_into(self, keys: &[BlockKey], buffers: &mut [&mut [u8]]) -> Vec<GetOutcome> {
        let mut flow = ReadFlow::new(self.core, keys, self.call, ReadPurpose::Use).copying(buffers);
        flow.run(self.core);
        flow.into_gets()
    }
}

//! The scrubber: compares blocks in DRAM with their checksums, to find flipped bits.
//!
//! A put computes no checksum, because that would cost at least a third of its speed
//! (`docs/decisions/0021-checksums-in-dram.md`). The first pass over a block, or its first write to
//! a lower tier, computes the checksum; later passes compare.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::checksum;
use cascade_memory::Slab;
use cascade_runtime::thread::{Builder, JoinHandle};
use cascade_tier::tier::{Address, BlockFacts, TierError};

use crate::core::catalog::{Catalog, ContentIndex};
use crate::core::pending::PendingWrite;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::hold::StateGuard;

/// Maximum bytes of one step. Its blocks cannot be evicted meanwhile.
const STEP_BYTES: usize = 4 << 20;
/// Maximum number of catalog entries of one step.
const STEP_KEYS: u32 = 256;
/// Delay of the first pass after the start: by then caches are warm and clients are connected.
const FIRST_PASS_DELAY: Duration = Duration::from_secs(10);
/// Minimum time between two steps.
const STEP_DELAY_MIN: Duration = Duration::from_millis(20);
/// Minimum time between two passes: an idle store wakes up once a minute.
const PASS_DELAY_MIN: Duration = Duration::from_secs(60);

/// Result of one pass over the blocks in DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScrubReport {
    /// Blocks compared.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Blocks with changed bytes; they were dropped from DRAM.
    pub damaged: u64,
    /// Whether the pass covered all blocks before the deadline.
    pub is_complete: bool,
}

/// A content with the result of its comparison.
struct CheckedContent {
    place: (ContentIndex, u32),
    slab: Slab,
    is_intact: bool,
}

/// Whether the bytes match their checksum; the first call for a slab records it. A device that
/// cannot copy them says nothing about them.
fn is_intact(slab: &Slab) -> bool {
    slab.bytes_or_copy().map_or(true, |bytes| slab.verify_checksum(checksum(&bytes)))
}

/// Compares some blocks, from an index of the catalog on. Returns the index to continue at, or
/// `None` at the end.
///
/// Computes the checksums without the lock. The slab that the step holds prevents eviction, and
/// `settle` checks that the content still has it.
pub(crate) fn scrub_step(core: &StoreCore, from: u32) -> (ScrubReport, Option<u32>) {
    let mut state = core.lock();
    // An erase waits until no block is in scrub: a new step would delay it.
    if state.is_closed || state.is_erasing {
        return (ScrubReport::default(), None);
    }
    let (mut picked, next) = contents_to_check(&state.catalog, from);
    state.blocks_in_scrub += picked.len() as u64;
    drop(state);
    for one in &mut picked {
        one.is_intact = is_intact(&one.slab);
    }
    let mut step = ScrubReport::default();
    let mut state = core.lock();
    state.history.set_time(core.clock.unix_ms());
    for one in picked {
        state.blocks_in_scrub -= 1;
        step.blocks += 1;
        step.bytes += one.slab.len() as u64;
        step.damaged += u64::from(settle(&mut state, &one));
    }
    core.unlock(state);
    core.notify_changed();
    (step, next)
}

/// Computes or compares the checksums of blocks before they are written to a stage. Removes
/// damaged blocks from the batch and from DRAM. Returns their number.
pub(crate) fn remove_damaged(
    core: &StoreCore,
    stage: usize,
    pending: &mut Vec<PendingWrite>,
    blocks: &mut Vec<(BlockFacts, Slab)>,
) -> u64 {
    let is_intact: Vec<bool> = blocks.iter().map(|(_, slab)| is_intact(slab)).collect();
    let mut state = core.lock();
    state.history.set_time(core.clock.unix_ms());
    for ((pending, (_, slab)), is_intact) in pending.iter().zip(&*blocks).zip(&is_intact) {
        let place = (pending.content, pending.generation);
        let one = CheckedContent { place, slab: slab.clone(), is_intact: *is_intact };
        settle(&mut state, &one);
        if !is_intact {
            // Also if `settle` dropped nothing, because the content has another slab by now:
            // this write does not take place.
            if state.catalog.live_content(place).is_some() {
                state.clear_dirty(place.0, stage);
            }
            // The mover subtracts only the bytes of blocks that stay in its batch.
            state.lower[stage].pending_bytes -= u64::from(pending.facts.bytes);
        }
    }
    core.unlock(state);
    let (mut of_pending, mut of_blocks) = (is_intact.iter(), is_intact.iter());
    let is_kept = |is_intact: Option<&bool>| is_intact.is_none_or(|is_intact| *is_intact);
    pending.retain(|_| is_kept(of_pending.next()));
    blocks.retain(|_| is_kept(of_blocks.next()));
    is_intact.iter().filter(|is_intact| !**is_intact).count() as u64
}

/// Applies the comparisons that a stage made when it stored these blocks.
pub(super) fn settle_checked<'a>(
    core: &'a StoreCore,
    mut state: StateGuard<'a>,
    pending: &[PendingWrite],
    blocks: &[(BlockFacts, Slab)],
    results: &[Result<Address, TierError>],
) -> StateGuard<'a> {
    for ((pending, (_, slab)), result) in pending.iter().zip(blocks).zip(results) {
        state = core.end_full_hold(state);
        state.charge(1);
        let is_intact = !matches!(result, Err(TierError::ChangedInMemory));
        let place = (pending.content, pending.generation);
        settle(&mut state, &CheckedContent { place, slab: slab.clone(), is_intact });
    }
    state
}

/// The contents in DRAM with their first key among the next entries. Each content has one first
/// key, so that a pass picks it once.
fn contents_to_check(catalog: &Catalog, from: u32) -> (Vec<CheckedContent>, Option<u32>) {
    let end = catalog.key_indices_end();
    let mut to = from.saturating_add(STEP_KEYS).min(end);
    let (mut picked, mut bytes) = (Vec::new(), 0);
    for key in catalog.keys_at(from..to) {
        let index = catalog.entry(key).content;
        let content = catalog.content(index);
        let Some(slab) = content.slab.clone().filter(|_| catalog.first_key_of(index) == key) else {
            continue;
        };
        bytes += slab.len();
        picked.push(CheckedContent { place: (index, content.generation), slab, is_intact: true });
        if bytes >= STEP_BYTES {
            to = key.0 + 1;
            break;
        }
    }
    (picked, (to < end).then_some(to))
}

/// Applies the result of one comparison. Returns true if the block was damaged and dropped.
fn settle(state: &mut StoreState, one: &CheckedContent) -> bool {
    let Some(content) = state.catalog.live_content(one.place) else { return false };
    // The content may have been evicted and read again since: then the result is about other
    // memory.
    if content.slab.as_ref().is_none_or(|slab| !slab.is_same(&one.slab)) {
        return false;
    }
    if !one.is_intact {
        state.drop_damaged(one.place.0);
        return true;
    }
    // Each key has a record of its own. After a restart the block is compared with this checksum
    // before it is served.
    if let (Some(ledger), Some(sum)) = (&state.ledger, one.slab.checksum()) {
        for key in state.catalog.each_key_of(one.place.0) {
            ledger.note_sum(key, sum);
        }
    }
    false
}

/// Runs until the store closes.
fn run(core: &StoreCore, bytes_per_second: NonZeroU64) {
    let mut at = 0;
    let mut due = core.clock.monotonic().saturating_add(FIRST_PASS_DELAY);
    loop {
        let state = core.lock();
        if state.is_closed {
            return;
        }
        let left = due.saturating_sub(core.clock.monotonic());
        if !left.is_zero() {
            // Ends early when the store closes.
            drop(core.wait_for_prober_wakeup(state, left));
            continue;
        }
        drop(state);
        let (step, next) = scrub_step(core, at);
        at = next.unwrap_or(0);
        let nanos = u128::from(step.bytes) * 1_000_000_000 / u128::from(bytes_per_second.get());
        let cost =
            Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).max(STEP_DELAY_MIN);
        let cost = if next.is_none() { cost.max(PASS_DELAY_MIN) } else { cost };
        // The time of the step itself is not subtracted: the rate is an upper bound.
        due = core.clock.monotonic().saturating_add(cost);
    }
}

/// Starts the scrubber thread, unless it is off or the pipeline has no DRAM.
pub(crate) fn start(core: &Arc<StoreCore>) -> std::io::Result<Option<JoinHandle<()>>> {
    let rate = core.config.scrub_bytes_per_second.filter(|_| core.pipeline.keeps_in_memory);
    let Some(rate) = rate else { return Ok(None) };
    let core = Arc::clone(core);
    let thread = Builder::new().name("cascade-scrub".to_owned());
    thread.spawn(move || run(&core, rate)).map(Some)
}

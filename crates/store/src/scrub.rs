//! Compares blocks in DRAM with their checksums, so that a bit that flipped there is found.
//!
//! A put takes no checksum: that would cost it a third of its speed and more
//! (`docs/decisions/0021-checksums-in-dram.md`). The first pass over a block, or the mover before
//! it writes the block down, takes the checksum, whoever wrote the bytes; later passes compare.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use cascade_block::checksum;
use cascade_memory::Slab;

use crate::catalog::{Catalog, ContentIndex};
use crate::node::Node;
use crate::stage::BlockFacts;
use crate::state::{Pending, State};
use crate::{CallOptions, Store};

/// Most bytes whose slabs are held at a time. They cannot be evicted meanwhile.
const STEP_BYTES: usize = 4 << 20;
/// Most entries of the catalog that are looked through at a time.
const STEP_KEYS: u32 = 256;
/// The first pass begins so long after the start, when caches are warm and clients are served.
const REST_AT_START: Duration = Duration::from_secs(10);
/// The least time between two steps, and between the end of a pass and the next one: an idle store
/// is woken once a minute.
const REST_MIN: Duration = Duration::from_millis(20);
const REST_AFTER_PASS: Duration = Duration::from_secs(60);

/// What one pass over the blocks in DRAM came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scrubbed {
    /// Blocks that were looked at.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of the blocks, those whose bytes were not what they had been. They are gone.
    pub damaged: u64,
    /// Whether the deadline left time for all of them.
    pub is_whole: bool,
}

/// A content whose bytes are compared.
struct Checked {
    place: (ContentIndex, u32),
    slab: Slab,
    is_intact: bool,
}

impl Store {
    /// Compares every block in DRAM with its checksum now, and takes the checksums of those that
    /// have none. What is damaged is dropped, counted, and a miss unless a tier below has it.
    pub fn scrub(&self, options: CallOptions) -> Scrubbed {
        let node = self.node();
        let call = node.call(options);
        let mut all = Scrubbed::default();
        let mut at = Some(0);
        while let Some(from) = at {
            if call.deadline.has_passed(&*node.clock) {
                return all;
            }
            let (step, next) = node.scrub_step(from);
            all.blocks += step.blocks;
            all.bytes += step.bytes;
            all.damaged += step.damaged;
            at = next;
        }
        all.is_whole = true;
        all
    }
}

impl Node {
    /// Compares some blocks from an index of the catalog on. Returns where to go on, or nothing at
    /// the end.
    fn scrub_step(&self, from: u32) -> (Scrubbed, Option<u32>) {
        let mut state = self.lock();
        if state.is_closed || state.is_erasing {
            return (Scrubbed::default(), None);
        }
        let (mut picked, next) = pick(&state.catalog, from);
        state.scrubbing += picked.len() as u64;
        drop(state);
        for one in &mut picked {
            one.is_intact = one.slab.agrees_with(checksum(&one.slab));
        }
        let mut step = Scrubbed::default();
        let mut state = self.lock();
        state.history.tell_time(self.clock.unix_ms());
        for one in picked {
            state.scrubbing -= 1;
            step.blocks += 1;
            step.bytes += one.slab.len() as u64;
            step.damaged += u64::from(settle(&mut state, &one));
        }
        self.release(state);
        self.announce_change();
        (step, next)
    }

    /// Takes the checksums of blocks that are about to be written down, or compares them. What is
    /// damaged is taken out of the batch and dropped from DRAM. Returns how many those are.
    pub(crate) fn leave_out_damaged(
        &self,
        stage: usize,
        pending: &mut Vec<Pending>,
        blocks: &mut Vec<(BlockFacts, Slab)>,
    ) -> u64 {
        let is_intact: Vec<bool> =
            blocks.iter().map(|(_, slab)| slab.agrees_with(checksum(slab))).collect();
        let mut state = self.lock();
        state.history.tell_time(self.clock.unix_ms());
        for ((pending, (_, slab)), is_intact) in pending.iter().zip(&*blocks).zip(&is_intact) {
            let place = (pending.content, pending.generation);
            let one = Checked { place, slab: slab.clone(), is_intact: *is_intact };
            settle(&mut state, &one);
            if !is_intact {
                if let Some(content) = state.catalog.live_content(place) {
                    content.dirty &= !(1 << stage);
                }
                state.pending_bytes[stage] -= u64::from(pending.facts.bytes);
            }
        }
        self.release(state);
        let (mut of_pending, mut of_blocks) = (is_intact.iter(), is_intact.iter());
        let is_kept = |is_intact: Option<&bool>| is_intact.is_none_or(|is_intact| *is_intact);
        pending.retain(|_| is_kept(of_pending.next()));
        blocks.retain(|_| is_kept(of_blocks.next()));
        is_intact.iter().filter(|is_intact| !**is_intact).count() as u64
    }
}

/// The contents in DRAM whose first key is at one of the next indices, each once.
fn pick(catalog: &Catalog, from: u32) -> (Vec<Checked>, Option<u32>) {
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
        picked.push(Checked { place: (index, content.generation), slab, is_intact: true });
        if bytes >= STEP_BYTES {
            to = key.0 + 1;
            break;
        }
    }
    (picked, (to < end).then_some(to))
}

/// Enters what became of one block. True if it is damaged and was dropped.
fn settle(state: &mut State, one: &Checked) -> bool {
    let Some(content) = state.catalog.live_content(one.place) else { return false };
    if content.slab.as_ref().is_none_or(|slab| !slab.is_same(&one.slab)) {
        return false;
    }
    if !one.is_intact {
        state.drop_damaged(one.place.0);
        return true;
    }
    if let (Some(ledger), Some(sum)) = (&state.ledger, one.slab.checksum()) {
        let mut next = Some(state.catalog.first_key_of(one.place.0));
        while let Some(key) = next {
            ledger.note_sum(key, sum);
            next = state.catalog.next_key_of(key);
        }
    }
    false
}

/// Runs until the store closes.
fn run(node: &Node, bytes_per_second: NonZeroU64) {
    let mut at = 0;
    let mut due = node.clock.monotonic().saturating_add(REST_AT_START);
    loop {
        let state = node.lock();
        if state.is_closed {
            return;
        }
        let left = due.saturating_sub(node.clock.monotonic());
        if !left.is_zero() {
            // Closing the store ends this wait early.
            drop(node.wait_look(state, left));
            continue;
        }
        drop(state);
        let (step, next) = node.scrub_step(at);
        at = next.unwrap_or(0);
        let nanos = u128::from(step.bytes) * 1_000_000_000 / u128::from(bytes_per_second.get());
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).max(REST_MIN);
        let cost = if next.is_none() { cost.max(REST_AFTER_PASS) } else { cost };
        due = node.clock.monotonic().saturating_add(cost);
    }
}

/// The scrubber of this node, unless it is off or nothing is kept in DRAM.
pub(crate) fn start(node: &Arc<Node>) -> std::io::Result<Option<JoinHandle<()>>> {
    let rate = node.config.scrub_bytes_per_second.filter(|_| node.pipeline.has_dram);
    let Some(rate) = rate else { return Ok(None) };
    let node = Arc::clone(node);
    let thread = std::thread::Builder::new().name("cascade-scrub".to_owned());
    thread.spawn(move || run(&node, rate)).map(Some)
}

//! The mover: carries blocks down to one stage in batches, within a byte budget.
//!
//! One thread a stage, so that no stage waits for another's writes. (Puts wait for the slowest:
//! what is queued is bounded.) Blocks go in the order in which they were put, which is about the
//! order in which eviction will want them written.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, Deadline};
use cascade_memory::Slab;

use crate::catalog::{Address, ContentIndex};
use crate::health::Direction;
use crate::history::Loss;
use crate::node::Node;
use crate::shedding::Verdict;
use crate::stage::{BlockFacts, Room, StageError};
use crate::state::{NameChange, Pending, State};

/// Most bytes in one batch.
const BATCH_BYTES: usize = 16 << 20;
/// Most blocks in one batch.
const BATCH_BLOCKS: usize = 256;
/// Most names in one call.
const NAMES_MAX: usize = 4096;
/// How long a stage that did not learn its names is left alone.
const UNTOLD_PAUSE: Duration = Duration::from_millis(20);
/// So many failed writes of one block to a stage that is used, and it is not written again: it may
/// be what the stage fails on.
const WRITE_TRIES: u8 = 3;
/// How often a full stage is asked for room in vain before its blocks are given up.
const ROOM_TRIES: u32 = 3;
/// After so many rounds of making room for one batch nothing is kept: room comes first.
const ROOM_ROUNDS_KEEPING: u32 = 4;

/// A batch on its way down.
struct Batch {
    pending: Vec<Pending>,
    blocks: Vec<(BlockFacts, Slab)>,
    names: Vec<NameChange>,
    /// Queued blocks that were deleted while they waited.
    deleted: u64,
}

/// Runs until the store closes and its queue is empty.
pub(crate) fn run(node: &Arc<Node>, stage: usize) {
    let mut allowance = Allowance::new(node);
    while let Some(mut batch) = next_batch(node, stage) {
        allowance.wait_for(node, batch.blocks.iter().map(|(_, slab)| slab.len() as u64).sum());
        // What changed in memory since it was put is not written down as if it were right.
        batch.deleted += node.leave_out_damaged(stage, &mut batch.pending, &mut batch.blocks);
        let deadline = Deadline::after(&*node.clock, node.config.timeout);
        if let Some(why) = tell_names(node, stage, &batch.names, deadline) {
            wait_for_names(node, stage, batch, &why);
            continue;
        }
        // Names may have taken all of the time.
        let deadline = Deadline::after(&*node.clock, node.config.timeout);
        let results = store_with_room(node, stage, &batch.blocks, deadline);
        let is_long_enough = node.config.timeout >= node.config.health.probe_timeout;
        let verdict =
            Verdict::of(results.iter().map(|result| result.as_ref().err()), is_long_enough);
        // Before anyone can see them as written: a slab that the mover holds cannot be evicted.
        drop(batch.blocks);
        let mut state = node.lock();
        state.history.tell_time(node.clock.unix_ms());
        let is_late = |result: &Result<_, _>| matches!(result, Err(StageError::Timeout));
        let is_stuck = !results.is_empty() && results.iter().all(is_late);
        for (pending, result) in batch.pending.iter().zip(results) {
            settle(&mut state, stage, pending, result);
        }
        state.blocks_tickets[stage].settled += batch.pending.len() as u64 + batch.deleted;
        if is_stuck {
            give_up_queue(&mut state, stage, &StageError::Timeout);
        }
        node.judge(&mut state, stage, Direction::Writes, verdict);
        drop(state);
        node.announce_change();
    }
}

/// Gives up what is queued for a stage: it let a whole batch run out of time, it is shed, or the
/// store closes and cannot wait. The blocks stay in DRAM for as long as they last there, and are
/// counted.
pub(crate) fn give_up_queue(state: &mut State, stage: usize, why: &StageError) {
    let queue = std::mem::take(&mut state.queues[stage]);
    state.blocks_tickets[stage].settled += queue.len() as u64;
    for pending in queue {
        settle(state, stage, &pending, Err(why.clone()));
    }
}

/// Runs until the last sender of hints is gone.
pub(crate) fn run_prefetch(node: &Node, hints: &Mutex<Receiver<Vec<BlockKey>>>) {
    let mut allowance = Allowance::new(node);
    loop {
        let hint = hints.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(keys) = hint else { return };
        node.prefetch_now(&keys, &mut |bytes| allowance.wait_for(node, bytes));
    }
}

fn next_batch(node: &Node, stage: usize) -> Option<Batch> {
    let mut state = node.lock();
    // A quarter of what may wait leaves puts their room.
    let retry_bytes = (BATCH_BYTES as u64).min(node.dirty_bytes_max / 4).max(1);
    loop {
        if state.is_write_shed(stage) && !state.is_closed {
            state = node.wait_work(state);
            continue;
        }
        if state.queues[stage].is_empty() && !state.is_closed {
            state.queue_lacking(stage, retry_bytes);
        }
        let names = std::mem::take(&mut state.names[stage]);
        let mut batch = Batch { pending: Vec::new(), blocks: Vec::new(), names, deleted: 0 };
        let mut bytes = 0;
        while bytes < BATCH_BYTES && batch.blocks.len() < BATCH_BLOCKS {
            let Some(pending) = state.queues[stage].pop_front() else { break };
            let place = (pending.content, pending.generation);
            let slab = state.catalog.live_content(place).and_then(|content| content.slab.clone());
            let Some(slab) = slab else {
                // It was deleted while it waited.
                state.pending_bytes[stage] -= u64::from(pending.facts.bytes);
                batch.deleted += 1;
                continue;
            };
            bytes += slab.len();
            batch.blocks.push((pending.facts, slab));
            batch.pending.push(pending);
        }
        if !batch.blocks.is_empty() || !batch.names.is_empty() {
            return Some(batch);
        }
        state.blocks_tickets[stage].settled += batch.deleted;
        node.announce_change();
        if state.is_closed {
            return None;
        }
        state = node.wait_work(state);
    }
}

/// Blocks wait behind names that their stage did not learn: they keep their order.
fn wait_for_names(node: &Node, stage: usize, batch: Batch, why: &StageError) {
    drop(batch.blocks);
    let mut state = node.lock();
    state.history.tell_time(node.clock.unix_ms());
    state.blocks_tickets[stage].settled += batch.deleted;
    for pending in batch.pending.into_iter().rev() {
        state.queues[stage].push_front(pending);
    }
    if state.is_write_shed(stage) || matches!(why, StageError::Timeout | StageError::Shed) {
        give_up_queue(&mut state, stage, why);
    }
    node.announce_change();
    node.pause(state, UNTOLD_PAUSE);
}

/// Tells a stage names in their order, runs of one kind together. What it did not learn or forget
/// waits to be told again, first of all, and why is returned; what a store that is closed does not
/// tell shows after a restart, and is counted.
fn tell_names(
    node: &Arc<Node>,
    stage: usize,
    names: &[NameChange],
    deadline: Deadline,
) -> Option<StageError> {
    let mut told = 0;
    let is_add = |change: &NameChange| matches!(change, NameChange::Add(..));
    let runs = names.chunk_by(|one, next| is_add(one) == is_add(next));
    for run in runs.flat_map(|run| run.chunks(NAMES_MAX)) {
        let (mut adds, mut removes) = (Vec::new(), Vec::new());
        for change in run {
            match *change {
                NameChange::Add(facts, address) => adds.push((facts, address)),
                NameChange::Remove(key, address) => removes.push((key, address)),
            }
        }
        let result = if adds.is_empty() {
            node.stages[stage].remove(removes, deadline)
        } else {
            node.stages[stage].alias(adds, deadline)
        };
        if let Err(error) = result {
            let mut state = node.lock();
            let verdict = Verdict::of([Some(&error)].into_iter(), false);
            node.judge(&mut state, stage, Direction::Writes, verdict);
            state.note_error(stage, error.clone());
            if !state.is_closed {
                state.names_tickets[stage].settled += told as u64;
                state.keep_names(stage, &names[told..]);
                return Some(error);
            }
            state.counters.name_failures += run.len() as u64;
            state.unwritten.count(stage, run.len() as u64);
        }
        told += run.len();
    }
    if told > 0 {
        node.lock().names_tickets[stage].settled += told as u64;
    }
    None
}

/// Stores a batch, making room for what does not fit.
fn store_with_room(
    node: &Arc<Node>,
    stage: usize,
    blocks: &[(BlockFacts, Slab)],
    deadline: Deadline,
) -> Vec<Result<Address, StageError>> {
    let mut results: Vec<_> = blocks.iter().map(|_| Err(StageError::Full)).collect();
    let mut left: Vec<usize> = (0..blocks.len()).collect();
    let (mut vain, mut rounds) = (0, 0);
    while !left.is_empty() {
        let batch = left.iter().map(|at| blocks[*at].clone()).collect();
        let at = Arc::clone(node);
        let late = move |stored: Vec<_>| forget_late(&at, stage, &stored);
        let answers = node.stages[stage].store(batch, deadline, late);
        for (at, result) in left.iter().zip(answers) {
            results[*at] = result;
        }
        let before = left.len();
        left.retain(|at| matches!(results[*at], Err(StageError::Full)));
        let may_keep = rounds < ROOM_ROUNDS_KEEPING;
        rounds += 1;
        vain = if left.len() < before || may_keep { 0 } else { vain + 1 };
        if left.is_empty() || vain > ROOM_TRIES || deadline.has_passed(&*node.clock) {
            break;
        }
        match make_room(node, stage, may_keep, deadline) {
            Ok(room) => {
                apply_room(node, stage, &room);
                left.extend(follow_room(blocks, &room, &mut results));
            }
            Err(error) => {
                let mut state = node.lock();
                let verdict = Verdict::of([Some(&error)].into_iter(), false);
                node.judge(&mut state, stage, Direction::Writes, verdict);
                state.note_error(stage, error);
                break;
            }
        }
    }
    results
}

fn make_room(
    node: &Arc<Node>,
    stage: usize,
    may_keep: bool,
    deadline: Deadline,
) -> Result<Room, StageError> {
    let mut kept = HashMap::new();
    let (asked, told) = (Arc::clone(node), Arc::clone(node));
    let keep = move |key: &BlockKey, _| may_keep && keeps(&asked, stage, key, &mut kept);
    let late = move |room| apply_room(&told, stage, &room);
    node.stages[stage].make_room(Box::new(keep), deadline, late)
}

/// Blocks that were stored after they had been given up: the stage is to forget them, because they
/// will be stored again, or have been deleted since.
fn forget_late(node: &Node, stage: usize, stored: &[(BlockKey, Address)]) {
    let mut state = node.lock();
    if !state.is_closed {
        for (key, address) in stored {
            state.push_name(stage, NameChange::Remove(*key, *address));
        }
    }
    node.release(state);
}

/// Blocks of this very batch may have been moved or dropped to make room for its rest, before the
/// catalog knows of them. Returns those that have to be stored again.
fn follow_room(
    blocks: &[(BlockFacts, Slab)],
    room: &Room,
    results: &mut [Result<Address, StageError>],
) -> Vec<usize> {
    let moved: HashMap<_, _> = room.moved.iter().map(|(_, old, new)| (*old, *new)).collect();
    let dropped: HashSet<_> = room.dropped.iter().copied().collect();
    let mut again = Vec::new();
    for (at, ((facts, _), result)) in blocks.iter().zip(results).enumerate() {
        let Ok(address) = *result else { continue };
        if dropped.contains(&(facts.key, address)) {
            *result = Err(StageError::Full);
            again.push(at);
        } else if let Some(new) = moved.get(&address) {
            *result = Ok(*new);
        }
    }
    again
}

/// A block survives its segment if it was asked for since it was written there, is in DRAM, or is
/// protected. Decided once for all names of a content: they go or stay together.
fn keeps(node: &Node, stage: usize, key: &BlockKey, kept: &mut HashMap<(u32, u32), bool>) -> bool {
    let mut state = node.lock();
    let Some(found) = state.catalog.find(key) else { return false };
    let entry = state.catalog.entry(found);
    let (index, is_prefix) = (entry.content, entry.is_prefix());
    let content = state.catalog.content_mut(index);
    if content.address(stage).is_none() {
        return false;
    }
    *kept.entry((index.0, content.generation)).or_insert_with(|| {
        let was_referenced = content.referenced & (1 << stage) != 0;
        content.referenced &= !(1 << stage);
        was_referenced || is_prefix || content.slab.is_some()
    })
}

fn apply_room(node: &Node, stage: usize, room: &Room) {
    let mut state = node.lock();
    state.history.tell_time(node.clock.unix_ms());
    // Names that wait to be told were meant for where the blocks lay before.
    let places: HashMap<_, _> = room.moved.iter().map(|(_, old, new)| (*old, *new)).collect();
    for change in &mut state.names[stage] {
        let (NameChange::Add(_, address) | NameChange::Remove(_, address)) = change;
        *address = places.get(address).copied().unwrap_or(*address);
    }
    for (key, old, new) in &room.moved {
        if let Some(content) = content_at(&mut state, stage, key, *old) {
            state.set_address(content, stage, *new);
        }
    }
    for (key, address) in &room.dropped {
        state.counters.reclaimed_blocks += 1;
        if let Some(content) = content_at(&mut state, stage, key, *address) {
            state.clear_address(content, stage);
            state.catalog.content_mut(content).was_reclaimed = true;
            state.forget_if_nowhere(content, Loss::Reclaimed);
        }
    }
    drop(state);
    node.announce_change();
}

fn content_at(
    state: &mut State,
    stage: usize,
    key: &BlockKey,
    address: Address,
) -> Option<ContentIndex> {
    let found = state.catalog.find(key)?;
    let index = state.catalog.entry(found).content;
    (state.catalog.content(index).address(stage) == Some(address)).then_some(index)
}

/// Enters what became of one block that was written.
fn settle(state: &mut State, stage: usize, pending: &Pending, result: Result<Address, StageError>) {
    state.pending_bytes[stage] -= u64::from(pending.facts.bytes);
    let place = (pending.content, pending.generation);
    let Some(content) = state.catalog.live_content(place) else {
        // It was deleted while it was written.
        let address = result.ok();
        if let Some(address) = address {
            state.push_name(stage, NameChange::Remove(pending.facts.key, address));
        }
        return;
    };
    content.dirty &= !(1 << stage);
    let is_clean = content.dirty == 0;
    match result {
        Ok(address) => {
            content.was_reclaimed = false;
            state.set_address(pending.content, stage, address);
            state.counters.demoted_blocks += 1;
            state.counters.demoted_bytes += u64::from(pending.facts.bytes);
            name_everywhere(state, stage, pending, address);
        }
        Err(StageError::Declined { .. }) => state.counters.demote_declines += 1,
        Err(error) => {
            state.counters.demote_failures += 1;
            state.unwritten.count(stage, 1);
            let is_its_own = matches!(error, StageError::Failed(_) | StageError::NoAnswer);
            let tries = pending.tries + u8::from(is_its_own && !state.is_write_shed(stage));
            if !matches!(error, StageError::Full) && tries < WRITE_TRIES {
                state.note_lacking(stage, Pending { tries, ..*pending });
            }
            state.note_error(stage, error);
        }
    }
    if is_clean && !state.has_dram {
        state.drop_slab(pending.content);
        state.forget_if_nowhere(pending.content, Loss::Unwritten);
    }
}

/// The stage learns the other names of a content, and forgets the one it was written under if
/// that was deleted meanwhile.
fn name_everywhere(state: &mut State, stage: usize, pending: &Pending, address: Address) {
    let mut is_named_as_written = false;
    for key in state.catalog.keys_of(pending.content) {
        let entry = state.catalog.entry(key);
        if entry.key == pending.facts.key {
            is_named_as_written = true;
            continue;
        }
        let expires = entry.expires_unix_ms;
        let facts = BlockFacts {
            key: entry.key,
            parent: state.catalog.parent_of(key).map(|parent| state.catalog.entry(parent).key),
            is_prefix: entry.is_prefix(),
            expires_unix_ms: (expires != 0).then_some(expires),
            ..pending.facts
        };
        state.push_name(stage, NameChange::Add(facts, address));
    }
    if !is_named_as_written {
        state.push_name(stage, NameChange::Remove(pending.facts.key, address));
    }
}

/// The byte budget: what may be written now, refilled with time.
struct Allowance {
    bytes_per_second: Option<u64>,
    /// When what was written so far is paid for.
    paid_until: Duration,
}

impl Allowance {
    fn new(node: &Node) -> Self {
        Self {
            bytes_per_second: node.config.mover_bytes_per_second,
            paid_until: node.clock.monotonic(),
        }
    }

    fn wait_for(&mut self, node: &Node, bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        loop {
            let now = node.clock.monotonic();
            if now >= self.paid_until {
                let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
                self.paid_until =
                    now + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
                return;
            }
            let state = node.lock();
            if state.is_closed {
                return;
            }
            node.pause(state, self.paid_until.saturating_sub(now));
        }
    }
}

/// A mover of this node, for a thread of its own.
pub(crate) fn start(
    node: &Arc<Node>,
    stage: usize,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let node = Arc::clone(node);
    std::thread::Builder::new()
        .name(format!("cascade-mover-{}", node.stages[stage].name()))
        .spawn(move || run(&node, stage))
}

//! The mover: writes queued blocks to one lower stage in batches, within a byte budget.
//!
//! Each stage has its own thread, so that no stage waits for the writes of another. The queues are
//! bounded: puts wait for the slowest stage. Blocks are written in the order of their puts, which
//! is roughly the order in which eviction needs them written.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_memory::Slab;
use cascade_runtime::{Deadline, thread};
use cascade_tier::tier::{Address, BlockFacts, MakeRoomOutcome, TierError};

use crate::core::circuit::Direction;
use crate::core::health_signal::HealthSignal;
use crate::core::pending::{KeyChange, PendingWrite};
use crate::core::queue::Queue;
use crate::drive::breaker::record_health;
use crate::drive::rate_limiter::RateLimiter;
use crate::drive::room::{apply_room_to_changes, make_room, maps_of};
use crate::drive::scrub::{remove_damaged, settle_checked};
use crate::drive::settle::{fail_queue, settle};
use crate::drive::shrink::Shrink;
use crate::shared::StoreCore;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};

/// Maximum bytes of one batch. The disk pauses between two batches, so that short ones are slow.
const BATCH_BYTES: u64 = 32 << 20;
/// The part of a stage's capacity that one batch may have. In a stage that is too small for its
/// batch, room for some blocks would be made by dropping others of the batch.
const BATCH_SHARE: u64 = 8;
/// Maximum number of key changes in one call.
const KEY_CHANGES_PER_CALL: usize = 4096;
/// Delay before key changes that a stage failed to record are retried.
const KEY_CHANGES_RETRY_DELAY: Duration = Duration::from_millis(20);
/// Rounds of making room without effect before the rest of a batch is given up.
const INEFFECTIVE_ROUNDS_MAX: u32 = 3;
/// Rounds of making room for one batch that may keep blocks; later rounds keep none, to make sure
/// of room.
const KEEPING_ROUNDS_MAX: u32 = 4;
/// Rounds of making room for one call with key changes.
const CHANGES_ROUNDS_MAX: u32 = KEEPING_ROUNDS_MAX + INEFFECTIVE_ROUNDS_MAX;

/// One batch for a stage.
struct WriteBatch {
    pending: Vec<PendingWrite>,
    blocks: Vec<(BlockFacts, Slab)>,
    key_changes: Queue<KeyChange>,
    /// Queued blocks that were deleted while they waited.
    deleted: u64,
}

impl WriteBatch {
    fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.key_changes.is_empty()
    }
}

/// Runs until the store closes and its queue is empty.
pub(crate) fn run(core: &Arc<StoreCore>, stage: usize) {
    let mut rate_limiter = RateLimiter::new(core);
    let (mut shrink, mut batch_bytes) = (Shrink::default(), batch_bytes_of(core, stage));
    loop {
        // Between two batches: the key changes of a batch would keep the addresses of blocks that
        // move.
        shrink.step(core, stage);
        if core.stages[stage].take_resized() {
            batch_bytes = batch_bytes_of(core, stage);
        }
        let Some(mut batch) = next_batch(core, stage, batch_bytes) else { break };
        if batch.is_empty() {
            continue;
        }
        rate_limiter.wait_for(core, batch.blocks.iter().map(|(_, slab)| slab.len() as u64).sum());
        if !core.stages[stage].checks_slabs() {
            // Compares checksums first: bytes that changed in memory since the put must not be
            // written with a new, valid checksum.
            batch.deleted += remove_damaged(core, stage, &mut batch.pending, &mut batch.blocks);
        }
        let deadline = Deadline::after(&*core.clock, core.config.timeout);
        let key_changes = std::mem::take(&mut batch.key_changes);
        if let Err(why) = send_key_changes(core, stage, key_changes.into(), deadline) {
            requeue_batch(core, stage, batch, &why);
            continue;
        }
        // A new deadline: the key changes may have used up the first one.
        let deadline = Deadline::after(&*core.clock, core.config.timeout);
        let results = store_with_room(core, stage, &batch.blocks, deadline);
        let is_long_enough = core.config.timeout >= core.config.health.probe_timeout;
        let signal =
            HealthSignal::of(results.iter().map(|result| result.as_ref().err()), is_long_enough);
        let mut state = core.lock_for(batch.pending.len());
        state.history.set_time(core.clock.unix_ms());
        if core.stages[stage].checks_slabs() {
            state = settle_checked(core, state, &batch.pending, &batch.blocks, &results);
        }
        // Before the blocks become clean: eviction skips a slab that has another holder.
        drop(batch.blocks);
        let is_time_out = |result: &Result<_, _>| matches!(result, Err(TierError::Timeout));
        let is_stuck = !results.is_empty() && results.iter().all(is_time_out);
        for (pending, result) in batch.pending.iter().zip(results) {
            state = core.end_full_hold(state);
            state.charge(1);
            settle(&mut state, stage, pending, result);
        }
        // Deleted blocks settle, too: a flush waits for every ticket that was pushed.
        state.lower[stage].block_tickets.settled += batch.pending.len() as u64 + batch.deleted;
        // Every further batch would take the whole time-out again, while puts wait for the backlog.
        if is_stuck {
            state = fail_queue(core, state, stage, &TierError::Timeout);
        }
        record_health(core, &mut state, stage, Direction::Writes, signal);
        drop(state);
        core.notify_changed();
    }
}

/// Most bytes of a batch for a stage.
fn batch_bytes_of(core: &StoreCore, stage: usize) -> u64 {
    match core.stages[stage].stats().capacity_bytes {
        0 => BATCH_BYTES,
        capacity_bytes => BATCH_BYTES.min(capacity_bytes / BATCH_SHARE),
    }
}

/// Waits for the next batch of a stage: all queued key changes, and blocks up to the limits. `None`
/// once the store is closed and the queues are empty. The batch is empty if the stage has to shrink
/// and there is nothing to write.
fn next_batch(core: &StoreCore, stage: usize, batch_bytes: u64) -> Option<WriteBatch> {
    let mut state = core.lock();
    // At most a quarter of the backlog limit, so that retries do not make puts wait.
    let retry_bytes = batch_bytes.min(core.dirty_bytes_max() / 4).max(1);
    loop {
        // Not once the store is closed: nothing wakes this thread after the close.
        if state.is_write_circuit_open(stage) && !state.is_closed {
            if state.lower[stage].queue.is_empty() {
                state = core.wait_for_work(state);
            } else {
                // Puts wait for the backlog, and flushes for these tickets.
                state = fail_queue(core, state, stage, &TierError::CircuitOpen);
                core.notify_changed();
            }
            continue;
        }
        // Their blocks must not be written before them, either.
        if state.lower[stage].translations > 0 {
            state = core.wait_for_work(state);
            continue;
        }
        // Only while the queue is empty: blocks of puts have priority over retries.
        if state.lower[stage].queue.is_empty() && !state.is_closed {
            state.requeue_unstored(stage, retry_bytes);
        }
        let batch;
        (state, batch) = take_batch(core, state, stage, batch_bytes);
        if !batch.blocks.is_empty() || !batch.key_changes.is_empty() {
            return Some(batch);
        }
        // Before the wait: a flush may wait for exactly these tickets.
        state.lower[stage].block_tickets.settled += batch.deleted;
        core.notify_changed();
        if state.is_closed {
            return None;
        }
        if state.is_hold_full() && state.lower[stage].requeue_count > 0 {
            // `requeue_unstored` has met only blocks that need no retry, and is not done.
            state = core.end_full_hold(state);
            continue;
        }
        if core.stages[stage].is_shrinking() && !state.is_closing {
            // The deleted blocks are counted already.
            return Some(WriteBatch { deleted: 0, ..batch });
        }
        state = core.wait_for_work(state);
    }
}

/// Takes the queued key changes of a stage, and queued blocks up to the limits.
fn take_batch<'a>(
    core: &'a StoreCore,
    mut state: StateGuard<'a>,
    stage: usize,
    batch_bytes: u64,
) -> (StateGuard<'a>, WriteBatch) {
    let key_changes = state.lower[stage].key_changes.take();
    let mut batch = WriteBatch { pending: Vec::new(), blocks: Vec::new(), key_changes, deleted: 0 };
    let mut bytes = 0;
    while batch.blocks.is_empty() || (bytes < batch_bytes && !state.is_hold_full()) {
        if state.is_hold_full() && batch.blocks.is_empty() {
            // All that it has met were deleted while they were queued, perhaps very many.
            state = core.end_full_hold(state);
            // A stage must record these before the blocks that were queued after them.
            let more = state.lower[stage].key_changes.take();
            batch.key_changes.append(more);
        }
        let Some(pending) = state.lower[stage].queue.pop_front() else { break };
        let pending = state.with_current_key(pending);
        state.charge(1);
        let place = (pending.content, pending.generation);
        let slab = state.catalog.live_content(place).and_then(|content| content.slab.clone());
        let Some(slab) = slab else {
            // Deleted while it was queued: `settle`, which subtracts the bytes of other blocks,
            // does not see this one.
            state.lower[stage].pending_bytes -= u64::from(pending.facts.bytes);
            batch.deleted += 1;
            continue;
        };
        bytes += slab.len() as u64;
        batch.blocks.push((pending.facts, slab));
        batch.pending.push(pending);
    }
    (state, batch)
}

/// Requeues the blocks of a batch whose key changes failed, in their order: a stage must record key
/// changes before later blocks.
fn requeue_batch(core: &StoreCore, stage: usize, batch: WriteBatch, why: &TierError) {
    drop(batch.blocks);
    let mut state = core.lock();
    state.history.set_time(core.clock.unix_ms());
    state.lower[stage].block_tickets.settled += batch.deleted;
    for pending in batch.pending.into_iter().rev() {
        // With the ticket that it has: each block settles once, however often it is queued.
        state.lower[stage].queue.push_front(pending);
    }
    if state.is_write_circuit_open(stage)
        || matches!(why, TierError::Timeout | TierError::CircuitOpen)
    {
        state = fail_queue(core, state, stage, why);
    }
    core.notify_changed();
    core.wait_to_retry(state, KEY_CHANGES_RETRY_DELAY);
}

/// Sends key changes to a stage, in their order, with consecutive changes of one kind in one call.
/// On failure, puts the rest back at the front of the queue and returns the error. Once the store
/// is closed, there is no retry: the failures are counted, and the changes are missing after a
/// restart.
fn send_key_changes(
    core: &Arc<StoreCore>,
    stage: usize,
    mut changes: Vec<KeyChange>,
    deadline: Deadline,
) -> Result<(), TierError> {
    let (mut run_max, mut rounds) = (KEY_CHANGES_PER_CALL, 0);
    while !changes.is_empty() {
        let count = run_length(&changes, run_max);
        let mut result = send_run(core, stage, &changes[..count], deadline);
        if matches!(result, Err(TierError::Full)) && rounds < CHANGES_ROUNDS_MAX {
            match make_room(core, stage, rounds < KEEPING_ROUNDS_MAX, deadline) {
                Ok(room) => {
                    let (moved, dropped) = maps_of(&room);
                    let dropped = apply_room_to_changes(&mut changes, &moved, &dropped);
                    core.lock().settle_key_changes(stage, &dropped);
                    // The stage may have recorded a part of the run, which takes room each time.
                    (run_max, rounds) = ((count / 2).max(1), rounds + 1);
                    continue;
                }
                Err(error) => result = Err(error),
            }
        }
        if let Err(error) = result {
            let mut state = core.lock();
            // Also `Full`: a stage that stays full whatever is dropped does not work.
            let signal = match error {
                TierError::Full => HealthSignal::Failure(TierError::Full),
                _ => HealthSignal::of([Some(&error)].into_iter(), false),
            };
            record_health(core, &mut state, stage, Direction::Writes, signal);
            state.note_error(stage, error.clone());
            if !state.is_closed {
                // Stop at the first failure: later changes of a key must not overtake earlier ones.
                // Only this thread takes changes, so that all that are queued are later ones.
                drop(state);
                let failed = Queue::from(changes);
                core.lock().requeue_key_changes(stage, failed);
                return Err(error);
            }
            state.counters.name_failures += count as u64;
            state.write_failures.count(stage, count as u64);
        }
        // Before the next run, which can remove keys: until then, reads of the added keys use them.
        for some in changes[..count].chunks(KEYS_PER_HOLD) {
            core.lock_for(some.len()).settle_key_changes(stage, some);
        }
        changes.drain(..count);
        // Up to the full length again: many short runs would each move the rest of the changes.
        (run_max, rounds) = ((run_max * 2).min(KEY_CHANGES_PER_CALL), 0);
    }
    Ok(())
}

/// The number of changes of the same kind at the front, at most `run_max`.
fn run_length(changes: &[KeyChange], run_max: usize) -> usize {
    let is_add = |change: &KeyChange| matches!(change, KeyChange::Add(..));
    let first = changes.first().map(is_add);
    changes.iter().take(run_max).take_while(|change| Some(is_add(change)) == first).count()
}

/// Sends key changes of one kind to a stage.
fn send_run(
    core: &StoreCore,
    stage: usize,
    run: &[KeyChange],
    deadline: Deadline,
) -> Result<(), TierError> {
    let (mut adds, mut removes) = (Vec::new(), Vec::new());
    for change in run {
        match *change {
            KeyChange::Add(facts, address) => adds.push((facts, address)),
            KeyChange::Remove(key, address) => removes.push((key, address)),
        }
    }
    if adds.is_empty() {
        core.stages[stage].remove(removes, deadline)
    } else {
        core.stages[stage].alias(adds, deadline)
    }
}

/// Stores a batch, and makes room for blocks that do not fit. Each round tries the blocks that
/// still lack room. It ends when all are stored, at the deadline, or after more than
/// [`INEFFECTIVE_ROUNDS_MAX`] rounds without progress. Progress is fewer blocks without room than
/// after any round before: where a batch does not fit as a whole, room for its last blocks is made
/// by dropping the first ones, which are then stored again, without end.
fn store_with_room(
    core: &Arc<StoreCore>,
    stage: usize,
    blocks: &[(BlockFacts, Slab)],
    deadline: Deadline,
) -> Vec<Result<Address, TierError>> {
    let mut results: Vec<_> = blocks.iter().map(|_| Err(TierError::Full)).collect();
    let mut remaining: Vec<usize> = (0..blocks.len()).collect();
    let mut fewest = remaining.len();
    let (mut ineffective, mut rounds) = (0, 0);
    while !remaining.is_empty() {
        let batch = remaining.iter().map(|at| blocks[*at].clone()).collect();
        let at = Arc::clone(core);
        let late = move |stored: Vec<_>| remove_late_stores(&at, stage, &stored);
        let stored = core.stages[stage].store(batch, deadline, late);
        for (at, result) in remaining.iter().zip(stored) {
            results[*at] = result;
        }
        remaining.retain(|at| matches!(results[*at], Err(TierError::Full)));
        let may_keep = rounds < KEEPING_ROUNDS_MAX;
        rounds += 1;
        // Rounds that keep blocks can free nothing; only those that keep none are counted.
        ineffective = if remaining.len() < fewest || may_keep { 0 } else { ineffective + 1 };
        fewest = fewest.min(remaining.len());
        let is_last = ineffective > INEFFECTIVE_ROUNDS_MAX || deadline.has_passed(&*core.clock);
        if remaining.is_empty() || is_last {
            break;
        }
        match make_room(core, stage, may_keep, deadline) {
            Ok(room) => remaining.extend(apply_room_to_batch(blocks, &room, &mut results)),
            Err(error) => {
                let mut state = core.lock();
                let signal = HealthSignal::of([Some(&error)].into_iter(), false);
                record_health(core, &mut state, stage, Direction::Writes, signal);
                state.note_error(stage, error);
                break;
            }
        }
    }
    results
}

/// Removes blocks that a stage stored after the call's deadline: the call has failed, so that they
/// are queued again or deleted by now.
fn remove_late_stores(core: &StoreCore, stage: usize, stored: &[(BlockKey, Address)]) {
    let mut state = core.lock();
    if !state.is_closed {
        for (key, address) in stored {
            state.push_key_change(stage, KeyChange::Remove(*key, *address));
        }
    }
    core.unlock(state);
}

/// Applies moves and drops to the results of this batch: making room for the rest can move or drop
/// blocks of the batch that are not in the catalog yet. Returns the blocks to store again.
fn apply_room_to_batch(
    blocks: &[(BlockFacts, Slab)],
    room: &MakeRoomOutcome,
    results: &mut [Result<Address, TierError>],
) -> Vec<usize> {
    let moved: HashMap<_, _> = room.moved.iter().map(|(_, old, new)| (*old, *new)).collect();
    let dropped: HashSet<_> = room.dropped.iter().copied().collect();
    let mut again = Vec::new();
    for (at, ((facts, _), result)) in blocks.iter().zip(results).enumerate() {
        let Ok(address) = *result else { continue };
        if dropped.contains(&(facts.key, address)) {
            *result = Err(TierError::Full);
            again.push(at);
        } else if let Some(new) = moved.get(&address) {
            *result = Ok(*new);
        }
    }
    again
}

/// Starts the mover thread of a stage.
pub(crate) fn start(
    core: &Arc<StoreCore>,
    stage: usize,
) -> std::io::Result<thread::JoinHandle<()>> {
    let core = Arc::clone(core);
    thread::Builder::new()
        .name(format!("cascade-mover-{}", core.stages[stage].name()))
        .spawn(move || run(&core, stage))
}

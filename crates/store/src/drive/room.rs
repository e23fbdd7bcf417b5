//! Makes room in a full stage. What that moved and dropped is applied to the catalog and to the
//! queued key changes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_runtime::{Deadline, Plant, is_planted};
use cascade_tier::tier::{Address, MakeRoomOutcome, TierError};

use crate::core::catalog::ContentIndex;
use crate::core::pending::KeyChange;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::hold::KEYS_PER_HOLD;

/// Asks a stage to free space. Applies what it moved and dropped to the catalog, and returns it. A
/// result after the deadline is applied when it comes, so that the catalog never keeps stale
/// addresses.
pub(super) fn make_room(
    core: &Arc<StoreCore>,
    stage: usize,
    may_keep: bool,
    deadline: Deadline,
) -> Result<MakeRoomOutcome, TierError> {
    let mut kept = HashMap::new();
    let (keeper, late_node) = (Arc::clone(core), Arc::clone(core));
    let keep = move |key: &BlockKey, _| should_keep(&keeper, stage, key, may_keep, &mut kept);
    let reclaim = Arc::clone(&core.lock().lower[stage].reclaim);
    let late_reclaim = Arc::clone(&reclaim);
    let late = move |room| {
        apply_room(&late_node, stage, &room);
        drop(late_reclaim);
    };
    let room = core.stages[stage].make_room(Box::new(keep), deadline, late)?;
    apply_room(core, stage, &room);
    drop(reclaim);
    Ok(room)
}

/// Whether reclaim keeps a block: if it was read since it was written there, is in DRAM, or is
/// protected. Decided once per content, so that all its keys are kept or dropped together.
fn should_keep(
    core: &StoreCore,
    stage: usize,
    key: &BlockKey,
    may_keep: bool,
    kept: &mut HashMap<(u32, u32), bool>,
) -> bool {
    let mut state = core.lock();
    let Some(found) = state.catalog.find(key) else { return false };
    let entry = state.catalog.entry(found);
    let (index, is_prefix) = (entry.content, entry.is_prefix());
    let content = state.catalog.content_mut(index);
    // Not in the catalog with this stage, such as a block of the batch that is being stored. If it
    // is dropped, the mover stores it again.
    if !content.has_address(stage) {
        return false;
    }
    *kept.entry((index.0, content.generation)).or_insert_with(|| {
        let was_referenced = content.referenced & (1 << stage) != 0;
        // A second chance: the next reclaim keeps the block only if it is read again by then.
        content.referenced &= !(1 << stage);
        let is_used = was_referenced || is_prefix || content.slab.is_some();
        let is_kept = may_keep && is_used;
        // From now on: a read can meet the dropped block before the stage reports it.
        content.was_reclaimed |= !is_kept;
        is_kept
    })
}

/// The new address of each moved block by its old one, and the addresses of dropped blocks.
pub(super) fn maps_of(room: &MakeRoomOutcome) -> (HashMap<Address, Address>, HashSet<Address>) {
    let moved = room.moved.iter().map(|(_, old, new)| (*old, *new)).collect();
    (moved, room.dropped.iter().map(|(_, address)| *address).collect())
}

/// Gives key changes the new addresses of their blocks, and removes the keys to be added to dropped
/// blocks. Returns these.
pub(super) fn apply_room_to_changes(
    changes: &mut Vec<KeyChange>,
    moved: &HashMap<Address, Address>,
    dropped: &HashSet<Address>,
) -> Vec<KeyChange> {
    let mut removed = Vec::new();
    changes.retain_mut(|change| apply_room_to_change(change, moved, dropped, &mut removed));
    removed
}

/// As `apply_room_to_changes`, for one change. Returns whether it is kept.
fn apply_room_to_change(
    change: &mut KeyChange,
    moved: &HashMap<Address, Address>,
    dropped: &HashSet<Address>,
    removed: &mut Vec<KeyChange>,
) -> bool {
    let (KeyChange::Add(_, address) | KeyChange::Remove(_, address)) = change;
    // First: if only some keys of a block did not fit, the block has moved all the same.
    if let Some(new) = moved.get(address) {
        *address = *new;
        return true;
    }
    let is_kept = !dropped.contains(address) || matches!(change, KeyChange::Remove(..));
    if !is_kept {
        removed.push(*change);
    }
    is_kept
}

/// Applies moves and drops to the queued key changes of a stage, one part in a hold of the lock.
fn apply_room_to_queue(core: &StoreCore, stage: usize, room: &MakeRoomOutcome) {
    let (moved, dropped) = maps_of(room);
    let mut state = core.lock_for(KEYS_PER_HOLD);
    // Those that are queued from now on have the new addresses already.
    let (mut next, end) = (i64::MIN, state.lower[stage].key_changes.end());
    state.lower[stage].translations += 1;
    while next < end {
        let mut removed = Vec::new();
        let apply =
            |change: &mut KeyChange| apply_room_to_change(change, &moved, &dropped, &mut removed);
        let Some((after, length)) = state.lower[stage].key_changes.retain_part(next, apply) else {
            break;
        };
        next = after;
        state.charge(u32::try_from(length).unwrap_or(u32::MAX));
        state.settle_key_changes(stage, &removed);
        state = core.end_full_hold(state);
    }
    state.lower[stage].translations -= 1;
    drop(state);
    core.notify_movers();
}

/// Applies moves and drops of a stage to the catalog and the queued key changes.
fn apply_room(core: &StoreCore, stage: usize, room: &MakeRoomOutcome) {
    if !is_planted(Plant::StaleAddress) {
        core.in_holds(None, &room.moved, |state, (key, old, new)| {
            if let Some(content) = content_at(state, stage, key, *old) {
                state.set_address(content, stage, *new);
            }
        });
    }
    let names: HashSet<_> = room.dropped.iter().copied().collect();
    core.in_holds(None, &room.dropped, |state, (key, address)| {
        state.counters.reclaimed_blocks += 1;
        // The first dropped key of a content clears the address; for its other keys there is
        // nothing left to do.
        if let Some(content) = content_at(state, stage, key, *address) {
            state.forget_dropped(stage, (content, *address), &names);
        }
    });
    apply_room_to_pending(core, stage, room, &names);
    // Last: until here, changes with the old addresses were queued.
    apply_room_to_queue(core, stage, room);
    core.notify_changed();
}

/// Applies moves and drops to contents whose keys the stage has yet to record. It cannot name them:
/// it knows such a content by a key that was deleted.
fn apply_room_to_pending(
    core: &StoreCore,
    stage: usize,
    room: &MakeRoomOutcome,
    names: &HashSet<(BlockKey, Address)>,
) {
    let (moved, dropped) = maps_of(room);
    let mut last = None;
    loop {
        let mut state = core.lock_for(KEYS_PER_HOLD);
        let (places, next) = state.lower[stage].additions.places_after(last.as_ref());
        for place in places {
            if state.catalog.live_content(place).is_none() {
                continue;
            }
            let Some(address) = state.catalog.address(place.0, stage) else { continue };
            if let Some(new) = moved.get(&address) {
                state.set_address(place.0, stage, *new);
            } else if dropped.contains(&address) {
                state.forget_dropped(stage, (place.0, address), names);
            }
        }
        if next.is_none() {
            return;
        }
        last = next;
    }
}

/// The content of a key, if the stage has it at this address; not if it was moved or deleted since.
fn content_at(
    state: &mut StoreState,
    stage: usize,
    key: &BlockKey,
    address: Address,
) -> Option<ContentIndex> {
    // Also of a cleared key: the address will be in the removal that its stage gets.
    let catalog = &state.catalog;
    let found = catalog.find(key).or_else(|| catalog.find_cleared(key))?;
    let index = state.catalog.entry(found).content;
    (state.catalog.address(index, stage) == Some(address)).then_some(index)
}

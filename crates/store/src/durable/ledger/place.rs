//! Places of the ledger's table: how words are stored so that a kill at any time leaves a place
//! valid, free or damaged.

use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use cascade_block::checksum;

/// Most words under the checksum of a place.
pub(super) const FIELDS_MAX: usize = 18;

/// Flag in a record's first word; the lower half has the record's checksum.
pub(super) const LIVE: u64 = 1 << 32;

/// Content of a record's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PlaceContent<T> {
    /// Nothing.
    Free,
    /// A valid record.
    Record(T),
    /// A record with a wrong checksum.
    Damaged,
}

/// The state word of a record with these fields.
pub(super) fn seal(fields: &[u64]) -> u64 {
    let mut bytes = [0; FIELDS_MAX * 8];
    for (piece, field) in bytes.chunks_exact_mut(8).zip(fields) {
        piece.copy_from_slice(&field.to_le_bytes());
    }
    // `LIVE` keeps the word from being zero, which means free, when the checksum is zero.
    LIVE | u64::from(checksum(&bytes[..fields.len() * 8]))
}

/// Stores a word of the ledger. Tests end a process at each of these.
pub(super) fn set(word: &AtomicU64, value: u64, ordering: Ordering) {
    #[cfg(test)]
    if !super::kills::may_store() {
        return;
    }
    word.store(value, ordering);
}

/// Writes a record with these fields. `kind` is set in its state word.
pub(super) fn publish(place: &[AtomicU64], fields: &[u64], kind: u64) {
    publish_as(place, fields, seal(fields) | kind);
}

/// Writes the fields first, then the state word that makes them valid: a process killed in between
/// leaves the place free, as it was.
pub(super) fn publish_as(place: &[AtomicU64], fields: &[u64], state: u64) {
    for (word, field) in place[1..].iter().zip(fields) {
        set(word, *field, Ordering::Relaxed);
    }
    // Release: no store of a field may come after this one.
    set(&place[0], state, Ordering::Release);
}

/// Frees a place. Later stores must not come before it, also as seen by the process that recovers
/// the memory after this one is killed. The kernel kills between two instructions, so only the
/// compiler could reorder them; hence the compiler fence, and no fence for other CPUs.
pub(super) fn clear(place: &[AtomicU64]) {
    set(&place[0], 0, Ordering::Release);
    compiler_fence(Ordering::SeqCst);
}

/// Zeroes a place that was cleared.
pub(super) fn wipe(place: &[AtomicU64]) {
    clear(place);
    for word in &place[1..] {
        set(word, 0, Ordering::Relaxed);
    }
}

pub(super) fn read_fields<const FIELDS: usize>(
    place: &[AtomicU64],
    kind: u64,
) -> PlaceContent<[u64; FIELDS]> {
    let state = place[0].load(Ordering::Acquire);
    if state == 0 {
        return PlaceContent::Free;
    }
    // Relaxed: the load of the state word orders them.
    let fields = std::array::from_fn(|at| place[1 + at].load(Ordering::Relaxed));
    if seal(&fields) | kind == state { PlaceContent::Record(fields) } else { PlaceContent::Damaged }
}

//! Addresses of a block in lower tiers, in the records of the ledger.
//!
//! They change while a record is live, so its checksum does not cover them. Each has a check of its
//! own over the address, the tier and the record that it belongs to. A flipped bit, or a kill
//! between the stores of address and check, loses that address, and the restart treats the block
//! as missing in that tier.
//!
//! The record of a block has the addresses in the first two tiers of the ledger. The others are in
//! a second record, the continuation, which the block's record links. It is complete before it is
//! linked, and freed after the block's record: one that no record links is left by a kill.

use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::checksum;

use super::place::{PlaceContent, clear, publish, read_fields, set};
use crate::core::catalog::LOWER_STAGES_MAX;

/// The addresses in the tiers of the ledger, plus one; zero where there is none.
pub(super) type Stored = [u64; LOWER_STAGES_MAX];

/// Tiers whose addresses are in the record of the block.
pub(super) const INLINE_TIERS: usize = 2;
/// Word with the checks of the addresses, the first in the lower half.
const CHECKS_WORD: usize = 19;
/// First word of the addresses.
const ADDRESS_WORD: usize = 20;
/// Word with 1 + the place of the continuation; zero where there is none.
const LINK_WORD: usize = 23;

/// Flag in the first word of a continuation.
const CONTINUES: u64 = 1 << 33;
const OUTSIDE_TIERS: usize = LOWER_STAGES_MAX - INLINE_TIERS;
/// Words under the checksum of a continuation: the place of the block's record and its first word.
const CONTINUATION_FIELDS: usize = 2;
/// First word of the addresses in a continuation.
const OUTSIDE_ADDRESS_WORD: usize = 1 + CONTINUATION_FIELDS;
/// First word of their checks.
const OUTSIDE_CHECK_WORD: usize = OUTSIDE_ADDRESS_WORD + OUTSIDE_TIERS;

/// The check of an address in a tier, of the block whose record has this first word.
fn check(stored: u64, tier: usize, owner: u64) -> u64 {
    let mut bytes = [0; 24];
    for (piece, word) in bytes.chunks_exact_mut(8).zip([owner, tier as u64, stored]) {
        piece.copy_from_slice(&word.to_le_bytes());
    }
    u64::from(checksum(&bytes))
}

fn with_check(checks: u64, tier: usize, check: u64) -> u64 {
    let shift = 32 * tier;
    checks & !(u64::from(u32::MAX) << shift) | check << shift
}

/// Stores the addresses of a record before it is published. `owner` is the first word that it will
/// have. It has no continuation yet.
pub(super) fn write_inline(place: &[AtomicU64], owner: u64, stored: &Stored) {
    let mut checks = 0;
    for (tier, stored) in stored.iter().enumerate().take(INLINE_TIERS) {
        set(&place[ADDRESS_WORD + tier], *stored, Ordering::Relaxed);
        if *stored != 0 {
            checks = with_check(checks, tier, check(*stored, tier, owner));
        }
    }
    set(&place[CHECKS_WORD], checks, Ordering::Relaxed);
    set(&place[LINK_WORD], 0, Ordering::Relaxed);
}

/// Stores an address in a live record, for one of the first tiers.
pub(super) fn note_inline(place: &[AtomicU64], tier: usize, stored: u64) {
    let owner = place[0].load(Ordering::Relaxed);
    set(&place[ADDRESS_WORD + tier], stored, Ordering::Release);
    let checks = place[CHECKS_WORD].load(Ordering::Relaxed);
    let checks = with_check(checks, tier, check(stored, tier, owner));
    set(&place[CHECKS_WORD], checks, Ordering::Release);
}

/// The addresses in the record of a block, without those that do not match their checks.
pub(super) fn read_inline(place: &[AtomicU64]) -> Stored {
    let owner = place[0].load(Ordering::Relaxed);
    let checks = place[CHECKS_WORD].load(Ordering::Relaxed);
    let mut stored = Stored::default();
    for (tier, stored) in stored.iter_mut().enumerate().take(INLINE_TIERS) {
        let address = place[ADDRESS_WORD + tier].load(Ordering::Relaxed);
        if checks >> (32 * tier) & u64::from(u32::MAX) == check(address, tier, owner) {
            *stored = address;
        }
    }
    stored
}

/// Removes an address in one of the first tiers.
pub(super) fn clear_inline(place: &[AtomicU64], tier: usize) {
    set(&place[ADDRESS_WORD + tier], 0, Ordering::Release);
}

/// The place that a record names as its continuation. Only recovery reads it, and checks it.
pub(super) fn link_of(place: &[AtomicU64]) -> Option<u32> {
    let link = place[LINK_WORD].load(Ordering::Relaxed);
    link.checked_sub(1).and_then(|at| u32::try_from(at).ok())
}

/// Links a continuation that is complete.
pub(super) fn link(place: &[AtomicU64], continuation: u32) {
    set(&place[LINK_WORD], 1 + u64::from(continuation), Ordering::Release);
}

/// Removes the link to a continuation that is not valid.
pub(super) fn unlink(place: &[AtomicU64]) {
    set(&place[LINK_WORD], 0, Ordering::Release);
}

/// Whether a place has a continuation, valid or not.
pub(super) fn is_continuation(place: &[AtomicU64]) -> bool {
    place[0].load(Ordering::Acquire) & CONTINUES != 0
}

/// Writes a continuation for the block whose record is at `owner` and has the first word `state`.
pub(super) fn write_outside(place: &[AtomicU64], (owner, state): (u32, u64), stored: &Stored) {
    for (at, stored) in stored.iter().enumerate().skip(INLINE_TIERS) {
        let outside = at - INLINE_TIERS;
        set(&place[OUTSIDE_ADDRESS_WORD + outside], *stored, Ordering::Relaxed);
        set(&place[OUTSIDE_CHECK_WORD + outside], check(*stored, at, state), Ordering::Relaxed);
    }
    publish(place, &[u64::from(owner), state], CONTINUES);
}

/// Stores an address in a live continuation.
pub(super) fn note_outside(place: &[AtomicU64], tier: usize, stored: u64) {
    let outside = tier - INLINE_TIERS;
    let state = place[CONTINUATION_FIELDS].load(Ordering::Relaxed);
    set(&place[OUTSIDE_ADDRESS_WORD + outside], stored, Ordering::Release);
    set(&place[OUTSIDE_CHECK_WORD + outside], check(stored, tier, state), Ordering::Release);
}

/// Removes an address in a continuation.
pub(super) fn clear_outside(place: &[AtomicU64], tier: usize) {
    set(&place[OUTSIDE_ADDRESS_WORD + tier - INLINE_TIERS], 0, Ordering::Release);
}

/// Adds the addresses in a continuation to those of the block whose record it continues. Returns
/// false if it is damaged, or continues another record.
pub(super) fn read_outside(
    place: &[AtomicU64],
    (owner, state): (u32, u64),
    stored: &mut Stored,
) -> bool {
    let content = read_fields::<CONTINUATION_FIELDS>(place, CONTINUES);
    if content != PlaceContent::Record([u64::from(owner), state]) {
        return false;
    }
    for (at, stored) in stored.iter_mut().enumerate().skip(INLINE_TIERS) {
        let outside = at - INLINE_TIERS;
        let address = place[OUTSIDE_ADDRESS_WORD + outside].load(Ordering::Relaxed);
        let is_right = place[OUTSIDE_CHECK_WORD + outside].load(Ordering::Relaxed)
            == check(address, at, state);
        *stored = if is_right { address } else { 0 };
    }
    true
}

/// Frees a continuation that no record links any more. Returns whether it was damaged.
pub(super) fn free_continuation(place: &[AtomicU64]) -> bool {
    let content = read_fields::<CONTINUATION_FIELDS>(place, CONTINUES);
    clear(place);
    content == PlaceContent::Damaged
}

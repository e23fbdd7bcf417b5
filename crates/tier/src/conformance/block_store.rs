//! Conformance checks of a block store, embedded or served: checks over [`BlockStore`].
//!
//! Each check runs on a fresh store and panics on a violation. Call [`all`] from a test. The bytes
//! of a block are a function of its key, so that every read is compared in full.

mod lengths;
mod prepared;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, TenantSecret};
use cascade_memory::Slab;
use cascade_runtime::{Deadline, SystemClock, yield_now};

use crate::{
    BlockStore, CallOptions, Change, ChangeCursor, DeclineReason, GetOutcome, Put, PutOutcome,
    PutSlab, Request, StoreCounters, StoreError, TierName, ViewOutcome,
};

/// A fresh store under test, with a pool of [`DRAM_BYTES`].
pub struct Subject {
    /// The store.
    pub store: Box<dyn BlockStore>,
    /// Reads the counters of the store; for a served store, of its node.
    pub counters: Box<dyn Fn() -> StoreCounters>,
    /// Whether the store deduplicates equal bytes under two keys.
    pub deduplicates: bool,
    /// The tier of the store's own memory: `dram`, or `hbm` on a device.
    pub memory: TierName,
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subject({:?})", self.store)
    }
}

/// Size of the pool that the checks need.
pub const DRAM_BYTES: u64 = 64 << 20;

/// Sizes of blocks: empty, one byte, one page, more than one page, large.
const SIZES: [usize; 5] = [0, 1, 4096, 5000, 1 << 20];
/// How long a check waits for a background event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(20);
/// With a long timeout: on a slow disk, a write-through put of many blocks takes longer than the
/// default.
const NOW: CallOptions = CallOptions { timeout: Some(Duration::from_secs(600)), writer: None };

type Check = fn(&Subject);

/// Runs every check, each on a fresh store.
///
/// # Panics
/// If the store violates a check.
pub fn all(open: &mut dyn FnMut() -> Subject) {
    let checks: [Check; 30] = [
        a_fresh_store_is_empty,
        a_stored_block_is_read_back,
        batches_have_any_length,
        a_key_keeps_its_bytes,
        a_key_twice_in_a_batch_is_stored_once,
        a_buffer_is_never_overrun,
        slabs_are_written_in_place,
        a_chain_matches_from_its_root,
        pins_are_counted,
        a_deleted_block_is_a_miss_and_its_views_stay_valid,
        a_cleared_store_is_empty,
        a_block_expires,
        a_declined_block_has_a_reason,
        equal_bytes_are_deduplicated_with_digests,
        an_evicted_block_is_a_miss_or_in_a_lower_tier,
        registered_manifests_are_listed,
        a_follower_of_changes_has_the_exact_set,
        calls_with_a_zero_timeout_lose_no_blocks,
        prepared::a_prepared_block_is_read_back_once_sealed,
        prepared::a_prepared_key_that_is_present_is_counted_once,
        prepared::dropped_slabs_are_returned_and_not_counted,
        prepared::the_first_of_two_preparers_to_seal_stores_the_block,
        prepared::a_declined_block_gets_no_slab,
        prepared::preparing_with_a_zero_timeout_leaks_no_slabs,
        prepared::a_closed_store_prepares_and_seals_nothing,
        a_closed_store_fails_every_call,
        lengths::a_chain_of_any_length_is_acquired,
        lengths::every_call_accepts_a_batch_of_any_length,
        lengths::any_number_of_slabs_is_prepared_and_sealed,
        lengths::every_call_on_a_closed_store_returns,
    ];
    for check in checks {
        let subject = open();
        check(&subject);
        counters_add_up(&(subject.counters)());
    }
    every_outcome_is_counted_once(&open());
}

/// Key number `n`.
pub fn key(n: u64) -> BlockKey {
    let mut bytes = [0x5A; 32];
    bytes[..8].copy_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    bytes[8..16].copy_from_slice(&n.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

/// The keys with these numbers.
pub fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
    range.map(key).collect()
}

/// The bytes of a block, a function of its key.
pub fn bytes_of(key: &BlockKey, length: usize) -> Vec<u8> {
    let mut state = key.fingerprint() | 1;
    let mut bytes = vec![0; length.next_multiple_of(8)];
    // The tests spend much of their time here: without optimisation a vector grows slowly.
    for word in bytes.as_chunks_mut().0 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *word = (state ^ (state >> 29)).to_le_bytes();
    }
    bytes.truncate(length);
    bytes
}

impl Subject {
    fn put(&self, keys: &[BlockKey], length: usize) -> Vec<PutOutcome> {
        let bytes: Vec<_> = keys.iter().map(|key| bytes_of(key, length)).collect();
        let batch: Vec<_> = keys.iter().zip(&bytes).map(|(key, b)| Put::new(*key, b)).collect();
        let outcomes = self.store.put(&batch, NOW);
        assert_eq!(outcomes.len(), keys.len(), "one outcome for each block");
        outcomes
    }

    fn put_new(&self, keys: &[BlockKey], length: usize) {
        let outcomes = self.put(keys, length);
        let is_stored = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Stored);
        let unexpected = outcomes.iter().find(|outcome| !is_stored(outcome));
        assert!(unexpected.is_none(), "{unexpected:?} of {} blocks of {length} bytes", keys.len());
    }

    /// The tier that each block was read from; every byte is compared.
    fn read(&self, keys: &[BlockKey]) -> Vec<Option<TierName>> {
        let views = self.store.view(keys, NOW);
        assert_eq!(views.len(), keys.len(), "one view for each block");
        keys.iter().zip(views).map(|(key, view)| tier_of(key, view)).collect()
    }

    fn has_all(&self, keys: &[BlockKey]) -> bool {
        self.read(keys).iter().all(Option::is_some)
    }
}

fn has_bytes(slab: &Slab, bytes: &[u8]) -> bool {
    slab.bytes_or_copy().is_ok_and(|found| *found == *bytes)
}

fn tier_of(key: &BlockKey, view: ViewOutcome) -> Option<TierName> {
    match view {
        ViewOutcome::Hit { slab, tier } => {
            assert!(
                has_bytes(&slab, &bytes_of(key, slab.len())),
                "wrong bytes for {key} from {tier}"
            );
            Some(tier)
        }
        ViewOutcome::Miss => None,
        ViewOutcome::Failed(error) => panic!("{key}: {error}"),
    }
}

fn counters_add_up(counters: &StoreCounters) {
    let StoreCounters { gets, hits, misses, get_failures, .. } = counters;
    assert_eq!(*gets, hits + misses + get_failures, "reads: {counters:?}");
    let StoreCounters { puts, stored, deduplicated, present, .. } = counters;
    let accepted = stored + deduplicated + present;
    let refused = counters.conflicts + counters.declined + counters.put_failures;
    assert_eq!(*puts, accepted + refused, "puts: {counters:?}");
}

fn a_fresh_store_is_empty(subject: &Subject) {
    let (store, keys) = (&subject.store, keys(0..3));
    assert!(!subject.has_all(&keys));
    assert_eq!(store.contains(&keys), [false; 3]);
    assert_eq!(store.locate(&keys), [[""; 0]; 3]);
    assert_eq!(store.pin(&keys), [false; 3]);
    assert_eq!(store.unpin(&keys), [false; 3]);
    assert_eq!(store.delete(&keys), [false; 3]);
    assert_eq!(store.prefetch(&keys), 0);
    assert!(store.lookup_prefix(&Request::new(&keys)).tiers.is_empty());
    assert!(store.acquire(&Request::new(&keys), NOW).is_empty());
    store.flush(NOW).expect("there is nothing to write");
    store.clear();
}

fn a_stored_block_is_read_back(subject: &Subject) {
    for (first, length) in (0..).step_by(10).zip(SIZES) {
        let keys = keys(first..first + 3);
        let outcomes = subject.put(&keys, length);
        // A tier may refuse an empty block; with write-through, the put then fails.
        if length == 0 && matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { .. })) {
            continue;
        }
        let is_taken = |o: &PutOutcome| matches!(o, PutOutcome::Stored | PutOutcome::Deduplicated);
        assert!(outcomes.iter().all(is_taken), "{outcomes:?} of {length} bytes");
        let tiers = subject.read(&keys);
        assert!(
            tiers.iter().all(|tier| *tier == Some(subject.memory)),
            "{length} bytes: {tiers:?}"
        );
        let mut buffers = vec![vec![0; length]; 3];
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        for outcome in subject.store.get(&keys, &mut slices, NOW) {
            assert!(
                matches!(outcome, GetOutcome::Hit { bytes, .. } if bytes == length),
                "{outcome:?}"
            );
        }
        for (key, buffer) in keys.iter().zip(&buffers) {
            assert!(*buffer == bytes_of(key, length), "{length} bytes of {key}");
        }
        assert_eq!(subject.store.contains(&keys), [true; 3]);
        let located = subject.store.locate(&keys);
        assert!(located.iter().all(|tiers| tiers.first() == Some(&subject.memory)), "{located:?}");
    }
    subject.store.flush(NOW).expect("every tier can store the blocks");
}

fn batches_have_any_length(subject: &Subject) {
    let mut first = 0;
    for count in [0, 1, 300, 5000] {
        let keys = keys(first..first + count);
        first += count;
        subject.put_new(&keys, 512);
        assert!(subject.has_all(&keys), "{count} blocks");
        assert_eq!(subject.store.contains(&keys).len(), keys.len());
        let again = subject.put(&keys, 512);
        let is_present = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Present);
        assert!(again.iter().all(is_present), "{count} blocks again");
        let found = subject.store.lookup_prefix(&Request::new(&keys));
        assert_eq!(found.tiers.len(), keys.len());
        let mut buffers = vec![[0; 512]; keys.len()];
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(<[u8; 512]>::as_mut).collect();
        let read = subject.store.get(&keys, &mut slices, NOW);
        assert!(read.iter().all(|outcome| matches!(outcome, GetOutcome::Hit { .. })));
        assert!(keys.iter().zip(&buffers).all(|(key, buffer)| bytes_of(key, 512) == buffer));
    }
}

fn a_key_keeps_its_bytes(subject: &Subject) {
    let key = key(1);
    subject.put_new(&[key], 4096);
    for other in [vec![7; 4096], vec![7; 100], Vec::new()] {
        let outcomes = subject.store.put(&[Put::new(key, &other)], NOW);
        assert!(matches!(outcomes[0], PutOutcome::Conflict), "{outcomes:?}");
    }
    assert!(subject.has_all(&[key]), "the first bytes stay");
}

fn a_key_twice_in_a_batch_is_stored_once(subject: &Subject) {
    let outcomes = subject.put(&[key(1), key(2), key(1)], 4096);
    let [PutOutcome::Stored, PutOutcome::Stored, PutOutcome::Present] = outcomes[..] else {
        panic!("{outcomes:?}");
    };
    assert!(subject.has_all(&[key(1), key(2), key(1)]));
}

fn a_buffer_is_never_overrun(subject: &Subject) {
    let key = key(1);
    subject.put_new(&[key], 5000);
    let (mut short, mut long) = ([0xEE; 4999], [0xEE; 6000]);
    let mut buffers: [&mut [u8]; 2] = [&mut short, &mut long];
    let outcomes = subject.store.get(&[key, key], &mut buffers, NOW);
    assert!(matches!(outcomes[0], GetOutcome::TooShort { needed_bytes: 5000 }), "{outcomes:?}");
    assert!(matches!(outcomes[1], GetOutcome::Hit { bytes: 5000, .. }), "{outcomes:?}");
    assert!(short.iter().all(|byte| *byte == 0xEE), "nothing is written into a short buffer");
    assert!(long[..5000] == *bytes_of(&key, 5000));
    assert!(long[5000..].iter().all(|byte| *byte == 0xEE), "nothing after the block");
}

fn slabs_are_written_in_place(subject: &Subject) {
    let keys = keys(0..2);
    let slab = |key: &BlockKey, length: usize| {
        let mut slab = subject.store.reserve(length, NOW).expect("the store is empty");
        slab.fill_from(&bytes_of(key, length)).expect("host memory never fails");
        slab
    };
    drop(slab(&keys[0], 5000));
    let mut longer = subject.store.reserve(8000, NOW).expect("the store is empty");
    longer.truncate(5000);
    longer.fill_from(&bytes_of(&keys[1], 5000)).expect("host memory never fails");
    let batch = vec![PutSlab::new(keys[0], slab(&keys[0], 5000)), PutSlab::new(keys[1], longer)];
    let outcomes = subject.store.put_slabs(batch, NOW);
    assert!(matches!(outcomes[..], [PutOutcome::Stored, PutOutcome::Stored]), "{outcomes:?}");
    assert!(subject.has_all(&keys));
    let again = vec![PutSlab::new(keys[0], slab(&keys[0], 5000))];
    let outcomes = subject.store.put_slabs(again, NOW);
    assert!(matches!(outcomes[..], [PutOutcome::Present]), "{outcomes:?}");
    let other = vec![PutSlab::new(keys[0], slab(&keys[1], 5000))];
    let outcomes = subject.store.put_slabs(other, NOW);
    assert!(matches!(outcomes[..], [PutOutcome::Conflict]), "{outcomes:?}");
    assert!(subject.store.put_slabs(Vec::new(), NOW).is_empty());
    let error = subject.store.reserve(1 << 40, NOW).expect_err("no pool is that large");
    assert!(matches!(error, StoreError::Config { setting: "dram", .. }), "{error:?}");
}

fn a_chain_matches_from_its_root(subject: &Subject) {
    let chain = keys(0..8);
    let bytes: Vec<_> = chain.iter().map(|key| bytes_of(key, 4096)).collect();
    let put = |at: usize| Put {
        parent: at.checked_sub(1).map(|before| chain[before]),
        is_prefix: at < 2,
        ..Put::new(chain[at], &bytes[at])
    };
    let batch: Vec<_> = [0, 1, 2, 3, 5, 6].map(put).into();
    let outcomes = subject.store.put(&batch, NOW);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored)), "{outcomes:?}");
    let found = subject.store.lookup_prefix(&Request::new(&chain));
    assert_eq!(found.tiers, [subject.memory; 4], "it ends at the first gap");
    let views = subject.store.acquire(&Request::new(&chain), NOW);
    assert_eq!(views.len(), 4);
    assert!(chain.iter().zip(views).all(|(key, view)| tier_of(key, view).is_some()));
    subject.store.hint(&Request::new(&chain));
}

fn pins_are_counted(subject: &Subject) {
    let (store, key) = (&subject.store, key(1));
    subject.put_new(&[key], 4096);
    assert_eq!([store.pin(&[key]), store.pin(&[key])], [[true], [true]]);
    assert_eq!([store.unpin(&[key]), store.unpin(&[key])], [[true], [true]]);
    assert_eq!(store.unpin(&[key]), [false], "as often as it was pinned");
    assert_eq!(store.pin(&[key]), [true]);
    assert_eq!(store.delete(&[key]), [true], "pinned ones too");
    assert_eq!(store.unpin(&[key]), [false], "its pins went with it");
    subject.put_new(&[key], 4096);
    assert_eq!(store.unpin(&[key]), [false], "the new block was never pinned");
}

fn a_deleted_block_is_a_miss_and_its_views_stay_valid(subject: &Subject) {
    let (store, keys) = (&subject.store, keys(0..2));
    subject.put_new(&keys, 4096);
    let views = store.view(&keys, NOW);
    assert_eq!(store.delete(&[keys[0], key(9)]), [true, false]);
    assert_eq!(store.contains(&keys), [false, true]);
    // Fill DRAM several times over: the memory of the views must not be reused.
    for first in (100..400).step_by(4) {
        subject.put(&(first..first + 4).map(key).collect::<Vec<_>>(), 1 << 18);
    }
    for (key, view) in keys.iter().zip(views) {
        assert!(tier_of(key, view).is_some(), "a view's bytes stay while it is held");
    }
    assert_eq!(subject.read(&keys[..1]), [None]);
    let other = vec![3; 100];
    let outcomes = store.put(&[Put::new(keys[0], &other)], NOW);
    assert!(matches!(outcomes[0], PutOutcome::Stored | PutOutcome::Declined(_)), "{outcomes:?}");
}

fn a_cleared_store_is_empty(subject: &Subject) {
    let keys = keys(0..300);
    subject.put_new(&keys, 512);
    subject.store.clear();
    assert!(subject.store.contains(&keys).iter().all(|is_there| !is_there));
    assert!(subject.read(&keys).iter().all(Option::is_none));
    subject.put_new(&keys, 512);
    assert!(subject.has_all(&keys));
}

fn a_block_expires(subject: &Subject) {
    let (short, long) = (key(1), key(2));
    let bytes = [bytes_of(&short, 100), bytes_of(&long, 100)];
    let batch = [
        Put { ttl_ms: Some(1), ..Put::new(short, &bytes[0]) },
        Put { ttl_ms: Some(3_600_000), ..Put::new(long, &bytes[1]) },
    ];
    let outcomes = subject.store.put(&batch, NOW);
    assert!(matches!(outcomes[..], [PutOutcome::Stored, PutOutcome::Stored]), "{outcomes:?}");
    let deadline = Deadline::after(&SystemClock, EVENT_TIMEOUT);
    while subject.read(&[short])[0].is_some() {
        assert!(!deadline.remaining(&SystemClock).is_zero(), "the block does not expire");
        yield_now();
    }
    assert_eq!(subject.store.contains(&[short, long]), [false, true]);
    assert!(subject.has_all(&[long]));
}

fn a_declined_block_has_a_reason(subject: &Subject) {
    let bytes = bytes_of(&key(1), 4096);
    let partial = Put { is_partial: true, ..Put::new(key(1), &bytes) };
    let outcomes = subject.store.put(&[partial], NOW);
    assert!(matches!(outcomes[..], [PutOutcome::Declined(DeclineReason::Partial)]), "{outcomes:?}");
    let length = usize::try_from(DRAM_BYTES).expect("the pool is small") + 1;
    let outcomes = subject.put(&[key(2)], length);
    assert!(
        matches!(outcomes[..], [PutOutcome::Declined(DeclineReason::TooLarge)]),
        "{outcomes:?}"
    );
    assert_eq!(subject.store.contains(&[key(1), key(2)]), [false, false]);
}

fn equal_bytes_are_deduplicated_with_digests(subject: &Subject) {
    let bytes = vec![42; 4096];
    let batch = [Put::new(key(1), &bytes), Put::new(key(2), &bytes)];
    let outcomes = subject.store.put(&batch, NOW);
    let [PutOutcome::Stored, second] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(
        matches!(second, PutOutcome::Deduplicated),
        subject.deduplicates,
        "{outcomes:?} with a digest: {}",
        subject.deduplicates
    );
    for view in subject.store.view(&[key(1), key(2)], NOW) {
        assert!(
            matches!(&view, ViewOutcome::Hit { slab, .. } if has_bytes(slab, &bytes)),
            "{view:?}"
        );
    }
}

fn an_evicted_block_is_a_miss_or_in_a_lower_tier(subject: &Subject) {
    let keys = keys(0..96);
    for some in keys.chunks(8) {
        let outcomes = subject.put(some, 1 << 20);
        let has_failed = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Failed(_));
        assert!(!outcomes.iter().any(has_failed), "{outcomes:?}");
    }
    subject.store.flush(NOW).expect("every tier can store the blocks");
    let located = subject.store.locate(&keys);
    let below: Vec<BlockKey> = keys
        .iter()
        .zip(&located)
        .filter(|(_, tiers)| tiers.first().is_some_and(|tier| *tier != subject.memory))
        .map(|(key, _)| *key)
        .collect();
    assert!(subject.store.prefetch(&below) <= below.len());
    for (some, located) in keys.chunks(4).zip(located.chunks(4)) {
        for (tier, located) in subject.read(some).into_iter().zip(located) {
            assert_eq!(
                tier.is_some(),
                !located.is_empty(),
                "a block is read exactly if it is located"
            );
        }
    }
}

fn registered_manifests_are_listed(subject: &Subject) {
    let manifest = Manifest::new().with("weights", "conformance").with("dtype", "bf16");
    let namespace = Namespace::new(manifest.clone(), &TenantSecret::new("secret"));
    subject.store.register(&namespace, NOW).expect("every tier stores it or ignores it");
    let listed = subject.store.manifests(NOW).expect("every tier lists its manifests");
    let found = listed.iter().find(|(id, _)| *id == namespace.id());
    let is_listed = found.is_some_and(|(_, listed)| *listed == manifest);
    assert!(listed.is_empty() || is_listed, "{listed:?}");
}

fn a_follower_of_changes_has_the_exact_set(subject: &Subject) {
    let (store, keys) = (&subject.store, keys(0..100));
    let (mut present, mut cursor) = (BTreeSet::new(), None);
    let mut follow = |max: usize| {
        let mut all_changes = Vec::new();
        loop {
            let answer = store.changes(cursor, max).expect("the store has a change log");
            assert!(!answer.is_lost && answer.changes.len() <= max, "{answer:?}");
            for change in &answer.changes {
                match change {
                    Change::Stored(key) => drop(present.insert(*key)),
                    Change::Removed(key) => drop(present.remove(key)),
                    Change::Cleared => present.clear(),
                }
            }
            all_changes.extend(answer.changes);
            cursor = Some(answer.next);
            if answer.is_current {
                return (all_changes, present.clone());
            }
        }
    };
    assert_eq!(follow(7).1.len(), 0);
    subject.put_new(&keys, 512);
    let all: BTreeSet<BlockKey> = keys.iter().copied().collect();
    assert_eq!(follow(7).1, all);
    assert_eq!(follow(7).0, [], "nothing has changed");
    store.delete(&keys[..2]);
    store.clear();
    subject.put_new(&keys[5..6], 512);
    let (changes, present) = follow(1 << 20);
    let expected = [
        Change::Removed(keys[0]),
        Change::Removed(keys[1]),
        Change::Cleared,
        Change::Stored(keys[5]),
    ];
    assert_eq!(changes, expected);
    assert_eq!(present, [keys[5]].into());
    let foreign = ChangeCursor::from_bytes([7; ChangeCursor::BYTES]);
    let answer = store.changes(Some(foreign), 10).expect("any cursor is valid");
    assert!(answer.is_lost && answer.is_current, "{answer:?}");
    assert_eq!(answer.changes, [Change::Stored(keys[5])]);
}

fn calls_with_a_zero_timeout_lose_no_blocks(subject: &Subject) {
    let none = CallOptions { timeout: Some(Duration::ZERO), writer: None };
    let keys = keys(0..50);
    subject.put_new(&keys[..40], 4096);
    for _ in 0..20 {
        for (key, view) in keys.iter().zip(subject.store.view(&keys, none)) {
            match view {
                ViewOutcome::Failed(
                    StoreError::Timeout { .. } | StoreError::Unavailable { .. },
                ) => {}
                other => drop(tier_of(key, other)),
            }
        }
        drop(subject.store.reserve(4096, none));
        let bytes = bytes_of(&keys[45], 4096);
        drop(subject.store.put(&[Put::new(keys[45], &bytes)], none));
        drop(subject.store.acquire(&Request::new(&keys), none));
    }
    // Late calls may still hold blocks for a moment: then every block can be read again.
    let deadline = Deadline::after(&SystemClock, EVENT_TIMEOUT);
    while !subject.has_all(&keys[..40]) {
        assert!(!deadline.remaining(&SystemClock).is_zero(), "the blocks cannot be read again");
        yield_now();
    }
}

fn a_closed_store_fails_every_call(subject: &Subject) {
    let (store, keys) = (&subject.store, keys(0..2));
    subject.put_new(&keys, 4096);
    let views = store.view(&keys, NOW);
    store.close().expect("every tier can store the blocks");
    store.close().expect("a second close does nothing");
    for outcome in subject.put(&keys, 4096) {
        assert!(matches!(outcome, PutOutcome::Failed(StoreError::Closed)), "{outcome:?}");
    }
    for view in store.view(&keys, NOW) {
        assert!(matches!(view, ViewOutcome::Failed(StoreError::Closed)), "{view:?}");
    }
    let error = store.reserve(100, NOW).expect_err("it is closed");
    assert!(matches!(error, StoreError::Closed), "{error:?}");
    let error = store.flush(NOW).expect_err("it is closed");
    assert!(matches!(error, StoreError::Closed), "{error:?}");
    let error = store.changes(None, 1).expect_err("it is closed");
    assert!(matches!(error, StoreError::Closed), "{error:?}");
    assert!(store.lookup_prefix(&Request::new(&keys)).tiers.is_empty());
    assert_eq!(store.delete(&keys), [false; 2]);
    for (key, view) in keys.iter().zip(views) {
        assert!(tier_of(key, view).is_some(), "views that are held stay valid");
    }
}

/// Embedded and served stores count the same calls equally.
fn every_outcome_is_counted_once(subject: &Subject) {
    let all = keys(0..2500);
    subject.put_new(&all, 512);
    subject.put(&all, 512);
    let other = vec![9; 512];
    subject.store.put(&[Put::new(all[0], &other)], NOW);
    let partial = Put { is_partial: true, ..Put::new(key(9999), &other) };
    subject.store.put(&[partial], NOW);
    subject.read(&all);
    subject.read(&keys(5000..5010));
    subject.store.lookup_prefix(&Request::new(&keys(2490..2510)));
    let counters = (subject.counters)();
    let puts = [counters.puts, counters.stored, counters.present, counters.conflicts];
    assert_eq!(puts, [5002, 2500, 2500, 1], "{counters:?}");
    assert_eq!([counters.declined, counters.put_failures], [1, 0], "{counters:?}");
    assert_eq!([counters.gets, counters.hits, counters.misses], [2510, 2500, 10], "{counters:?}");
    let lookups = [counters.requests, counters.blocks_requested, counters.blocks_matched];
    assert_eq!(lookups, [1, 20, 10], "{counters:?}");
    counters_add_up(&counters);
}

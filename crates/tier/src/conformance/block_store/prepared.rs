//! Checks of the two-phase put: prepare slabs, fill them, then seal or drop them.

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::{Deadline, SystemClock, yield_now};

use super::{DRAM_BYTES, EVENT_TIMEOUT, NOW, Subject, bytes_of, key, keys};
use crate::{CallOptions, DeclineReason, PrepareOutcome, Put, PutOutcome, PutSlab, StoreError};

impl Subject {
    fn prepare(
        &self,
        keys: &[BlockKey],
        length: usize,
        options: CallOptions,
    ) -> Vec<PrepareOutcome> {
        let batch: Vec<_> = keys.iter().map(|key| Put::new(*key, &[])).collect();
        let prepared = self.store.prepare(&batch, &vec![length; keys.len()], options);
        assert_eq!(prepared.len(), keys.len(), "one outcome for each block");
        prepared
    }

    /// Waits until the pool has these reserved and requested bytes.
    fn await_pool(&self, expected: (u64, u64)) {
        // A client returns dropped slabs with its next message, a moment later.
        let message = || format!("the pool has {:?} bytes, not {expected:?}", self.pool_bytes());
        await_condition(&|| self.pool_bytes() == expected, &message);
    }

    /// Reserved and requested bytes of the pool.
    fn pool_bytes(&self) -> (u64, u64) {
        let pool = self.store.stats().pool;
        (pool.reserved_bytes as u64, pool.requested_bytes as u64)
    }
}

fn await_condition(is_met: &dyn Fn() -> bool, message: &dyn Fn() -> String) {
    let deadline = Deadline::after(&SystemClock, EVENT_TIMEOUT);
    while !is_met() {
        assert!(!deadline.remaining(&SystemClock).is_zero(), "{}", message());
        yield_now();
    }
}

/// Fills a prepared slab.
fn filled(key: &BlockKey, prepared: PrepareOutcome, bytes: &[u8]) -> PutSlab {
    let PrepareOutcome::Slab(mut slab) = prepared else { panic!("{key}: {prepared:?}") };
    slab.fill_from(bytes).expect("host memory never fails");
    PutSlab::new(*key, slab)
}

fn seal(subject: &Subject, keys: &[BlockKey], prepared: Vec<PrepareOutcome>) -> Vec<PutOutcome> {
    let fill = |(key, one): (&BlockKey, PrepareOutcome)| {
        let PrepareOutcome::Slab(slab) = &one else { panic!("{key}: {one:?}") };
        let bytes = bytes_of(key, slab.len());
        filled(key, one, &bytes)
    };
    subject.store.put_slabs(keys.iter().zip(prepared).map(fill).collect(), NOW)
}

fn is_present(prepared: &PrepareOutcome) -> bool {
    matches!(prepared, PrepareOutcome::Settled(PutOutcome::Present))
}

pub(super) fn a_prepared_block_is_read_back_once_sealed(subject: &Subject) {
    assert!(subject.prepare(&[], 4096, NOW).is_empty());
    let mut first = 0;
    for (count, length) in [(1, 1), (3, 5000), (5000, 512), (4, 1 << 20)] {
        let keys = keys(first..first + count);
        first += count;
        let prepared = subject.prepare(&keys, length, NOW);
        assert_eq!(
            subject.store.contains(&keys),
            vec![false; keys.len()],
            "a block is present only once sealed"
        );
        let outcomes = seal(subject, &keys, prepared);
        let is_stored = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Stored);
        assert!(outcomes.iter().all(is_stored), "{count} blocks of {length} bytes");
        let tiers = subject.read(&keys);
        assert!(
            tiers.iter().all(|tier| *tier == Some(subject.memory)),
            "{length} bytes: {tiers:?}"
        );
    }
}

pub(super) fn a_prepared_key_that_is_present_is_counted_once(subject: &Subject) {
    let known = keys(0..2500);
    subject.put_new(&known, 512);
    let (before, pool) = ((subject.counters)(), subject.pool_bytes());
    let prepared = subject.prepare(&keys(0..2502), 512, NOW);
    let slabs: Vec<usize> = (0..2502).filter(|at| !is_present(&prepared[*at])).collect();
    assert_eq!(slabs, [2500, 2501], "slabs for the missing blocks only");
    drop(prepared);
    subject.await_pool(pool);
    let settled = || (subject.counters)().present - before.present;
    let message = || format!("{} are counted as present", settled());
    await_condition(&|| settled() >= 2500, &message);
    let after = (subject.counters)();
    assert_eq!([after.puts - before.puts, settled()], [2500, 2500], "{after:?}");
    assert_eq!([after.gets, after.stored], [before.gets, before.stored], "{after:?}");
    // A different length is a conflict, without a comparison of bytes.
    let other = subject.prepare(&known[..1], 513, NOW);
    assert!(matches!(other[..], [PrepareOutcome::Settled(PutOutcome::Conflict)]), "{other:?}");
}

pub(super) fn dropped_slabs_are_returned_and_not_counted(subject: &Subject) {
    let keys = keys(0..40);
    subject.put_new(&keys[..8], 4096);
    subject.store.flush(NOW).expect("every tier can store the blocks");
    let (before, pool) = ((subject.counters)(), subject.pool_bytes());
    for length in [1, 5000, 1 << 18] {
        let mut prepared = subject.prepare(&keys[8..], length, NOW);
        for one in &mut prepared {
            let PrepareOutcome::Slab(slab) = one else { panic!("{one:?}") };
            slab.fill_from(&vec![0xDB; length]).expect("memory of a working device");
        }
        drop(prepared);
    }
    subject.await_pool(pool);
    assert_eq!(subject.store.contains(&keys[8..]), [false; 32]);
    let after = (subject.counters)();
    assert_eq!([after.puts, after.put_failures], [before.puts, before.put_failures], "{after:?}");
    // Drop some slabs of a batch and seal the others.
    let mut prepared = subject.prepare(&keys[8..], 4096, NOW);
    drop(prepared.split_off(16));
    let outcomes = seal(subject, &keys[8..24], prepared);
    assert!(outcomes.iter().all(|one| matches!(one, PutOutcome::Stored)), "{outcomes:?}");
    assert!(subject.has_all(&keys[..24]));
    assert_eq!(subject.store.contains(&keys[24..]), [false; 16]);
}

pub(super) fn the_first_of_two_preparers_to_seal_stores_the_block(subject: &Subject) {
    let both = keys(0..2);
    let [one, other] = [(), ()].map(|()| subject.prepare(&both, 4096, NOW));
    let outcomes = seal(subject, &both, one);
    assert!(matches!(outcomes[..], [PutOutcome::Stored, PutOutcome::Stored]), "{outcomes:?}");
    subject.store.flush(NOW).expect("every tier can store the blocks");
    let mut other = other.into_iter();
    let mut late = |key: &BlockKey, bytes: &[u8]| {
        let prepared = other.next().expect("two were prepared");
        subject.store.put_slabs(vec![filled(key, prepared, bytes)], NOW).remove(0)
    };
    let same = late(&both[0], &bytes_of(&both[0], 4096));
    assert!(matches!(same, PutOutcome::Present), "{same:?}");
    let different = late(&both[1], &[7; 4096]);
    assert!(matches!(different, PutOutcome::Conflict), "{different:?}");
    assert!(subject.has_all(&both), "the first bytes stay");
    subject.store.clear();
    subject.await_pool((0, 0));
    // The same key twice in one batch counts as two preparers.
    let twice = [both[0], both[0]];
    let prepared = subject.prepare(&twice, 4096, NOW);
    let outcomes = seal(subject, &twice, prepared);
    assert!(matches!(outcomes[..], [PutOutcome::Stored, PutOutcome::Present]), "{outcomes:?}");
}

pub(super) fn a_declined_block_gets_no_slab(subject: &Subject) {
    let too_large = usize::try_from(DRAM_BYTES).expect("the pool is small") + 1;
    for length in [too_large, 1 << 32] {
        let prepared = subject.prepare(&[key(1)], length, NOW);
        let [PrepareOutcome::Settled(PutOutcome::Declined(DeclineReason::TooLarge))] = prepared[..]
        else {
            panic!("{length} bytes: {prepared:?}");
        };
    }
    let partial = Put { is_partial: true, ..Put::new(key(2), &[]) };
    let prepared = subject.store.prepare(&[partial], &[4096], NOW);
    let [PrepareOutcome::Settled(PutOutcome::Declined(DeclineReason::Partial))] = prepared[..]
    else {
        panic!("{prepared:?}");
    };
    // A batch that holds the whole pool, or the whole share of a client, gets no further slabs; it
    // must not wait for its own slabs.
    let prepared = subject.prepare(&keys(0..96), 1 << 20, NOW);
    let slabs = prepared.iter().filter(|one| matches!(one, PrepareOutcome::Slab(_))).count();
    assert!((16..96).contains(&slabs), "{slabs} slabs of a MiB from a pool of 64");
    for one in prepared.iter().filter(|one| !matches!(one, PrepareOutcome::Slab(_))) {
        let PrepareOutcome::Settled(
            PutOutcome::Declined(DeclineReason::Full)
            | PutOutcome::Failed(StoreError::NoRoom { .. } | StoreError::Limit { .. }),
        ) = one
        else {
            panic!("{one:?}");
        };
    }
    drop(prepared);
    subject.await_pool((0, 0));
}

pub(super) fn preparing_with_a_zero_timeout_leaks_no_slabs(subject: &Subject) {
    let none = CallOptions { timeout: Some(Duration::ZERO), writer: None };
    let keys = keys(0..50);
    subject.put_new(&keys[..25], 4096);
    subject.store.flush(NOW).expect("every tier can store the blocks");
    let pool = subject.pool_bytes();
    for _ in 0..20 {
        drop(subject.prepare(&keys, 4096, none));
    }
    subject.await_pool(pool);
    let deadline = Deadline::after(&SystemClock, EVENT_TIMEOUT);
    loop {
        let prepared = subject.prepare(&keys[25..], 4096, NOW);
        if prepared.iter().all(|one| matches!(one, PrepareOutcome::Slab(_))) {
            drop(seal(subject, &keys[25..], prepared));
            break;
        }
        assert!(!deadline.remaining(&SystemClock).is_zero(), "the slabs are not returned");
    }
    assert!(subject.has_all(&keys));
}

pub(super) fn a_closed_store_prepares_and_seals_nothing(subject: &Subject) {
    let keys = keys(0..2);
    let prepared = subject.prepare(&keys, 4096, NOW);
    subject.store.close().expect("every tier can store the blocks");
    for outcome in seal(subject, &keys, prepared) {
        assert!(matches!(outcome, PutOutcome::Failed(StoreError::Closed)), "{outcome:?}");
    }
    for one in subject.prepare(&keys, 4096, NOW) {
        let PrepareOutcome::Settled(PutOutcome::Failed(StoreError::Closed)) = one else {
            panic!("{one:?}");
        };
    }
}

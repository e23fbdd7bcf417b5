//! Holds: early release, numbers, and what they count.

use std::collections::BTreeSet;

use cascade_memory::{HugePages, Pool, PoolConfig};
use proptest::prelude::*;

use super::*;

/// Guards nothing.
struct NoGuard;

impl HoldGuard for NoGuard {
    fn release_all(guards: impl IntoIterator<Item = Self>) {
        guards.into_iter().for_each(drop);
    }

    fn keep(self) {}
}

fn pool() -> Pool {
    let config =
        PoolConfig { capacity_bytes: 1 << 20, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).expect("1 MiB can be allocated")
}

fn slab(pool: &Pool) -> Hold<NoGuard> {
    let slab = pool.allocate(4096).expect("the pool is large enough");
    Hold::new(HeldMemory::Slab(slab), None, Duration::ZERO)
}

fn tiny(pool: &Pool) -> Hold<NoGuard> {
    let slab = pool.allocate(1).expect("64 bytes each");
    Hold::new(HeldMemory::Slab(slab), None, Duration::ZERO)
}

const CALL: Range<u64> = 10..14;

/// Grants one hold of a call. Returns whether it was granted.
fn grants(holds: &mut Holds<NoGuard>, call: &Range<u64>, number: u64, hold: Hold<NoGuard>) -> bool {
    holds.grant(call, [(number, hold)]).is_empty()
}

/// Whether there was a slab to take.
fn takes(holds: &mut Holds<NoGuard>, number: u64) -> bool {
    let mut is_taken = false;
    holds.take_slabs([number], |slab| is_taken = slab.is_some());
    is_taken
}

#[test]
fn a_hold_that_is_released_early_is_not_granted() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    assert!(grants(&mut holds, &CALL, 10, slab(&pool)));
    // The call times out at the client, which releases all its holds on another connection.
    assert_eq!(holds.release(vec![CALL]).len(), 1);
    assert!(!grants(&mut holds, &CALL, 11, slab(&pool)), "it was released early");
    holds.finish_grants(&CALL);
    assert_eq!((holds.bytes(), holds.totals()), (0, HoldTotals::default()));
    drop(holds);
    assert_eq!(pool.stats().requested_bytes, 0);
}

#[test]
fn numbers_in_use_are_refused() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    assert!(holds.begin_grants(13, 1).is_err(), "pending");
    assert!(grants(&mut holds, &CALL, 12, slab(&pool)));
    holds.finish_grants(&CALL);
    assert!(holds.begin_grants(12, 1).is_err(), "held");
    holds.begin_grants(13, 9).expect("13 was not granted");
    assert_eq!(holds.bytes(), 4096);
    assert!(!takes(&mut holds, 13));
    assert!(takes(&mut holds, 12));
    assert_eq!(holds.bytes(), 0);
}

#[test]
fn numbers_need_not_count_up() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    assert!(grants(&mut holds, &CALL, 12, slab(&pool)));
    holds.finish_grants(&CALL);
    holds.begin_grants(2, 8).expect("lower numbers are free");
    assert!(holds.begin_grants(5, 1).is_err(), "pending");
    assert!(holds.begin_grants(11, 9).is_err(), "held");
    assert!(holds.begin_grants(u64::MAX, 1).is_err(), "out of range");
    holds.begin_grants(u64::MAX - 1, 1).expect("the last number");
}

#[test]
fn closed_holds_grant_nothing() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    assert!(grants(&mut holds, &CALL, 10, slab(&pool)));
    assert_eq!(holds.close().len(), 1);
    assert!(!grants(&mut holds, &CALL, 11, slab(&pool)));
    assert!(holds.begin_grants(50, 1).is_err());
}

/// A client released the same numbers again and again while a call was in flight. The node
/// stored every release, and its memory grew without bound.
#[test]
fn repeated_early_releases_take_no_further_memory() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    let wide = 0..60_000;
    for _ in 0..1000 {
        assert!(holds.release(vec![wide.clone()]).is_empty());
    }
    assert_eq!(holds.pending[0].released.len(), 4);
    assert!(!grants(&mut holds, &CALL, 13, slab(&pool)), "it was released early");
}

/// Each range of a message was compared with all holds. With 65,536 wide ranges and 262,144
/// holds, one message kept a thread of the node busy for minutes.
#[test]
fn a_message_of_many_wide_ranges_is_compared_once_with_all_holds() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(100, 9000).expect("the numbers are new");
    let call = 100..9100;
    assert!(holds.grant(&call, call.clone().map(|number| (number, tiny(&pool)))).is_empty());
    let beyond = 9_000..9_000 + u64::from(u32::MAX);
    assert_eq!(holds.release(vec![beyond; 65_536]).len(), 100);
    let ranges = [(105, 2), (100, 3), (104, 2), (0, 101), (8_999, 0)];
    let ranges = ranges.map(|(first, count)| first..first + count);
    assert_eq!(holds.release(ranges.to_vec()).len(), 6, "100 to 102 and 104 to 106");
    assert!(takes(&mut holds, 103) && !takes(&mut holds, 106));
    assert_eq!(holds.totals().reservations, 9000 - 100 - 6 - 1);
    assert_eq!(holds.bytes(), (holds.totals().reservations * COUNTED_BYTES_MIN) as u64);
}

/// A hold of one byte takes 64 bytes of the pool. Counted by length, a client could hold all of
/// the pool.
#[test]
fn a_small_hold_counts_with_the_minimum() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    assert!(grants(&mut holds, &CALL, 10, tiny(&pool)));
    assert_eq!(holds.bytes(), COUNTED_BYTES_MIN as u64);
}

/// A client that released all but one hold of each call kept the memory of whole calls.
#[test]
fn memory_follows_the_number_of_holds() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    for call in 0..20 {
        let numbers = 1000 * call..1000 * call + 500;
        holds.begin_grants(numbers.start, 500).expect("the numbers are new");
        let all = numbers.clone().map(|number| (number, tiny(&pool)));
        assert!(holds.grant(&numbers, all).is_empty());
        holds.finish_grants(&numbers);
        let left = numbers.start + 7;
        assert_eq!(holds.release(vec![numbers.start..left, left + 1..numbers.end]).len(), 499);
    }
    assert_eq!(holds.totals().reservations, 20);
    assert!(holds.held.capacity() <= 2 * 20, "{}", holds.held.capacity());
}

proptest! {
    /// Calls, releases and seals of any numbers do the same as with a set of numbers.
    #[test]
    fn holds_do_the_same_as_a_set_of_numbers(
        operations in prop::collection::vec((0_u8..4, 0_u64..40, 0_u64..12, any::<u16>()), 1..80),
    ) {
        let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
        let mut model = BTreeSet::new();
        for (operation, first, count, granted) in operations {
            let numbers = first..first + count;
            match operation {
                0 | 1 => {
                    let is_free = model.range(numbers.clone()).next().is_none();
                    let begun = holds.begin_grants(first, u32::try_from(count).unwrap());
                    prop_assert_eq!(begun.is_ok(), is_free);
                    if begun.is_err() {
                        continue;
                    }
                    let is_granted = |number: &u64| granted & (1 << (number - first)) != 0;
                    let granted: Vec<u64> = numbers.clone().filter(is_granted).collect();
                    let all = granted.iter().map(|number| (*number, slab(&pool)));
                    prop_assert!(holds.grant(&numbers, all).is_empty());
                    model.extend(granted);
                    holds.finish_grants(&numbers);
                }
                2 => {
                    let released = holds.release(vec![numbers.clone()]).len();
                    let before = model.len();
                    model.retain(|number| !numbers.contains(number));
                    prop_assert_eq!(released, before - model.len());
                }
                _ => {
                    // As a client seals: mostly in order, some numbers twice or never granted.
                    let sealed = numbers.chain([first, first + 1, first]);
                    let sealed: Vec<u64> = sealed.filter(|at| granted & (1 << (at % 16)) != 0)
                        .collect();
                    let mut taken = Vec::new();
                    holds.take_slabs(sealed.iter().copied(), |slab| taken.push(slab.is_some()));
                    let expected: Vec<bool> = sealed.iter().map(|at| model.remove(at)).collect();
                    prop_assert_eq!(taken, expected);
                }
            }
            prop_assert_eq!(holds.totals().reservations, model.len());
            prop_assert_eq!(holds.bytes(), 4096 * model.len() as u64);
        }
        prop_assert_eq!(holds.close().len(), model.len());
        prop_assert_eq!(pool.stats().requested_bytes, 0);
    }
}

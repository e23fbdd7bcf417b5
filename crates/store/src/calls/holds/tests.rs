//! Holds: early release, numbers, and what they count.

use cascade_memory::{HugePages, Pool, PoolConfig};

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

const CALL: Range<u64> = 10..14;

#[test]
fn a_hold_that_is_released_early_is_not_granted() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    assert!(holds.grant(10, slab(&pool)).is_none());
    // The call times out at the client, which releases all its holds on another connection.
    assert_eq!(holds.release(vec![CALL]).len(), 1);
    assert!(holds.grant(11, slab(&pool)).is_some(), "it was released early");
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
    assert!(holds.grant(12, slab(&pool)).is_none());
    holds.finish_grants(&CALL);
    assert!(holds.begin_grants(12, 1).is_err(), "held");
    holds.begin_grants(13, 9).expect("13 was not granted");
    assert_eq!(holds.bytes(), 4096);
    assert!(holds.take_slab(13).is_none());
    assert!(holds.take_slab(12).is_some());
    assert_eq!(holds.bytes(), 0);
}

#[test]
fn numbers_need_not_count_up() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    assert!(holds.grant(12, slab(&pool)).is_none());
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
    assert!(holds.grant(10, slab(&pool)).is_none());
    assert_eq!(holds.close().len(), 1);
    assert!(holds.grant(11, slab(&pool)).is_some());
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
    assert!(holds.grant(13, slab(&pool)).is_some(), "it was released early");
}

/// Each range of a message was compared with all holds. With 65,536 wide ranges and 262,144
/// holds, one message kept a thread of the node busy for minutes.
#[test]
fn a_message_of_many_wide_ranges_is_compared_once_with_all_holds() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(100, 9000).expect("the numbers are new");
    for number in 100..9100 {
        let tiny = pool.allocate(1).expect("64 bytes each");
        let hold = Hold::new(HeldMemory::Slab(tiny), None, Duration::ZERO);
        assert!(holds.grant(number, hold).is_none());
    }
    let beyond = 9_000..9_000 + u64::from(u32::MAX);
    assert_eq!(holds.release(vec![beyond; 65_536]).len(), 100);
    let ranges = [(105, 2), (100, 3), (104, 2), (0, 101), (8_999, 0)];
    let ranges = ranges.map(|(first, count)| first..first + count);
    assert_eq!(holds.release(ranges.to_vec()).len(), 6, "100 to 102 and 104 to 106");
    assert!(holds.take_slab(103).is_some() && holds.take_slab(106).is_none());
    assert_eq!(holds.totals().reservations, 9000 - 100 - 6 - 1);
    assert_eq!(holds.bytes(), (holds.totals().reservations * COUNTED_BYTES_MIN) as u64);
}

/// A hold of one byte takes 64 bytes of the pool. Counted by length, a client could hold all of
/// the pool.
#[test]
fn a_small_hold_counts_with_the_minimum() {
    let (pool, mut holds) = (pool(), Holds::<NoGuard>::default());
    holds.begin_grants(10, 4).expect("the numbers are new");
    let tiny = pool.allocate(1).expect("the pool is empty");
    assert!(holds.grant(10, Hold::new(HeldMemory::Slab(tiny), None, Duration::ZERO)).is_none());
    assert_eq!(holds.bytes(), COUNTED_BYTES_MIN as u64);
}

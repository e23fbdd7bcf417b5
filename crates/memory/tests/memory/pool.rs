//! The pool against a naive model: no overlap, correct alignment, bounded waste, no leak.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cascade_memory::{DIRECT_ALIGN, HugePages, Pool, PoolConfig, Slab, SlabMut};
use proptest::prelude::*;

fn pool(capacity_bytes: usize) -> Pool {
    Pool::new(&PoolConfig { capacity_bytes, huge_pages: HugePages::Auto, populate: true }).unwrap()
}

/// Xorshift: enough to vary sizes, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

fn assert_nothing_leaked(pool: &Pool) {
    pool.compact();
    let stats = pool.stats();
    assert_eq!((stats.requested_bytes, stats.reserved_bytes, stats.magazine_bytes), (0, 0, 0));
    assert_eq!(stats.largest_free_bytes, stats.capacity_bytes);
    drop(pool.allocate(stats.capacity_bytes).expect("all of it is free, in one piece"));
}

#[test]
fn a_million_random_calls_waste_less_than_a_tenth_and_leak_nothing() {
    let pool = pool(256 << 20);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut held: Vec<SlabMut> = Vec::new();
    let (mut allocated, mut waste_percent_max) = (0, 0);
    for call in 0..1_000_000 {
        if held.len() < 64 || random.below(2) == 0 {
            // Sizes of blocks: most are large, all are from a page on.
            let order = 13 + random.below(8);
            let bytes = 4096 + random.below(1 << order);
            match pool.allocate(bytes) {
                Some(slab) => held.push(slab),
                None => drop(held.swap_remove(random.below(held.len()))),
            }
            allocated += 1;
        } else {
            drop(held.swap_remove(random.below(held.len())));
        }
        if call % 1000 == 999 {
            let stats = pool.stats();
            let waste = stats.reserved_bytes - stats.requested_bytes;
            waste_percent_max = waste_percent_max.max(waste * 100 / stats.requested_bytes);
            let sum = stats.reserved_bytes + stats.magazine_bytes + stats.free_bytes;
            assert_eq!(sum, stats.capacity_bytes);
        }
    }
    assert!(allocated > 400_000);
    assert!(waste_percent_max < 10, "wasted {waste_percent_max} %");
    held.clear();
    assert_nothing_leaked(&pool);
}

#[test]
fn memory_of_unused_sizes_is_available_to_other_sizes() {
    let pool = pool(16 << 20);
    for size in [64, 512, 4096, 65_536, 1 << 20, 3 << 20, 4096, 16 << 20] {
        let all: Vec<SlabMut> = std::iter::from_fn(|| pool.allocate(size)).collect();
        assert_eq!(all.len(), (16 << 20) / size, "slabs of {size}");
    }
    assert_nothing_leaked(&pool);
}

/// A magazine held 64 pieces. Three quarters of a batch of 256 blocks were taken from the heap and
/// returned to it one by one.
#[test]
fn a_freed_batch_is_allocated_again_without_the_heap() {
    let pool = pool(64 << 20);
    let batch = || -> Vec<_> {
        (0..256).map(|_| pool.allocate(4096).expect("the pool is large enough")).collect()
    };
    drop(batch());
    let before = pool.stats();
    assert!(before.magazine_bytes >= 256 * 4096, "{before:?}");
    let again = batch();
    assert_eq!(pool.stats().free_bytes, before.free_bytes, "the heap is not used");
    drop(again);
    assert_nothing_leaked(&pool);
}

#[test]
fn allocations_larger_than_the_pool_fail() {
    let pool = pool(1 << 20);
    assert!(pool.allocate((1 << 20) + 1).is_none());
    assert!(pool.allocate(usize::MAX).is_none());
    assert_eq!(pool.allocate(0).unwrap().len(), 0);
    assert_nothing_leaked(&pool);
}

#[test]
fn a_slab_for_direct_reads_is_aligned_at_both_ends() {
    let pool = pool(1 << 20);
    let _misaligning = pool.allocate(5000).unwrap();
    for bytes in [1, 5000, 5120, 70_000] {
        let mut slab = pool.allocate_direct(bytes).unwrap();
        assert!(slab.offset().is_multiple_of(DIRECT_ALIGN));
        assert!(slab.padded_host_mut().unwrap().len().is_multiple_of(DIRECT_ALIGN));
        assert_eq!(slab.len(), bytes);
    }
}

#[test]
fn a_shortened_slab_counts_its_visible_length() {
    let pool = pool(1 << 20);
    let mut slab = pool.allocate(100_000).unwrap();
    slab.truncate(200_000);
    assert_eq!(slab.len(), 100_000);
    slab.truncate(70_000);
    assert_eq!((slab.len(), pool.stats().requested_bytes), (70_000, 70_000));
    drop(slab);
    assert_nothing_leaked(&pool);
}

#[test]
fn a_sealed_slab_outlives_the_pools_own_handle() {
    let bytes: Vec<u8> = (0..=255).cycle().take(200_000).collect();
    let slab = {
        let pool = pool(1 << 20);
        let mut slab = pool.allocate(bytes.len()).unwrap();
        slab.fill_from(&bytes).unwrap();
        slab.seal()
    };
    let reader: Slab = slab.clone();
    assert_eq!(reader.holders(), 2);
    drop(slab);
    let mut copy = vec![0; bytes.len()];
    reader.copy_to(&mut copy).unwrap();
    assert_eq!(copy, bytes);
    assert!(format!("{reader:?}").len() < 60, "no bytes in messages");
}

#[test]
fn the_release_of_a_watched_slab_is_reported_once() {
    let pool = pool(1 << 20);
    let slab = pool.allocate(100).unwrap().seal();
    let mut tokens = Vec::new();
    assert!(!slab.watch(1), "no other holder");
    let (reader, other) = (slab.clone(), slab.clone());
    assert!(slab.watch(2));
    drop(reader);
    assert!(!pool.take_released(8, &mut tokens) && tokens.is_empty(), "one reader is left");
    drop(other);
    assert!(!pool.take_released(8, &mut tokens));
    assert_eq!(tokens, [2]);
    drop(slab.clone());
    let readers = [3, 4, 5].map(|token| {
        let slab = pool.allocate(100).unwrap().seal();
        let reader = slab.clone();
        assert!(slab.watch(token));
        (slab, reader)
    });
    let slabs = readers.map(|(slab, _)| slab);
    assert!(pool.take_released(2, &mut tokens), "one more is reported");
    assert!(!pool.take_released(2, &mut tokens));
    assert_eq!(tokens, [2, 3, 4, 5], "in the order of the releases");
    drop((slab, slabs));
    assert_nothing_leaked(&pool);
}

/// Stamps every slab with a unique number and checks the stamp before the slab is freed.
#[test]
fn threads_never_share_a_slab() {
    const SIZES: [usize; 6] = [100, 4096, 20_000, 65_536, 131_072, 300_000];
    let pool = pool(64 << 20);
    let stamps = AtomicU64::new(1);
    let stamp = |slab: &mut SlabMut| {
        let stamp = stamps.fetch_add(1, Ordering::Relaxed);
        for line in slab.host_mut().unwrap().chunks_exact_mut(64) {
            line[..8].copy_from_slice(&stamp.to_le_bytes());
        }
        stamp
    };
    let check = |(slab, stamp): (Slab, u64)| {
        let mut lines = slab.host().expect("host memory").chunks_exact(64);
        assert!(lines.all(|line| line[..8] == stamp.to_le_bytes()), "{slab:?}");
    };
    thread::scope(|scope| {
        for seed in 1..=4 {
            let (pool, stamp, check) = (pool.clone(), &stamp, &check);
            scope.spawn(move || {
                let mut random = Random(seed);
                let mut held = Vec::new();
                for _ in 0..10_000 {
                    if let Some(mut slab) = pool.allocate(SIZES[random.below(SIZES.len())]) {
                        let stamp = stamp(&mut slab);
                        held.push((slab.seal(), stamp));
                    }
                    while held.len() > random.below(200) {
                        check(held.swap_remove(random.below(held.len())));
                    }
                }
                held.into_iter().for_each(check);
            });
        }
    });
    assert_nothing_leaked(&pool);
}

#[derive(Debug, Clone)]
enum Step {
    Allocate { bytes: usize, direct: bool },
    Release { index: usize },
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![0_usize..4096, 4096_usize..65_536, 65_536_usize..300_000];
    prop_oneof![
        8 => (bytes, any::<bool>()).prop_map(|(bytes, direct)| Step::Allocate { bytes, direct }),
        6 => (0_usize..1000).prop_map(|index| Step::Release { index }),
        1 => Just(Step::Compact),
    ]
}

/// Granule of a slab, as documented.
fn documented_granule(bytes: usize, direct: bool) -> usize {
    match bytes {
        _ if direct => 4096,
        0..4096 => 64,
        4096..65_536 => 512,
        _ => 4096,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn behaves_like_a_list_of_ranges(steps in prop::collection::vec(step(), 1..300)) {
        let pool = pool(4 << 20);
        let mut held: Vec<(SlabMut, usize)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate { bytes, direct } => {
                    let slab =
                        if direct { pool.allocate_direct(bytes) } else { pool.allocate(bytes) };
                    let Some(mut slab) = slab else { continue };
                    let granule = documented_granule(bytes, direct);
                    let reserved = bytes.max(1).next_multiple_of(granule);
                    let padded = slab.padded_host_mut().unwrap().len();
                    prop_assert_eq!((slab.len(), padded), (bytes, reserved));
                    prop_assert_eq!(slab.offset() % granule, 0);
                    prop_assert!(slab.offset() + reserved <= 4 << 20);
                    let apart = held.iter().all(|(other, length)| {
                        slab.offset() + reserved <= other.offset()
                            || other.offset() + length <= slab.offset()
                    });
                    prop_assert!(apart, "{:?} overlaps one of {:?}", slab, held);
                    held.push((slab, reserved));
                }
                Step::Release { index } if !held.is_empty() => {
                    drop(held.swap_remove(index % held.len()));
                }
                Step::Release { .. } => {}
                Step::Compact => pool.compact(),
            }
            let stats = pool.stats();
            let reserved: usize = held.iter().map(|(_, reserved)| reserved).sum();
            let requested: usize = held.iter().map(|(slab, _)| slab.len()).sum();
            prop_assert_eq!((stats.requested_bytes, stats.reserved_bytes), (requested, reserved));
        }
        held.clear();
        assert_nothing_leaked(&pool);
    }
}

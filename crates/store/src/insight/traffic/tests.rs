//! Long chains are reported in parts, with the result of a report in one.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_tier::{Put, PutOutcome};

use super::*;
use crate::{FilesConfig, PolicyKind};

const BLOCKS: usize = 3000;
const BLOCK: u32 = 4096;

fn seed() -> FingerprintSeed {
    FingerprintSeed::new(7)
}

/// Statistics of a store that samples every block, in DRAM and in files.
fn insight(policy: PolicyKind) -> Insight {
    Insight::new(&config(policy), Some("dram"), &["files"], seed())
}

fn config(policy: PolicyKind) -> StoreConfig {
    let mut files = FilesConfig::new("unused");
    files.capacity_bytes = u64::from(6000 * BLOCK);
    files.segment_bytes = u64::from(64 * BLOCK);
    StoreConfig {
        dram_bytes: u64::from(4000 * BLOCK),
        files: Some(files),
        policy,
        ..StoreConfig::default()
    }
}

fn keys(chain: u8) -> Vec<BlockKey> {
    let key = |block: usize| {
        let mut bytes = [chain; 32];
        bytes[..8].copy_from_slice(&(block as u64).to_le_bytes());
        BlockKey::from_bytes(bytes)
    };
    (0..BLOCKS).map(key).collect()
}

fn lookup<'a>(at: u32, keys: &'a [BlockKey], hints: &'a Hints, matched: usize) -> ChainLookup<'a> {
    ChainLookup {
        at: Duration::from_secs(at.into()),
        keys,
        partial_tail: at.is_multiple_of(3),
        hints,
        in_dram: matched / 2,
        matched,
        block_bytes: BLOCK,
    }
}

fn holds_of(lock: &InsightLock, call: impl FnOnce(&InsightLock)) -> usize {
    let before = lock.holds.load(Ordering::Relaxed);
    call(lock);
    lock.holds.load(Ordering::Relaxed) - before
}

/// A request of any length was one hold: 32,768 blocks held all other lookups for 2 ms.
#[test]
fn long_chains_are_reported_in_short_holds_with_the_same_result() {
    for policy in [PolicyKind::Lru, PolicyKind::PrefixCost, PolicyKind::Waterfall] {
        let (parts, mut whole) = (InsightLock::new(insight(policy), seed()), insight(policy));
        let hints = Hints { expected_within: Some(Duration::from_secs(5)), ..Hints::default() };
        let chains: Vec<Vec<BlockKey>> = (0..3).map(keys).collect();
        for (at, turn) in (0..30).enumerate() {
            let keys = &chains[at % chains.len()][..BLOCKS - 31 * at];
            let lookup = lookup(turn, keys, &hints, if at < 3 { 0 } else { 900 });
            let least = lookup.keys.len() / KEYS_PER_HOLD;
            assert!(holds_of(&parts, |parts| parts.request(&lookup)) > least);
            whole.request(&lookup);
            assert!(holds_of(&parts, |parts| parts.hint(lookup.at, keys, &hints)) > least);
            let mut hint = whole.shadows.begin_hint();
            hint.select(keys, seed());
            let all = &mut Visits::unlimited();
            assert!(whole.shadows.continue_hint(&mut hint, (lookup.at, &hints), all));
            let bytes = vec![0; BLOCK as usize];
            let put = |key: &BlockKey| Put::new(*key, &bytes);
            let puts: Vec<Put<'_>> = keys[900..].iter().map(put).collect();
            let stored: Vec<_> = puts.iter().map(|_| PutOutcome::Stored).collect();
            let length = |at: usize| puts[at].bytes.len();
            parts.lock().shadows.put(lookup.at, &puts, length, &stored);
            whole.shadows.put(lookup.at, &puts, length, &stored);
        }
        let parts = parts.lock();
        assert_eq!(parts.figures().0, whole.figures().0, "{policy:?}");
        assert_eq!(parts.hot.top(9), whole.hot.top(9));
        let missed = |figures: Vec<ShadowFigure>| {
            figures.iter().any(|one| {
                (1..one.since_start.blocks_requested).contains(&one.since_start.blocks_simulated)
            })
        };
        assert!(missed(parts.figures().0), "some blocks are hits and some are misses");
    }
}

#[test]
fn short_chains_are_reported_in_one_hold() {
    let lock = InsightLock::new(insight(PolicyKind::PrefixCost), seed());
    let (keys, hints) = (keys(1), Hints::default());
    let lookup = lookup(1, &keys[..KEYS_PER_HOLD], &hints, 9);
    assert_eq!(holds_of(&lock, |lock| lock.request(&lookup)), 1);
}

#[test]
fn a_request_ends_when_its_models_are_replaced() {
    let lock = InsightLock::new(insight(PolicyKind::PrefixCost), seed());
    let (keys, hints) = (keys(1), Hints::default());
    let lookup = lookup(1, &keys, &hints, BLOCKS);
    let mut request = lock.lock().shadows.begin_request(lookup.block_bytes);
    request.select(&keys, seed());
    let few = || Visits::limited(KEYS_PER_HOLD);
    assert!(!lock.lock().shadows.continue_request(&mut request, &lookup, &mut few()));
    lock.replace(&config(PolicyKind::PrefixCost), Some("dram"), &["files"]);
    lock.request(&lookup);
    let figures = lock.lock().figures().0;
    assert!(lock.lock().shadows.continue_request(&mut request, &lookup, &mut few()));
    assert_eq!(lock.lock().figures().0, figures, "it counts no more");
}

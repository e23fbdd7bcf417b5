//! Blocks whose bytes are a function of their key, so that any reader can verify them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, TenantSecret};
use cascade_runtime::{Deadline, SystemClock};
use cascade_store::{CallOptions, Put, PutOutcome, Store, StoreConfig, ViewOutcome};
pub(crate) use cascade_tier::conformance::block_store::bytes_of;

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn namespace() -> Namespace {
    Namespace::new(Manifest::new().with("weights", "test"), &TenantSecret::new("secret"))
}

pub(crate) fn key(n: u64) -> BlockKey {
    namespace().key_of_id(&n.to_le_bytes())
}

pub(crate) fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
    let namespace = namespace();
    range.map(|n| namespace.key_of_id(&n.to_le_bytes())).collect()
}

pub(crate) fn put(store: &Store, keys: &[BlockKey], length: usize) -> Vec<PutOutcome> {
    let bytes: Vec<_> = keys.iter().map(|key| bytes_of(key, length)).collect();
    let batch: Vec<_> = keys.iter().zip(&bytes).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    store.put(&batch, CallOptions::default())
}

/// The tier each block was served from; checks every byte.
pub(crate) fn check(store: &Store, keys: &[BlockKey]) -> Vec<Option<&'static str>> {
    let check_one = |(key, view): (&BlockKey, ViewOutcome)| match view {
        ViewOutcome::Hit { slab, tier } => {
            assert!(
                slab.host() == Some(&bytes_of(key, slab.len())[..]),
                "wrong bytes for {key} from {tier}"
            );
            Some(tier)
        }
        ViewOutcome::Miss => None,
        ViewOutcome::Failed(error) => panic!("{key}: {error:?}"),
    };
    // A few at a time, because views hold memory.
    let views = keys.chunks(4).flat_map(|some| store.view(some, CallOptions::default()));
    keys.iter().zip(views).map(check_one).collect()
}

/// Waits for another thread until a condition holds.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while !condition() {
        assert!(!limit.has_passed(&SystemClock), "timed out waiting until {what}");
        std::thread::yield_now();
    }
}

/// Sets a flag when it is dropped, also by a panic: a scope waits for the threads that run until it
/// is set.
pub(crate) struct StopOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(crate) fn dram(mib: u64) -> StoreConfig {
    StoreConfig { dram_bytes: mib * MIB, huge_pages: false, ..StoreConfig::default() }
}

//! The conformance suite over both I/O engines, durable and not, direct and buffered.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use cascade_disk::conformance::{self, Reopen, deadline, open};
use cascade_disk::{FilesConfig, IoEngine};
use cascade_runtime::SystemClock;

const CAPACITY_BYTES: u64 = 24 << 20;

fn with_tier(engine: IoEngine, durable: bool, direct: bool, check: fn(&mut Reopen<'_>)) {
    let directory = tempfile::tempdir().unwrap();
    let config = FilesConfig {
        capacity_bytes: CAPACITY_BYTES,
        segment_bytes: 4 << 20,
        engine,
        durable,
        direct,
        queue_depth: 8,
        ..FilesConfig::new(directory.path())
    };
    check(&mut |pool| open(config.clone(), Arc::new(SystemClock), pool, deadline()).unwrap());
}

macro_rules! suite {
    ($($name:ident: $engine:expr, $durable:expr, $direct:expr;)*) => {$(
        mod $name {
            use super::*;

            fn run(check: fn(&mut Reopen<'_>)) {
                with_tier($engine, $durable, $direct, check);
            }

            #[test]
            fn blocks_are_read_back() {
                run(conformance::blocks_are_read_back);
            }

            #[test]
            fn removals_persist() {
                run(conformance::removals_persist);
            }

            #[test]
            fn aliases_keep_bytes() {
                run(conformance::aliases_keep_bytes);
            }

            #[test]
            fn capacity_is_respected() {
                run(|reopen| conformance::capacity_is_respected(reopen, CAPACITY_BYTES));
            }

            #[test]
            fn restarts_leave_space_for_reclaim() {
                run(|reopen| conformance::restarts_leave_space_for_reclaim(reopen, CAPACITY_BYTES));
            }

            #[test]
            fn reclaim_keeps_selected_blocks() {
                run(conformance::reclaim_keeps_selected_blocks);
            }

            #[test]
            fn invalid_requests_fail_alone() {
                run(conformance::invalid_requests_fail_alone);
            }

            #[test]
            fn manifests_are_kept() {
                run(conformance::manifests_are_kept);
            }
        }
    )*};
}

suite! {
    uring: IoEngine::Uring, false, true;
    psync: IoEngine::Psync, false, true;
    durable: IoEngine::Auto, true, true;
    buffered: IoEngine::Auto, false, false;
}

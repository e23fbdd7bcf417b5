//! The conformance suite over embedded stores. The client's tests run it over served stores.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::time::Duration;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::{FilesConfig, HealthConfig, PolicyKind, Store, StoreConfig, WritePolicy};
use cascade_tier::conformance::block_store::{DRAM_BYTES, Subject, all};

fn dram() -> StoreConfig {
    StoreConfig {
        dram_bytes: DRAM_BYTES,
        huge_pages: false,
        policy: PolicyKind::Lru,
        ..StoreConfig::default()
    }
}

fn files(directory: &std::path::Path) -> StoreConfig {
    let files = FilesConfig {
        capacity_bytes: 512 << 20,
        segment_bytes: 16 << 20,
        ..FilesConfig::new(directory)
    };
    // A slow disk must not open a circuit.
    let health = HealthConfig { probe_timeout: Duration::from_secs(30), ..HealthConfig::default() };
    StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), health, ..dram() }
}

fn run(config: impl Fn(&std::path::Path) -> StoreConfig) {
    let mut directories = Vec::new();
    all(&mut || {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(config(directory.path())).unwrap();
        directories.push(directory);
        let counted = store.clone();
        Subject {
            deduplicates: store.config().digest != DigestMode::Off,
            memory: "dram",
            store: Box::new(store),
            counters: Box::new(move || counted.stats().counters),
        }
    });
}

#[test]
fn a_store_of_dram_conforms() {
    run(|_| dram());
}

#[test]
fn a_store_of_dram_and_files_conforms() {
    run(files);
}

#[test]
fn a_write_through_store_with_digests_conforms() {
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    run(|directory| StoreConfig { digest, write: WritePolicy::Through, ..files(directory) });
}

//! The conformance suite over embedded stores; that of the client runs it over served ones.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::conformance::{DRAM_BYTES, Subject, all};
use cascade_store::{FilesConfig, PolicyKind, Store, StoreConfig, WritePolicy};

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
    StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), ..dram() }
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
            store: Box::new(store),
            counters: Box::new(move || counted.stats().counters),
        }
    });
}

#[test]
fn dram_alone() {
    run(|_| dram());
}

#[test]
fn dram_and_files() {
    run(files);
}

#[test]
fn with_digests_and_written_through() {
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    run(|directory| StoreConfig { digest, write: WritePolicy::Through, ..files(directory) });
}

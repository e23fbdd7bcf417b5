//! The same suite that embedded stores pass, over a served one.

use std::sync::Arc;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::conformance::{DRAM_BYTES, Subject, all};
use cascade_store::{FilesConfig, PolicyKind, StoreConfig, WritePolicy};

use crate::host::Host;

fn files(store: &mut StoreConfig, directory: &std::path::Path) {
    "Dram|Files".clone_into(&mut store.pipeline);
    store.files = Some(FilesConfig {
        capacity_bytes: 512 << 20,
        segment_bytes: 16 << 20,
        ..FilesConfig::new(directory)
    });
}

fn run(configure: impl Fn(&mut StoreConfig, &std::path::Path)) {
    let mut hosts = Vec::new();
    all(&mut || {
        let directory = tempfile::tempdir().unwrap();
        let host = Arc::new(Host::start(|config| {
            config.store.dram_bytes = DRAM_BYTES;
            config.store.policy = PolicyKind::Lru;
            configure(&mut config.store, directory.path());
        }));
        let counted = host.store();
        let subject = Subject {
            store: Box::new(host.connect()),
            deduplicates: counted.config().digest != DigestMode::Off,
            counters: Box::new(move || counted.stats().counters),
        };
        hosts.push((host, directory));
        subject
    });
    for (host, _) in &hosts {
        host.assert_nothing_leaks();
    }
}

#[test]
fn dram_alone() {
    run(|_, _| {});
}

#[test]
fn dram_and_files() {
    run(files);
}

#[test]
fn with_digests_and_written_through() {
    run(|store, directory| {
        files(store, directory);
        store.digest = DigestMode::On(DigestAlgorithm::Blake3);
        store.write = WritePolicy::Through;
    });
}

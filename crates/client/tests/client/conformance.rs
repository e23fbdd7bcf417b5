//! The conformance suite of embedded stores, run over a served store.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::{FilesConfig, PolicyKind, StoreConfig, WritePolicy};
use cascade_tier::conformance::block_store::{DRAM_BYTES, Subject, all};

use crate::test_node::TestNode;

fn files(store: &mut StoreConfig, directory: &std::path::Path) {
    "Dram|Files".clone_into(&mut store.pipeline);
    store.files = Some(FilesConfig {
        capacity_bytes: 512 << 20,
        segment_bytes: 16 << 20,
        ..FilesConfig::new(directory)
    });
    // A slow disk must not open a circuit.
    store.health.probe_timeout = Duration::from_secs(30);
}

fn run(configure: impl Fn(&mut StoreConfig, &std::path::Path)) {
    let mut hosts = Vec::new();
    all(&mut || {
        let directory = tempfile::tempdir().unwrap();
        let host = Arc::new(TestNode::start(|config| {
            config.store.dram_bytes = DRAM_BYTES;
            config.store.policy = PolicyKind::Lru;
            configure(&mut config.store, directory.path());
        }));
        let counted = host.store();
        let subject = Subject {
            store: Box::new(host.connect()),
            deduplicates: counted.config().digest != DigestMode::Off,
            memory: "dram",
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
fn a_served_store_of_dram_conforms() {
    run(|_, _| {});
}

#[test]
fn a_served_store_of_dram_and_files_conforms() {
    run(files);
}

#[test]
fn a_served_write_through_store_with_digests_conforms() {
    run(|store, directory| {
        files(store, directory);
        store.digest = DigestMode::On(DigestAlgorithm::Blake3);
        store.write = WritePolicy::Through;
    });
}

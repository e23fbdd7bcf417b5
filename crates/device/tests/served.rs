//! A node whose blocks are in the memory of the fake device, and its clients: the conformance suite
//! of stores, with the node, the client and the driver in one process.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod fake;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_client::{Client, ConnectOptions};
use cascade_device::CudaImporter;
use cascade_node::{Node, NodeConfig, Server};
use cascade_store::{FilesConfig, PolicyKind, StoreConfig, WritePolicy};
use cascade_tier::conformance::block_store::{DRAM_BYTES, Subject, all};

use fake::{context, is_child};

/// The first device of the fake.
const GPU: &str = "GPU-fafafafa-fafa-fafa-fafa-fafafafafafa";

fn files(store: &mut StoreConfig, directory: &Path) {
    "Hbm|Files".clone_into(&mut store.pipeline);
    store.files = Some(FilesConfig {
        capacity_bytes: 512 << 20,
        segment_bytes: 16 << 20,
        ..FilesConfig::new(directory)
    });
    // A slow disk must not open a circuit.
    store.health.probe_timeout = Duration::from_secs(30);
}

fn run(test: &str, configure: impl Fn(&mut StoreConfig, &Path)) {
    // Each check has a node of its own, and the suite keeps all of them.
    if !is_child(test, &[("FAKE_CUDA_BYTES", "8589934592")]) {
        return;
    }
    let importer = Arc::new(CudaImporter::new(&context()));
    let mut kept = Vec::new();
    all(&mut || {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("node.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut config = NodeConfig::new(&socket);
        config.gpu = Some(GPU.to_owned());
        "Hbm".clone_into(&mut config.store.pipeline);
        config.store.dram_bytes = DRAM_BYTES;
        config.store.policy = PolicyKind::Lru;
        configure(&mut config.store, &directory.path().join("files"));
        let node = Node::open(config).unwrap();
        let server = Server::start(node.clone(), listener).unwrap();
        let devices = Some(Arc::clone(&importer) as Arc<dyn cascade_memory::DeviceImporter>);
        let client =
            Client::connect(ConnectOptions { devices, ..ConnectOptions::new(&socket) }).unwrap();
        let counted = node.tenants().all()[0].store().clone();
        kept.push((server, directory));
        Subject {
            store: Box::new(client),
            deduplicates: counted.config().digest != DigestMode::Off,
            memory: "hbm",
            counters: Box::new(move || counted.stats().counters),
        }
    });
}

#[test]
fn a_node_in_device_memory_conforms() {
    run("a_node_in_device_memory_conforms", |_, _| {});
}

#[test]
fn a_node_in_device_memory_and_files_conforms() {
    run("a_node_in_device_memory_and_files_conforms", files);
}

#[test]
fn a_write_through_node_in_device_memory_with_digests_conforms() {
    run("a_write_through_node_in_device_memory_with_digests_conforms", |store, directory| {
        files(store, directory);
        store.digest = DigestMode::On(DigestAlgorithm::Blake3);
        store.write = WritePolicy::Through;
    });
}

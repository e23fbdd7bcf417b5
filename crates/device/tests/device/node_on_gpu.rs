//! A node whose blocks are in the memory of the fake device, and its clients: the conformance suite
//! of stores, with node, client and driver in one process.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use cascade_client::{Client, ConnectOptions};
use cascade_device::CudaImporter;
use cascade_node::{Node, NodeConfig, Server};
use cascade_store::PolicyKind;
use cascade_tier::conformance::block_store::{DRAM_BYTES, Subject, all};

use crate::fake::{context, is_child};

/// The first device of the fake.
const GPU: &str = "GPU-fafafafa-fafa-fafa-fafa-fafafafafafa";

#[test]
fn a_node_in_device_memory_conforms() {
    if !is_child("a_node_in_device_memory_conforms", &[]) {
        return;
    }
    let importer = Arc::new(CudaImporter::new(&context()));
    let mut last = None;
    all(&mut || {
        // The node of the check before ends here, with its threads.
        drop(last.take());
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("node.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut config = NodeConfig::new(&socket);
        config.gpu = Some(GPU.to_owned());
        "Hbm".clone_into(&mut config.store.pipeline);
        config.store.dram_bytes = DRAM_BYTES;
        config.store.policy = PolicyKind::Lru;
        let node = Node::open(config).unwrap();
        let server = Server::start(node.clone(), listener).unwrap();
        let devices = Some(Arc::clone(&importer) as Arc<dyn cascade_memory::DeviceImporter>);
        let client =
            Client::connect(ConnectOptions { devices, ..ConnectOptions::new(&socket) }).unwrap();
        let counted = node.tenants().all()[0].store().clone();
        last = Some((server, directory));
        Subject {
            store: Box::new(client),
            deduplicates: false,
            memory: "hbm",
            counters: Box::new(move || counted.stats().counters),
        }
    });
}

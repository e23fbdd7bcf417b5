//! A trace as requests for a store: the keys of each request, the namespace and the block size.

use std::collections::HashMap;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId, TenantSecret};

use crate::trace::Trace;

/// The requests of a trace with keys for a store.
#[derive(Debug, Clone)]
pub struct Workload {
    /// In order of arrival.
    pub requests: Vec<PlannedRequest>,
    /// The namespace of all keys.
    pub namespace: NamespaceId,
    /// Size of every block's payload.
    pub block_bytes: usize,
}

/// One request's blocks from the root.
#[derive(Debug, Clone)]
pub struct PlannedRequest {
    /// Arrival time since the start of the trace.
    pub at: Duration,
    /// Its blocks.
    pub keys: Vec<BlockKey>,
    /// Whether the last block is not full.
    pub has_partial_tail: bool,
}

impl Workload {
    /// Derives the keys of all blocks of the trace.
    ///
    /// Equal block numbers of a trace mean equal chains, so a key is derived from the number. The
    /// payload size is part of the namespace, so that a directory with blocks of the same trace in
    /// another size gives no hits.
    pub fn new(trace: &Trace, block_bytes: usize) -> Self {
        let manifest = Manifest::new()
            .with("weights", "none: synthetic payload")
            .with("workload", &trace.name)
            .with("block_tokens", trace.block_tokens.to_string())
            .with("block_bytes", block_bytes.to_string())
            .with("payload", "cascade replay 1");
        let namespace = Namespace::new(manifest, &TenantSecret::new(""));
        let mut keys: HashMap<u64, BlockKey> = HashMap::new();
        let mut key_of =
            |id: &u64| *keys.entry(*id).or_insert_with(|| namespace.key_of_id(&id.to_le_bytes()));
        let requests = trace.requests.iter().map(|request| PlannedRequest {
            at: request.at,
            keys: request.blocks.iter().map(&mut key_of).collect(),
            has_partial_tail: request.partial_tail,
        });
        Self { requests: requests.collect(), namespace: namespace.id(), block_bytes }
    }
}

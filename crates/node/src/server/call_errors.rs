//! The errors of calls that the node refuses by rule, before they reach the store.

use cascade_store::StoreError;
use cascade_wire::BLOCKS_MAX;

pub(super) fn not_held() -> StoreError {
    StoreError::Config {
        setting: "hold",
        reason: "the client seals a slab that it does not hold, or more bytes than the slab has"
            .to_owned(),
    }
}

pub(super) fn read_only() -> StoreError {
    StoreError::Config {
        setting: "access",
        reason: "this client connected read-only; connect with access to write".to_owned(),
    }
}

pub(super) fn administer_only() -> StoreError {
    StoreError::Config {
        setting: "access",
        reason: "this client connected to administer; connect with access to read or write"
            .to_owned(),
    }
}

pub(super) fn draining() -> StoreError {
    StoreError::Config {
        setting: "node",
        reason: "the node is draining; it accepts no new blocks and serves only present ones"
            .to_owned(),
    }
}

pub(super) fn too_many_blocks(blocks: usize) -> StoreError {
    StoreError::Config {
        setting: "batch",
        reason: format!("{blocks} blocks in one message; the limit is {BLOCKS_MAX}"),
    }
}

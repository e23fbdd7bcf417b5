//! Failures of a call, by what its caller can do.

use std::sync::Arc;

use cascade_memory::{DeviceError, MemoryError};
use thiserror::Error;

use crate::TierName;

/// A failure; the variant says what the caller can do.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline of the call passed. Retry later, or compute.
    #[error("could not {operation} within {timeout_ms} ms; retry later or raise the timeout")]
    Timeout {
        /// The operation in progress.
        operation: &'static str,
        /// The timeout of the call.
        timeout_ms: u64,
    },
    /// The write backlog of a lower tier is at its limit. Retry later.
    #[error(
        "the write backlog is at its limit: {pending_bytes} bytes wait to be written, most to tier \
         {tier}; retry later or raise dirty_max"
    )]
    Busy {
        /// The tier with the largest backlog.
        tier: TierName,
        /// Backlog of all tiers together.
        pending_bytes: u64,
    },
    /// Every byte of DRAM is pinned or held by views. Drop views, use smaller batches, or enlarge
    /// DRAM.
    #[error(
        "no room for {needed_bytes} bytes: all of DRAM is pinned or held by views; drop views, \
         unpin blocks or enlarge DRAM"
    )]
    NoRoom {
        /// Length of the block.
        needed_bytes: usize,
    },
    /// The client reached its share of a resource that the clients of a store share. Release some:
    /// drop views, unpin blocks, or make fewer concurrent calls.
    #[error("the limit of this client is reached: {most} {limit}; release some first")]
    Limit {
        /// The resource.
        limit: &'static str,
        /// The current limit for one client.
        most: u64,
    },
    /// A tier failed. Compute.
    #[error("tier {tier} failed to {operation}")]
    Tier {
        /// The tier.
        tier: TierName,
        /// The operation that failed.
        operation: &'static str,
        /// The cause.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A block could not be copied from or to device memory. Compute.
    #[error("cannot copy a block from or to device memory")]
    Device(#[source] DeviceError),
    /// The call gives access to the bytes of blocks in place, and they are in device memory. Copy
    /// them with a get, or put them with a put.
    #[error(
        "cannot {operation}: the blocks of tier {tier} are in device memory, which no processor \
         can access; copy blocks with get and put"
    )]
    NotHostMemory {
        /// The operation.
        operation: &'static str,
        /// The tier.
        tier: TierName,
    },
    /// The pipeline is not valid.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// A setting is not valid.
    #[error("{setting}: {reason}")]
    Config {
        /// Name of the setting.
        setting: &'static str,
        /// What is wrong and which values are valid.
        reason: String,
    },
    /// The pool could not be created.
    #[error("cannot create the DRAM tier")]
    Memory(#[source] Arc<MemoryError>),
    /// The size of the pool could not be changed.
    #[error("cannot change the size of DRAM")]
    Resize(#[source] Arc<MemoryError>),
    /// A thread could not be started.
    #[error("cannot start the threads of the store")]
    Threads {
        /// The error of the operating system.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// The store is being erased. Retry once the erase has ended.
    #[error("the store is being erased; retry once the erase has ended")]
    Erasing,
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// The node is unavailable. Compute; the client reconnects by itself.
    #[error("the node at {socket} is unavailable: {reason}")]
    Unavailable {
        /// Socket of the node.
        socket: String,
        /// The last error.
        reason: String,
    },
    /// The node refuses this client. Change the credentials or the settings of the client.
    #[error("the node at {socket} refuses this client: {reason}")]
    Refused {
        /// Socket of the node.
        socket: String,
        /// The reason that the node gave.
        reason: String,
    },
}

/// What is wrong with a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The registry does not have a stage of this name.
    #[error("pipeline {pipeline:?}: unknown stage {stage:?}; known are {known}")]
    UnknownStage {
        /// The whole pipeline.
        pipeline: String,
        /// The unknown stage.
        stage: String,
        /// The known stages.
        known: String,
    },
    /// The order of the stages is not valid, or a stage is missing.
    #[error("pipeline {pipeline:?}: {reason}")]
    BadOrder {
        /// The whole pipeline.
        pipeline: String,
        /// What is wrong, and with which stage.
        reason: String,
    },
}

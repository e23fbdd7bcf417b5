//! The state of one stage below DRAM.

use std::sync::Arc;
use std::time::Duration;

use cascade_tier::tier::TierError;

use crate::HealthConfig;
use crate::core::additions::Additions;
use crate::core::circuit::Breaker;
use crate::core::pending::{KeyChange, PendingWrite, Tickets};
use crate::core::queue::Queue;

/// What waits for a stage, and how it works.
#[derive(Debug)]
pub(crate) struct LowerTier {
    /// Blocks to be written.
    pub(crate) queue: Queue<PendingWrite>,
    pub(crate) block_tickets: Tickets,
    pub(crate) key_changes: Queue<KeyChange>,
    pub(crate) key_tickets: Tickets,
    /// How many threads are giving queued key changes their new addresses. Meanwhile its mover
    /// takes none.
    pub(crate) translations: u32,
    /// Shared by the calls that make room, until the catalog has what they dropped.
    pub(crate) reclaim: Arc<()>,
    /// The additions among the key changes that are queued or being recorded.
    pub(crate) additions: Additions,
    pub(crate) last_error: Option<TierError>,
    /// Write backlog: bytes queued or being written.
    pub(crate) pending_bytes: u64,
    pub(crate) breaker: Breaker,
    /// Blocks that it failed to store, oldest first. They are queued again when its write circuit
    /// closes or a write probe succeeds.
    pub(crate) unstored: Queue<PendingWrite>,
    /// The number of blocks at the front of `unstored` to queue again now.
    pub(crate) requeue_count: usize,
}

impl LowerTier {
    pub(crate) fn new(health: HealthConfig, now: Duration, now_unix_ms: u64) -> Self {
        Self {
            queue: Queue::default(),
            block_tickets: Tickets::default(),
            key_changes: Queue::default(),
            key_tickets: Tickets::default(),
            translations: 0,
            reclaim: Arc::default(),
            additions: Additions::default(),
            last_error: None,
            pending_bytes: 0,
            breaker: Breaker::new(health, now, now_unix_ms),
            unstored: Queue::default(),
            requeue_count: 0,
        }
    }

    /// Whether the tier may have dropped blocks for room that the catalog says it has.
    pub(crate) fn is_making_room(&self) -> bool {
        Arc::strong_count(&self.reclaim) > 1
    }
}

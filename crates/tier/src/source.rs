//! Sources: places that somebody else keeps, such as a peer host, behind one small trait.
//!
//! A source only knows how to locate and fetch blocks. The store asks it for blocks that its own
//! catalog does not have, and keeps what it fetches in DRAM. To add a source: implement [`Source`],
//! run [`crate::conformance::source`] over it, and pass it to the store in its configuration.

mod of_store;

use std::fmt;

use cascade_block::BlockKey;
use cascade_runtime::{Cancel, Deadline};

use crate::TierName;
use crate::tier::{Address, BlockFacts, Load, LoadOutcome, LoadQueue, TierError, next_loads};

pub use of_store::StoreSource;

/// The limits of one call to a source.
#[derive(Debug, Clone, Copy)]
pub struct SourceLimit<'a> {
    /// When the call must have returned.
    pub deadline: Deadline,
    /// Set when the caller has stopped waiting: the call may end without further results.
    pub cancel: &'a Cancel,
}

/// A block that a source has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocatedBlock {
    /// Its properties. The store keeps the block under these; it computes a digest itself.
    pub facts: BlockFacts,
    /// The CRC-32C of its bytes ([`cascade_block::checksum`]), against which the store compares
    /// what it fetched.
    pub checksum: u32,
    /// Where the source has it; only the source understands it. The store passes it to the fetch,
    /// perhaps seconds later.
    pub address: Address,
}

/// A place that keeps blocks which the store did not put there.
///
/// Calls come from several threads, on threads that exist for such calls. Every call returns by its
/// deadline, and soon after it was cancelled. A source that exceeds its deadlines costs the store a
/// thread for each hung call, up to a limit; callers of the store do not wait beyond the deadline.
pub trait Source: Send + Sync + fmt::Debug {
    /// The source's name in results and statistics. Not the name of a tier of the same store.
    fn name(&self) -> TierName;

    /// Which of these blocks it has; one result for each key, in order. An answer is a hint: the
    /// block may be gone when it is fetched.
    fn locate(
        &self,
        keys: &[BlockKey],
        limit: &SourceLimit<'_>,
    ) -> Result<Vec<Option<LocatedBlock>>, TierError>;

    /// Fetches blocks; one result for each, in order. A block that it no longer has is
    /// [`LoadOutcome::Gone`], never other bytes.
    fn fetch(&self, batch: Vec<Load>, limit: &SourceLimit<'_>) -> Vec<LoadOutcome>;

    /// As [`Self::fetch`], for blocks of a queue, until it is empty, the deadline passes or the
    /// call is cancelled. Gives each block that it takes back once, before it returns; the others
    /// stay in the queue.
    ///
    /// Worth implementing for a source that can give back a block while it fetches the next ones.
    /// Its calls share what they fetch through, such as a connection, so that a call for one block
    /// ends while another call fetches many.
    fn fetch_each(&self, queue: &mut dyn LoadQueue, limit: &SourceLimit<'_>) {
        while !limit.cancel.is_set() {
            let (numbers, batch) = next_loads(queue);
            if batch.is_empty() {
                return;
            }
            let mut outcomes = self.fetch(batch, limit).into_iter();
            for number in numbers {
                let missing = || LoadOutcome::Failed(TierError::NoResult);
                queue.ended(number, outcomes.next().unwrap_or_else(missing));
            }
        }
    }

    /// Whether it can be reached, without any block. Called while the source is idle, and while its
    /// circuit is open: success closes the circuit.
    fn probe(&self, deadline: Deadline) -> Result<(), TierError>;

    /// Number of its own calls still running after their deadline.
    fn stuck_calls(&self) -> u64 {
        0
    }

    /// Releases resources, such as connections. Later calls fail.
    fn close(&self) {}
}

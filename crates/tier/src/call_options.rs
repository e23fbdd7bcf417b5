//! Options of a call.

use std::num::NonZeroU32;
use std::time::Duration;

/// Options of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallOptions {
    /// Timeout of the call. Default: the timeout of the store.
    pub timeout: Option<Duration>,
    /// Identifier of the caller, kept with the blocks that it puts, for `Store::explain`.
    pub writer: Option<WriterId>,
}

/// Identifier of the writer of a block, chosen by the caller, such as a process or session number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriterId(pub NonZeroU32);

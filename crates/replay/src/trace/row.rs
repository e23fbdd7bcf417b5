//! What reads a row.

use super::field::TraceObject;
use super::parser::{Parser, RowOutcome};
use super::{TraceError, TraceFormat};

/// Reads a row of one format.
pub(super) type RowReader =
    fn(&mut Parser, TraceFormat, TraceObject<'_>) -> Result<RowOutcome, TraceError>;

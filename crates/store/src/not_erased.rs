//! What an erase could not erase.

/// Something that was not erased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotErased {
    /// A file, a tier, or memory.
    pub what: String,
    /// The reason.
    pub why: String,
}

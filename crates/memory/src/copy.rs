//! Copies between a caller's memory and slabs.

/// Copies all of `source` over all of `target`.
///
/// # Panics
/// If the lengths differ.
pub fn copy_bytes(target: &mut [u8], source: &[u8]) {
    target.copy_from_slice(source);
}

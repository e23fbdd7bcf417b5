//! Copies between callers and slabs.

/// Copies a whole block.
///
/// # Panics
/// If the lengths differ.
pub fn copy_in(target: &mut [u8], source: &[u8]) {
    target.copy_from_slice(source);
}

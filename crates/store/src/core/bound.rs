//! How much one hold of the store's lock may do.

/// Most keys that are handled while the lock is held once. More would make other calls wait longer;
/// fewer would make batches pay for the lock.
pub(crate) const KEYS_PER_HOLD: usize = 256;

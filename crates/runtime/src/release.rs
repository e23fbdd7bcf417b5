//! What a guard does after it has unlocked: it tells the world, so that waiting threads try again.

use crate::simulated;

/// The last field of a guard, so that it is dropped when the lock is free.
pub(crate) struct Release<'a, L: ?Sized>(pub(crate) &'a L);

impl<L: ?Sized> Drop for Release<'_, L> {
    #[inline]
    fn drop(&mut self) {
        if let Some(world) = simulated::current() {
            world.released(address_of(self.0));
        }
    }
}

/// Identifies a lock or a condition variable while someone uses it. Addresses are only compared
/// for equality: they differ from run to run.
#[inline]
pub(crate) fn address_of<L: ?Sized>(lock: &L) -> usize {
    std::ptr::from_ref(lock).cast::<()>().addr()
}

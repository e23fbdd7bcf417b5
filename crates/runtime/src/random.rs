//! Randomness: the kernel's, or the world's generator.

use std::io;

use crate::simulated;

/// Fills the buffer with random bytes from the kernel; in a world, from its seed.
pub fn fill_random(mut bytes: &mut [u8]) -> io::Result<()> {
    if let Some(world) = simulated::current() {
        world.fill_random(bytes);
        return Ok(());
    }
    while !bytes.is_empty() {
        let flags = rustix::rand::GetRandomFlags::empty();
        // A signal may interrupt a long request, or end it early.
        match rustix::rand::getrandom(&mut *bytes, flags) {
            Ok(filled) => bytes = &mut std::mem::take(&mut bytes)[filled..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A random number, as [`fill_random`].
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    fill_random(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

//! Random bytes from the kernel, for identifiers that must be unique.

use std::io;

/// `N` random bytes from the kernel.
pub(crate) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    if filled < N {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

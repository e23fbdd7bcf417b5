//! The key file of encrypted worlds: a file in memory, because stores read a real one.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, memfd_create};

/// The key of all worlds.
const KEY: [u8; 32] = [0x5c; 32];

/// The path of the file. It lives as long as this process.
pub(crate) fn path() -> io::Result<PathBuf> {
    static FILE: OnceLock<File> = OnceLock::new();
    let file = if let Some(file) = FILE.get() {
        file
    } else {
        let fresh = make()?;
        FILE.get_or_init(|| fresh)
    };
    Ok(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
}

fn make() -> io::Result<File> {
    let mut file = File::from(memfd_create("simulated-key", MemfdFlags::CLOEXEC)?);
    // Stores refuse a key that other users can read.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(&KEY)?;
    Ok(file)
}

//! Drops files from the page cache and counts their cached pages, so that reads come from the disk.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// All files below a directory.
pub(super) fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// Asks the kernel to drop the cached pages of all files below a directory.
pub(super) fn drop_cached_pages(directory: &Path) -> io::Result<()> {
    for path in files(directory)? {
        let file = File::open(path)?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Bytes of the files below a directory that are in the page cache, counted by `fincore`.
///
/// None if that program is missing or fails. Then only `O_DIRECT` shows that reads are cold.
pub(super) fn cached_bytes(directory: &Path) -> io::Result<Option<u64>> {
    let files = files(directory)?;
    let listing = Command::new("fincore").args(["-b", "-n", "-o", "RES"]).args(files).output();
    let listing = match listing {
        Ok(output) if output.status.success() => output.stdout,
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let text = String::from_utf8_lossy(&listing);
    Ok(text.split_whitespace().map(|size| size.parse::<u64>().ok()).sum())
}

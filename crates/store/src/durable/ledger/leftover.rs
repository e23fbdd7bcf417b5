//! Leftover pools: files of ended processes in a directory, with or without blocks.
//!
//! A process that is killed before its first block leaves files that hold nothing. The next start
//! of a node of the same user removes them. Files that hold blocks stay for the node that made
//! them. The ledger's header distinguishes the two; it is read under its lock, which a live process
//! holds.

use std::io;
use std::path::{Path, PathBuf};

use cascade_memory::IdlePoolFiles;
use rustix::process::geteuid;

use super::opening::{boot_id, is_complete};
use super::{HEADER_FIELDS, MAGIC, USED, USED_WORD, VERSION, VERSION_WORD};

/// Words of the header that show whether the files can be used.
const WORDS: usize = USED_WORD + 1;

/// Suffix of the names of a node's pools; see [`pool_prefix`].
const SUFFIX: &str = ".pool";

/// The files of a pool that no running process uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftoverPool {
    /// The pool; its ledger lies beside it.
    pub path: PathBuf,
    /// Size of both files.
    pub bytes: u64,
    /// Whether the node that made it can recover blocks from it. If not, the next start of any node
    /// of this user in that directory removes the files.
    pub has_blocks: bool,
}

/// Prefix of the names of the pools of this user's nodes.
fn pool_prefix() -> String {
    format!("cascade-{}-", geteuid().as_raw())
}

/// The pools of this user's nodes in a directory that no running process uses. Takes the lock of
/// each for a moment and changes nothing.
///
/// # Errors
/// The directory cannot be read.
pub fn leftover_pools(directory: &Path) -> io::Result<Vec<LeftoverPool>> {
    let mut left = Vec::new();
    for path in IdlePoolFiles::names(directory, &pool_prefix(), SUFFIX)? {
        // Files that cannot be opened are skipped: they may belong to another program.
        let Ok(Some(files)) = IdlePoolFiles::lock(&path) else { continue };
        let Ok(has_blocks) = has_blocks(&files) else { continue };
        left.push(LeftoverPool { bytes: files.reserved_bytes(), path, has_blocks });
    }
    Ok(left)
}

/// Removes empty pools in a directory, left by killed starts of this user's nodes. Skips `own`,
/// which is about to be opened. Returns the messages to log.
pub(crate) fn remove_unused(directory: &Path, own: &Path) -> Vec<String> {
    // A directory that cannot be read fails the start right after this, with its own message.
    let names = IdlePoolFiles::names(directory, &pool_prefix(), SUFFIX).unwrap_or_default();
    names.into_iter().filter(|path| path != own).filter_map(|path| remove(&path)).collect()
}

fn remove(path: &Path) -> Option<String> {
    let files = IdlePoolFiles::lock(path).ok()??;
    // If the header cannot be read, the files may hold blocks, so they stay.
    if has_blocks(&files).unwrap_or(true) {
        return None;
    }
    let bytes = files.reserved_bytes();
    Some(match files.remove() {
        Ok(()) => format!(
            "removed {} ({bytes} bytes), left by a start that was killed before its first block",
            path.display()
        ),
        Err(error) => format!(
            "cannot remove {} ({bytes} bytes), left by a start that was killed: {}; remove it",
            path.display(),
            cascade_block::with_causes(&error)
        ),
    })
}

/// Whether a store can recover blocks from these files. Another version of the program may recover
/// blocks from files of another version.
fn has_blocks(files: &IdlePoolFiles) -> Result<bool, cascade_memory::MemoryError> {
    let words: [u64; WORDS] = files.first_words()?;
    // No version is zero: such a header was never completed.
    if words[0] == MAGIC && ![0, VERSION].contains(&words[VERSION_WORD]) {
        return Ok(true);
    }
    let fields = words.first_chunk::<HEADER_FIELDS>().expect("a header has more words");
    let is_complete = is_complete(fields, words[HEADER_FIELDS]);
    let is_of_this_boot = fields[8..] == boot_id();
    Ok(is_complete && is_of_this_boot && words[USED_WORD] == USED && files.has_pool())
}

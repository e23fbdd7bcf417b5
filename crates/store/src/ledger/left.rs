//! Pools that ended processes left in a directory: which hold blocks, and which nobody can use.
//!
//! A process that is killed before its first block leaves files that hold nothing. The next start
//! of a node of the same user removes them. Files that hold blocks stay for the node that made
//! them. Both are told apart by the ledger's header, under its lock: whoever lives holds that lock.

use std::io;
use std::path::{Path, PathBuf};

use cascade_memory::IdleFiles;
use rustix::process::geteuid;

use super::opening::{boot_id, header_sum};
use super::{HEADER_FIELDS, MAGIC, USED, USED_WORD, VERSION};

/// Words of the header that tell what the files are good for.
const WORDS: usize = USED_WORD + 1;

/// What the names of a node's pools end with; see [`pool_prefix`].
const SUFFIX: &str = ".pool";

/// The files of a pool that no running process has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftPool {
    /// The pool; its ledger lies beside it.
    pub path: PathBuf,
    /// What both files take.
    pub bytes: u64,
    /// Whether the node that made it finds blocks there. If not, the next start of any node of
    /// this user in that directory removes the files.
    pub has_blocks: bool,
}

/// What the names of the pools of this user's nodes begin with.
fn pool_prefix() -> String {
    format!("cascade-{}-", geteuid().as_raw())
}

/// The pools of nodes of this user in a directory that no running process has. Takes the lock of
/// each for a moment and changes nothing.
///
/// # Errors
/// The directory cannot be read.
pub fn left_pools(directory: &Path) -> io::Result<Vec<LeftPool>> {
    let mut left = Vec::new();
    for path in IdleFiles::names(directory, &pool_prefix(), SUFFIX)? {
        // What cannot be opened is not ours to judge.
        let Ok(Some(files)) = IdleFiles::lock(&path) else { continue };
        let Ok(has_blocks) = has_blocks(&files) else { continue };
        left.push(LeftPool { bytes: files.reserved_bytes(), path, has_blocks });
    }
    Ok(left)
}

/// Removes the pools in a directory that starts of this user's nodes left when they were killed.
/// `own` is not looked at: it is about to be opened. Returns what there is to tell.
pub(crate) fn remove_unused(directory: &Path, own: &Path) -> Vec<String> {
    // A directory that cannot be read fails the start right after this, and says so there.
    let names = IdleFiles::names(directory, &pool_prefix(), SUFFIX).unwrap_or_default();
    names.into_iter().filter(|path| path != own).filter_map(|path| remove(&path)).collect()
}

fn remove(path: &Path) -> Option<String> {
    let files = IdleFiles::lock(path).ok()??;
    if has_blocks(&files).unwrap_or(true) {
        return None;
    }
    let bytes = files.reserved_bytes();
    Some(match files.remove() {
        Ok(()) => format!(
            "removed {} ({bytes} bytes), which a start that was killed had left",
            path.display()
        ),
        Err(error) => format!(
            "{} ({bytes} bytes) was left by a start that was killed and cannot be removed: {}",
            path.display(),
            cascade_block::with_causes(&error)
        ),
    })
}

/// Whether some store can take blocks over from these files. Those of another version may be
/// another program's to take over.
fn has_blocks(files: &IdleFiles) -> Result<bool, cascade_memory::MemoryError> {
    let words: [u64; WORDS] = files.first_words()?;
    if words[0] == MAGIC && words[1] != VERSION && words[1] != 0 {
        return Ok(true);
    }
    let fields = words.first_chunk::<HEADER_FIELDS>().expect("a header has more words");
    let is_whole = words[0] == MAGIC && words[HEADER_FIELDS] == header_sum(fields);
    let is_of_this_boot = fields[8..] == boot_id();
    Ok(is_whole && is_of_this_boot && words[USED_WORD] == USED && files.has_pool())
}

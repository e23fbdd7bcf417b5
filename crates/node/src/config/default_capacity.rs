//! The default size of the file tier: a share of the space on its file system.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use cascade_block::ByteSize;

use crate::doctor::{FileSystem, Machine as _, ThisMachine};

/// Share of the space that the tier takes. The rest is for the system and for other users.
const SHARE_PERCENT: u64 = 80;
/// The size if the space cannot be measured, and the largest size on memory or a container layer.
const FALLBACK_BYTES: u64 = 4 << 30;
/// The smallest useful tier. The doctor fails if even that is not free.
const MINIMUM_BYTES: u64 = 64 << 20;
/// Sizes from here on are rounded down to whole GiB, smaller ones to whole MiB.
const GIB_ROUNDING_BYTES: u64 = 16 << 30;
/// How long a file system may take to answer, so that a dead mount cannot block the start.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// The space that a file system has for a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AvailableSpace {
    /// Kind of file system.
    pub file_system: FileSystem,
    /// Bytes that are free for this user.
    pub free_bytes: u64,
    /// Bytes that the files in the directory already take. They count as available, so that the
    /// size of the tier stays the same from start to start as it fills.
    pub own_bytes: u64,
}

impl AvailableSpace {
    /// Measures the space for a directory, which need not exist yet.
    ///
    /// # Errors
    /// If the file system fails or does not answer within five seconds.
    pub fn of(directory: &Path) -> io::Result<Self> {
        let (sender, answer) = mpsc::sync_channel(1);
        let directory = directory.to_owned();
        let measure = move || {
            // Sending fails if the time-out has passed.
            drop(sender.send(measure(&directory)));
        };
        thread::Builder::new().name("cascade-room".to_owned()).spawn(measure)?;
        answer.recv_timeout(TIME_LIMIT).unwrap_or_else(|_| {
            let reason = format!("no answer within {} s", TIME_LIMIT.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, reason))
        })
    }
}

fn measure(directory: &Path) -> io::Result<AvailableSpace> {
    let existing = directory.ancestors().find(|path| path.exists());
    let existing = existing.map_or_else(|| PathBuf::from("/"), Path::to_owned);
    let space = ThisMachine::default().space(&existing)?;
    // If the directory is missing, files in its parent do not belong to the tier.
    let is_own = existing == directory && directory.is_dir();
    let own_bytes = if is_own { ThisMachine::default().used_bytes(directory, "")? } else { 0 };
    Ok(AvailableSpace { file_system: space.file_system, free_bytes: space.free_bytes, own_bytes })
}

/// The capacity of each of `shares` stores below a directory, and an explanation of it.
/// `reserved_bytes` are the quotas of other tenants there.
pub(super) fn capacity(
    directory: &Path,
    room: io::Result<AvailableSpace>,
    reserved_bytes: u64,
    shares: u64,
) -> (u64, String) {
    let at = directory.display();
    let room = match room {
        Ok(room) => room,
        Err(error) => {
            let reason = format!("the free space for {at} could not be measured ({error})");
            return (FALLBACK_BYTES, reason);
        }
    };
    let total = room.free_bytes.saturating_add(room.own_bytes);
    let share = (total / 100 * SHARE_PERCENT).saturating_sub(reserved_bytes) / shares.max(1);
    let is_disk = !room.file_system.is_memory() && room.file_system != FileSystem::OVERLAY;
    let maximum = if is_disk { u64::MAX } else { FALLBACK_BYTES };
    let rounded = |bytes: u64| {
        let unit = if bytes >= GIB_ROUNDING_BYTES { 1 << 30 } else { 1 << 20 };
        bytes / unit * unit
    };
    let bytes = rounded(share.min(maximum)).max(MINIMUM_BYTES);
    let total = ByteSize(total).rounded();
    let kind = room.file_system;
    let reason = if share > maximum {
        format!("at most {} on {kind}, which is not on a disk", ByteSize(maximum))
    } else {
        let split = if shares > 1 { format!(", one of {shares} tenants") } else { String::new() };
        format!("{SHARE_PERCENT} % of {total} free or used by the tier at {at}{split}")
    };
    (bytes, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;
    const EXT4: FileSystem = FileSystem(0xef53);

    fn capacity_of(file_system: FileSystem, free_bytes: u64, own_bytes: u64) -> (u64, String) {
        let room = AvailableSpace { file_system, free_bytes, own_bytes };
        capacity(Path::new("/nvme"), Ok(room), 0, 1)
    }

    #[test]
    fn the_default_is_80_percent_of_a_disk_and_stays_the_same_as_the_tier_fills() {
        let (empty, reason) = capacity_of(EXT4, 2 * TIB, 0);
        assert_eq!(empty, 1638 * GIB);
        assert!(reason.contains("80 %") && reason.contains("2.0 TiB"), "{reason}");
        assert_eq!(capacity_of(EXT4, 2 * TIB - empty, empty).0, empty);
        assert_eq!(capacity_of(EXT4, GIB, 0).0, 819 << 20);
        assert_eq!(capacity_of(EXT4, 0, 0).0, MINIMUM_BYTES);
    }

    #[test]
    fn the_default_on_memory_or_a_container_layer_is_at_most_4_gib() {
        for kind in [FileSystem::TMPFS, FileSystem::OVERLAY] {
            let (bytes, reason) = capacity_of(kind, 2 * TIB, 0);
            assert_eq!(bytes, FALLBACK_BYTES);
            assert!(reason.contains("not on a disk"), "{reason}");
            assert_eq!(capacity_of(kind, GIB, 0).0, 819 << 20);
        }
    }

    #[test]
    fn tenants_without_a_quota_share_what_quotas_leave() {
        let room = AvailableSpace { file_system: EXT4, free_bytes: 1000 * GIB, own_bytes: 0 };
        let (bytes, reason) = capacity(Path::new("/nvme"), Ok(room), 200 * GIB, 3);
        assert_eq!(bytes, 200 * GIB);
        assert!(reason.contains("one of 3 tenants"), "{reason}");
    }

    #[test]
    fn a_file_system_that_does_not_answer_gives_the_fallback_size() {
        let error = io::Error::from(io::ErrorKind::TimedOut);
        let (bytes, reason) = capacity(Path::new("/nvme"), Err(error), 0, 1);
        assert_eq!(bytes, FALLBACK_BYTES);
        assert!(reason.contains("/nvme") && reason.contains("not be measured"), "{reason}");
    }

    #[test]
    fn a_missing_directory_has_the_space_of_its_nearest_parent() {
        let directory = tempfile::tempdir().unwrap();
        let missing = AvailableSpace::of(&directory.path().join("a/b")).unwrap();
        assert!(missing.own_bytes == 0 && missing.free_bytes > 0, "{missing:?}");
        std::fs::write(directory.path().join("block"), vec![7; 1 << 20]).unwrap();
        let existing = AvailableSpace::of(directory.path()).unwrap();
        assert!(existing.own_bytes >= 1 << 20, "{existing:?}");
    }
}

//! The default size of the file tier: a share of the room on its file system.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use cascade_block::ByteSize;

use crate::doctor::{FileSystem, Machine as _, ThisMachine};

/// Share of the room that the tier takes. The rest is for the system and for other users.
const SHARE_PERCENT: u64 = 80;
/// The size where the room is not known, and the most where it is not a disk's.
const SMALL_BYTES: u64 = 4 << 30;
/// The least that is worth a tier. The doctor says when not even that is free.
const LEAST_BYTES: u64 = 64 << 20;
/// From this size on, whole GiB: below, whole MiB.
const ROUGH_BYTES: u64 = 16 << 30;
/// How long a file system may take to answer. A dead mount must not hold up the start for ever.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// What a directory's file system has for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Which kind of file system.
    pub file_system: FileSystem,
    /// Bytes that are free for this user.
    pub free_bytes: u64,
    /// Bytes that the directory's own files take already. They count as room, so that the tier
    /// does not shrink from start to start as it fills.
    pub own_bytes: u64,
}

impl Room {
    /// What this machine has for a directory, which need not exist yet.
    ///
    /// # Errors
    /// If the file system does not say, or not within five seconds.
    pub fn of(directory: &Path) -> io::Result<Self> {
        let (sender, answer) = mpsc::sync_channel(1);
        let wanted = directory.to_owned();
        let measure = move || {
            // Nobody waits any more if the time was up.
            drop(sender.send(measure(&wanted)));
        };
        thread::Builder::new().name("cascade-room".to_owned()).spawn(measure)?;
        answer.recv_timeout(TIME_LIMIT).unwrap_or_else(|_| {
            let reason = format!("no answer within {} s", TIME_LIMIT.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, reason))
        })
    }
}

fn measure(directory: &Path) -> io::Result<Room> {
    let existing = directory.ancestors().find(|path| path.exists());
    let existing = existing.map_or_else(|| PathBuf::from("/"), Path::to_owned);
    let space = ThisMachine.space(&existing)?;
    // A directory above, where this one is missing, belongs to others.
    let is_own = existing == directory && directory.is_dir();
    let own_bytes = if is_own { ThisMachine.used_bytes(directory, "")? } else { 0 };
    Ok(Room { file_system: space.file_system, free_bytes: space.free_bytes, own_bytes })
}

/// The capacity of each of `shares` stores below a directory, when `reserved_bytes` are given to
/// others, and the reason in words.
pub(super) fn capacity(
    directory: &Path,
    room: io::Result<Room>,
    reserved_bytes: u64,
    shares: u64,
) -> (u64, String) {
    let at = directory.display();
    let room = match room {
        Ok(room) => room,
        Err(error) => {
            let reason = format!("the room on the file system of {at} is not known ({error})");
            return (SMALL_BYTES, reason);
        }
    };
    let whole = room.free_bytes.saturating_add(room.own_bytes);
    let share = (whole / 100 * SHARE_PERCENT).saturating_sub(reserved_bytes) / shares.max(1);
    let is_disk = !room.file_system.is_memory() && room.file_system != FileSystem::OVERLAY;
    let most = if is_disk { u64::MAX } else { SMALL_BYTES };
    let rounded = |bytes: u64| {
        let unit = if bytes >= ROUGH_BYTES { 1 << 30 } else { 1 << 20 };
        bytes / unit * unit
    };
    let bytes = rounded(share.min(most)).max(LEAST_BYTES);
    let whole = ByteSize(whole).rounded();
    let kind = room.file_system;
    let reason = if share > most {
        format!("at most {} on {kind}, which is no disk's file system", ByteSize(most))
    } else {
        let of = if shares > 1 { format!(", one of {shares} tenants") } else { String::new() };
        format!("{SHARE_PERCENT} % of {whole} free or taken by the tier at {at}{of}")
    };
    (bytes, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;
    const EXT4: FileSystem = FileSystem(0xef53);

    fn of(file_system: FileSystem, free_bytes: u64, own_bytes: u64) -> (u64, String) {
        let room = Room { file_system, free_bytes, own_bytes };
        capacity(Path::new("/nvme"), Ok(room), 0, 1)
    }

    #[test]
    fn a_disk_gives_most_of_what_is_free_and_the_same_when_the_tier_is_full() {
        let (empty, reason) = of(EXT4, 2 * TIB, 0);
        assert_eq!(empty, 1638 * GIB);
        assert!(reason.contains("80 %") && reason.contains("2.0 TiB"), "{reason}");
        assert_eq!(of(EXT4, 2 * TIB - empty, empty).0, empty);
        assert_eq!(of(EXT4, GIB, 0).0, 819 << 20);
        assert_eq!(of(EXT4, 0, 0).0, LEAST_BYTES);
    }

    #[test]
    fn memory_and_a_containers_layer_give_little() {
        for kind in [FileSystem::TMPFS, FileSystem::OVERLAY] {
            let (bytes, reason) = of(kind, 2 * TIB, 0);
            assert_eq!(bytes, SMALL_BYTES);
            assert!(reason.contains("no disk's file system"), "{reason}");
            assert_eq!(of(kind, GIB, 0).0, 819 << 20);
        }
    }

    #[test]
    fn tenants_share_what_quotas_leave() {
        let room = Room { file_system: EXT4, free_bytes: 1000 * GIB, own_bytes: 0 };
        let (bytes, reason) = capacity(Path::new("/nvme"), Ok(room), 200 * GIB, 3);
        assert_eq!(bytes, 200 * GIB);
        assert!(reason.contains("one of 3 tenants"), "{reason}");
    }

    #[test]
    fn a_file_system_that_does_not_answer_gives_the_small_size() {
        let error = io::Error::from(io::ErrorKind::TimedOut);
        let (bytes, reason) = capacity(Path::new("/nvme"), Err(error), 0, 1);
        assert_eq!(bytes, SMALL_BYTES);
        assert!(reason.contains("/nvme") && reason.contains("not known"), "{reason}");
    }

    #[test]
    fn the_room_of_a_directory_that_is_missing_is_that_of_the_one_above() {
        let directory = tempfile::tempdir().unwrap();
        let missing = Room::of(&directory.path().join("a/b")).unwrap();
        assert!(missing.own_bytes == 0 && missing.free_bytes > 0, "{missing:?}");
        std::fs::write(directory.path().join("block"), vec![7; 1 << 20]).unwrap();
        let existing = Room::of(directory.path()).unwrap();
        assert!(existing.own_bytes >= 1 << 20, "{existing:?}");
    }
}

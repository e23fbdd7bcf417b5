//! The kind and the free space of a file system.

use std::fmt;

/// The kind and the space of a directory's file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// The kind of file system.
    pub file_system: FileSystem,
    /// Bytes that are free for this user.
    pub free_bytes: u64,
    /// Size of the file system.
    pub total_bytes: u64,
}

/// A kind of file system, by its magic number (`statfs(2)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystem(pub u64);

impl FileSystem {
    /// `tmpfs`.
    pub const TMPFS: Self = Self(0x0102_1994);
    /// `ramfs`.
    pub const RAMFS: Self = Self(0x8584_58f6);
    /// `hugetlbfs`.
    pub const HUGETLBFS: Self = Self(0x9584_58f6);
    /// `overlay`, the writable layer of a container.
    pub const OVERLAY: Self = Self(0x794c_7630);
    /// NFS.
    pub const NFS: Self = Self(0x6969);
    /// Lustre.
    pub const LUSTRE: Self = Self(0x0bd0_0bd0);

    const NAMES: [(u64, &'static str); 16] = [
        (Self::TMPFS.0, "tmpfs"),
        (Self::RAMFS.0, "ramfs"),
        (Self::HUGETLBFS.0, "hugetlbfs"),
        (Self::OVERLAY.0, "overlay"),
        (Self::NFS.0, "nfs"),
        (Self::LUSTRE.0, "lustre"),
        (0xef53, "ext4"),
        (0x5846_5342, "xfs"),
        (0x9123_683e, "btrfs"),
        (0x2fc1_2fc1, "zfs"),
        (0xf2f5_2010, "f2fs"),
        (0x6573_5546, "fuse"),
        (0x00c3_6400, "ceph"),
        (0x4750_4653, "gpfs"),
        (0x0102_1997, "9p"),
        (0xfe53_4d42, "smb"),
    ];

    /// Whether its files are in memory, and lost on reboot.
    pub fn is_memory(self) -> bool {
        [Self::TMPFS, Self::RAMFS, Self::HUGETLBFS].contains(&self)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((_, name)) => f.pad(name),
            None => write!(f, "file system {:#x}", self.0),
        }
    }
}

//! Why the kernel gives no `io_uring`, from the error of the attempt.

use std::fmt;
use std::io;

use rustix::io::Errno;

/// Why there is no ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingRefusal {
    /// The memory of a ring exceeds what this user may lock (`RLIMIT_MEMLOCK`).
    LockedMemory,
    /// All file descriptors are in use.
    Descriptors,
    /// A setting, a seccomp profile or an old kernel.
    Forbidden,
}

impl RingRefusal {
    /// The reason behind an error of the attempt.
    pub fn of(error: &io::Error) -> Self {
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOMEM) => Self::LockedMemory,
            Some(Errno::MFILE | Errno::NFILE) => Self::Descriptors,
            _ if error.kind() == io::ErrorKind::OutOfMemory => Self::LockedMemory,
            _ => Self::Forbidden,
        }
    }

    /// What to do.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::LockedMemory => {
                "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1"
            }
            Self::Descriptors => {
                "ulimit -n 65536; systemd: LimitNOFILE=65536; Docker: --ulimit nofile=65536"
            }
            Self::Forbidden => {
                "sudo sysctl kernel.io_uring_disabled=0; Docker: use a seccomp profile that allows \
                 io_uring_setup, io_uring_enter and io_uring_register"
            }
        }
    }
}

impl fmt::Display for RingRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LockedMemory => "the limit of locked memory is too low for io_uring",
            Self::Descriptors => "no file descriptor is free for io_uring",
            Self::Forbidden => "the kernel refuses io_uring",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A low limit of locked memory was reported as a kernel that forbids `io_uring`.
    #[test]
    fn a_limit_is_not_called_a_prohibition() {
        for (errno, reason) in [
            (Errno::NOMEM, RingRefusal::LockedMemory),
            (Errno::MFILE, RingRefusal::Descriptors),
            (Errno::PERM, RingRefusal::Forbidden),
            (Errno::NOSYS, RingRefusal::Forbidden),
        ] {
            assert_eq!(RingRefusal::of(&errno.into()), reason);
        }
        assert!(RingRefusal::LockedMemory.remedy().contains("LimitMEMLOCK"));
    }
}

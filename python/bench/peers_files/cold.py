"""Shows that a read came from the disk."""

import ctypes
import os
from pathlib import Path

CACHED_SHARE_MAX = 0.01
"""Most of a round's bytes that may be in the page cache before a cold read: metadata."""
DISK_SHARE_MIN = 0.99
"""Least of a round's bytes that a cold read must have fetched from the disk."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class NotColdError(Exception):
    """A read that was to be cold was served from memory."""


def disk_bytes_read() -> int | None:
    """Return the bytes that this process has fetched from disks; None if the kernel hides it."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(": ") for line in lines)
    return int(fields["read_bytes"]) if "read_bytes" in fields else None


def check_cold(read: int, cached_before: int, from_disk: int | None) -> None:
    """Raise `NotColdError` if a read of `read` bytes was not served by the disk."""
    if cached_before > CACHED_SHARE_MAX * read:
        raise NotColdError(f"{cached_before} of {read} bytes were in the page cache before a read")
    if from_disk is not None and from_disk < DISK_SHARE_MIN * read:
        raise NotColdError(f"only {from_disk} of {read} bytes were read from the disk")


def settle(directory: Path) -> None:
    """Wait until the file system has written what it owes, so that the next figure does not pay."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if _LIBC.syncfs(descriptor):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(directory))
    finally:
        os.close(descriptor)

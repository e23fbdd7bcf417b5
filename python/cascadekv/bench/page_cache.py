"""Drops files from the kernel's page cache, and counts the bytes that are still cached."""

import ctypes
import mmap
import os
from pathlib import Path

__all__ = ["cached_bytes", "drop"]

_libc = ctypes.CDLL(None, use_errno=True)


def drop(directory: Path) -> int:
    """Sync the files below a directory and drop their cached pages; returns bytes still cached.

    Raises `OSError` for a file that cannot be read.
    """
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return cached_bytes(directory)


def cached_bytes(directory: Path) -> int:
    """Return the bytes of files below a directory that are in the page cache."""
    return sum(_cached_bytes_of(path) for path in _files(directory))


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 0]


def _cached_bytes_of(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapping:
        pages = -(-size // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        # ctypes returns the address of writable memory only; a private mapping is writable.
        first = ctypes.c_char.from_buffer(mapping)
        try:
            address = ctypes.c_void_p(ctypes.addressof(first))
            if _libc.mincore(address, ctypes.c_size_t(size), resident) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
        finally:
            del first
        return sum(page & 1 for page in resident) * mmap.PAGESIZE

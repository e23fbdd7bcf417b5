"""Whether the files of a model have changed, above all since an engine can have read them.

An engine reads its weights before a connector exists, so a connector cannot look at the files
first. But a change of a file sets its time of change (`ctime`), which programs cannot choose. A
file whose last change is older than the process is the file that the process has read.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FileFacts", "changed_since_start", "facts_of", "note_no_engine_yet", "process_start"]

FileFacts = tuple[tuple[str | int, ...], ...]
"""For each path its device, inode, size and times: equal if nothing was changed."""

SLACK_S = 0.1
"""Resolution of the times of local files, and of the start of a process."""
REMOTE_SLACK_S = 600.0
"""Most that the clock of a file server may be behind ours."""
LOCAL_KINDS = frozenset(("ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"))
"""File systems that take times from the clock of this host."""
_before_load = [0.0]


def note_no_engine_yet() -> None:
    """Note the time, unless this process may have read weights already.

    Engines initialize PyTorch's process groups before they load. Called when a connector is
    imported, which for an engine in this process is when its configuration is made.
    """
    torch: Any = sys.modules.get("torch")
    is_initialized = getattr(getattr(torch, "distributed", None), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        _before_load[0] = time.time()


def process_start() -> float:
    """Return when this process began, by the clock of local files. Linux only."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    seconds_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + seconds_after_boot


def changed_since_start(place: Path) -> str | None:
    """Return what has changed in a model's directory or file since; `None` if nothing has."""
    try:
        since = max(process_start(), _before_load[0])
        kinds = _kinds()
        for path in _watched(place):
            for facts in (path.lstat(), path.stat()):
                slack = SLACK_S if kinds.get(facts.st_dev) in LOCAL_KINDS else REMOTE_SLACK_S
                if facts.st_ctime > since - slack:
                    return f"{path} was changed {facts.st_ctime - since:+.1f} s after it"
    except (OSError, ValueError, IndexError) as error:
        return f"the times of {place} cannot be read: {error}"
    return None


def facts_of(place: Path) -> FileFacts:
    """Return the facts of a model's directory or file. Raises `OSError` if one cannot be read."""
    facts: list[tuple[str | int, ...]] = []
    for path in _watched(place):
        for it in (path.lstat(), path.stat()):
            times = it.st_mtime_ns, it.st_ctime_ns
            facts.append((str(path), it.st_dev, it.st_ino, it.st_size, *times))
    return tuple(facts)


def _watched(place: Path) -> Iterator[Path]:
    """Return the paths whose change changes what is read under the name of a model."""
    absolute = place.absolute()
    yield absolute
    yield from (each for each in absolute.parents if each.is_symlink())
    if not place.is_dir():
        return
    yield from (each for each in absolute.rglob("*") if not each.name.startswith("."))
    if absolute.parent.name == "snapshots":
        # Of a hub cache: which snapshot a revision means.
        yield from (absolute.parent.parent / "refs").rglob("*")


def _kinds() -> dict[int, str]:
    """Return the kind of each mounted file system by its device."""
    kinds: dict[int, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        major, minor = before.split()[2].split(":")
        kinds[os.makedev(int(major), int(minor))] = after.split()[0]
    return kinds

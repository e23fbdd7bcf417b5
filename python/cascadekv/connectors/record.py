"""Records finished requests as a trace for `cascade replay`: one JSON object per line.

The engine's thread appends to a bounded queue, and a background thread writes the file. Requests
that do not fit into the queue, or cannot be written, are dropped and counted: recording never
delays the engine.
"""

import errno
import io
import json
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cascadekv.errors import ConfigError

__all__ = ["TraceRecorder"]

logger = logging.getLogger(__name__)

QUEUE_MAX = 4096
"""Most lines in the queue."""
HASH_BYTES = 16
"""Leading bytes of a block key that are recorded, as 32 hexadecimal digits."""
DEFAULT_NAME = "trace"
LINE_BYTES_MAX = 64 << 20
"""Upper bound for a line: more than a million blocks of 35 characters each."""
LOG_INTERVAL_S = 60.0
"""Least time between two log lines about failed writes."""

_RequestRecord = tuple[int, int, int, tuple[bytes, ...]]
"""Unix time in milliseconds, prompt tokens, output tokens, keys."""


class TraceRecorder:
    """Appends to a file and rotates it when it is full.

    `place` is a directory, where each process writes its own `trace-PID.jsonl`, or a path that ends
    in `.jsonl`. A full `NAME.jsonl` is renamed to `NAME.1.jsonl`, that one to `NAME.2.jsonl` and so
    on; the oldest file is deleted. `cascade replay` reads one file or the directory.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        block_tokens: int,
        max_bytes: int = 64 << 20,
        max_files: int = 3,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open the file. Raises `ConfigError` if it cannot be written, with the reason."""
        if block_tokens < 1 or max_bytes < 1 or max_files < 1:
            raise ConfigError(
                f"block_tokens is {block_tokens}, max_bytes {max_bytes}, max_files {max_files}; "
                f"each must be at least 1"
            )
        self._block_tokens = block_tokens
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._now = now
        self._path = _trace_path(Path(place))
        self._requests: queue.Queue[_RequestRecord | None] = queue.Queue(QUEUE_MAX)
        self._lock = threading.Lock()
        self._closed = False
        self._dropped = 0
        self._logged_at = 0.0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: io.FileIO | None = open_trace(self._path)
        except OSError as error:
            raise ConfigError(
                f"{self._path}: the trace cannot be written: {error.strerror}; set another path or "
                f"disable the recording (cascade.record, enable_record_traces)"
            ) from error
        self._thread = threading.Thread(target=self._write, name="cascade-trace", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file that lines are appended to."""
        return self._path

    @property
    def dropped(self) -> int:
        """Number of requests that were dropped because the disk was slow or failed."""
        return self._dropped

    def record(
        self,
        *,
        input_tokens: int,
        output_tokens: int,
        keys: Iterable[bytes],
        arrived_unix_s: float | None = None,
    ) -> None:
        """Record a finished request; never waits.

        `keys` are those of the prompt's full blocks, in order, optionally with one more for a last
        block that is not full. `arrived_unix_s` is the arrival time; the default is now.
        """
        at = self._now() if arrived_unix_s is None else arrived_unix_s
        request = (int(at * 1000), input_tokens, output_tokens, tuple(keys))
        with self._lock:
            if not self._closed:
                try:
                    self._requests.put_nowait(request)
                except queue.Full:
                    self._dropped += 1
            else:
                self._dropped += 1

    def close(self, *, timeout: float = 5.0) -> None:
        """Write the queued requests, for at most `timeout` seconds; may be called again."""
        deadline = time.monotonic() + timeout
        with self._lock:
            is_first_call, self._closed = not self._closed, True
        if is_first_call:
            try:
                self._requests.put(None, timeout=timeout)
            except queue.Full:
                self._count_dropped(self._requests.qsize(), "the disk was too slow at the end")
                return
        self._thread.join(max(deadline - time.monotonic(), 0.0))

    def _write(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._append(self._line(request))
            except OSError as error:
                self._count_dropped(1, f"{self._path}: {error.strerror}")
                self._close_file()
        self._close_file()

    def _line(self, request: _RequestRecord) -> bytes:
        timestamp, input_tokens, output_tokens, keys = request
        fields = {
            "timestamp": timestamp,
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": [key[:HASH_BYTES].hex() for key in keys],
            "block_tokens": self._block_tokens,
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    def _append(self, line: bytes) -> None:
        """Write a whole line or nothing: a partial line would make the trace unreadable."""
        if self._file is None:
            self._file = open_trace(self._path)
        used = self._file.seek(0, os.SEEK_END)
        if used and used + len(line) > self._max_bytes:
            self._close_file()
            self._rotate()
            self._file = open_trace(self._path)
            used = 0
        if self._file.write(line) != len(line):
            self._file.truncate(used)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rotate(self) -> None:
        if self._max_files == 1:
            self._path.unlink(missing_ok=True)
            return
        for number in range(self._max_files - 2, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")

    def _close_file(self) -> None:
        """Close the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._count_dropped(0, f"{self._path}: {error.strerror}")

    def _count_dropped(self, count: int, reason: str) -> None:
        with self._lock:
            self._dropped += count
            now = time.monotonic()
            is_due = not self._logged_at or now - self._logged_at >= LOG_INTERVAL_S
            if is_due:
                self._logged_at = now
        if is_due:
            logger.warning("Cascade: requests are missing from the trace: %s", reason)


def open_trace(path: Path) -> io.FileIO:
    """Open a file for appending; truncates a partial last line, left by a killed process."""
    file = io.FileIO(path, "ab+", opener=_open_own)
    end = file.seek(0, os.SEEK_END)
    begin = max(end - LINE_BYTES_MAX, 0)
    file.seek(begin)
    tail = file.read(end - begin)
    if tail and not tail.endswith(b"\n"):
        file.truncate(begin + tail.rfind(b"\n") + 1)
    return file


def _open_own(path: str, flags: int) -> int:
    """Open a file, unless it may be that of another user, whom the directory lets create files."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link") from error
        raise
    found = os.fstat(descriptor)
    # Some file systems show one user as the owner of all files.
    owners = (os.geteuid(), Path(path).parent.stat().st_uid)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in owners:
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is not a file of this user with one hard link")


def _trace_path(place: Path) -> Path:
    if place.suffix == ".jsonl":
        return place
    return place / f"{DEFAULT_NAME}-{os.getpid()}.jsonl"

"""Records finished requests as a trace that `cascade replay` reads: one JSON object a line.

The engine's thread only appends to a bounded queue; a thread of the recorder writes. What does not
fit, or cannot be written, is counted and dropped: a trace is never worth a token's delay.
"""

import errno
import io
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cascadekv.errors import ConfigError

__all__ = ["TraceRecorder"]

logger = logging.getLogger(__name__)

WAITING_MAX = 4096
"""Most lines that wait to be written."""
HASH_BYTES = 16
"""Bytes of a block key that a trace keeps: 32 hex digits, far more than a trace has blocks."""
DEFAULT_NAME = "trace"
LINE_BYTES_MAX = 64 << 20
"""More than any line has: a million blocks of 35 characters each."""
LOGGED_EVERY_S = 60.0
"""How often a failure to write is logged."""

_Request = tuple[int, int, int, tuple[bytes, ...]]
"""Milliseconds since 1970, tokens of the prompt and of the answer, keys."""


class TraceRecorder:
    """Appends to one file, and starts a new one when it is full.

    `place` is a directory, in which the trace is `trace-PID.jsonl` (each process writes its own),
    or a path that ends in `.jsonl`. A full `NAME.jsonl` becomes `NAME.1.jsonl`, that one
    `NAME.2.jsonl` and so on; the oldest goes. `cascade replay` takes one file, or the directory.
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
        """Open the file. Raises `ConfigError` that says what cannot be written, and why."""
        if block_tokens < 1 or max_bytes < 1 or max_files < 1:
            raise ConfigError(
                f"block_tokens is {block_tokens}, max_bytes {max_bytes}, max_files {max_files}; "
                f"at least 1 each"
            )
        self._block_tokens = block_tokens
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._now = now
        self._path = _file(Path(place))
        self._requests: queue.Queue[_Request | None] = queue.Queue(WAITING_MAX)
        self._lock = threading.Lock()
        self._closed = False
        self._dropped = 0
        self._logged_at = 0.0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: io.FileIO | None = open_trace(self._path)
        except OSError as error:
            raise ConfigError(
                f"{self._path}: the trace cannot be written: {error.strerror}; name another place "
                f"or turn enable_record_traces off"
            ) from error
        self._thread = threading.Thread(target=self._write, name="cascade-trace", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Where the newest lines go."""
        return self._path

    @property
    def dropped(self) -> int:
        """How many requests are not in the trace, because the disk was slow or refused."""
        return self._dropped

    def record(
        self,
        *,
        input_tokens: int,
        output_tokens: int,
        keys: Iterable[bytes],
        arrived_unix_s: float | None = None,
    ) -> None:
        """Note a finished request; never waits.

        `keys` are those of the prompt's whole blocks, in order, and may have one more for a last
        block that is not full. `arrived_unix_s` is when it came; now, unless given.
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
        """Write what waits, for at most `timeout` seconds; may be repeated."""
        deadline = time.monotonic() + timeout
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            try:
                self._requests.put(None, timeout=timeout)
            except queue.Full:
                self._drop(self._requests.qsize(), "the disk is too slow to end in time")
                return
        self._thread.join(max(deadline - time.monotonic(), 0.0))

    def _write(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._append(self._line(request))
            except OSError as error:
                self._drop(1, f"{self._path}: {error.strerror}")
                self._let_go()
        self._let_go()

    def _line(self, request: _Request) -> bytes:
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
        """Write a whole line, or nothing: half a line would make the trace unreadable."""
        if self._file is None:
            self._file = open_trace(self._path)
        used = self._file.seek(0, os.SEEK_END)
        if used and used + len(line) > self._max_bytes:
            self._let_go()
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

    def _let_go(self) -> None:
        """Close the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._drop(0, f"{self._path}: {error.strerror}")

    def _drop(self, count: int, reason: str) -> None:
        with self._lock:
            self._dropped += count
            now = time.monotonic()
            due = not self._logged_at or now - self._logged_at >= LOGGED_EVERY_S
            if due:
                self._logged_at = now
        if due:
            logger.warning("Cascade: requests are missing from the trace: %s", reason)


def open_trace(path: Path) -> io.FileIO:
    """Open to append behind the last whole line: a killed process may leave half a one."""
    file = io.FileIO(path, "ab+")
    end = file.seek(0, os.SEEK_END)
    begin = max(end - LINE_BYTES_MAX, 0)
    file.seek(begin)
    tail = file.read(end - begin)
    if tail and not tail.endswith(b"\n"):
        file.truncate(begin + tail.rfind(b"\n") + 1)
    return file


def _file(place: Path) -> Path:
    if place.suffix == ".jsonl":
        return place
    return place / f"{DEFAULT_NAME}-{os.getpid()}.jsonl"

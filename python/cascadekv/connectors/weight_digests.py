"""Digests of every byte of a model's files of weights, remembered between runs.

A digest is remembered by the file's device, inode, size and times. No program can write to a file
without a new time of change (`ctime`), so a remembered digest is that of the file that is there.
"""

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cascadekv.connectors.weights import NotDigestedError, fingerprint_of_model

__all__ = ["WeightDigests", "digests_place"]

_LOG = logging.getLogger("vllm.cascade")
AT_ONCE_BYTES = 2 << 30
"""Most bytes that are read while an engine starts: 3 s at 0.8 GB/s."""
PIECE_BYTES = 8 << 20
"""Bytes that are read at a time."""
SHARE = 0.04
"""Share of a processor that digests in the background take."""
SETTLED_S = 2.0
"""Least age of a change that a digest is remembered after: times have a resolution."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digests_place(options: Mapping[str, object]) -> Path:
    """Return where digests are remembered, for the store's settings: beside its files."""
    files = options.get("cascade.files")
    if isinstance(files, str) and files:
        return Path(f"{files.rstrip('/')}.weights")
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "cascade" / "weights"


class WeightDigests:
    """The digests of the files of one model; those that are not known are computed."""

    def __init__(self, place: Path, *, at_once_bytes: int = AT_ONCE_BYTES) -> None:
        """Remember digests in a directory; files up to `at_once_bytes` in total are read now."""
        self._place = place
        self._left = at_once_bytes
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        """By path: what computes its digests."""

    def fingerprint(self, path: str) -> str | None:
        """Return the fingerprint of the weights at a path; `None` if there are none.

        Raises `NotDigestedError` if the digests of large files are not known yet.
        """
        return fingerprint_of_model(path, digest_of=self._quick)

    def start(self, paths: Sequence[str]) -> None:
        """Compute the unknown digests of files in the background, for later runs."""
        for path in paths:
            if path not in self._threads:
                # A daemon: the interpreter must be able to exit although a file system hangs.
                self._threads[path] = thread = threading.Thread(
                    target=self._compute_all, args=(path,), name="cascade-digests", daemon=True
                )
                thread.start()

    def close(self) -> None:
        """Stop computing; nothing is remembered of a file that was not read to its end."""
        self._stop.set()
        for thread in self._threads.values():
            thread.join(timeout=1)

    def _quick(self, file: Path) -> bytes:
        known = self._known(_facts(file))
        if known is not None:
            return known
        self._left -= file.stat().st_size
        if self._left < 0:
            raise NotDigestedError(f"the digest of {file} is not known yet")
        return self._compute(file, share=1.0)

    def _compute_all(self, path: str) -> None:
        def digest(file: Path) -> bytes:
            known = self._known(_facts(file))
            return self._compute(file, share=SHARE) if known is None else known

        started = time.monotonic()
        try:
            fingerprint_of_model(path, digest_of=digest)
        except (OSError, NotDigestedError) as error:
            if not self._stop.is_set():
                _LOG.warning("Cascade: the weights of %s have no digest: %s", path, error)
            return
        seconds = time.monotonic() - started
        _LOG.info("Cascade: the weights of %s were digested in %.0f s", path, seconds)

    def _compute(self, file: Path, *, share: float) -> bytes:
        """Read a file; raises `NotDigestedError` if it changes meanwhile or this object closes."""
        began, before, digest = time.time(), _facts(file), hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            piece = memoryview(bytearray(PIECE_BYTES))
            while True:
                busy = time.thread_time()
                count = opened.readinto(piece)
                if not count:
                    break
                digest.update(piece[:count])
                pause = (time.thread_time() - busy) * (1 / share - 1)
                if self._stop.wait(pause) if pause else self._stop.is_set():
                    raise NotDigestedError(f"reading {file} was stopped")
        if _facts(file) != before:
            raise NotDigestedError(f"{file} was changed while it was read")
        if began > file.stat().st_ctime + SETTLED_S:
            self._remember(before, digest.hexdigest())
        return digest.digest()

    def _record(self, facts: str) -> Path:
        return self._place / hashlib.sha256(facts.encode()).hexdigest()

    def _known(self, facts: str) -> bytes | None:
        try:
            self._check_place()
            name, digest = self._record(facts).read_text().splitlines()
        except (OSError, ValueError):
            return None
        is_right = name == facts and _DIGEST.fullmatch(digest) is not None
        return bytes.fromhex(digest) if is_right else None

    def _check_place(self) -> None:
        """Raise `PermissionError` if another user can put digests there."""
        found = self._place.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{self._place} belongs to, or can be written by, another user")

    def _remember(self, facts: str, digest: str) -> None:
        try:
            self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_place()
            record = self._record(facts)
            unfinished = record.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            unfinished.write_text(f"{facts}\n{digest}\n")
            unfinished.replace(record)
        except OSError as error:
            _LOG.warning("Cascade: digests of weights cannot be remembered: %s", error)


def _facts(file: Path) -> str:
    it = file.stat()
    return f"{it.st_dev} {it.st_ino} {it.st_size} {it.st_mtime_ns} {it.st_ctime_ns}"

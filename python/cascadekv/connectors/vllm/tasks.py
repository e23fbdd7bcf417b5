"""Logs hits, loads and saves in UCM's format, for tools that parse UCM's logs.

Loads and saves are enabled by `UC_LOGGER_LEVEL=debug`, as in UCM. A task of UCM's Cache Store is
the copy between the engine's memory and the host, of one layer if loads are layer by layer. A task
of its Posix Store is the read from files, or the write to them, which ends when the store has
nothing left to write.
"""

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cascadekv import CascadeError, Store

__all__ = ["TaskLog", "log_hits"]

LEVEL = "UC_LOGGER_LEVEL"
FILE_TIER = "files"
POLL_S = 0.05
"""How often the store is asked whether it has written everything to files."""


@dataclass(slots=True)
class _Task:
    """A task as UCM's lines name it."""

    name: str
    started: float = field(default_factory=time.perf_counter)


class TaskLog:
    """Logs the start and the end of each task of one worker, with a sequence number."""

    def __init__(
        self,
        logger: logging.Logger,
        store: Callable[[], Store | None],
        level: str | None = None,
    ) -> None:
        """Log only if `level`, or else `UC_LOGGER_LEVEL`, is debug."""
        chosen = os.environ.get(LEVEL, "") if level is None else level
        self._logger = logger
        self._store = store
        self._numbers = itertools.count(1)
        self._writes: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        """Blocks and bytes for the file tier; `None` ends the thread."""
        self._writer: threading.Thread | None = None
        self.is_on = chosen.lower() == "debug"

    @contextmanager
    def load(self, blocks: int, size: int, tier: str) -> Generator[None]:
        """Log a load. A load from files is a task of both UCM stores."""
        with self.copy(blocks, size), self.read(blocks, size, tier):
            yield

    @contextmanager
    def copy(self, blocks: int, size: int) -> Generator[None]:
        """Log a copy to the engine's memory."""
        with self._task("Cache", "LOAD", blocks, size):
            yield

    @contextmanager
    def read(self, blocks: int, size: int, tier: str) -> Generator[None]:
        """Log a read from files; nothing for other tiers."""
        if tier == FILE_TIER:
            with self._task("Posix", "Backend2Cache", blocks, size):
                yield
        else:
            yield

    @contextmanager
    def save(self, blocks: int, size: int) -> Generator[None]:
        """Log a save."""
        with self._task("Cache", "DUMP", blocks, size):
            yield

    def write_back(self, blocks: int, size: int) -> None:
        """Log the write of saved blocks to files, if the store has a file tier."""
        if not self.is_on or not blocks:
            return
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._log_writes, name="cascade-write-log", daemon=True
            )
            self._writer.start()
        self._writes.put((blocks, size))

    def close(self) -> None:
        """End the thread that logs writes to files."""
        if self._writer is not None:
            self._writes.put(None)
            self._writer.join()

    @contextmanager
    def _task(self, store: str, operation: str, blocks: int, size: int) -> Generator[None]:
        if not self.is_on:
            yield
            return
        task = self._begin(store, operation, blocks, size)
        yield
        self._end(task)

    def _begin(self, store: str, operation: str, blocks: int, size: int) -> _Task:
        task = _Task(f"{store} task({next(self._numbers)},{operation},{blocks},{size})")
        # At level info, which vLLM shows by default; the variable enables these lines already.
        self._logger.info("[UC][D] %s dispatching. %s", task.name, _place())
        return task

    def _end(self, task: _Task) -> None:
        cost = (time.perf_counter() - task.started) * 1000
        self._logger.info("[UC][D] %s finished, cost %.3fms. %s", task.name, cost, _place())

    def _log_writes(self) -> None:
        running: list[_Task] = []
        while True:
            try:
                write = self._writes.get(timeout=POLL_S if running else None)
            except queue.Empty:
                if self._pending_bytes() == 0:
                    for task in running:
                        self._end(task)
                    running = []
                continue
            if write is None:
                return
            if self._pending_bytes() is not None:
                running.append(self._begin("Posix", "Cache2Backend", *write))

    def _pending_bytes(self) -> int | None:
        """Return the bytes that are not written to files yet; `None` without a file tier."""
        store = self._store()
        try:
            stats = None if store is None else store.stats()
        except CascadeError as error:
            self._logger.debug("Cascade: the store does not say what it has written: %s", error)
            return None
        return None if stats is None or FILE_TIER not in stats["stages"] else stats["pending_bytes"]


def _place() -> str:
    return f"[{os.getpid()},{threading.get_native_id()}]"


def log_hits(logger: logging.Logger, request: str, counts: tuple[int, int, int], way: str) -> None:
    """Log hits of a request: all its blocks, those in the engine's cache, and those outside.

    `way` is empty, or what UCM's second line begins with, which says what `hit_ratio` permits.
    """
    text = "%srequest_id: %s, total_blocks_num: %d, hit hbm: %d, hit external: %d"
    logger.info(text, way, request, *counts)

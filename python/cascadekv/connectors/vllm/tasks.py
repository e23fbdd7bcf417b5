"""Logs each load and save of a worker in UCM's format, for tools that parse UCM's logs.

Enabled by `UC_LOGGER_LEVEL=debug`, as in UCM. A task of UCM's Cache Store is the copy between the
engine's memory and the host; a task of its Posix Store is the read from files. Writes to files are
not logged: the store writes back later, in batches of its own.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["TaskLog"]

LEVEL = "UC_LOGGER_LEVEL"
FILE_TIER = "files"


class TaskLog:
    """Logs the start and the end of each task of one worker, with a sequence number."""

    def __init__(self, logger: logging.Logger, level: str | None = None) -> None:
        """Log only if `level`, or else `UC_LOGGER_LEVEL`, is debug."""
        chosen = os.environ.get(LEVEL, "") if level is None else level
        self._logger = logger
        self._numbers = itertools.count(1)
        self.is_on = chosen.lower() == "debug"

    @contextmanager
    def load(self, blocks: int, size: int, tier: str) -> Generator[None]:
        """Log a load. A load from files is a task of both UCM stores."""
        with self._task("Cache", "LOAD", blocks, size):
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

    @contextmanager
    def _task(self, store: str, operation: str, blocks: int, size: int) -> Generator[None]:
        if not self.is_on:
            yield
            return
        place = f"[{os.getpid()},{threading.get_native_id()}]"
        task = f"{store} task({next(self._numbers)},{operation},{blocks},{size})"
        # At level info, which vLLM shows by default; the variable enables these lines already.
        self._logger.info("[UC][D] %s dispatching. %s", task, place)
        started = time.perf_counter()
        yield
        cost = (time.perf_counter() - started) * 1000
        self._logger.info("[UC][D] %s finished, cost %.3fms. %s", task, cost, place)

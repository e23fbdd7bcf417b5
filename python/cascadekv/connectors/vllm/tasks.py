"""UCM's two lines for each load and save of a worker, for whoever reads its logs.

On with the environment variable `UC_LOGGER_LEVEL=debug`, as there. Its Cache Store is the copy
between the engine's memory and the host; its Posix Store what is read from files for it. What is
written to files is the store's to tell: it goes down later, in batches of its own.
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
FILE_TIERS = ("files", "posix")


class TaskLog:
    """Numbers the tasks of one worker and tells their beginning and end."""

    def __init__(self, logger: logging.Logger, level: str | None = None) -> None:
        """Tell nothing unless the level, or the variable, says debug."""
        chosen = os.environ.get(LEVEL, "") if level is None else level
        self._logger = logger
        self._numbers = itertools.count(1)
        self.is_on = chosen.lower() == "debug"

    @contextmanager
    def load(self, blocks: int, size: int, tier: str) -> Generator[None]:
        """Tell of a load; from files that is a task of both stores."""
        with self._task("Cache", "LOAD", blocks, size):
            if tier in FILE_TIERS:
                with self._task("Posix", "Backend2Cache", blocks, size):
                    yield
            else:
                yield

    @contextmanager
    def save(self, blocks: int, size: int) -> Generator[None]:
        """Tell of a save."""
        with self._task("Cache", "DUMP", blocks, size):
            yield

    @contextmanager
    def _task(self, store: str, operation: str, blocks: int, size: int) -> Generator[None]:
        if not self.is_on:
            yield
            return
        place = f"[{os.getpid()},{threading.get_native_id()}]"
        task = f"{store} task({next(self._numbers)},{operation},{blocks},{size})"
        # At the level that is shown: the variable already asked for them.
        self._logger.info("[UC][D] %s dispatching. %s", task, place)
        started = time.perf_counter()
        yield
        cost = (time.perf_counter() - started) * 1000
        self._logger.info("[UC][D] %s finished, cost %.3fms. %s", task, cost, place)

"""Background threads for LMCache's tasks: each task has one result, and LMCache is signalled."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from cascadekv._native import BlockKey
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.errors import DeadlineError

__all__ = ["Lane", "Locks"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Lane(Generic[_T]):
    """The tasks of one kind: stores, lookups or loads. None waits for a task of another kind."""

    def __init__(
        self, name: str, notifier: Any, *, threads: int, timeout_s: float, failures: FailureLog
    ) -> None:
        """Start no thread yet. `notifier` is LMCache's; the lane closes it."""
        self.notifier = notifier
        self._name = name
        self._timeout_s = timeout_s
        self._failures = failures
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"cascade-{name}")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._results: dict[int, _T] = {}

    def submit(self, task: int, action: Callable[[float], _T], *, failed: _T) -> None:
        """Call `action` with its deadline in a thread; its result, or `failed`, is the task's.

        A task that waited until its deadline is not begun.
        """
        deadline = time.monotonic() + self._timeout_s
        if not self.run(lambda: self._carry_out(task, action, failed, deadline)):
            self._finish(task, failed)

    def run(self, action: Callable[[], None]) -> bool:
        """Call `action` in a thread; false if the lane is closed or of another process."""
        if os.getpid() != self._pid:
            self._failures.count(self._name, "the process was forked after LMCache started")
            return False
        try:
            self._pool.submit(action)
        except RuntimeError as error:
            self._failures.count(self._name, error)
            return False
        return True

    def take(self, task: int) -> _T | None:
        """Return a task's result once; `None` while it is not known."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, _T]:
        """Return all results that were not returned yet, by task."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Wait for the tasks, which end by their deadlines, and close the notifier.

        LMCache frees the memory of loads afterwards.
        """
        if os.getpid() == self._pid:
            self._pool.shutdown()
        with self._lock:
            self._is_closed = True
            self.notifier.close()

    def _carry_out(
        self, task: int, action: Callable[[float], _T], failed: _T, deadline: float
    ) -> None:
        result = failed
        try:
            if time.monotonic() < deadline:
                result = action(deadline)
            else:
                late = DeadlineError("the task waited longer than cascade.timeout for its turn")
                self._failures.count(self._name, late)
        except STORE_FAILURES as error:
            self._failures.count(self._name, error)
        except Exception:
            logger.exception("Cascade: %s failed by a bug", self._name)
        finally:
            self._finish(task, result)

    def _finish(self, task: int, result: _T) -> None:
        with self._lock:
            self._results[task] = result
            # After a fork, the notifier is shared with the parent process.
            if not self._is_closed and os.getpid() == self._pid:
                self.notifier.notify()


class Locks:
    """LMCache's locks and the pins that stand for them. They are counted, and expire."""

    def __init__(self, ttl_s: float) -> None:
        """Remember locks for at most `ttl_s` seconds."""
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._held: dict[Any, deque[tuple[float, list[BlockKey]]]] = {}

    def add(self, key: Any, blocks: list[BlockKey]) -> None:
        """Remember a lock of an object, with the blocks that were pinned for it."""
        with self._lock:
            self._held.setdefault(key, deque()).append((time.monotonic(), blocks))

    def remove(self, keys: Iterable[Any]) -> list[BlockKey]:
        """Forget one lock of each object, the oldest; returns the blocks to unpin."""
        blocks: list[BlockKey] = []
        with self._lock:
            for key in keys:
                if pins := self._held.get(key):
                    blocks += pins.popleft()[1]
                    if not pins:
                        del self._held[key]
        return blocks

    def remove_expired(self) -> list[BlockKey]:
        """Forget locks that nobody released in time; returns the blocks to unpin."""
        oldest = time.monotonic() - self._ttl_s
        blocks: list[BlockKey] = []
        with self._lock:
            for key in [key for key, pins in self._held.items() if pins[0][0] <= oldest]:
                pins = self._held[key]
                while pins and pins[0][0] <= oldest:
                    blocks += pins.popleft()[1]
                if not pins:
                    del self._held[key]
        return blocks

    def remove_all(self) -> list[BlockKey]:
        """Forget all locks; returns the blocks to unpin."""
        with self._lock:
            held, self._held = self._held, {}
        return [block for pins in held.values() for _, blocks in pins for block in blocks]

    def is_held(self, key: Any) -> bool:
        """Return whether an object is locked."""
        with self._lock:
            return key in self._held

    def __len__(self) -> int:
        """Return the number of locked objects."""
        with self._lock:
            return len(self._held)

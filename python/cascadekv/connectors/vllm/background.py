"""Calls of a node that do not hold the scheduler's thread: one thread carries them out in order."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Background"]

WAITING_MAX = 4096
"""Calls that wait at most; one more is dropped. A call ends by the timeout of the node's client."""
Answer = TypeVar("Answer")


class Background:
    """One thread for the scheduler's calls of a node."""

    def __init__(self) -> None:
        """Start no thread before there is a call."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cascade-lookup")
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def is_idle(self) -> bool:
        """Whether no call waits or is carried out."""
        return self._waiting == 0

    def submit(self, call: Callable[[], Answer]) -> Future[Answer] | None:
        """Have a call carried out; nothing where too many wait already."""
        with self._lock:
            if self._waiting >= WAITING_MAX:
                return None
            self._waiting += 1
        future = self._pool.submit(call)
        future.add_done_callback(self._ended)
        return future

    def close(self) -> None:
        """Drop the calls that wait, and wait for the one that is carried out."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ended(self, _: Future[Answer]) -> None:
        with self._lock:
            self._waiting -= 1

"""A background thread for calls to a node, so that they do not block the scheduler's thread."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["BackgroundThread"]

_LOG = logging.getLogger("vllm.cascade")
PENDING_MAX = 4096
"""Most calls in the queue or in flight; further calls are dropped.

Each call ends by the timeout of the node's client.
"""
Result = TypeVar("Result")


class BackgroundThread:
    """One thread that makes some of the scheduler's calls to a node, in order."""

    def __init__(self, name: str) -> None:
        """Create the queue; the thread `cascade-NAME` starts with the first call."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"cascade-{name}")
        self._lock = threading.Lock()
        self._pending = 0

    @property
    def is_idle(self) -> bool:
        """Whether no call is queued or in flight."""
        return self._pending == 0

    def run(self, call: Callable[[], None]) -> None:
        """Queue a call without a result; it is dropped if the queue is full."""

        def logged() -> None:
            try:
                call()
            except Exception:  # noqa: BLE001 # a bug in the cache must not go unnoticed
                _LOG.exception("Cascade: a call in the background failed; it is not repeated")

        self.submit(logged)

    def submit(self, call: Callable[[], Result]) -> Future[Result] | None:
        """Queue a call; `None` if the queue is full."""
        with self._lock:
            if self._pending >= PENDING_MAX:
                return None
            self._pending += 1
        future = self._pool.submit(call)
        future.add_done_callback(self._on_done)
        return future

    def close(self) -> None:
        """Drop the queued calls and wait for the call in flight."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _on_done(self, _: Future[Result]) -> None:
        # Also called for cancelled calls.
        with self._lock:
            self._pending -= 1

"""The calls of the scheduler's side to the store that no request waits for: hints and names."""

import logging
import time
from collections.abc import Callable, Sequence

from cascadekv import CascadeError, Hints, Store, part_of_trace
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.metadata import Part
from cascadekv.connectors.vllm.tracked import TrackedRequest

__all__ = ["StoreCalls"]

_LOG = logging.getLogger("vllm.cascade")
LOOKAHEAD_BUDGET_S = 0.02
"""Most time that lookahead for one request takes; a store that needs longer is overloaded."""


class StoreCalls:
    """Calls for the keys of requests; failures are counted. Any thread may use it."""

    def __init__(self, store: Callable[[], Store | None], parts: Sequence[Part]) -> None:
        """`store` returns the store, or `None` while it is unavailable."""
        self._store = store
        self._parts = parts
        self._failures = FailureLog(_LOG)

    def look_ahead(self, tracked: TrackedRequest, seconds: float) -> None:
        """Hint and prefetch the blocks of a request that waits for up to so many seconds."""
        store = self._store()
        if store is None:
            return
        blocks, hints = tracked.keys.blocks, Hints(expected_within=seconds)
        try:
            with part_of_trace(tracked.trace):
                deadline = time.monotonic() + LOOKAHEAD_BUDGET_S
                for part in self._parts:
                    keys = tracked.keys.keys(part.name, 0, blocks)
                    if time.monotonic() > deadline:
                        return
                    store.hint(keys, hints=hints)
                    if time.monotonic() > deadline:
                        return
                    store.prefetch(keys)
        except CascadeError as error:
            self._failures.count("lookahead", error)

    def send_hints(self, keys: RequestKeys, hints: Hints) -> None:
        """Pass hints about a request's blocks to the store."""
        store = self._store()
        if store is None:
            return
        try:
            for part in self._parts:
                store.hint(keys.keys(part.name, 0, keys.blocks), hints=hints)
        except CascadeError as error:
            self._failures.count("sending hints", error)

    def put_names(self, request_keys: RequestKeys, first: int, last: int, timeout: float) -> None:
        """Store the keys of blocks `first` to `last` without KV, to count hits."""
        store = self._store()
        if store is None:
            return
        try:
            for part in self._parts:
                keys = request_keys.keys(part.name, first, last)
                parent = request_keys.parent(part.name, first)
                store.put(keys, bytes(len(keys)), parent=parent, timeout=timeout)
        except CascadeError as error:
            self._failures.count("storing keys", error)

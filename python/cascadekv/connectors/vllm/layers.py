"""A load that arrives layer by layer, while the engine computes the layers before."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from cascadekv import BlockKeys, CascadeError, PagedMemory, Store, part_of_trace
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.metadata import Load, Loaded

if TYPE_CHECKING:
    from cascadekv import Views

__all__ = ["LayeredLoad"]

GRACE_S = 5.0
"""How much longer than its own deadline a load is waited for: it ends by that in any case."""


class LayeredLoad:
    """Blocks of one request on their way, and which of their layers are there."""

    def __init__(
        self,
        load: Load,
        memory: PagedMemory,
        pages: Sequence[int],
        timeout: float,
        at_once: Callable[[Load], Loaded],
    ) -> None:
        """Every region of the memory is a layer; `at_once` loads without regard to layers."""
        self.load = load
        self._memory = memory
        self._pages = pages
        self._at_once = at_once
        # Counted from here, because loads wait for each other's threads.
        self._deadline = time.monotonic() + timeout
        self._is_late = False
        self._ready = [threading.Event() for _ in range(memory.regions)]
        self._future: Future[Loaded] | None = None

    def begin(
        self,
        pool: ThreadPoolExecutor,
        store: Callable[[], Store | None],
        keys: bytes,
        failures: FailureLog,
    ) -> None:
        """Start on a thread of the pool."""
        self._future = pool.submit(self._run, store, BlockKeys(keys), failures)

    def wait(self, layer: int) -> None:
        """Return once a layer's blocks are in place, or are known to be bad."""
        left = self._deadline + GRACE_S - time.monotonic()
        if not self._ready[layer].wait(max(0.0, left)):
            self._is_late = True

    def result(self) -> Loaded:
        """Return how it ended, once it has."""
        if self._future is None:
            raise RuntimeError("a load by layers was not begun")
        load, count = self.load, len(self._pages)
        every = list(range(load.first, load.first + count))
        if self._future.cancel():
            return Loaded(load.request, load.first, load.tier, count, every, 0, 0.0, 0.0)
        loaded = self._future.result()
        if self._is_late:
            # The engine computed without some of them, wherever they are by now.
            loaded = replace(loaded, bad=every)
        return loaded

    def _run(
        self, store: Callable[[], Store | None], keys: BlockKeys, failures: FailureLog
    ) -> Loaded:
        started, cpu = time.perf_counter(), time.thread_time()
        there = [False] * len(self._pages)
        try:
            opened, left = store(), self._deadline - time.monotonic()
            if opened is not None and left > 0:
                trace = part_of_trace(self.load.trace)
                with trace, opened.view(keys, timeout=left) as views:
                    failed = any(views.error(at) is not None for at in range(len(views)))
                    if not failed:
                        there = self._scatter(views)
                if failed:
                    # Too many for the pool at once.
                    return self._at_once(self.load)
        except (CascadeError, ValueError, BufferError) as error:
            failures.count("reading blocks", error)
            there = [False] * len(self._pages)
        finally:
            for event in self._ready:
                event.set()
        load = self.load
        times = time.perf_counter() - started, time.thread_time() - cpu
        bad = [load.first + at for at, is_there in enumerate(there) if not is_there]
        copied = sum(there) * self._memory.block_bytes
        return Loaded(load.request, load.first, load.tier, len(there), bad, copied, *times)

    def _scatter(self, views: "Views") -> list[bool]:
        there = [True] * len(self._pages)
        for layer, event in enumerate(self._ready):
            copied = views.scatter(self._memory, self._pages, first=layer, count=1)
            there = [before and now for before, now in zip(there, copied, strict=True)]
            event.set()
        return there

"""A load layer by layer: the engine computes a layer while later layers are loaded.

In host memory, the engine waits until a layer's blocks have arrived. A GPU waits by itself: the
engine waits only until the copies of the layer were started.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from cascadekv import BlockKeys, CascadeError, Store, part_of_trace
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.hbm import TieredReader
from cascadekv.connectors.vllm.memory import GpuPages, HostMemory, LoadOrder
from cascadekv.connectors.vllm.metadata import Load, LoadResult

if TYPE_CHECKING:
    from cascadekv import Views

__all__ = ["LayerwiseLoad"]

GRACE_S = 5.0
"""How long to wait for a load after its deadline."""


class LayerwiseLoad:
    """A load of one request in flight, and which of its layers have arrived."""

    def __init__(
        self,
        load: Load,
        memory: HostMemory | GpuPages,
        order: LoadOrder,
        pages: Sequence[int],
        deadline: float,
    ) -> None:
        """Each region of the memory is a layer.

        The deadline, by the monotonic clock, includes the time in the queue of the loading threads.
        """
        self.load = load
        self.order = order
        self._memory = memory
        self._pages = pages
        self._deadline = deadline
        self._is_late = False
        self._ready = [threading.Event() for _ in range(memory.layers)]
        self._future: Future[LoadResult] | None = None

    def begin(
        self,
        pool: ThreadPoolExecutor,
        store: Callable[[], Store | TieredReader | None],
        keys: bytes,
        failures: FailureLog,
        load_all_layers: Callable[[], LoadResult],
    ) -> None:
        """Queue the load in the thread pool; `load_all_layers` loads all layers together."""
        self._future = pool.submit(self._run, store, BlockKeys(keys), failures, load_all_layers)

    def wait(self, layer: int) -> None:
        """Return once the engine's next work finds the layer's blocks, or they have failed."""
        left = self._deadline + GRACE_S - time.monotonic()
        if not self._ready[layer].wait(max(0.0, left)):
            self._is_late = True
            return
        self.order.hold_back_for(layer)

    def result(self) -> LoadResult:
        """Wait for the end of the load and return its result.

        The load ends by its deadline. It must not be abandoned before: it writes to the pages,
        which the engine may reuse after the step.
        """
        if self._future is None:
            raise RuntimeError("the layerwise load was not started")
        load, count = self.load, len(self._pages)
        all_blocks = list(range(load.first, load.first + count))
        if self._future.cancel():
            return LoadResult(load.request, load.first, load.tier, count, all_blocks, 0, 0.0, 0.0)
        try:
            loaded = self._future.result()
        finally:
            # Also layers that the engine did not ask for, and those of a failed load.
            self.order.hold_back_engine()
        if self._is_late:
            # The engine computed a layer before its blocks arrived: its output is wrong, although
            # the blocks may be complete by now.
            loaded = replace(loaded, bad=all_blocks)
        return loaded

    def _run(
        self,
        store: Callable[[], Store | TieredReader | None],
        keys: BlockKeys,
        failures: FailureLog,
        load_all_layers: Callable[[], LoadResult],
    ) -> LoadResult:
        started, cpu = time.perf_counter(), time.thread_time()
        looked_up = started
        arrived = [False] * len(self._pages)
        try:
            opened, left = store(), self._deadline - time.monotonic()
            if opened is not None and left > 0:
                trace = part_of_trace(self.load.trace)
                with trace, opened.view(keys, timeout=left) as views:
                    looked_up = time.perf_counter()
                    failed = any(views.error(at) is not None for at in range(len(views)))
                    if not failed:
                        arrived = self._scatter(views)
                if failed:
                    # The pool has no room for all blocks at the same time: load them in batches.
                    return load_all_layers()
        except (CascadeError, ValueError, BufferError) as error:
            failures.count("reading blocks", error)
            arrived = [False] * len(self._pages)
        finally:
            # Also after a failure: the engine must not wait for the deadline.
            for event in self._ready:
                event.set()
        load = self.load
        # The copies of a GPU go on, and their time is added once it is known.
        ended = looked_up if self._memory.is_asynchronous else time.perf_counter()
        times = ended - started, time.thread_time() - cpu
        bad = [load.first + at for at, is_loaded in enumerate(arrived) if not is_loaded]
        copied = sum(arrived) * self._memory.block_bytes
        return LoadResult(load.request, load.first, load.tier, len(arrived), bad, copied, *times)

    def _scatter(self, views: "Views") -> list[bool]:
        arrived = [True] * len(self._pages)
        for layer, event in enumerate(self._ready):
            copied = self._memory.load_layer(views, self._pages, layer, self.order)
            arrived = [before and now for before, now in zip(arrived, copied, strict=True)]
            event.set()
        return arrived

"""A load layer by layer: the engine computes a layer while later layers are loaded.

In host memory, the engine waits until a layer's blocks have arrived. A GPU waits by itself: the
engine waits only until the copies of the layer were started.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from cascadekv import BlockKeys, CascadeError, part_of_trace
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.memory import GpuPages, HostMemory, LoadOrder
from cascadekv.connectors.vllm.metadata import LoadResult, Part
from cascadekv.connectors.vllm.running_load import RunningLoad
from cascadekv.connectors.vllm.tasks import TaskLog

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.block_reader import BlockReader, FoundBlocks

__all__ = ["LayerwiseLoad"]

GRACE_S = 5.0
"""How long to wait for a load after its deadline."""


class LayerwiseLoad:
    """A load of one request in flight, and which of its layers have arrived."""

    def __init__(
        self,
        running: RunningLoad,
        part: Part,
        memory: HostMemory | GpuPages,
        order: LoadOrder,
        deadline: float,
    ) -> None:
        """Each region of the memory is a layer of the part.

        The deadline, by the monotonic clock, includes the time in the queue of the loading threads.
        """
        self.running = running
        self.order = order
        self._part = part
        self._memory = memory
        self._pages = running.load.blocks[part.group]
        self._deadline = deadline
        self._is_late = False
        self._ready = [threading.Event() for _ in range(memory.layers)]
        self._future: Future[LoadResult] | None = None

    def begin(
        self,
        pool: ThreadPoolExecutor,
        reader: Callable[[], "BlockReader | None"],
        failures: FailureLog,
        load_all_layers: Callable[[], LoadResult],
        tasks: TaskLog,
    ) -> None:
        """Queue the load in the thread pool; `load_all_layers` loads all layers together."""
        self._future = pool.submit(self._run, reader, failures, load_all_layers, tasks)

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
        if self._future.cancel():
            return self.running.failed()
        try:
            loaded = self._future.result()
        finally:
            # Also layers that the engine did not ask for, and those of a failed load.
            self.order.hold_back_engine()
        if self._is_late:
            # The engine computed a layer before its blocks arrived: its output is wrong, although
            # the blocks may be complete by now.
            loaded = replace(loaded, bad=self.running.failed().bad, hbm_blocks=0)
        return loaded

    def _run(
        self,
        reader: Callable[[], "BlockReader | None"],
        failures: FailureLog,
        load_all_layers: Callable[[], LoadResult],
        tasks: TaskLog,
    ) -> LoadResult:
        started, cpu = time.perf_counter(), time.thread_time()
        running, load = self.running, self.running.load
        running.expect(self._part.name, range(len(self._pages)))
        try:
            opened, left = reader(), self._deadline - time.monotonic()
            if opened is not None and left > 0:
                keys = BlockKeys(load.keys[self._part.name])
                with contextlib.ExitStack() as stack:
                    stack.enter_context(part_of_trace(load.trace))
                    size = len(self._pages) * self._memory.block_bytes
                    with tasks.read(len(self._pages), size, load.tier):
                        blocks = stack.enter_context(opened.view(keys, timeout=left))
                    blocks.note_times(running)
                    failed = bool(blocks.failures())
                    if not failed:
                        self._scatter(blocks, tasks)
                if failed:
                    # The pool has no room for all blocks at the same time: load them in batches.
                    return load_all_layers()
        except (CascadeError, ValueError, BufferError) as error:
            failures.count("reading blocks", error)
            # No block counts as copied if one of its layers was not.
            running.expect(self._part.name, range(len(self._pages)))
        finally:
            # Also after a failure: the engine must not wait for the deadline.
            for event in self._ready:
                event.set()
        cpu_seconds = time.thread_time() - cpu
        # The copies of a GPU go on, and their time is added once it is known.
        on_host = None if self._memory.is_asynchronous else time.perf_counter() - started
        return running.result(seconds=on_host, cpu_seconds=cpu_seconds)

    def _scatter(self, blocks: "FoundBlocks", tasks: TaskLog) -> None:
        """Copy all layers in their order, and note the blocks of which every layer is copied."""
        arrived = [set(found.positions) for found in blocks.found]
        size = len(self._pages) * self._memory.block_bytes // self._memory.layers
        for layer, event in enumerate(self._ready):
            with tasks.copy(len(self._pages), size):
                for found, own in zip(blocks.found, arrived, strict=True):
                    moved = found.load(self._memory, self._pages, self.order, layer)
                    own.intersection_update(moved)
            event.set()
        for found, own in zip(blocks.found, arrived, strict=True):
            self.running.note_copies(
                self._part.name,
                sorted(own),
                self._memory.block_bytes,
                is_on_gpu=found.is_on_gpu,
            )

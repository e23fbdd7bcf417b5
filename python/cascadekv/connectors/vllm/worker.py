"""The worker's side: copies blocks between the engine's KV memory and the store.

Loads and saves are batches of blocks, read from and written to the store's pool. In host memory, a
save ends before its step ends, because the engine may reuse the pages in the next step. A GPU
copies beside the worker: the engine's later work on the GPU waits for the copies, and a thread
seals the blocks. Failures of the store are not raised into the engine: missing, late or damaged
blocks are reported by page, and the engine computes them.
"""

import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from cascadekv import (
    Namespace,
    PreparedPut,
    Store,
    part_of_trace,
)
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.vllm.batches import Batches, SaveRun, runs_of, select
from cascadekv.connectors.vllm.gpu_clock import StepClock
from cascadekv.connectors.vllm.gpu_loads import FoundLoad, StepLoads
from cascadekv.connectors.vllm.gpu_saves import GpuSave, SaveQueue, StepSaves, is_stored
from cascadekv.connectors.vllm.hbm import HbmTier, TieredReader
from cascadekv.connectors.vllm.layers import LayerwiseLoad
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.memory import GpuPages, HostMemory, LoadOrder, Memory
from cascadekv.connectors.vllm.metadata import (
    SLOW_TIERS,
    Load,
    LoadResult,
    LoadTime,
    Save,
    SaveResult,
    StepPlan,
    WorkerReport,
)
from cascadekv.connectors.vllm.tasks import TaskLog

__all__ = ["Worker"]

_LOG = logging.getLogger("vllm.cascade")
LOADERS = 2
"""Threads for asynchronous loads; more would compete with the engine for cores."""
SEAL_S = 0.01
"""Least time for sealing blocks that are copied already when the time for saves is over."""
IDLE_WAIT_S = 0.002
"""How long a step without tokens waits for a load, so that the engine does not spin."""


@dataclass(slots=True)
class _StepState:
    """The state of the current step; the engine may compute before it loads."""

    layerwise_loads: list[LayerwiseLoad] = field(default_factory=list[LayerwiseLoad])
    computing_since: float | None = None


class Worker:
    """Carries out the scheduler's plans on one worker's KV memory."""

    def __init__(  # noqa: PLR0913 # each is named by its caller
        self,
        store: Callable[[], Store | None],
        namespace: Callable[[str], Namespace],
        *,
        load_timeout: float,
        save_timeout: float,
        is_layerwise: bool = False,
        hbm: HbmTier | None = None,
    ) -> None:
        """`store` returns the store, or `None` while it is unavailable; time-outs in seconds.

        `hbm` is the tier above the store, for KV in the memory of a GPU.
        """
        self._store = store
        self._namespace = namespace
        self._load_timeout = load_timeout
        self._save_timeout = save_timeout
        self._is_layerwise = is_layerwise
        self._hbm = hbm
        self._parts: dict[str, tuple[HeldPart, Memory]] = {}
        self._layers: dict[str, int] = {}
        """Index of each layer for layerwise loads; empty if they are off."""
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="cascade-load")
        self._step = _StepState()
        self._gpu_saves = SaveQueue()
        self._async_loads: dict[str, tuple[Load, Future[LoadResult]]] = {}
        """Asynchronous loads in flight, by request."""
        self._failed_pages: set[int] = set()
        """Pages that could not be loaded, to be reported to the engine."""
        self._invalid_pages: dict[tuple[int, int], int] = {}
        """By group and page: the plan whose load of the page failed."""
        self._plan = 0
        self._is_idle = False
        """Whether the current step computes no tokens."""
        self._report = WorkerReport()
        self._times: deque[LoadTime] = deque()
        """Times of loads, to be reported; other threads append them."""
        self._failures = FailureLog(_LOG)
        self._tasks = TaskLog(_LOG)
        self._clock: StepClock | None = None
        """Of a GPU; on a host the worker measures steps."""

    def attach(self, parts: Sequence[tuple[HeldPart, Memory]], layers: Sequence[str]) -> None:
        """Set the KV memory; `layers` are the first part's layers, in the order of its regions."""
        self._parts = {held.part.name: (held, memory) for held, memory in parts}
        self._layers = {}
        gpu = next((memory for _, memory in parts if isinstance(memory, GpuPages)), None)
        self._clock = StepClock(gpu, self._failures) if gpu is not None else None
        by_layer = all(isinstance(memory, HostMemory | GpuPages) for _, memory in parts)
        if self._is_layerwise and len(parts) == 1 and by_layer:
            self._layers = {layer: index for index, layer in enumerate(layers)}
        elif self._is_layerwise:
            reason = "the KV is in several parts" if by_layer else "the KV is in device memory"
            _LOG.warning("Cascade: cascade.layerwise is ignored: %s", reason)

    def begin_step(self, plan: StepPlan) -> None:
        """Begin a step: called before the loads and the kernels of a plan."""
        if self._clock is not None:
            self._clock.begin(plan)

    def start_loads(self, plan: StepPlan) -> None:
        """Load what this step needs, and start the asynchronous loads."""
        self._plan = max(self._plan, plan.number)
        self._is_idle = plan.tokens == 0
        # The engine plans steps ahead. Pages stay invalid until a plan was made with the knowledge
        # that their load failed; earlier plans may save blocks that were computed from them.
        self._invalid_pages = {
            page: failed_in
            for page, failed_in in self._invalid_pages.items()
            if failed_in > plan.completed
        }
        if plan.loads:
            self._start_all(plan.loads)

    def _start_all(self, loads: Sequence[Load]) -> None:
        # One deadline for all synchronous loads of the step, and one place in the engine's work.
        deadline = time.monotonic() + self._load_timeout
        together: list[Load] = []
        try:
            place = {name: memory.order() for name, (_, memory) in self._parts.items()}
        except STORE_FAILURES as error:
            for load in loads:
                self._fail(load, error)
            return
        for load in loads:
            try:
                if not self._start(load, place, deadline):
                    together.append(load)
            except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
                self._fail(load, error)
        if together:
            try:
                self._load_together(together, place, deadline)
            except Exception as error:  # noqa: BLE001 # likewise
                for load in together:
                    self._fail(load, error)
        if self._clock is not None and (together or self._step.layerwise_loads):
            # Loads of the step are no part of the time of its kernels.
            self._clock.begin_after_loads(is_layerwise=bool(self._step.layerwise_loads))

    def _fail(self, load: Load, error: Exception) -> None:
        """Report a load as failed: the engine counts its blocks as loaded otherwise."""
        self._failures.count("starting a load", error)
        failed = _failed_load(load)
        if load.is_async:
            future: Future[LoadResult] = Future()
            future.set_result(failed)
            self._async_loads[load.request] = (load, future)
        else:
            self._finish_sync_load(load, failed)

    def _start(self, load: Load, place: Mapping[str, LoadOrder], deadline: float) -> bool:
        """Start a load, unless it is copied together with others: then return false."""
        orders = {name: order.another() for name, order in place.items()}
        if load.is_async:
            future = self._loaders.submit(self._load_async, load, orders)
            self._async_loads[load.request] = (load, future)
        elif self._layers and load.keys and self._fits_one_batch(load):
            self._step.layerwise_loads.append(self._load_layerwise(load, orders, deadline))
        elif self._clock is not None:
            return False
        else:
            result = self._result_of(load, functools.partial(self._load, load, orders, deadline))
            self._times.append(LoadTime(load.tier, result.blocks, result.seconds))
            self._finish_sync_load(load, result)
        return True

    def _load_together(
        self, loads: Sequence[Load], orders: Mapping[str, LoadOrder], deadline: float
    ) -> None:
        """Load what the kernels of this step wait for, in one submission for each memory."""
        step = StepLoads(self._parts, orders, deadline, self._failures, self._tasks)
        try:
            results = self._copy_together(loads, step, orders, deadline)
        finally:
            # Also after a failure: some copies may have started. An exception means that no copy
            # of the GPU is in flight any more.
            for order in orders.values():
                order.hold_back_engine()
        results += [(found.load, found.result()) for found in step.found]
        for load, result in results:
            self._finish_sync_load(load, result)
        self._release_after(orders, step.found)

    def _copy_together(
        self,
        loads: Sequence[Load],
        step: StepLoads,
        orders: Mapping[str, LoadOrder],
        deadline: float,
    ) -> list[tuple[Load, LoadResult]]:
        """Look up the loads of a step and start their copies; returns those that were alone."""
        results: list[tuple[Load, LoadResult]] = []
        for load in loads:
            if load.tier in SLOW_TIERS:
                # The copies so far do not wait for the reads of this load.
                step.submit()
            try:
                is_found = step.find(load, self._reader())
            except Exception as error:  # noqa: BLE001 # a bug here must not fail the other loads
                self._failures.count("loading", error)
                results.append((load, _failed_load(load)))
                continue
            if not is_found:
                # More blocks than a batch, or than the pool has room for at the same time.
                step.submit()
                for order in orders.values():
                    order.wait()
                alone = functools.partial(self._load, load, orders, deadline)
                results.append((load, self._result_of(load, alone)))
        step.submit()
        return results

    def _release_after(self, orders: Mapping[str, LoadOrder], loads: Sequence[FoundLoad]) -> None:
        """Release blocks, and note how long their loads took, once the GPU has copied them."""
        *before, last = orders.values()
        for order in before:
            self._gpu_saves.release_after(order, lambda: None)

        def note_times() -> None:
            self._times.extend(filter(None, (found.time() for found in loads)))

        self._gpu_saves.release_after(last, note_times)

    def wait_for_layer(self, layer: str) -> None:
        """Return once the layer's KV has arrived or its load has failed."""
        if self._step.computing_since is None:
            self._step.computing_since = time.perf_counter()
        index = self._layers.get(layer)
        if index is not None:
            for load in self._step.layerwise_loads:
                load.wait(index)

    def save(self, plan: StepPlan) -> None:
        """Finish the loads of this step, and save the blocks that it computed."""
        since = self._step.computing_since
        if self._clock is not None:
            self._clock.end(plan)
        elif since is not None and plan.requests == 1 and plan.tokens > 1:
            seconds = time.perf_counter() - since
            self._report.prefill = (plan.tokens, plan.context_tokens, seconds)
        # Before the saves: blocks that were computed from failed loads must not be saved.
        for layerwise in self._step.layerwise_loads:
            result = self._result_of(layerwise.load, layerwise.result)
            note_time = functools.partial(self._note_time, layerwise.load, result, layerwise.order)
            if layerwise.order.has_copies:
                self._gpu_saves.release_after(layerwise.order, note_time)
            else:
                note_time()
            self._finish_sync_load(layerwise.load, result)
        self._step = _StepState()
        deadline = time.monotonic() + self._save_timeout
        saves = [save for save in plan.saves if not self._depends_on_invalid_page(save)]
        if saves:
            self._save_all(saves, self._namespace(plan.generation), deadline)
        self._report.saved += self._gpu_saves.take_results()

    def arrivals(self) -> tuple[set[str], set[str]]:
        """Return requests whose asynchronous loads ended, and those that failed completely."""
        if self._is_idle and self._async_loads:
            futures = [future for _, future in self._async_loads.values()]
            wait(futures, IDLE_WAIT_S, FIRST_COMPLETED)
        arrived: set[str] = set()
        failed: set[str] = set()
        for request, (load, future) in list(self._async_loads.items()):
            if not future.done():
                continue
            del self._async_loads[request]
            arrived.add(request)
            loaded = self._result_of(load, future.result)
            self._report.loaded.append(loaded)
            if loaded.bad and len(load.blocks) > 1:
                # With several groups, the engine does not accept single failed pages.
                failed.add(request)
            for pages in load.blocks.values() if request not in failed else ():
                self._failed_pages |= {pages[at - load.first] for at in loaded.bad} - {0}
        return arrived, failed

    def take_failed_pages(self) -> set[int]:
        """Return the pages that could not be loaded since the last call."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """Return the outcomes of loads and saves since the last call; `None` without any."""
        report, self._report = self._report, WorkerReport()
        report.saved += self._gpu_saves.take_results()
        while self._times:
            report.times.append(self._times.popleft())
        if self._clock is not None:
            report.prefill = self._clock.take()
        report.plan = self._plan
        has_content = report.loaded or report.saved or report.times or report.prefill
        return report if has_content else None

    def close(self) -> None:
        """Wait for running loads and saves, and release the engine's memory."""
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._gpu_saves.close()
        self._parts = {}
        if self._hbm is not None:
            self._hbm.close()

    def _result_of(self, load: Load, result: Callable[[], LoadResult]) -> LoadResult:
        """Return the result of a load; after a bug in it, all of its blocks count as failed."""
        try:
            return result()
        except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
            _LOG.exception("Cascade: a load failed; the engine computes instead")
            self._failures.count("loading", error)
            return _failed_load(load)

    def _finish_sync_load(self, load: Load, loaded: LoadResult) -> None:
        """Record the result of a synchronous load."""
        self._report.loaded.append(loaded)
        for group, pages in load.blocks.items():
            # Page 0 stands for blocks that the group does not keep.
            failed = {pages[at - load.first] for at in loaded.bad} - {0}
            self._invalid_pages |= dict.fromkeys(((group, page) for page in failed), self._plan)
            self._failed_pages |= failed

    def _depends_on_invalid_page(self, save: Save) -> bool:
        """Whether the blocks were computed from a page whose load failed: they are wrong too."""
        if not self._invalid_pages:
            return False
        return any(
            (group, page) in self._invalid_pages
            for group, pages in save.depends_on.items()
            for page in pages
        )

    def _fits_one_batch(self, load: Load) -> bool:
        held, memory = next(iter(self._parts.values()))
        pages = load.blocks[held.part.group]
        return len(pages) <= memory.batch_blocks and all(pages)

    def _load_layerwise(
        self, load: Load, orders: Mapping[str, LoadOrder], deadline: float
    ) -> LayerwiseLoad:
        ((held, memory),) = self._parts.values()
        assert isinstance(memory, HostMemory | GpuPages)  # noqa: S101 # as `attach` checked
        name, pages = held.part.name, load.blocks[held.part.group]
        layerwise = LayerwiseLoad(load, memory, orders[name], pages, deadline)
        load_all_layers = functools.partial(self._load, load, orders, deadline)
        keys = load.keys[name]
        layerwise.begin(self._loaders, self._reader, keys, self._failures, load_all_layers)
        return layerwise

    def _load_async(self, load: Load, orders: Mapping[str, LoadOrder]) -> LoadResult:
        """Load while the engine computes; returns once the pages are written."""
        try:
            result = self._load(load, orders, time.monotonic() + self._load_timeout)
        finally:
            for order in orders.values():
                order.wait()
        copies = [order.copy_seconds for order in orders.values()]
        if None not in copies:
            # A device's copies are over only now, and it has their time.
            seconds = result.seconds + sum(filter(None, copies))
            result = dataclasses.replace(result, seconds=seconds)
            self._times.append(LoadTime(load.tier, result.blocks, seconds))
        return result

    def _note_time(self, load: Load, result: LoadResult, order: LoadOrder) -> None:
        """Note how long a load took whose copies are over."""
        if order.copy_seconds is not None:
            seconds = result.seconds + order.copy_seconds
            self._times.append(LoadTime(load.tier, result.blocks, seconds))

    def _load(self, load: Load, orders: Mapping[str, LoadOrder], deadline: float) -> LoadResult:
        started, cpu = time.perf_counter(), time.thread_time()
        bad: set[int] = set()
        copied = count = 0
        lookup_seconds = 0.0
        for name, (held, memory) in self._parts.items():
            pages = load.blocks[held.part.group]
            count = len(pages)
            needed = [at for at in range(count) if pages[at]]
            keys = load.keys.get(name)
            # The scheduler failed to compute the keys.
            if keys is None:
                bad.update(needed)
                continue
            size = len(needed) * memory.block_bytes
            with self._tasks.load(len(needed), size, load.tier), part_of_trace(load.trace):
                batches = Batches(memory, orders[name], keys, pages, deadline)
                missing = self._load_part(batches, needed)
            lookup_seconds += batches.lookup_seconds
            copied += (len(needed) - len(missing)) * memory.block_bytes
            bad.update(missing)
        seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu
        if self._clock is not None:
            # The copies go on, and their time is added once it is known.
            seconds = lookup_seconds
        times = seconds, cpu_seconds
        indices = sorted(load.first + at for at in bad)
        return LoadResult(load.request, load.first, load.tier, count, indices, copied, *times)

    def _load_part(self, part: "Batches", needed: Sequence[int]) -> list[int]:
        """Copy a part's blocks to their pages; returns the indices of missing blocks."""
        missing: list[int] = []
        remaining = list(needed)
        most = part.memory.batch_blocks
        while remaining:
            batch, remaining = remaining[:most], remaining[most:]
            missing_now, no_room = self._load_batch(part, batch)
            missing += missing_now
            remaining = no_room + remaining
        return missing

    def _load_batch(self, part: "Batches", batch: list[int]) -> tuple[list[int], list[int]]:
        """Copy a batch; returns the missing blocks, and those that had no room in the pool.

        Blocks without room are retried once the views of the others are released. If no block of
        the batch was read, a retry cannot succeed, and all count as missing.
        """
        store, left = self._reader(), part.deadline - time.monotonic()
        if store is None or left <= 0:
            return batch, []
        started = time.perf_counter()
        try:
            with store.view(select(part.keys, batch), timeout=left) as views:
                part.lookup_seconds += time.perf_counter() - started
                pages = [part.pages[index] for index in batch]
                copied = part.memory.load(views, pages, part.order)
                failed = [views.error(at) is not None for at in range(len(batch))]
            if any(failed):
                # The copies of a GPU keep the blocks that they read.
                part.order.wait()
        except STORE_FAILURES as error:
            self._failures.count("reading blocks", error)
            return batch, []
        missing: list[int] = []
        no_room: list[int] = []
        can_retry = any(copied)
        for index, is_copied, has_failed in zip(batch, copied, failed, strict=True):
            if not is_copied:
                (no_room if has_failed and can_retry else missing).append(index)
        return missing, no_room

    def _save_all(self, saves: Sequence[Save], namespace: Namespace, deadline: float) -> None:
        """Save the blocks of a step, or start to if a GPU copies them."""
        if self._clock is None:
            self._report.saved += [self._save(save, namespace, deadline) for save in saves]
            return
        # The copies in the memory of a GPU are in submissions of their own.
        step, on_gpu = StepSaves(self._failures), StepSaves(self._failures)
        started = [self._start_save(it, (step, on_gpu), namespace, deadline) for it in saves]
        step.submit()
        on_gpu.submit()
        for save in started:
            self._gpu_saves.finish(save)

    def _save(self, save: Save, namespace: Namespace, deadline: float) -> SaveResult:
        started, cpu = time.perf_counter(), time.thread_time()
        # A block is stored if all parts that this worker writes are stored.
        stored = [True] * len(next(iter(save.blocks.values())))
        copied = 0
        for held, memory in self._parts.values():
            if not held.is_writer:
                continue
            pages = save.blocks[held.part.group]
            for first, last in runs_of(pages, memory.batch_blocks):
                size = (last - first) * memory.block_bytes
                with self._tasks.save(last - first, size), part_of_trace(save.trace):
                    run = SaveRun(save, held.part.name, first, last, pages)
                    results, written = self._save_run(run, memory, namespace, deadline)
                copied += written
                stored[first:last] = [
                    before and now for before, now in zip(stored[first:last], results, strict=True)
                ]
        times = time.perf_counter() - started, time.thread_time() - cpu
        return SaveResult(save.request, save.first, stored, copied, *times)

    def _save_run(
        self, run: "SaveRun", memory: Memory, namespace: Namespace, deadline: float
    ) -> tuple[list[bool], int]:
        """Save consecutive blocks of a part; returns which are stored, and the bytes copied."""
        stored: list[bool] = []
        copied = 0
        while run.first < run.last:
            results, written = self._save_batch(run, memory, namespace, deadline)
            copied += written
            # The pool may have room for the first blocks only; the others are tried again.
            count = results.index(False) if False in results else len(results)
            if not count:
                return stored + results, copied
            stored += results[:count]
            run = dataclasses.replace(run, first=run.first + count)
        return stored, copied

    def _save_batch(
        self, run: "SaveRun", memory: Memory, namespace: Namespace, deadline: float
    ) -> tuple[list[bool], int]:
        pages = run.pages[run.first : run.last]
        none_stored = [False] * len(pages)
        try:
            unsealed = self._prepare(run, memory, namespace, deadline)
            if unsealed is None:
                return none_stored, 0
            with unsealed as prepared:
                needed = len(prepared.needed)
                if needed:
                    memory.save(prepared, pages)
                left = max(deadline - time.monotonic(), SEAL_S)
                results = prepared.seal(timeout=left)
        except STORE_FAILURES as error:
            self._failures.count("saving blocks", error)
            return none_stored, 0
        return [is_stored(result) for result in results], needed * memory.block_bytes

    def _start_save(
        self,
        save: Save,
        steps: tuple[StepSaves, StepSaves],
        namespace: Namespace,
        deadline: float,
    ) -> GpuSave:
        """Add a save to those of its step. What the store refuses now is not tried again."""
        step, on_gpu = steps
        pending = GpuSave(save, self._failures, self._hbm)
        for held, memory in self._parts.values():
            if not held.is_writer or not isinstance(memory, GpuPages):
                continue
            pages = save.blocks[held.part.group]
            for first, last in runs_of(pages, memory.batch_blocks):
                run = SaveRun(save, held.part.name, first, last, pages)
                try:
                    prepared = self._prepare(run, memory, namespace, deadline)
                    if prepared is None:
                        pending.fail(first, last)
                        continue
                except STORE_FAILURES as error:
                    self._failures.count("saving blocks", error)
                    pending.fail(first, last)
                    continue
                step.add(memory, pending, (first, last), prepared, pages[first:last])
                if self._hbm is None or pending.on_gpu is None:
                    continue
                copy = self._hbm.prepare(run, memory.block_bytes, namespace)
                if copy is not None:
                    on_gpu.add(memory, pending.on_gpu, (first, last), copy, pages[first:last])
        pending.pause()
        return pending

    def _reader(self) -> Store | TieredReader | None:
        """Return what blocks are read from; `None` while the store is unavailable."""
        store = self._store()
        return store if store is None or self._hbm is None else TieredReader(store, self._hbm)

    def _prepare(
        self, run: "SaveRun", memory: Memory, namespace: Namespace, deadline: float
    ) -> PreparedPut | None:
        store, left = self._store(), deadline - time.monotonic()
        if store is None or left <= 0:
            return None
        return store.prepare(
            run.keys(),
            memory.block_bytes,
            parent=run.parent(),
            namespace=namespace,
            timeout=left,
        )


def _failed_load(load: Load) -> LoadResult:
    """Return the result of a load in which all blocks failed."""
    count = max(len(pages) for pages in load.blocks.values())
    bad = list(range(load.first, load.first + count))
    return LoadResult(load.request, load.first, load.tier, count, bad, 0, 0.0, 0.0)

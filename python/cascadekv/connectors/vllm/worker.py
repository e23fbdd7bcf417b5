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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from cascadekv import Namespace, Store, part_of_trace
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.vllm.adapters import AdapterUse, LoadedAdapters
from cascadekv.connectors.vllm.batches import Batches, select
from cascadekv.connectors.vllm.block_reader import BlockReader
from cascadekv.connectors.vllm.gpu_clock import StepClock
from cascadekv.connectors.vllm.gpu_loads import FoundLoad, StepLoads
from cascadekv.connectors.vllm.gpu_saves import SaveQueue
from cascadekv.connectors.vllm.hbm import HbmTier
from cascadekv.connectors.vllm.layers import LayerwiseLoad
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.memory import GpuPages, HostMemory, LoadOrder, Memory
from cascadekv.connectors.vllm.metadata import (
    SLOW_TIERS,
    Load,
    LoadResult,
    LoadTime,
    Save,
    StepPlan,
    WorkerReport,
)
from cascadekv.connectors.vllm.promotions import Promotions
from cascadekv.connectors.vllm.running_load import RunningLoad
from cascadekv.connectors.vllm.saves import Saver
from cascadekv.connectors.vllm.tasks import TaskLog
from cascadekv.connectors.vllm.transfers import Transfers

__all__ = ["Worker"]

_LOG = logging.getLogger("vllm.cascade")
LOADERS = 2
"""Threads for asynchronous loads; more would compete with the engine for cores."""
IDLE_WAIT_S = 0.002
"""How long a step without tokens waits for a load, so that the engine does not spin."""


@dataclass(slots=True)
class _StepState:
    """The state of the current step; the engine may compute before it loads."""

    layerwise_loads: list[LayerwiseLoad] = field(default_factory=list[LayerwiseLoad])
    loaded: list[RunningLoad] = field(default_factory=list[RunningLoad])
    """Synchronous loads that have ended."""
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
        transfers: Transfers | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """`store` returns the store, or `None` while it is unavailable; time-outs in seconds.

        `hbm` is the tier above the store, for KV in the memory of a GPU; `transfers` moves pages
        between engines; `adapters` are those that the worker has loaded.
        """
        self._store = store
        self._namespace = namespace
        self._load_timeout = load_timeout
        self._save_timeout = save_timeout
        self._is_layerwise = is_layerwise
        self._hbm = hbm
        self._transfers = transfers
        self._adapters = adapters
        self._parts: dict[str, tuple[HeldPart, Memory]] = {}
        self._layers: dict[str, int] = {}
        """Index of each layer for layerwise loads; empty if they are off."""
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="cascade-load")
        self._step = _StepState()
        self._gpu_saves = SaveQueue()
        self._async_loads: dict[str, tuple[RunningLoad, Future[LoadResult]]] = {}
        """Asynchronous loads in flight, by request."""
        self._failed_pages: set[int] = set()
        """Pages that could not be loaded, to be reported to the engine."""
        self._invalid_pages: dict[tuple[int, int], int] = {}
        """By group and page: the plan whose load of the page failed."""
        self._generation = ""
        """The generation of the current step's keys."""
        self._plan = 0
        self._is_idle = False
        """Whether the current step computes no tokens."""
        self._report = WorkerReport()
        self._times: deque[LoadTime] = deque()
        """Times of loads, to be reported; other threads append them."""
        self._failures = FailureLog(_LOG)
        self._tasks = TaskLog(_LOG, store)
        self._clock: StepClock | None = None
        """Of a GPU; on a host the worker measures steps."""
        self._saver = Saver(store, hbm, self._gpu_saves, self._failures, self._tasks)
        self._promotions = None if hbm is None else Promotions(hbm, namespace, self._failures)

    def attach(self, parts: Sequence[tuple[HeldPart, Memory]], layers: Sequence[str]) -> None:
        """Set the KV memory; `layers` are the first part's layers, in the order of its regions."""
        self._parts = {held.part.name: (held, memory) for held, memory in parts}
        self._saver.attach(self._parts)
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
        self._generation = plan.generation
        if self._adapters is not None:
            # The engine has loaded the adapters of the step.
            self._adapters.update(plan.number)
            reported = self._adapters.take_report(is_asked=plan.asks_adapters)
            self._report.adapters = reported or self._report.adapters
        if plan.transfer is not None and self._transfers is not None:
            try:
                # Before the kernels: they may use pages that were read for other engines.
                self._transfers.apply(plan.transfer)
            except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
                _LOG.exception("Cascade: a step of transfers failed")
                self._failures.count("a step of transfers", error)
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
        # Of a step that was not finished: their pages may be others' by now.
        self._step.loaded = []
        if plan.loads:
            self._start_all([RunningLoad(load, plan.generation) for load in plan.loads])

    def _start_all(self, loads: Sequence[RunningLoad]) -> None:
        # One deadline for all synchronous loads of the step, and one place in the engine's work.
        deadline = time.monotonic() + self._load_timeout
        together: list[RunningLoad] = []
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

    def _fail(self, running: RunningLoad, error: Exception) -> None:
        """Report a load as failed: the engine counts its blocks as loaded otherwise."""
        self._failures.count("starting a load", error)
        failed = running.failed()
        if running.load.is_async:
            future: Future[LoadResult] = Future()
            future.set_result(failed)
            self._async_loads[running.load.request] = (running, future)
        else:
            self._finish_sync_load(running, failed)

    def _start(self, running: RunningLoad, place: Mapping[str, LoadOrder], deadline: float) -> bool:
        """Start a load, unless it is copied together with others: then return false."""
        orders = {name: order.another() for name, order in place.items()}
        load = running.load
        if not load.is_async and not self._is_loaded(load.adapter):
            raise ValueError("the adapter has been loaded again from other files")
        if load.pull is not None:
            if self._transfers is None:
                raise ValueError("this worker reads no pages of other engines")
            pulled = self._transfers.pull(running, time.monotonic() + self._load_timeout)
            self._async_loads[load.request] = (running, pulled)
        elif load.push is not None:
            if self._transfers is None:
                raise ValueError("no other engine writes to this worker")
            self._async_loads[load.request] = (running, self._transfers.expect(running))
        elif load.is_async:
            future = self._loaders.submit(self._load_async, running, orders)
            self._async_loads[load.request] = (running, future)
        elif self._layers and load.keys and self._fits_one_batch(load):
            self._step.layerwise_loads.append(self._load_layerwise(running, orders, deadline))
        elif self._clock is not None:
            return False
        else:
            alone = functools.partial(self._load, running, orders, deadline)
            result = self._result_of(running, alone)
            self._times.append(LoadTime(load.tier, result.blocks, result.seconds))
            self._finish_sync_load(running, result)
        return True

    def _load_together(
        self, loads: Sequence[RunningLoad], orders: Mapping[str, LoadOrder], deadline: float
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
        results += [(found.running, found.running.result()) for found in step.found]
        for running, result in results:
            self._finish_sync_load(running, result)
        self._release_after(orders, step.found)

    def _copy_together(
        self,
        loads: Sequence[RunningLoad],
        step: StepLoads,
        orders: Mapping[str, LoadOrder],
        deadline: float,
    ) -> list[tuple[RunningLoad, LoadResult]]:
        """Look up the loads of a step and start their copies; returns those that were alone."""
        results: list[tuple[RunningLoad, LoadResult]] = []
        for running in loads:
            if running.load.tier in SLOW_TIERS:
                # The copies so far do not wait for the reads of this load.
                step.submit()
            try:
                is_found = step.find(running, self._reader())
            except Exception as error:  # noqa: BLE001 # a bug here must not fail the other loads
                self._failures.count("loading", error)
                results.append((running, running.failed()))
                continue
            if not is_found:
                # More blocks than a batch, or than the pool has room for at the same time.
                step.submit()
                for order in orders.values():
                    order.wait()
                alone = functools.partial(self._load, running, orders, deadline)
                results.append((running, self._result_of(running, alone)))
        step.submit()
        return results

    def _release_after(self, orders: Mapping[str, LoadOrder], loads: Sequence[FoundLoad]) -> None:
        """Release blocks, and note how long their loads took, once the GPU has copied them."""
        *before, last = orders.values()
        for order in before:
            self._gpu_saves.release_after(order, lambda: None)

        def note_times() -> None:
            for found in loads:
                self._times.extend(found.times())

        self._gpu_saves.release_after(last, note_times)

    def wait_for_layer(self, layer: str) -> None:
        """Return once the layer's KV has arrived or its load has failed."""
        if self._step.computing_since is None:
            self._step.computing_since = time.perf_counter()
        index = self._layers.get(layer)
        if index is not None:
            for load in self._step.layerwise_loads:
                load.wait(index)

    def layer_computed(self, layer: str, plan: StepPlan) -> None:
        """Push a layer that the step has computed, unless loads of the step may have failed."""
        is_known = not (self._step.layerwise_loads or self._invalid_pages)
        if self._transfers is not None and plan.transfer is not None and is_known:
            computed = [each for each in plan.transfer.computed if self._is_loaded(each.adapter)]
            self._transfers.layer_computed(layer, [each.request for each in computed])

    def _push(self, plan: StepPlan) -> None:
        """Push all layers of what the step has computed."""
        if self._transfers is None or plan.transfer is None:
            return
        right: list[str] = []
        wrong: list[str] = []
        for each in plan.transfer.computed:
            if not self._is_loaded(each.adapter):
                self._transfers.revoke(each.request)
                continue
            is_wrong = self._depends_on_invalid_page(each.tables)
            (wrong if is_wrong else right).append(each.request)
        self._transfers.end_step(right, wrong)

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
            running = layerwise.running
            result = self._result_of(running, layerwise.result)
            note_times = functools.partial(self._note_times, running, result, layerwise.order)
            if layerwise.order.has_copies:
                self._gpu_saves.release_after(layerwise.order, note_times)
            else:
                note_times()
            self._finish_sync_load(running, result)
        loaded, self._step = self._step.loaded, _StepState()
        self._promote_all(loaded)
        self._push(plan)
        deadline = time.monotonic() + self._save_timeout
        saves = [save for save in plan.saves if self._may_save(save)]
        if saves:
            space = self._namespace(plan.generation)
            self._report.saved += self._saver.save(saves, space, deadline)
        self._report.saved += self._gpu_saves.take_results()

    def _is_loaded(self, adapter: AdapterUse | None) -> bool:
        return adapter is None or (self._adapters is not None and self._adapters.is_loaded(adapter))

    def _may_save(self, save: Save) -> bool:
        """Whether blocks were computed from the KV and the weights that their keys say."""
        if save.adapter is not None and not (
            self._adapters is not None and self._adapters.has_computed(save.adapter)
        ):
            self._failures.count("saving blocks", "the adapter was loaded again from other files")
            return False
        return not self._depends_on_invalid_page(save.depends_on)

    def arrivals(self) -> tuple[set[str], set[str]]:
        """Return requests whose asynchronous loads ended, and those that failed completely."""
        if self._is_idle and self._async_loads:
            futures = [future for _, future in self._async_loads.values()]
            wait(futures, IDLE_WAIT_S, FIRST_COMPLETED)
        arrived: set[str] = set()
        failed: set[str] = set()
        ended: list[RunningLoad] = []
        for request, (running, future) in list(self._async_loads.items()):
            if not future.done():
                continue
            del self._async_loads[request]
            arrived.add(request)
            loaded, load = self._result_of(running, future.result), running.load
            if running.generation != self._generation:
                # The cache was reset since: these are blocks of other weights, to compute again.
                loaded = running.failed()
            ended.append(running)
            if not self._is_loaded(load.adapter):
                self._failures.count("loading", "the adapter was loaded again from other files")
                loaded = running.failed()
            self._report.loaded.append(loaded)
            if loaded.bad and (len(load.blocks) > 1 or load.has_windows):
                # With several groups, the engine does not accept single failed pages. With a
                # window, it has no pages for the blocks before a failed one.
                failed.add(request)
            for pages in load.blocks.values() if request not in failed else ():
                self._failed_pages |= {pages[at - load.first] for at in loaded.bad} - {0}
        if self._promotions is not None:
            # The requests hold the pages until the engine gets this report.
            self._promotions.start(ended)
        return arrived, failed

    def take_sent(self) -> set[str]:
        """Return finished requests whose pages no other engine reads any more."""
        return set() if self._transfers is None else self._transfers.take_ended()

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
        return report if has_content or report.adapters is not None else None

    def close(self) -> None:
        """Wait for running loads and saves, and release the engine's memory."""
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._gpu_saves.close()
        for each in (self._promotions, self._adapters, self._tasks):
            if each is not None:
                each.close()
        if self._transfers is not None:
            self._transfers.close()
        self._async_loads, self._parts = {}, {}
        self._saver.attach({})
        if self._hbm is not None:
            self._hbm.close()

    def _result_of(self, running: RunningLoad, result: Callable[[], LoadResult]) -> LoadResult:
        """Return the result of a load; after a bug in it, all of its blocks count as failed."""
        try:
            return result()
        except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
            _LOG.exception("Cascade: a load failed; the engine computes instead")
            self._failures.count("loading", error)
            if self._promotions is not None:
                self._promotions.drop(running)
            return running.failed()

    def _promote_all(self, loads: Sequence[RunningLoad]) -> None:
        """Promote the blocks of the synchronous loads of a step, after its kernels."""
        if self._promotions is None or not loads:
            return
        pages = [page for each in loads for own in each.load.blocks.values() for page in set(own)]
        shared = frozenset(page for page, count in Counter(pages).items() if count > 1)
        for running in loads:
            self._promotions.prepare(running, self._parts, shared)
        self._promotions.start(loads)

    def _finish_sync_load(self, running: RunningLoad, loaded: LoadResult) -> None:
        """Record the result of a synchronous load."""
        load = running.load
        self._report.loaded.append(loaded)
        if not loaded.bad:
            self._step.loaded.append(running)
        for group, pages in load.blocks.items():
            # Page 0 stands for blocks that the group does not keep.
            failed = {pages[at - load.first] for at in loaded.bad} - {0}
            self._invalid_pages |= dict.fromkeys(((group, page) for page in failed), self._plan)
            self._failed_pages |= failed

    def _depends_on_invalid_page(self, tables: Mapping[int, Sequence[int]]) -> bool:
        """Whether blocks were computed from a page whose load failed: they are wrong too."""
        if not self._invalid_pages:
            return False
        return any(
            (group, page) in self._invalid_pages
            for group, pages in tables.items()
            for page in pages
        )

    def _fits_one_batch(self, load: Load) -> bool:
        held, memory = next(iter(self._parts.values()))
        pages = load.blocks[held.part.group]
        return len(pages) <= memory.batch_blocks and all(pages)

    def _load_layerwise(
        self, running: RunningLoad, orders: Mapping[str, LoadOrder], deadline: float
    ) -> LayerwiseLoad:
        ((held, memory),) = self._parts.values()
        assert isinstance(memory, HostMemory | GpuPages)  # noqa: S101 # as `attach` checked
        name = held.part.name
        layerwise = LayerwiseLoad(running, held.part, memory, orders[name], deadline)
        load_all_layers = functools.partial(self._load, running, orders, deadline)
        layerwise.begin(self._loaders, self._reader, self._failures, load_all_layers, self._tasks)
        return layerwise

    def _load_async(self, running: RunningLoad, orders: Mapping[str, LoadOrder]) -> LoadResult:
        """Load while the engine computes; returns once the pages are written."""
        try:
            result = self._load(running, orders, time.monotonic() + self._load_timeout)
            if self._promotions is not None:
                # While the GPU copies.
                self._promotions.prepare(running, self._parts)
        finally:
            for order in orders.values():
                order.wait()
        store_copies, hbm_copies = _copy_seconds(orders.values())
        if self._clock is None:
            self._times.append(LoadTime(result.tier, result.blocks, result.seconds))
        else:
            self._times.extend(running.times(store_copies, hbm_copies))
        if store_copies is None or hbm_copies is None:
            return result
        # A device's copies are over only now, and it has their time.
        return dataclasses.replace(
            result,
            seconds=result.seconds + store_copies + hbm_copies,
            hbm_seconds=result.hbm_seconds + hbm_copies,
        )

    def _note_times(self, running: RunningLoad, result: LoadResult, order: LoadOrder) -> None:
        """Note how long a layerwise load took whose copies are over."""
        if self._clock is None:
            self._times.append(LoadTime(result.tier, result.blocks, result.seconds))
        else:
            self._times.extend(running.times(order.copy_seconds, order.within_seconds))

    def _load(
        self, running: RunningLoad, orders: Mapping[str, LoadOrder], deadline: float
    ) -> LoadResult:
        started, cpu = time.perf_counter(), time.thread_time()
        load = running.load
        if not load.keys:
            # The scheduler could not plan it.
            return running.failed()
        for name, (held, memory) in self._parts.items():
            pages = load.blocks[held.part.group]
            needed = [at for at in range(len(pages)) if pages[at]]
            running.expect(name, needed)
            keys = load.keys.get(name)
            # The scheduler failed to compute the keys.
            if keys is None:
                continue
            size = len(needed) * memory.block_bytes
            with self._tasks.load(len(needed), size, load.tier), part_of_trace(load.trace):
                batches = Batches(running, name, memory, orders[name], keys, pages, deadline)
                self._load_part(batches, needed)
        seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu
        # The copies of a GPU go on, and their time is added once it is known.
        on_host = seconds if self._clock is None else None
        return running.result(seconds=on_host, cpu_seconds=cpu_seconds)

    def _load_part(self, part: "Batches", needed: Sequence[int]) -> None:
        """Copy a part's blocks to their pages."""
        remaining = list(needed)
        most = part.memory.batch_blocks
        while remaining:
            batch, remaining = remaining[:most], remaining[most:]
            remaining = self._load_batch(part, batch) + remaining

    def _load_batch(self, part: "Batches", batch: list[int]) -> list[int]:
        """Copy a batch; returns the blocks that had no room in the pool.

        Blocks without room are retried once the views of the others are released. If no block of
        the batch was read, a retry cannot succeed.
        """
        reader, left = self._reader(), part.deadline - time.monotonic()
        if reader is None or left <= 0:
            return []
        pages, size = [part.pages[index] for index in batch], part.memory.block_bytes
        copied: set[int] = set()
        try:
            with reader.view(select(part.keys, batch), timeout=left) as blocks:
                blocks.note_times(part.running)
                for found in blocks.found:
                    own = found.load(part.memory, pages, part.order)
                    copied.update(own)
                    places = [batch[at] for at in own]
                    part.running.note_copies(part.name, places, size, is_on_gpu=found.is_on_gpu)
                failed = blocks.failures()
            if failed:
                # The copies of a GPU keep the blocks that they read.
                part.order.wait()
        except STORE_FAILURES as error:
            self._failures.count("reading blocks", error)
            return []
        return [batch[at] for at in sorted(failed - copied)] if copied else []

    def _reader(self) -> BlockReader | None:
        """Return what blocks are read from; `None` while the store is unavailable."""
        store = self._store()
        return None if store is None else BlockReader(store, self._hbm)


def _copy_seconds(orders: Iterable[LoadOrder]) -> tuple[float | None, float | None]:
    """Return how long copies took from the store, and from the memory of a GPU."""
    from_store: float | None = 0.0
    from_gpu: float | None = 0.0
    for order in orders:
        own, within = order.copy_seconds, order.within_seconds
        from_store = None if from_store is None or own is None else from_store + own
        from_gpu = None if from_gpu is None or within is None else from_gpu + within
    return from_store, from_gpu

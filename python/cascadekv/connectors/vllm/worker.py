"""The worker side: copies blocks between the engine's KV memory and the store.

Loads and saves are batches of blocks, read from and written to the store's own memory. A save is
over before the step ends, because the engine may give its blocks to another request in the next.
Nothing that happens to the store raises into the engine: what is not there, late or damaged is
named by block, and the engine computes it.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from cascadekv import (
    BlockKeys,
    CascadeError,
    Namespace,
    PutResult,
    PutStatus,
    Store,
    part_of_trace,
)
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.keys import KEY_BYTES
from cascadekv.connectors.vllm.layers import LayeredLoad
from cascadekv.connectors.vllm.layout import Held
from cascadekv.connectors.vllm.memory import HostMemory, Memory
from cascadekv.connectors.vllm.metadata import Load, Loaded, Plan, Progress, Save, Saved
from cascadekv.connectors.vllm.tasks import TaskLog

__all__ = ["Worker"]

_LOG = logging.getLogger("vllm.cascade")
LOADERS = 2
"""Loads beside the engine's own thread; more would take its cores."""
SEAL_S = 0.01
"""What copied blocks still get when the time for saving is over: they cost more than a look."""
IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for a load, instead of spinning beside it."""
LOAD_FAILURES = (CascadeError, ValueError, BufferError)
"""What a store or a copy may raise; everything else is a fault of ours and is raised."""


@dataclass(slots=True)
class _Step:
    """What the step under way loads while it computes; the engine may compute before it loads."""

    layered: list[LayeredLoad] = field(default_factory=list[LayeredLoad])
    computing_since: float | None = None


class Worker:
    """Carries out a scheduler's plans on one worker's KV memory."""

    def __init__(
        self,
        store: Callable[[], Store | None],
        namespace: Callable[[str], Namespace],
        *,
        load_timeout: float,
        save_timeout: float,
        is_layerwise: bool = False,
    ) -> None:
        """`store` gives the store, or `None` while there is none; timeouts are in seconds."""
        self._store = store
        self._namespace = namespace
        self._load_timeout = load_timeout
        self._save_timeout = save_timeout
        self._is_layerwise = is_layerwise
        self._held: dict[str, tuple[Held, Memory]] = {}
        self._layers: dict[str, int] = {}
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="cascade-load")
        self._step = _Step()
        self._under_way: dict[str, tuple[Load, Future[Loaded]]] = {}
        self._bad: set[int] = set()
        self._doubted: dict[tuple[int, int], int] = {}
        """By group and block: in which plan it was to be loaded and could not be."""
        self._plan = 0
        self._is_idle = False
        """Whether the step computes nothing."""
        self._progress = Progress()
        self._counted: dict[str, int] = {}
        self._failures = FailureLog(_LOG)
        self._tasks = TaskLog(_LOG)

    def attach(self, held: Sequence[tuple[Held, Memory]], layers: Sequence[str]) -> None:
        """Take the KV memory; `layers` are those of the first part, in the order of its regions."""
        self._held = {each.part.name: (each, memory) for each, memory in held}
        self._layers = {}
        is_on_host = all(isinstance(memory, HostMemory) for _, memory in held)
        if self._is_layerwise and len(held) == 1 and is_on_host:
            self._layers = {layer: at for at, layer in enumerate(layers)}
        elif self._is_layerwise:
            why = "the KV is in several parts" if is_on_host else "the KV is in device memory"
            _LOG.warning("Cascade: cascade.layerwise is ignored: %s", why)

    def start_loads(self, plan: Plan) -> None:
        """Read what this step needs, and begin to read what later steps need."""
        self._plan = max(self._plan, plan.number)
        self._is_idle = plan.tokens == 0
        # Steps are planned before the one before is over: blocks are in doubt until one is
        # planned that knows of them.
        self._doubted = {at: of for at, of in self._doubted.items() if of > plan.learned}
        # One for all that hold the step up.
        deadline = time.monotonic() + self._load_timeout
        for load in plan.loads:
            try:
                self._begin(load, deadline)
            except Exception as error:  # noqa: BLE001 # a fault of ours must not reach the engine
                self._failures.count("beginning a load", error)
                nothing = _nothing_of(load)
                if load.is_async:
                    future: Future[Loaded] = Future()
                    future.set_result(nothing)
                    self._under_way[load.request] = (load, future)
                else:
                    self._take(load, nothing)

    def _begin(self, load: Load, deadline: float) -> None:
        if load.is_async:
            self._under_way[load.request] = (load, self._loaders.submit(self._load, load))
        elif self._layers and load.keys and self._fits_at_once(load):
            self._step.layered.append(self._load_by_layer(load))
        else:
            self._take(load, self._ended(load, functools.partial(self._load, load, deadline)))

    def wait_for_layer(self, layer: str) -> None:
        """Return once the layer's KV is there, or is known to be bad."""
        if self._step.computing_since is None:
            self._step.computing_since = time.perf_counter()
        at = self._layers.get(layer)
        if at is not None:
            for layered in self._step.layered:
                layered.wait(at)

    def save(self, plan: Plan) -> None:
        """Copy what this step computed, and end what it loaded."""
        since = self._step.computing_since
        if since is not None and plan.requests == 1 and plan.tokens > 1:
            seconds = time.perf_counter() - since
            self._progress.prefill = (plan.tokens, plan.context_tokens, seconds)
        for layered in self._step.layered:
            self._take(layered.load, self._ended(layered.load, layered.result))
        self._step = _Step()
        deadline = time.monotonic() + self._save_timeout
        for save in plan.saves:
            if not self._stands_on_bad(save):
                saved = self._save(save, self._namespace(plan.generation), deadline)
                self._progress.saved.append(saved)

    def arrivals(self) -> tuple[set[str], set[str]]:
        """Give requests whose asynchronous loads ended, and those of them that failed whole."""
        if self._is_idle and self._under_way:
            futures = [future for _, future in self._under_way.values()]
            wait(futures, IDLE_WAIT_S, FIRST_COMPLETED)
        arrived: set[str] = set()
        failed: set[str] = set()
        for request, (load, future) in list(self._under_way.items()):
            if not future.done():
                continue
            del self._under_way[request]
            arrived.add(request)
            loaded = self._ended(load, future.result)
            self._progress.loaded.append(loaded)
            if loaded.bad and len(load.blocks) > 1:
                # With several groups the engine cannot be told of single blocks.
                failed.add(request)
            for blocks in load.blocks.values() if request not in failed else ():
                self._bad |= {blocks[at - load.first] for at in loaded.bad} - {0}
        return arrived, failed

    def bad_blocks(self) -> set[int]:
        """Give the blocks that could not be loaded since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    def progress(self) -> Progress | None:
        """Give what became of loads and saves since the last call; nothing if there was nothing."""
        progress, self._progress = self._progress, Progress()
        progress.plan = self._plan
        counts = self._failures.counts()
        new = {kind: total - self._counted.get(kind, 0) for kind, total in counts.items()}
        progress.failures = {kind: count for kind, count in new.items() if count}
        self._counted = counts
        busy = progress.loaded or progress.saved or progress.prefill or progress.failures
        return progress if busy else None

    def close(self) -> None:
        """End the loads and let go of the engine's memory."""
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._held = {}

    def _ended(self, load: Load, result: Callable[[], Loaded]) -> Loaded:
        """Give how a load ended; after a fault of ours none of its blocks is taken for good."""
        try:
            return result()
        except Exception as error:  # noqa: BLE001 # a fault of ours must not reach the engine
            _LOG.exception("Cascade: a load failed; the engine computes instead")
            self._failures.count("loading", error)
            return _nothing_of(load)

    def _take(self, load: Load, loaded: Loaded) -> None:
        """Note how a load of this step ended."""
        self._progress.loaded.append(loaded)
        for group, blocks in load.blocks.items():
            bad = {blocks[at - load.first] for at in loaded.bad} - {0}
            self._doubted |= dict.fromkeys(((group, block) for block in bad), self._plan)
            self._bad |= bad

    def _stands_on_bad(self, save: Save) -> bool:
        """Whether blocks were computed from such as could not be loaded: theirs are wrong too."""
        return (
            any(
                (group, on) in self._doubted
                for group, every in save.stands_on.items()
                for on in every
            )
            if self._doubted
            else False
        )

    def _fits_at_once(self, load: Load) -> bool:
        held, memory = next(iter(self._held.values()))
        pages = load.blocks[held.part.group]
        return len(pages) <= memory.batch_blocks and all(pages)

    def _load_by_layer(self, load: Load) -> LayeredLoad:
        held, memory = next(iter(self._held.values()))
        assert isinstance(memory, HostMemory)  # noqa: S101 # attach names layers of no other
        pages = load.blocks[held.part.group]
        layered = LayeredLoad(load, memory.paged, pages, self._load_timeout, self._load)
        layered.begin(self._loaders, self._store, load.keys[held.part.name], self._failures)
        return layered

    def _load(self, load: Load, deadline: float | None = None) -> Loaded:
        started, cpu = time.perf_counter(), time.thread_time()
        if deadline is None:
            deadline = time.monotonic() + self._load_timeout
        bad: set[int] = set()
        copied = count = 0
        for held, memory in self._held.values():
            pages = load.blocks[held.part.group]
            count = len(pages)
            wanted = [at for at in range(count) if pages[at]]
            keys = load.keys.get(held.part.name)
            if keys is None:
                bad.update(wanted)
                continue
            size = len(wanted) * memory.block_bytes
            with self._tasks.load(len(wanted), size, load.tier), part_of_trace(load.trace):
                missing = self._load_part(memory, keys, pages, wanted, deadline)
            copied += (len(wanted) - len(missing)) * memory.block_bytes
            bad.update(missing)
        times = time.perf_counter() - started, time.thread_time() - cpu
        named = sorted(load.first + at for at in bad)
        return Loaded(load.request, load.first, load.tier, count, named, copied, *times)

    def _load_part(
        self,
        memory: Memory,
        keys: bytes,
        pages: Sequence[int],
        wanted: Sequence[int],
        deadline: float,
    ) -> list[int]:
        """Copy a part's blocks to their pages; returns those that are not there."""
        missing: list[int] = []
        left = list(wanted)
        while left:
            batch, left = left[: memory.batch_blocks], left[memory.batch_blocks :]
            gone, crowded = self._load_batch(memory, keys, pages, batch, deadline)
            missing += gone
            left = crowded + left
        return missing

    def _load_batch(
        self,
        memory: Memory,
        keys: bytes,
        pages: Sequence[int],
        batch: list[int],
        deadline: float,
    ) -> tuple[list[int], list[int]]:
        """Copy what the pool has room for at once; returns what is gone, and what had no room."""
        store, left = self._store(), deadline - time.monotonic()
        if store is None or left <= 0:
            return batch, []
        try:
            with store.view(_select(keys, batch), timeout=left) as views:
                there = memory.load(views, [pages[each] for each in batch])
                failed = [views.error(at) is not None for at in range(len(batch))]
        except LOAD_FAILURES as error:
            self._failures.count("reading blocks", error)
            return batch, []
        missing = [(at, each) for at, each in enumerate(batch) if not there[at]]
        crowded = [each for at, each in missing if failed[at] and any(there)]
        return [each for _, each in missing if each not in crowded], crowded

    def _save(self, save: Save, namespace: Namespace, deadline: float) -> Saved:
        started, cpu = time.perf_counter(), time.thread_time()
        kept = [True] * len(next(iter(save.blocks.values())))
        copied = 0
        for held, memory in self._held.values():
            if not held.is_writer:
                continue
            pages = save.blocks[held.part.group]
            for first, last in _runs(pages, memory.batch_blocks):
                size = (last - first) * memory.block_bytes
                with self._tasks.save(last - first, size), part_of_trace(save.trace):
                    run = _Run(save, held.part.name, first, last, pages)
                    results, written = self._save_run(run, memory, namespace, deadline)
                copied += written
                kept[first:last] = [a and b for a, b in zip(kept[first:last], results, strict=True)]
        times = time.perf_counter() - started, time.thread_time() - cpu
        return Saved(save.request, save.first, kept, copied, *times)

    def _save_run(
        self, run: "_Run", memory: Memory, namespace: Namespace, deadline: float
    ) -> tuple[list[bool], int]:
        """Save consecutive blocks of a part; says which are kept, and how many bytes were new."""
        kept: list[bool] = []
        copied = 0
        while run.first < run.last:
            results, written = self._save_batch(run, memory, namespace, deadline)
            copied += written
            # The store has room for some at once: what comes after them is offered again.
            taken = results.index(False) if False in results else len(results)
            if not taken:
                return kept + results, copied
            kept += results[:taken]
            run = dataclasses.replace(run, first=run.first + taken)
        return kept, copied

    def _save_batch(
        self, run: "_Run", memory: Memory, namespace: Namespace, deadline: float
    ) -> tuple[list[bool], int]:
        pages = run.pages[run.first : run.last]
        nothing = [False] * len(pages)
        store, left = self._store(), deadline - time.monotonic()
        if store is None or left <= 0:
            return nothing, 0
        try:
            with store.prepare(
                run.keys(),
                memory.block_bytes,
                parent=run.parent(),
                namespace=namespace,
                timeout=left,
            ) as prepared:
                needed = len(prepared.needed)
                if needed:
                    memory.save(prepared, pages)
                left = max(deadline - time.monotonic(), SEAL_S)
                results = prepared.seal(timeout=left)
        except LOAD_FAILURES as error:
            self._failures.count("saving blocks", error)
            return nothing, 0
        return [_is_kept(result) for result in results], needed * memory.block_bytes


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one part to save."""

    save: Save
    part: str
    first: int
    last: int
    pages: Sequence[int]
    """Of all blocks of the save."""

    def keys(self) -> BlockKeys:
        return BlockKeys(self.save.keys[self.part][self.first * KEY_BYTES : self.last * KEY_BYTES])

    def parent(self) -> bytes | None:
        if not self.first:
            return self.save.parents[self.part]
        return self.save.keys[self.part][(self.first - 1) * KEY_BYTES : self.first * KEY_BYTES]


def _nothing_of(load: Load) -> Loaded:
    """Say that nothing of a load is there."""
    count = max(len(blocks) for blocks in load.blocks.values())
    bad = list(range(load.first, load.first + count))
    return Loaded(load.request, load.first, load.tier, count, bad, 0, 0.0, 0.0)


def _is_kept(result: PutResult) -> bool:
    """Whether the store has the block. Another's KV of the same tokens is as good as ours."""
    return result.ok or result.status is PutStatus.CONFLICT


def _select(keys: bytes, indices: Sequence[int]) -> BlockKeys:
    first, last = indices[0], indices[-1] + 1
    if last - first == len(indices):
        return BlockKeys(keys[first * KEY_BYTES : last * KEY_BYTES])
    return BlockKeys(b"".join(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in indices))


def _runs(pages: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut into runs of consecutive pages that are kept, none longer than `most`."""
    runs: list[tuple[int, int]] = []
    for at, page in enumerate(pages):
        if not page:
            continue
        if runs and runs[-1][1] == at and at - runs[-1][0] < most:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs

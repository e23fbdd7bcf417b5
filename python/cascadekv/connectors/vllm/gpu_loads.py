"""The loads that the kernels of a step on a GPU wait for: looked up one by one, copied together."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cascadekv import GpuLoad, Store, Views, part_of_trace
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.vllm.batches import select
from cascadekv.connectors.vllm.hbm import TIER, TieredReader
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.memory import SUBMISSION_BYTES, GpuPages, LoadOrder, Memory
from cascadekv.connectors.vllm.metadata import Load, LoadResult, LoadTime
from cascadekv.connectors.vllm.tasks import TaskLog

__all__ = ["FoundLoad", "StepLoads"]


@dataclass(slots=True)
class FoundLoad:
    """A load whose blocks are looked up, until the end of its copies."""

    load: Load
    count: int
    """Number of requested blocks."""
    bad: set[int] = field(default_factory=set[int])
    """Positions of blocks that were not found or not copied."""
    bytes: int = 0
    lookup_seconds: float = 0.0
    cpu_seconds: float = 0.0
    copies: list[tuple[GpuLoad, float]] = field(default_factory=list[tuple[GpuLoad, float]])
    """The submissions, and this load's share of their bytes."""

    def result(self) -> LoadResult:
        """Return the outcome, which is known once the copies were started."""
        load = self.load
        bad = sorted(load.first + at for at in self.bad)
        times = self.lookup_seconds, self.cpu_seconds
        return LoadResult(load.request, load.first, load.tier, self.count, bad, self.bytes, *times)

    def time(self) -> LoadTime | None:
        """Return the time of the lookup and of the GPU's copies, which must be over."""
        seconds = self.lookup_seconds
        for copies, share in self.copies:
            took = copies.seconds
            if took is None:
                return None
            seconds += share * took
        return LoadTime(self.load.tier, self.count, seconds)


@dataclass(slots=True)
class _Batch:
    """Blocks of a load that were looked up: their positions in it, and their pages."""

    found: FoundLoad
    views: Views
    positions: Sequence[int]
    pages: Sequence[int]

    @property
    def is_on_gpu(self) -> bool:
        """Whether the blocks are in the memory of a GPU: all are, or none is."""
        first = self.views[0]
        return first is not None and first.tier == TIER


@dataclass(slots=True)
class _Waiting:
    """The batches of one memory that wait for their submission."""

    memory: GpuPages
    batches: list[_Batch] = field(default_factory=list[_Batch])
    pages: set[int] = field(default_factory=set[int])


class StepLoads:
    """Collects the loads of one step, and starts their copies: a submission for each memory.

    Blocks in the store and those in the memory of a GPU are in submissions of their own.

    A submission has at most 64 MiB. A batch that fits no more, or that writes a page of an earlier
    one, starts another submission.
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[HeldPart, Memory]],
        orders: Mapping[str, LoadOrder],
        deadline: float,
        failures: FailureLog,
        tasks: TaskLog,
    ) -> None:
        """Begin without loads; `orders` has the place of the step by part."""
        self._parts = parts
        self._orders = orders
        self._deadline = deadline
        self._failures = failures
        self._tasks = tasks
        self._waiting: dict[tuple[str, bool], _Waiting] = {}
        self.found: list[FoundLoad] = []

    def find(self, load: Load, store: Store | TieredReader | None) -> bool:
        """Look up the blocks of a load, to be copied with those of other loads.

        Returns false, and changes nothing, if they are more than a batch or than the pool has room
        for at the same time.
        """
        found = FoundLoad(load, max(len(pages) for pages in load.blocks.values()))
        looked_up: list[tuple[str, GpuPages, _Batch]] = []
        started, cpu = time.perf_counter(), time.thread_time()
        for name, (held, memory) in self._parts.items():
            pages = load.blocks[held.part.group]
            needed = [at for at in range(len(pages)) if pages[at]]
            if len(needed) > memory.batch_blocks or not isinstance(memory, GpuPages):
                return False
            keys, left = load.keys.get(name), self._deadline - time.monotonic()
            # The scheduler failed to compute the keys, or there is no time left.
            if keys is None or store is None or left <= 0 or not needed:
                found.bad.update(needed)
                continue
            size = len(needed) * memory.block_bytes
            try:
                with self._tasks.load(len(needed), size, load.tier), part_of_trace(load.trace):
                    views = store.view(select(keys, needed), timeout=left)
            except STORE_FAILURES as error:
                self._failures.count("reading blocks", error)
                found.bad.update(needed)
                continue
            if any(views.error(at) is not None for at in range(len(needed))):
                return False
            batch = _Batch(found, views, needed, [pages[at] for at in needed])
            looked_up.append((name, memory, batch))
        found.lookup_seconds = time.perf_counter() - started
        found.cpu_seconds = time.thread_time() - cpu
        for name, memory, batch in looked_up:
            self._add(name, memory, batch)
        self.found.append(found)
        return True

    def _add(self, part: str, memory: GpuPages, batch: _Batch) -> None:
        place = part, batch.is_on_gpu
        waiting = self._waiting.setdefault(place, _Waiting(memory))
        size = (len(waiting.pages) + len(batch.pages)) * memory.block_bytes
        if size > SUBMISSION_BYTES or not waiting.pages.isdisjoint(batch.pages):
            self._submit(place)
            waiting = self._waiting[place] = _Waiting(memory)
        waiting.batches.append(batch)
        waiting.pages.update(batch.pages)

    def submit(self) -> None:
        """Start the copies of all blocks so far, and release the views."""
        for place in self._waiting:
            self._submit(place)
        self._waiting = {}

    def _submit(self, place: tuple[str, bool]) -> None:
        waiting = self._waiting[place]
        if not waiting.batches:
            return
        started = time.thread_time()
        given = [(batch.views, batch.pages) for batch in waiting.batches]
        try:
            copies = waiting.memory.start_loads(given, self._orders[place[0]])
        except STORE_FAILURES as error:
            reason = f"{len(given)} loads of one submission: {error}"
            self._failures.count("reading blocks", reason)
            for batch in waiting.batches:
                batch.found.bad.update(batch.positions)
        else:
            self._note(waiting, copies)
        for batch in waiting.batches:
            batch.views.release()
            batch.found.cpu_seconds += (time.thread_time() - started) / len(given)

    def _note(self, waiting: _Waiting, copies: GpuLoad) -> None:
        """Note which blocks of each load are copied."""
        copied, at = copies.copied, 0
        total = max(1, sum(copied))
        for batch in waiting.batches:
            own, at = copied[at : at + len(batch.pages)], at + len(batch.pages)
            missing = [
                position
                for position, is_copied in zip(batch.positions, own, strict=True)
                if not is_copied
            ]
            batch.found.bad.update(missing)
            count = len(own) - len(missing)
            batch.found.bytes += count * waiting.memory.block_bytes
            if count:
                batch.found.copies.append((copies, count / total))

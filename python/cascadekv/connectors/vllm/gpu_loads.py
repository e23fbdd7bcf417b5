"""The loads that the kernels of a step on a GPU wait for: looked up one by one, copied together."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cascadekv import GpuLoad, part_of_trace
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.vllm.batches import select
from cascadekv.connectors.vllm.block_reader import BlockReader, FoundViews
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.memory import SUBMISSION_BYTES, GpuPages, LoadOrder, Memory
from cascadekv.connectors.vllm.metadata import LoadTime
from cascadekv.connectors.vllm.running_load import RunningLoad
from cascadekv.connectors.vllm.tasks import TaskLog

__all__ = ["FoundLoad", "StepLoads"]


@dataclass(slots=True)
class FoundLoad:
    """A load whose blocks are looked up, until the end of its copies."""

    running: RunningLoad
    copies: list[tuple[GpuLoad, float, bool]] = field(
        default_factory=list[tuple[GpuLoad, float, bool]]
    )
    """The submissions, this load's share of their bytes, and whether they are within a GPU."""

    def times(self) -> list[LoadTime]:
        """Return the times of the lookups and of the GPU's copies, which must be over."""
        took: dict[bool, float | None] = {False: 0.0, True: 0.0}
        for copies, share, is_on_gpu in self.copies:
            own, known = copies.seconds, took[is_on_gpu]
            took[is_on_gpu] = None if own is None or known is None else known + share * own
        return self.running.times(took[False], took[True])


@dataclass(slots=True)
class _Batch:
    """Blocks of a part of a load that were looked up in one tier, and their pages."""

    found: FoundLoad
    part: str
    views: FoundViews
    pages: Sequence[int]


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

    def find(self, running: RunningLoad, reader: BlockReader | None) -> bool:
        """Look up the blocks of a load, to be copied with those of other loads.

        Returns false, and holds nothing, if they are more than a batch or than the pool has room
        for at the same time.
        """
        looked_up: list[tuple[GpuPages, _Batch]] = []
        try:
            if not self._look_up(running, reader, looked_up):
                _release(looked_up)
                return False
        except BaseException:
            _release(looked_up)
            raise
        for memory, batch in looked_up:
            self._add(memory, batch)
        return True

    def _look_up(
        self,
        running: RunningLoad,
        reader: BlockReader | None,
        looked_up: list[tuple[GpuPages, _Batch]],
    ) -> bool:
        found, load = FoundLoad(running), running.load
        cpu = time.thread_time()
        for name, (held, memory) in self._parts.items():
            pages = load.blocks[held.part.group]
            needed = [at for at in range(len(pages)) if pages[at]]
            if len(needed) > memory.batch_blocks or not isinstance(memory, GpuPages):
                return False
            running.expect(name, needed)
            keys, left = load.keys.get(name), self._deadline - time.monotonic()
            # The scheduler failed to compute the keys, or there is no time left.
            if keys is None or reader is None or left <= 0 or not needed:
                continue
            size = len(needed) * memory.block_bytes
            try:
                with self._tasks.load(len(needed), size, load.tier), part_of_trace(load.trace):
                    blocks = reader.view(select(keys, needed), timeout=left)
            except STORE_FAILURES as error:
                self._failures.count("reading blocks", error)
                continue
            blocks.note_times(running)
            for views in blocks.found:
                # Positions in the load, in place of those in the read.
                positions = [needed[at] for at in views.positions]
                own = FoundViews(views.views, positions, is_on_gpu=views.is_on_gpu)
                batch = _Batch(found, name, own, [pages[at] for at in positions])
                looked_up.append((memory, batch))
            if blocks.failures():
                return False
        running.cpu_seconds = time.thread_time() - cpu
        self.found.append(found)
        return True

    def _add(self, memory: GpuPages, batch: _Batch) -> None:
        place = batch.part, batch.views.is_on_gpu
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
        waiting, (part, is_on_gpu) = self._waiting[place], place
        if not waiting.batches:
            return
        started = time.thread_time()
        given = [(batch.views.views, batch.pages) for batch in waiting.batches]
        order = self._orders[part]
        try:
            copies = waiting.memory.start_loads(given, order, is_within=is_on_gpu)
        except STORE_FAILURES as error:
            reason = f"{len(given)} loads of one submission: {error}"
            self._failures.count("reading blocks", reason)
        else:
            _note(waiting, copies, is_on_gpu=is_on_gpu)
        for batch in waiting.batches:
            batch.views.views.release()
            batch.found.running.cpu_seconds += (time.thread_time() - started) / len(given)


def _note(waiting: _Waiting, copies: GpuLoad, *, is_on_gpu: bool) -> None:
    """Note which blocks of each load are copied."""
    copied, at = copies.copied, 0
    total = max(1, sum(copied))
    for batch in waiting.batches:
        own, at = copied[at : at + len(batch.pages)], at + len(batch.pages)
        arrived = [
            position
            for position, is_copied in zip(batch.views.positions, own, strict=True)
            if is_copied
        ]
        running, size = batch.found.running, waiting.memory.block_bytes
        running.note_copies(batch.part, arrived, size, is_on_gpu=is_on_gpu)
        if arrived:
            batch.found.copies.append((copies, len(arrived) / total, is_on_gpu))


def _release(looked_up: Sequence[tuple[GpuPages, _Batch]]) -> None:
    """Release blocks that are not copied."""
    for _, batch in looked_up:
        batch.views.views.release()

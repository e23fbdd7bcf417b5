"""Saves whose blocks a GPU is copying: a thread waits for the copies and seals the blocks."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from cascadekv import CascadeError, PreparedPut, PutResult, PutStatus
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.vllm.hbm import CopyPuts, HbmTier
from cascadekv.connectors.vllm.memory import SUBMISSION_BYTES, GpuPages, LoadOrder
from cascadekv.connectors.vllm.metadata import Save, SaveResult

__all__ = ["GpuSave", "SaveQueue", "StepSaves", "is_stored"]

_LOG = logging.getLogger("vllm.cascade")
FINISH_S = 30.0
"""Time-out of a save's copies and seal. The copies wait for the step that computes the blocks."""


def is_stored(result: PutResult) -> bool:
    """Whether the store has the block. After a conflict, it has valid KV of the same tokens."""
    return result.ok or result.status is PutStatus.CONFLICT


def log_results(results: Sequence[PutResult], failures: FailureLog) -> None:
    """Log why blocks could not be saved, such as a node that is away, and when they can again."""
    error = next((result.error for result in results if result.error is not None), None)
    if error is not None:
        failures.count("saving blocks", error)
    elif results:
        failures.succeed("saving blocks")


class PutList(Protocol):
    """The puts of a save in one place."""

    def add(self, first: int, last: int, prepared: PreparedPut, memory: GpuPages) -> None:
        """Add the put of a run of blocks, whose copies are started next."""
        ...

    def fail(self, first: int, last: int) -> None:
        """Count a run of blocks as not stored."""
        ...


class GpuSave:
    """A save of one request, from the start of its copies to its result."""

    def __init__(self, save: Save, failures: FailureLog, hbm: HbmTier | None = None) -> None:
        """Begin without copies."""
        self._save = save
        self.on_gpu = None if hbm is None else CopyPuts(hbm)
        """The puts of the same blocks in the memory of a GPU."""
        self._failures = failures
        # A block is stored if all parts that this worker writes are stored.
        self._stored = [True] * len(next(iter(save.blocks.values())))
        self._puts: list[tuple[int, int, PreparedPut, GpuPages]] = []
        self._started = time.perf_counter()
        self._cpu_seconds = -time.thread_time()

    def add(self, first: int, last: int, prepared: PreparedPut, memory: GpuPages) -> None:
        """Add the put of a run of blocks, whose copies are started next."""
        self._puts.append((first, last, prepared, memory))

    def fail(self, first: int, last: int) -> None:
        """Count a run of blocks as not stored."""
        self._stored[first:last] = [False] * (last - first)

    def pause(self) -> None:
        """End the part of the engine's thread, for the processor time in the result."""
        self._cpu_seconds += time.thread_time()

    def finish(self) -> SaveResult:
        """Wait for the copies and seal the blocks."""
        self._cpu_seconds -= time.thread_time()
        copied = 0
        for first, last, prepared, memory in self._puts:
            if not any(self._stored[first:last]):
                prepared.release()
                continue
            try:
                with prepared:
                    results = prepared.seal(timeout=FINISH_S)
            except STORE_FAILURES as error:
                self._failures.count("saving blocks", error)
                self.fail(first, last)
                continue
            copied += len(prepared.needed) * memory.block_bytes
            log_results(results, self._failures)
            for at, result in enumerate(results, first):
                self._stored[at] = self._stored[at] and is_stored(result)
            memory.log_registration()
        self._puts = []
        if self.on_gpu is not None:
            self.on_gpu.finish(self._stored)
        self._cpu_seconds += time.thread_time()
        save, seconds = self._save, time.perf_counter() - self._started
        times = seconds, self._cpu_seconds
        return SaveResult(save.request, save.first, self._stored, copied, *times, save.plan)

    def failed(self) -> SaveResult:
        """Return the result of a save of which nothing is stored."""
        none_stored = [False] * len(self._stored)
        save = self._save
        return SaveResult(save.request, save.first, none_stored, 0, 0.0, 0.0, save.plan)


@dataclass(slots=True)
class _Waiting:
    """A put that waits for its submission."""

    save: PutList
    first: int
    last: int
    prepared: PreparedPut
    pages: Sequence[int]


class StepSaves:
    """Collects the puts of one step, and starts their copies: a submission for each memory.

    A submission has at most 64 MiB; what does not fit starts another one.
    """

    def __init__(self, failures: FailureLog) -> None:
        """Begin without puts."""
        self._failures = failures
        self._waiting: dict[GpuPages, list[_Waiting]] = {}
        self._bytes: dict[GpuPages, int] = {}

    def add(
        self,
        memory: GpuPages,
        save: PutList,
        blocks: tuple[int, int],
        prepared: PreparedPut,
        pages: Sequence[int],
    ) -> None:
        """Add the put of a run of blocks of a save; `blocks` are the first and the end."""
        first, last = blocks
        save.add(first, last, prepared, memory)
        size = len(prepared.needed) * memory.block_bytes
        if not size:
            return
        if self._bytes.get(memory, 0) + size > SUBMISSION_BYTES:
            self._submit(memory)
        self._waiting.setdefault(memory, []).append(_Waiting(save, first, last, prepared, pages))
        self._bytes[memory] = self._bytes.get(memory, 0) + size

    def submit(self) -> None:
        """Start the copies of all puts so far."""
        for memory in list(self._waiting):
            self._submit(memory)

    def _submit(self, memory: GpuPages) -> None:
        puts = self._waiting.pop(memory, [])
        self._bytes[memory] = 0
        if not puts:
            return
        try:
            memory.start_saves([(put.prepared, put.pages) for put in puts])
        except STORE_FAILURES as error:
            # Puts whose copies failed are released, and not sealed.
            reason = f"{len(puts)} saves of one submission: {error}"
            self._failures.count("saving blocks", reason)
            for put in puts:
                put.save.fail(put.first, put.last)


class SaveQueue:
    """Finishes saves in one thread, in their order. Without saves there is no thread."""

    def __init__(self) -> None:
        """Begin with an empty queue."""
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="cascade-save")
        self._saves: list[tuple[GpuSave, Future[SaveResult]]] = []

    def finish(self, save: GpuSave) -> None:
        """Queue a save whose copies were started."""
        self._saves.append((save, self._finisher.submit(save.finish)))

    def release_after(self, order: LoadOrder, then: Callable[[], None]) -> None:
        """Release the blocks of loads once the GPU has copied them, then call `then`."""
        self._finisher.submit(_release_after, order, then)

    def take_results(self) -> list[SaveResult]:
        """Return the results of the saves that ended since the last call."""
        results: list[SaveResult] = []
        while self._saves and self._saves[0][1].done():
            save, future = self._saves.pop(0)
            try:
                results.append(future.result())
            except Exception:  # noqa: BLE001 # a bug here must not fail the engine
                _LOG.exception("Cascade: a save failed; the engine continues without")
                results.append(save.failed())
        return results

    def close(self) -> None:
        """Wait for all saves, at most for the timeout of one; those behind it are dropped."""
        wait([future for _, future in self._saves], FINISH_S)
        self._finisher.shutdown(wait=True, cancel_futures=True)


def _release_after(order: LoadOrder, then: Callable[[], None]) -> None:
    try:
        order.wait()
        then()
    except CascadeError as error:
        _LOG.warning("Cascade: a load did not end on its GPU: %s", error)

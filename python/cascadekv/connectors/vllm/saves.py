"""Saves the blocks that a step computed, into the store and into the tier above it."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from cascadekv import Namespace, PreparedPut, Store, part_of_trace
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.vllm.batches import SaveRun, runs_of
from cascadekv.connectors.vllm.gpu_saves import (
    GpuSave,
    SaveQueue,
    StepSaves,
    is_stored,
    log_results,
)
from cascadekv.connectors.vllm.hbm import HbmTier
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.memory import GpuPages, Memory
from cascadekv.connectors.vllm.metadata import Save, SaveResult
from cascadekv.connectors.vllm.tasks import TaskLog

__all__ = ["Saver"]

SEAL_S = 0.01
"""Least time for sealing blocks that are copied already when the time for saves is over."""


class Saver:
    """Saves blocks of one worker's KV memory."""

    def __init__(
        self,
        store: Callable[[], Store | None],
        hbm: HbmTier | None,
        queue: SaveQueue,
        failures: FailureLog,
        tasks: TaskLog,
    ) -> None:
        """`store` returns the store; `queue` finishes the saves of a GPU."""
        self._store = store
        self._hbm = hbm
        self._queue = queue
        self._failures = failures
        self._tasks = tasks
        self._parts: Mapping[str, tuple[HeldPart, Memory]] = {}
        self._is_on_gpu = False

    def attach(self, parts: Mapping[str, tuple[HeldPart, Memory]]) -> None:
        """Set the KV memory."""
        self._parts = parts
        self._is_on_gpu = any(isinstance(memory, GpuPages) for _, memory in parts.values())

    def save(
        self, saves: Sequence[Save], namespace: Namespace, deadline: float
    ) -> list[SaveResult]:
        """Save the blocks of a step, or start to if a GPU copies them: without results then."""
        if not self._is_on_gpu:
            return [self._save(save, namespace, deadline) for save in saves]
        # The copies in the memory of a GPU are in submissions of their own.
        step, on_gpu = StepSaves(self._failures), StepSaves(self._failures)
        started = [self._start_save(it, (step, on_gpu), namespace, deadline) for it in saves]
        step.submit()
        on_gpu.submit()
        for save in started:
            self._queue.finish(save)
        return []

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
                self._tasks.write_back(written // memory.block_bytes, written)
                stored[first:last] = [
                    before and now for before, now in zip(stored[first:last], results, strict=True)
                ]
        times = time.perf_counter() - started, time.thread_time() - cpu
        return SaveResult(save.request, save.first, stored, copied, *times, save.plan)

    def _save_run(
        self, run: SaveRun, memory: Memory, namespace: Namespace, deadline: float
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
        self, run: SaveRun, memory: Memory, namespace: Namespace, deadline: float
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
        log_results(results, self._failures)
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
                size = memory.block_bytes
                copy = self._hbm.prepare(run.keys(), run.parent(), size, namespace)
                if copy is not None:
                    on_gpu.add(memory, pending.on_gpu, (first, last), copy, pages[first:last])
        pending.pause()
        return pending

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

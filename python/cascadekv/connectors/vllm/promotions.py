"""Promotions: blocks that were loaded from the store are put into the memory of a GPU, too.

The GPU copies them from the pages that were just loaded. The memory is reserved while the pages
are loaded; the copies are started by the engine's thread when the load is reported. Until then the
request holds its pages. Like those of a save, the copies come before any later work of the engine,
which may write the pages again (decision 0031).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from cascadekv import Namespace, PreparedPut
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.batches import select
from cascadekv.connectors.vllm.hbm import SEAL_S, HbmTier
from cascadekv.connectors.vllm.keys import KEY_BYTES
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.memory import SUBMISSION_BYTES, GpuPages, Memory
from cascadekv.connectors.vllm.running_load import RunningLoad

__all__ = ["PROMOTED_BYTES", "Promotion", "Promotions"]

PROMOTED_BYTES = SUBMISSION_BYTES
"""Most bytes of all promotions that are not sealed yet; blocks beyond them are not promoted.

The engine's next kernels wait for the copies, and a node that is slow to answer gets no more.
"""

RUNS_MAX = 8
"""Most calls of the node for one part of a load."""


@dataclass(slots=True)
class _Run:
    """A put of consecutive blocks, and the pages to copy."""

    memory: GpuPages
    prepared: PreparedPut
    pages: Sequence[int]
    is_released: bool = False
    """Whether its copies did not start."""


@dataclass(slots=True)
class Promotion:
    """The puts of one load, before their copies are started."""

    bytes: int = 0
    """The share of `PROMOTED_BYTES` that it takes."""
    runs: list[_Run] = field(default_factory=list[_Run])


class Promotions:
    """Promotes loaded blocks of one worker. Calls but `prepare` are the engine's thread's."""

    def __init__(
        self, hbm: HbmTier, namespace: Callable[[str], Namespace], failures: FailureLog
    ) -> None:
        """Begin without copies."""
        self._hbm = hbm
        self._namespace = namespace
        self._failures = failures
        self._lock = threading.Lock()
        self._left = PROMOTED_BYTES
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="cascade-promote")
        self._seals: list[Future[None]] = []

    def prepare(
        self,
        running: RunningLoad,
        parts: Mapping[str, tuple[HeldPart, Memory]],
        shared_pages: frozenset[int] = frozenset(),
    ) -> None:
        """Reserve memory for blocks that come from the store. Any thread calls it.

        Blocks in `shared_pages`, which other loads wrote too, are left out.
        """
        if not self._hbm.is_available:
            return
        promotion = Promotion()
        try:
            for name, (held, memory) in parts.items():
                # As with saves, one of the workers that hold a part writes it.
                if held.is_writer and isinstance(memory, GpuPages):
                    pages = running.load.blocks[held.part.group]
                    loaded = running.from_store(name)
                    own = [at for at in loaded if pages[at] not in shared_pages]
                    self._prepare_part(promotion, running, name, (memory, pages, own))
        except Exception as error:  # noqa: BLE001 # a bug here must not fail the load
            self._failures.count("promoting blocks", error)
            self._drop(promotion)
            return
        if promotion.runs:
            running.promotion = promotion
        else:
            self._drop(promotion)

    def start(self, loads: Sequence[RunningLoad]) -> None:
        """Start the copies of loads that are over, and make the engine's later work wait.

        The pages must be the requests' until the engine learns that the loads are over.
        """
        try:
            self._start(loads)
        except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
            self._failures.count("promoting blocks", error)

    def _start(self, loads: Sequence[RunningLoad]) -> None:
        promotions = [running.promotion for running in loads if running.promotion is not None]
        by_memory: dict[GpuPages, list[_Run]] = {}
        for running in loads:
            running.promotion = None
        for promotion in promotions:
            for run in promotion.runs:
                by_memory.setdefault(run.memory, []).append(run)
        for memory, runs in by_memory.items():
            try:
                memory.start_saves([(run.prepared, run.pages) for run in runs])
            except Exception as error:  # noqa: BLE001 # nothing is in flight, the engine goes on
                self._failures.count("promoting blocks", error)
                for run in runs:
                    run.prepared.release()
                    run.is_released = True
        self._seals = [seal for seal in self._seals if not seal.done()]
        self._seals += [self._sealer.submit(self._seal, promotion) for promotion in promotions]

    def drop(self, running: RunningLoad) -> None:
        """Give back the memory for a load that failed."""
        promotion, running.promotion = running.promotion, None
        if promotion is not None:
            self._drop(promotion)

    def close(self) -> None:
        """Wait for the copies, at most for the timeout of one."""
        wait(self._seals, SEAL_S)
        self._sealer.shutdown(wait=True, cancel_futures=True)

    def _prepare_part(
        self,
        promotion: Promotion,
        running: RunningLoad,
        part: str,
        blocks: tuple[GpuPages, Sequence[int], Sequence[int]],
    ) -> None:
        """Reserve memory for blocks of one part: its memory, all pages, and the positions."""
        memory, pages, positions = blocks
        namespace = self._namespace(running.generation)
        count = self._take(len(positions), memory.block_bytes)
        promotion.bytes += count * memory.block_bytes
        for first, last in _runs(positions[:count], memory.batch_blocks)[:RUNS_MAX]:
            keys = running.load.keys[part]
            parent = running.load.parents.get(part)
            if first:
                parent = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES]
            wanted = select(keys, range(first, last))
            prepared = self._hbm.prepare(wanted, parent, memory.block_bytes, namespace)
            if prepared is None:
                return
            if prepared.needed:
                promotion.runs.append(_Run(memory, prepared, pages[first:last]))
            else:
                prepared.release()

    def _take(self, blocks: int, block_bytes: int) -> int:
        """Take a share of `PROMOTED_BYTES`; returns for how many blocks."""
        with self._lock:
            count = min(blocks, self._left // block_bytes)
            self._left -= count * block_bytes
        return count

    def _give_back(self, promotion: Promotion) -> None:
        with self._lock:
            self._left += promotion.bytes
        promotion.bytes = 0

    def _drop(self, promotion: Promotion) -> None:
        for run in promotion.runs:
            run.prepared.release()
        promotion.runs = []
        self._give_back(promotion)

    def _seal(self, promotion: Promotion) -> None:
        """Store the blocks once they are copied."""
        deadline = time.monotonic() + SEAL_S
        for run in promotion.runs:
            if not run.is_released:
                self._hbm.seal(run.prepared, deadline)
        promotion.runs = []
        self._give_back(promotion)


def _runs(positions: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return runs of consecutive positions, each of at most `most`; the last ones excluded."""
    runs: list[tuple[int, int]] = []
    for at in positions:
        if runs and runs[-1][1] == at and at - runs[-1][0] < most:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs

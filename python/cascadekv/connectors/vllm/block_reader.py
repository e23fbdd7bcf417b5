"""Reads of blocks: what is in the memory of a GPU from there, the rest from the store."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cascadekv import BlockKeys, Store, Views
from cascadekv.connectors.vllm.memory import GpuPages, HostMemory, LoadOrder, Memory
from cascadekv.connectors.vllm.running_load import RunningLoad

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.hbm import HbmTier

__all__ = ["BlockReader", "FoundBlocks", "FoundViews"]

READ_S_MIN = 0.001
"""Least time for the read from the store, if the one from the memory of a GPU took all of it."""


@dataclass(frozen=True, slots=True)
class FoundViews:
    """Views of one tier; a view without a block is a miss there."""

    views: Views
    positions: Sequence[int]
    """Where each view is in the request."""
    is_on_gpu: bool

    def load(
        self, memory: Memory, pages: Sequence[int], order: LoadOrder, layer: int | None = None
    ) -> list[int]:
        """Copy blocks, or one layer of them; returns the positions of those that are copied.

        `pages` are those of the whole request.
        """
        own = [pages[at] for at in self.positions]
        if self.is_on_gpu:
            assert isinstance(memory, GpuPages)  # noqa: S101 # as `open_hbm` checked
            given = [(self.views, own)]
            copied = memory.start_loads(given, order, layer, is_within=True).copied
        elif layer is None:
            copied = memory.load(self.views, own, order)
        else:
            assert isinstance(memory, HostMemory | GpuPages)  # noqa: S101 # others have no layers
            copied = memory.load_layer(self.views, own, layer, order)
        return [at for at, is_copied in zip(self.positions, copied, strict=True) if is_copied]


class FoundBlocks:
    """The blocks of one read, in one tier or in two. They stay there until `release`."""

    def __init__(self, found: Sequence[FoundViews], *, seconds: float, hbm_seconds: float) -> None:
        """Take the views, and how long their reads took."""
        self.found = found
        self.seconds = seconds
        self.hbm_seconds = hbm_seconds

    def failures(self) -> set[int]:
        """Return the positions of blocks that could not be read, for example for lack of room."""
        return {
            position
            for each in self.found
            if not each.is_on_gpu
            for at, position in enumerate(each.positions)
            if each.views.error(at) is not None
        }

    def note_times(self, running: RunningLoad) -> None:
        """Add the times of the reads to those of a load."""
        running.lookup_seconds += self.seconds
        running.hbm_lookup_seconds += self.hbm_seconds

    def release(self) -> None:
        """Release all blocks."""
        for each in self.found:
            each.views.release()

    def __enter__(self) -> Self:
        """Return these blocks."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release all blocks."""
        self.release()


class BlockReader:
    """Reads from the store, and from the tier above it if there is one."""

    def __init__(self, store: Store, hbm: "HbmTier | None" = None) -> None:
        """Read from both."""
        self._store = store
        self._hbm = hbm

    def view(self, keys: BlockKeys, *, timeout: float) -> FoundBlocks:
        """Return views of blocks; the store is asked for those that the memory of a GPU has not.

        Raises what `Store.view` raises; then nothing is held.
        """
        started = time.perf_counter()
        every = range(len(keys))
        on_gpu = None if self._hbm is None else self._hbm.view(keys, timeout)
        if on_gpu is None:
            views = self._store.view(keys, timeout=timeout)
            found = FoundViews(views, every, is_on_gpu=False)
            return FoundBlocks([found], seconds=time.perf_counter() - started, hbm_seconds=0.0)
        asked = time.perf_counter()
        parts = [FoundViews(on_gpu, every, is_on_gpu=True)]
        try:
            rest = [] if on_gpu.hits == len(keys) else [at for at in every if on_gpu[at] is None]
            if rest:
                left = max(READ_S_MIN, timeout - (asked - started))
                views = self._store.view(BlockKeys([keys[at] for at in rest]), timeout=left)
                parts.append(FoundViews(views, rest, is_on_gpu=False))
        except BaseException:
            on_gpu.release()
            raise
        seconds = time.perf_counter() - asked if rest else 0.0
        return FoundBlocks(parts, seconds=seconds, hbm_seconds=asked - started)

"""A load of one request on a worker: which of its blocks came from which tier, so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cascadekv.connectors.vllm.metadata import Load, LoadResult, LoadTime

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.promotions import Promotion

__all__ = ["HBM", "RunningLoad"]

HBM = "hbm"
"""The name of the tier in the memory of a GPU."""


@dataclass(slots=True)
class _PartBlocks:
    """The blocks of one part, by their positions in the load."""

    needed: set[int]
    missing: set[int]
    """Blocks that were not found, or not copied."""
    on_gpu: set[int] = field(default_factory=set[int])
    """Blocks that were copied from the memory of a GPU."""


@dataclass(slots=True)
class RunningLoad:
    """A load, and what is known about its blocks. One thread at a time uses it."""

    load: Load
    generation: str = ""
    """The generation of the load's keys."""
    bytes: int = 0
    """Bytes copied."""
    hbm_bytes: int = 0
    """Those of them that came from the memory of a GPU."""
    lookup_seconds: float = 0.0
    """The time of reads from the store, without their copies."""
    hbm_lookup_seconds: float = 0.0
    """The same for the memory of a GPU."""
    cpu_seconds: float = 0.0
    promotion: "Promotion | None" = None
    """The copies of its blocks to the memory of a GPU, once they are prepared."""
    _parts: dict[str, _PartBlocks] = field(default_factory=dict[str, _PartBlocks])

    @property
    def count(self) -> int:
        """Number of requested blocks."""
        return max(len(pages) for pages in self.load.blocks.values())

    def expect(self, part: str, positions: Sequence[int]) -> None:
        """Count blocks of a part as missing until they are copied."""
        self._parts[part] = _PartBlocks(set(positions), set(positions))

    def note_copies(
        self, part: str, positions: Sequence[int], block_bytes: int, *, is_on_gpu: bool
    ) -> None:
        """Note blocks whose copies were started, from the memory of a GPU or from the store."""
        blocks = self._parts[part]
        blocks.missing.difference_update(positions)
        self.bytes += len(positions) * block_bytes
        if is_on_gpu:
            blocks.on_gpu.update(positions)
            self.hbm_bytes += len(positions) * block_bytes

    def missing(self, part: str) -> set[int]:
        """Return the positions of blocks of a part that were not copied."""
        return self._parts[part].missing

    def from_store(self, part: str) -> list[int]:
        """Return the positions of blocks of a part that were copied from the store, in order."""
        blocks = self._parts.get(part)
        return sorted(blocks.needed - blocks.missing - blocks.on_gpu) if blocks else []

    def hbm_blocks(self) -> int:
        """Return how many blocks came from the memory of a GPU, with all of their parts."""
        parts = self._parts.values()
        elsewhere = {at for blocks in parts for at in blocks.needed - blocks.on_gpu}
        return len({at for blocks in parts for at in blocks.on_gpu} - elsewhere)

    def result(
        self, *, seconds: float | None = None, cpu_seconds: float | None = None
    ) -> LoadResult:
        """Return the outcome; the times are those of the lookups unless they are given."""
        load = self.load
        bad = {at for blocks in self._parts.values() for at in blocks.missing}
        lookups = self.lookup_seconds + self.hbm_lookup_seconds
        return LoadResult(
            load.request,
            load.first,
            load.tier,
            self.count,
            sorted(load.first + at for at in bad),
            self.bytes,
            lookups if seconds is None else seconds,
            self.cpu_seconds if cpu_seconds is None else cpu_seconds,
            self.hbm_blocks(),
            self.hbm_bytes,
            self.hbm_lookup_seconds,
        )

    def failed(self) -> LoadResult:
        """Return the outcome of a load in which all blocks failed."""
        load, count = self.load, self.count
        bad = list(range(load.first, load.first + count))
        return LoadResult(load.request, load.first, load.tier, count, bad, 0, 0.0, 0.0)

    def times(self, store_copies: float | None, hbm_copies: float | None) -> list[LoadTime]:
        """Return the times by tier, from the seconds of the copies; without those of `None`."""
        on_gpu = self.hbm_blocks()
        others = self.count - on_gpu
        times: list[LoadTime] = []
        if on_gpu and hbm_copies is not None:
            times.append(LoadTime(HBM, on_gpu, self.hbm_lookup_seconds + hbm_copies))
        if others and store_copies is not None:
            times.append(LoadTime(self.load.tier, others, self.lookup_seconds + store_copies))
        return times

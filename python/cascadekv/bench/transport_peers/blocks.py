"""Blocks to move: a region of them, bytes that depend on block and round, and a random order."""

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Order", "Region", "Shape", "contents", "order"]

WORD_BYTES = 8
CHUNK_BYTES = 2 << 20
"""Bytes that are written or compared at once; they fit into a cache."""
STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
"""Difference of two neighbouring words of a block. It is odd: no word repeats within a block."""

Words = NDArray[np.uint64]
Slots = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many blocks of which size move, and between how many places for them."""

    block_bytes: int
    batch: int
    """Blocks of one call of one thread."""
    threads: int
    slots: int
    """Blocks of a region."""
    is_random: bool = True
    """Whether the blocks of a batch are anywhere in the regions, not neighbours."""

    @classmethod
    def fit(
        cls,
        block_bytes: int,
        batch: int,
        threads: int,
        *,
        region_bytes: tuple[int, int],
        is_random: bool = True,
    ) -> "Shape":
        """Return a region of at least and at most `region_bytes`, and a batch that fits into it."""
        least, most = region_bytes
        batch = min(batch, max(1, most // (block_bytes * threads)))
        slots = max(least // block_bytes, batch * threads)
        return cls(
            block_bytes=block_bytes,
            batch=batch,
            threads=threads,
            slots=slots,
            is_random=is_random,
        )

    @property
    def region_bytes(self) -> int:
        """The size of a region."""
        return self.slots * self.block_bytes

    def batches(self, wanted: int) -> int:
        """Return how many batches each thread moves in a round: no block moves twice."""
        return max(1, min(wanted, self.slots // (self.batch * self.threads)))


class Region:
    """One mapping of memory that holds a shape's blocks."""

    def __init__(self, shape: Shape, path: str = "", *, is_shared: bool = False) -> None:
        """Map new memory, or memory that another process shares at `path`."""
        self.file = -1
        if path:
            self.file = os.open(path, os.O_RDWR)
        elif is_shared:
            self.file = os.memfd_create("blocks")
            os.ftruncate(self.file, shape.region_bytes)
        if self.file < 0:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.memory = mmap.mmap(-1, shape.region_bytes, flags=flags)
        else:
            self.memory = mmap.mmap(self.file, shape.region_bytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.memory, dtype=np.uint8)
        self.address: int = self.bytes.ctypes.data
        words = self.bytes.view(np.uint64)
        self._blocks: Words = words.reshape(shape.slots, shape.block_bytes // WORD_BYTES)
        self._steps: Words = np.arange(self._blocks.shape[1], dtype=np.uint64) * STEP
        self._chunk = max(1, CHUNK_BYTES // shape.block_bytes)

    def fill(self, first_words: Words) -> None:
        """Write all blocks, given the first word of each."""
        for start in range(0, len(self._blocks), self._chunk):
            rows = slice(start, start + self._chunk)
            np.add(first_words[rows, None], self._steps, out=self._blocks[rows])

    def differing(self, first_words: Words) -> int:
        """Compare each byte of the region; returns the number of blocks that differ."""
        count = 0
        for start in range(0, len(self._blocks), self._chunk):
            rows = slice(start, start + self._chunk)
            want = first_words[rows, None] + self._steps
            if not np.array_equal(self._blocks[rows], want):
                count += int(np.any(self._blocks[rows] != want, axis=1).sum())
        return count


def contents(slots: Slots, round_number: int) -> Words:
    """Return the first words of source blocks in a round: each block and round has its own."""
    mixed = slots.astype(np.uint64) + np.uint64(round_number << 40)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """Which blocks move where in a round: `[batch, thread, block]`."""

    source: Slots
    target: Slots

    def moved(self, counts: list[int]) -> tuple[Slots, Slots]:
        """Return all slots that moved when each thread made so many batches."""
        made: list[tuple[Any, Any]] = [
            (self.source[:count, thread].ravel(), self.target[:count, thread].ravel())
            for thread, count in enumerate(counts)
        ]
        return np.concatenate([m[0] for m in made]), np.concatenate([m[1] for m in made])


def order(shape: Shape, round_number: int, batches: int) -> Order:
    """Return the order of a round. Both processes compute the same one."""
    places = (batches, shape.threads, shape.batch)
    count = batches * shape.threads * shape.batch
    if not shape.is_random:
        slots = np.arange(count, dtype=np.int64).reshape(places)
        return Order(slots, slots)
    chance = np.random.default_rng((17, round_number))
    source, target = (chance.permutation(shape.slots)[:count].reshape(places) for _ in range(2))
    return Order(source, target)

"""Batches of the blocks of loads and saves, as the store takes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from cascadekv import BlockKeys
from cascadekv.connectors.vllm.keys import KEY_BYTES
from cascadekv.connectors.vllm.memory import LoadOrder, Memory
from cascadekv.connectors.vllm.metadata import Save
from cascadekv.connectors.vllm.running_load import RunningLoad

__all__ = ["Batches", "SaveRun", "runs_of", "select"]


@dataclass(slots=True)
class Batches:
    """What all batches of one part of a load have in common."""

    running: RunningLoad
    name: str
    """The part."""
    memory: Memory
    order: LoadOrder
    keys: bytes
    pages: Sequence[int]
    deadline: float


@dataclass(frozen=True, slots=True)
class SaveRun:
    """Consecutive blocks of one part to save."""

    save: Save
    part: str
    first: int
    last: int
    pages: Sequence[int]
    """The pages of all blocks of the save."""

    def keys(self) -> BlockKeys:
        """Return the keys of the blocks."""
        return BlockKeys(self.save.keys[self.part][self.first * KEY_BYTES : self.last * KEY_BYTES])

    def parent(self) -> bytes | None:
        """Return the key of the block before the first one."""
        if not self.first:
            return self.save.parents[self.part]
        return self.save.keys[self.part][(self.first - 1) * KEY_BYTES : self.first * KEY_BYTES]


def select(keys: bytes, indices: Sequence[int]) -> BlockKeys:
    """Return the keys at these indices, which ascend."""
    first, last = indices[0], indices[-1] + 1
    if last - first == len(indices):
        return BlockKeys(keys[first * KEY_BYTES : last * KEY_BYTES])
    return BlockKeys(b"".join(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in indices))


def runs_of(pages: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return runs of consecutive blocks that have pages, each of at most `most` blocks."""
    runs: list[tuple[int, int]] = []
    for at, page in enumerate(pages):
        if not page:
            continue
        if runs and runs[-1][1] == at and at - runs[-1][0] < most:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs

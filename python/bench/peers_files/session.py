"""The rounds of one competitor in this process: bytes by name, timed calls, checked results."""

import mmap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cold
import numpy as np
import payload
from cascadekv.bench import page_cache
from competitors import Blocks, Competitor


def memory(size: int) -> Blocks:
    """Return the caller's memory: page-aligned for O_DIRECT, huge pages where they are allowed."""
    pages = mmap.mmap(-1, size)
    pages.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(pages, np.uint8)
    array.fill(1)  # Touched once, as the memory of a caller that reads again and again.
    return array


class Session:
    """Runs the commands of the parent with one competitor."""

    def __init__(self, competitor: Competitor) -> None:
        self._competitor = competitor
        self._memory: Blocks | None = None
        self._content: object = None
        """The round whose bytes the memory has."""

    def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run one command and return its results."""
        if command["do"] == "versions":
            return {"versions": self._competitor.versions()}
        if command["do"] == "close":
            self._competitor.close()
            return {}
        names = [
            f"{command['block_bytes']} {command['round']} {number}"
            for number in range(command["bytes"] // command["block_bytes"])
        ]
        blocks = self._blocks(len(names), command["block_bytes"])
        keys = self._competitor.keys(names, command["block_bytes"])
        directory = Path(command["directory"])
        if command["do"] == "put":
            if self._content != names:
                self._content = None
                for name, block in zip(names, blocks, strict=True):
                    payload.fill(name, block)
                self._content = names
            return self._put(directory, keys, blocks, durable=command["durable"])
        return self._get(directory, keys, blocks, names)

    def _blocks(self, count: int, block_bytes: int) -> Blocks:
        if self._memory is None or self._memory.nbytes != count * block_bytes:
            self._memory = memory(count * block_bytes)
        return self._memory.reshape(count, block_bytes)

    def _put(
        self, directory: Path, keys: object, blocks: Blocks, *, durable: bool
    ) -> dict[str, Any]:
        directory.mkdir(parents=True)
        self._competitor.open_new(directory, blocks[0].nbytes, durable=durable)
        results, seconds = _timed(lambda: self._competitor.put(keys, blocks))
        self._competitor.check(results)
        return {"seconds": seconds}

    def _get(
        self, directory: Path, keys: object, blocks: Blocks, names: list[str]
    ) -> dict[str, Any]:
        self._content = None
        blocks.fill(0)  # Bytes that no read wrote are found.
        self._competitor.end_writes()
        page_cache.drop(directory)
        self._competitor.begin_reads()
        cached, before = page_cache.cached_bytes(directory), cold.disk_bytes_read()
        results, seconds = _timed(lambda: self._competitor.get(keys, blocks))
        after = cold.disk_bytes_read()
        self._competitor.check(results)
        for name, block in zip(names, blocks, strict=True):
            payload.check(name, block)
        from_disk = None if before is None or after is None else after - before
        cold.check_cold(blocks.nbytes, cached, from_disk)
        self._content = names
        return {"seconds": seconds, "cached_bytes": cached, "disk_bytes": from_disk}


def _timed(work: Callable[[], list[Any]]) -> tuple[list[Any], float]:
    start = time.perf_counter()
    results = work()
    return results, time.perf_counter() - start

"""Compares the store with LMCache's CPU backend: the same blocks, in one process, alternating.

Runs in an environment with the real package (`make bench-peers`). Each side copies blocks in and
out, by block or as a batch, as its interface allows; every byte is verified.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import cascadekv
import numpy as np
import torch
from cascadekv.bench.optimised import require_optimised
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

ROUNDS = 7
BATCH = 256
BLOCK_BYTES = 128 << 10
POOL_BYTES = 1 << 30


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Lmcache:
    """LMCache's CPU backend, used as by its storage manager."""

    def __init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=1.0)
        allocator = MixedMemoryAllocator(POOL_BYTES)
        self._backend = LocalCPUBackend(config, dst_device="cpu", memory_allocator=allocator)

    def keys(self, number: int) -> list[CacheEngineKey]:
        """Return the keys of a round's blocks."""
        start = number * BATCH
        return [CacheEngineKey("model", 1, 0, start + block, torch.uint8) for block in range(BATCH)]

    def put(self, keys: list[CacheEngineKey], blocks: torch.Tensor) -> None:
        """Allocate, copy in, submit."""
        for key, block in zip(keys, blocks, strict=True):
            slot = self._backend.allocate(block.shape, block.dtype)
            slot.tensor.copy_(block)
            self._backend.submit_put_task(key, slot)
            slot.ref_count_down()

    def get(self, keys: list[CacheEngineKey], targets: torch.Tensor) -> None:
        """Look up, copy out, release."""
        for key, target in zip(keys, targets, strict=True):
            slot = self._backend.get_blocking(key)
            target.copy_(slot.tensor)
            slot.ref_count_down()

    def delete(self, keys: list[CacheEngineKey]) -> None:
        """Delete the blocks of a round."""
        for key in keys:
            self._backend.remove(key)


class Cascade:
    """The store, through `cascadekv`."""

    def __init__(self) -> None:
        self._store = cascadekv.Store(dram=POOL_BYTES)
        self._space = cascadekv.Namespace(cascadekv.Manifest({"weights": "bench"}))

    def keys(self, number: int) -> cascadekv.BlockKeys:
        """Return the keys of a round's blocks."""
        return cascadekv.BlockKeys(
            [self._space.key_of_id(f"{number} {block}") for block in range(BATCH)]
        )

    def put(self, keys: cascadekv.BlockKeys, blocks: torch.Tensor) -> None:
        """Copy in."""
        self._store.put(keys, blocks.numpy())

    def get(self, keys: cascadekv.BlockKeys, targets: torch.Tensor) -> None:
        """Copy out."""
        self._store.get(keys, targets.numpy())

    def delete(self, keys: cascadekv.BlockKeys) -> None:
        """Delete the blocks of a round."""
        self._store.delete(keys)


def measure() -> list[dict[str, object]]:
    """Measure put and get of a batch on each side in turn, in ROUNDS rounds after a warm-up."""
    random = np.random.default_rng(1)
    source = torch.from_numpy(random.integers(0, 256, (BATCH, BLOCK_BYTES), dtype=np.uint8))
    target = torch.ones_like(source)
    gibibytes = source.numel() / 2**30
    samples: dict[str, list[float]] = {}
    sides = {"cascade": Cascade(), "lmcache": Lmcache()}
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            keys = side.keys(number)
            put = gibibytes / seconds(lambda side=side, keys=keys: side.put(keys, source))
            target.zero_()
            get = gibibytes / seconds(lambda side=side, keys=keys: side.get(keys, target))
            if not torch.equal(source, target):
                raise AssertionError(f"{name} returned a wrong byte")
            side.delete(keys)
            if number > 0:
                samples.setdefault(f"{name}/put/128KiB", []).append(put)
                samples.setdefault(f"{name}/get/128KiB", []).append(get)
        copy = gibibytes / seconds(lambda: target.copy_(source))
        samples.setdefault("memcpy/torch", []).append(copy)
    limit = statistics.median(samples["memcpy/torch"])
    return [
        {
            "name": name,
            "value": statistics.median(values),
            "unit": "GiB/s",
            "limit": limit,
            "share": statistics.median(values) / limit,
            "samples": values,
        }
        for name, values in samples.items()
    ]


if __name__ == "__main__":
    require_optimised()
    torch.set_num_threads(1)
    print(f"lmcache {version('lmcache')}, cascadekv {cascadekv.__version__}, one thread")
    figures = measure()
    for figure in figures:
        low, high = min(figure["samples"]), max(figure["samples"])
        print(f"{figure['name']:22} {figure['value']:7.2f} GiB/s   ({low:.2f} to {high:.2f})")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

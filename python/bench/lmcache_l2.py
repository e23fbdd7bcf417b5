"""Compares our L2 adapter for LMCache with its own file adapters, by LMCache's storage manager.

Runs in an environment with the real package (`make bench-lmcache`): lmcache_l2.py DIRECTORY JSON.
Chunks have the shape of Llama-3.1-8B. They are written into LMCache's L1, which LMCache stores in
L2; L1 is cleared; LMCache prefetches them, first as they are, then in a new storage manager after
the page cache was dropped. Every byte that was loaded is compared.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from cascadekv.bench import page_cache
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager

LAYERS, WIDTH, CHUNK_TOKENS = 32, 8 * 128, 256
CHUNK_BYTES = 2 * LAYERS * CHUNK_TOKENS * WIDTH * 2
CHUNKS = 16
ROUNDS = 5
LIMIT_S = 60
POLL_S = 0.0005
LAYOUT = MemoryLayoutDesc([torch.Size((2, LAYERS, CHUNK_TOKENS, WIDTH))], [torch.bfloat16])


def cascade(directory: Path) -> dict[str, object]:
    """Return the options of our adapter, with an embedded store."""
    parameters = {
        "cascade.dram": "1GiB",
        "cascade.files": str(directory),
        "cascade.files_capacity": "4GiB",
        "cascade.weights": "bench",
    }
    return {
        "type": "plugin",
        "module_path": "cascadekv.connectors.lmcache",
        "class_name": "CascadeL2Adapter",
        "adapter_params": parameters,
    }


SYSTEMS: dict[str, Callable[[Path], dict[str, object]]] = {
    "cascade": cascade,
    "fs": lambda at: {"type": "fs", "base_path": str(at)},
    "fs-odirect": lambda at: {"type": "fs", "base_path": str(at), "use_odirect": True},
    "fs-native": lambda at: {"type": "fs_native", "base_path": str(at)},
    "fs-native-odirect": lambda at: {
        "type": "fs_native",
        "base_path": str(at),
        "use_odirect": True,
    },
}
"""LMCache's options of each system: its defaults, and with `use_odirect`."""


class Manager:
    """LMCache's storage manager over one L2 adapter."""

    def __init__(self, options: dict[str, object]) -> None:
        parser = add_l2_adapters_args(argparse.ArgumentParser())
        given = parser.parse_args(["--l2-adapter", json.dumps(options)])
        memory = L1MemoryManagerConfig(
            # Below the share at which LMCache begins to evict, 80 %.
            size_in_bytes=CHUNKS * 3 // 2 * CHUNK_BYTES,
            use_lazy=False,
            shm_name="",
        )
        self._manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory),
                eviction_config=EvictionConfig(eviction_policy="LRU"),
                l2_adapter_config=L2AdaptersConfig(
                    parse_args_to_l2_adapters_config(given).adapters
                ),
            )
        )

    def store(self, keys: list[ObjectKey], contents: list[np.ndarray]) -> float:
        """Write chunks into L1; return how long it takes until L2 has them."""
        reserved = self._manager.reserve_write(keys, LAYOUT)
        if len(reserved) != len(keys):
            raise RuntimeError("LMCache's L1 is full")
        for key, content in zip(keys, contents, strict=True):
            bytes_of(reserved[key])[:] = content
        start = time.perf_counter()
        self._manager.finish_write(keys)
        adapter = self._manager.l2_adapters()[0][1]
        total = len(keys) * CHUNK_BYTES
        wait_until(lambda: adapter.get_usage().total_bytes_used >= total, "L2 has not all chunks")
        return time.perf_counter() - start

    def load(self, keys: list[ObjectKey], contents: list[np.ndarray]) -> float:
        """Prefetch chunks from L2 into L1 and compare them; return how long the prefetch takes."""
        wait_until(self._clear_l1, "LMCache did not release the chunks in its L1")
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, keys[0].object_group_id, LAYOUT)])
        start = time.perf_counter()
        handle = self._manager.submit_prefetch_task(spec)
        if not self._manager.wait_prefetch_status(handle, LIMIT_S):
            raise TimeoutError(f"a prefetch did not end within {LIMIT_S} s")
        seconds = time.perf_counter() - start
        result = self._manager.query_prefetch_status(handle)
        if result is None or (result.l1_hit_count, result.l2_hit_count) != (0, len(keys)):
            raise RuntimeError(f"not all chunks came from L2: {result}")
        with self._manager.read_prefetched_results(keys) as items:
            if items is None:
                raise RuntimeError("LMCache did not return prefetched chunks")
            for item, content in zip(items, contents, strict=True):
                if not np.array_equal(bytes_of(item), content):
                    raise RuntimeError("a chunk has wrong bytes")
        self._manager.finish_read_prefetched(keys)
        return seconds

    def _clear_l1(self) -> bool:
        """Return whether L1 is empty: LMCache keeps chunks locked for a while after their store."""
        self._manager.clear()
        used, _ = self._manager.get_l1_usage()
        return used == 0

    def close(self) -> None:
        """End it."""
        self._manager.close()


def bytes_of(item: object) -> np.ndarray:
    """Return the bytes of an object of LMCache."""
    return np.frombuffer(item.byte_array.cast("B"), dtype=np.uint8)  # pyright: ignore[reportAttributeAccessIssue]


def wait_until(condition: Callable[[], bool], problem: str) -> None:
    """Poll a condition; raises `TimeoutError` with the problem."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{problem} after {LIMIT_S} s")
        time.sleep(POLL_S)


def keys_and_contents(number: int) -> tuple[list[ObjectKey], list[np.ndarray]]:
    """Return the keys of a round's chunks, and bytes that no other chunk has."""
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    hashes = [hashlib.sha256(f"{number} {at}".encode()).digest() for at in range(CHUNKS)]
    keys = [ObjectKey(chunk_hash, "org/model", rank, 0, "") for chunk_hash in hashes]
    contents = [
        np.random.default_rng([number, at]).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
        for at in range(CHUNKS)
    ]
    return keys, contents


def measure(name: str, directory: Path, number: int) -> dict[str, float]:
    """Measure one round of a system, in a new directory. Seconds of each part."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    keys, contents = keys_and_contents(number)
    options = SYSTEMS[name](directory)
    manager = Manager(options)
    try:
        store, load = manager.store(keys, contents), manager.load(keys, contents)
    finally:
        manager.close()
    cached = page_cache.drop(directory)
    if cached > CHUNKS * CHUNK_BYTES // 100:
        raise RuntimeError(f"{cached} bytes stay in the page cache")
    manager = Manager(options)
    try:
        cold = manager.load(keys, contents)
    finally:
        manager.close()
    shutil.rmtree(directory)
    return {"store": store, "load": load, "cold-load": cold}


def main() -> int:
    """Measure all systems in turns; returns 1 if one failed."""
    base, output = Path(sys.argv[1]), Path(sys.argv[2])
    samples: dict[str, dict[str, list[float]]] = {}
    errors: dict[str, str] = {}
    for number in range(ROUNDS + 1):
        names = [name for name in SYSTEMS if name not in errors]
        # Another one begins in each round.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            try:
                seconds = measure(name, base / "lmcache-l2" / name, number)
            except Exception as error:  # noqa: BLE001 # whatever a system raises is its result
                errors[name] = f"{type(error).__name__}: {error}"
                continue
            # The first round touches memory and imports modules; it is not counted.
            for part, took in seconds.items() if number else ():
                rate = CHUNKS * CHUNK_BYTES / took / 1e9
                samples.setdefault(name, {}).setdefault(part, []).append(rate)
    rows = [
        {
            "system": name,
            "part": part,
            "gbps": statistics.median(rates),
            "samples": rates,
            "chunks": CHUNKS,
            "chunk_bytes": CHUNK_BYTES,
            "lmcache": version("lmcache"),
            "verified": True,
        }
        for name, parts in samples.items()
        for part, rates in parts.items()
    ]
    output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{'GB/s, median (range)':<22}" + "".join(f"{part:>22}" for part in PARTS))
    for name, parts in samples.items():
        cells = [parts[part] for part in PARTS]
        texts = [f"{statistics.median(c):.2f} ({min(c):.2f}-{max(c):.2f})" for c in cells]
        print(f"{name:<22}" + "".join(f"{text:>22}" for text in texts))
    for name, error in errors.items():
        print(f"{name}: not measured: {error}", file=sys.stderr)
    return 1 if errors else 0


PARTS = ("store", "load", "cold-load")

if __name__ == "__main__":
    sys.exit(main())

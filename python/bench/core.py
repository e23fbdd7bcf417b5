"""Measures the store from Python beside memcpy between the same memory, in turn.

Prints a table and, with a path as argument, writes the figures as JSON in the form of
`cascade bench core`. Every block is checked against what was put.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cascadekv
import numpy as np

ROUNDS = 7
BATCH = 256
BLOCK_BYTES = 128 << 10


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def figure(name: str, unit: str, samples: list[float], limits: list[float]) -> dict[str, object]:
    """Put samples beside those of their limit."""
    value = statistics.median(samples)
    limit = statistics.median(limits) if limits else None
    share = value / limit if limit else None
    print(
        f"{name:34} {value:9.3f} {unit:9}"
        + (f" of {limit:8.3f}: {share:6.1%}" if limit and share else "")
        + f"   ({min(samples):.3f} to {max(samples):.3f})"
    )
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "limit": limit,
        "share": share,
        "samples": samples,
        "limit_samples": limits,
        "limit_is": "numpy.copyto of the whole batch to or from the pool" if limits else "",
    }


def measure() -> list[dict[str, object]]:
    """Put, get and view batches of blocks that are in no cache, and copy the same with memcpy."""
    space = cascadekv.Namespace(cascadekv.Manifest({"weights": "bench"}))
    source = np.random.default_rng(1).integers(0, 256, (BATCH, BLOCK_BYTES), dtype=np.uint8)
    target = np.ones_like(source)
    gigabytes = source.nbytes / 1e9
    puts, gets, views, lookups, copies_in, copies_out = [], [], [], [], [], []
    with cascadekv.Store(dram=8 * source.nbytes, policy="lru") as store:
        inside = np.frombuffer(store.reserve(source.nbytes), np.uint8).reshape(source.shape)
        for number in range(ROUNDS + 1):
            keys = cascadekv.BlockKeys(
                [space.key_of_id(f"{number} {block}") for block in range(BATCH)]
            )
            put = gigabytes / seconds(lambda keys=keys: store.put(keys, source))
            get = gigabytes / seconds(lambda keys=keys: store.get(keys, target))
            if not (target == source).all():
                raise AssertionError("a byte is wrong")
            view = seconds(lambda keys=keys: store.view(keys)) / BATCH * 1e6
            lookup = seconds(lambda keys=keys: store.lookup_prefix(keys)) / BATCH * 1e6
            copy_in = gigabytes / seconds(lambda: np.copyto(inside, source))
            copy_out = gigabytes / seconds(lambda: np.copyto(target, inside))
            store.delete(keys)
            if number > 0:  # the first round touches memory for the first time
                puts.append(put)
                gets.append(get)
                views.append(view)
                lookups.append(lookup)
                copies_in.append(copy_in)
                copies_out.append(copy_out)
    return [
        figure("python/put/128KiB", "GB/s", puts, copies_in),
        figure("python/get/128KiB", "GB/s", gets, copies_out),
        figure("python/view/batch of 256", "us/block", views, []),
        figure("python/lookup_prefix/batch of 256", "us/block", lookups, []),
    ]


if __name__ == "__main__":
    figures = measure()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

"""Measures the store from Python, alternating with memcpy of the same memory as the limit.

Prints a table and, with a path as argument, writes the figures as JSON in the format of
`cascade bench core`. Every block is verified.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cascadekv
import numpy as np
from cascadekv.bench.optimised import require_optimised

ROUNDS = 7
BATCH = 256
BLOCK_BYTES = 128 << 10
LAYERS = 8
SAVED = 32
PAGES = 4 * SAVED
LARGE_PAGE_BYTES = 64 << 10
SMALL_PAGE_BYTES = 1 << 10


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def figure(name: str, unit: str, samples: list[float], limits: list[float]) -> dict[str, object]:
    """Print and return samples with the samples of their limit."""
    value = statistics.median(samples)
    limit = statistics.median(limits) if limits else None
    share = value / limit if limit else None
    print(
        f"{name:44} {value:9.3f} {unit:9}"
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
    """Measure put, get and view of batches larger than CPU caches, and memcpy of the same bytes."""
    space = cascadekv.Namespace(cascadekv.Manifest({"weights": "bench"}))
    source = np.random.default_rng(1).integers(0, 256, (BATCH, BLOCK_BYTES), dtype=np.uint8)
    target = np.ones_like(source)
    gibibytes = source.nbytes / 2**30
    puts, gets, views, lookups, copies_in, copies_out = [], [], [], [], [], []
    with cascadekv.Store(dram=8 * source.nbytes, policy="lru") as store:
        inside = np.frombuffer(store.reserve(source.nbytes), np.uint8).reshape(source.shape)
        for number in range(ROUNDS + 1):
            keys = cascadekv.BlockKeys(
                [space.key_of_id(f"{number} {block}") for block in range(BATCH)]
            )
            put = gibibytes / seconds(lambda keys=keys: store.put(keys, source))
            get = gibibytes / seconds(lambda keys=keys: store.get(keys, target))
            if not (target == source).all():
                raise AssertionError("a byte is wrong")
            view = seconds(lambda keys=keys: store.view(keys)) / BATCH * 1e6
            lookup = seconds(lambda keys=keys: store.lookup_prefix(keys)) / BATCH * 1e6
            copy_in = gibibytes / seconds(lambda: np.copyto(inside, source))
            copy_out = gibibytes / seconds(lambda: np.copyto(target, inside))
            store.delete(keys)
            if number > 0:  # the first round has page faults
                puts.append(put)
                gets.append(get)
                views.append(view)
                lookups.append(lookup)
                copies_in.append(copy_in)
                copies_out.append(copy_out)
    return [
        figure("python/put/128KiB", "GiB/s", puts, copies_in),
        figure("python/get/128KiB", "GiB/s", gets, copies_out),
        figure("python/view/batch of 256", "us/block", views, []),
        figure("python/lookup_prefix/batch of 256", "us/block", lookups, []),
    ]


def page_seconds(page_bytes: int) -> list[list[float]]:
    """Measure saves and loads of pages of an engine's cache, and numpy's copies of as many pages.

    Returns the seconds of saves, loads, copies in and copies out, each for all rounds.
    """
    space = cascadekv.Namespace(cascadekv.Manifest({"weights": "bench"}))
    shape = (LAYERS, PAGES, page_bytes)
    source = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    target = np.ones_like(source)
    saved, loaded = (
        cascadekv.PagedMemory([(layer, 0, page_bytes, page_bytes) for layer in array], PAGES)
        for array in (source, target)
    )
    rounds = []
    with cascadekv.Store(dram=16 * source.nbytes + (64 << 20), policy="lru") as store:
        inside = np.frombuffer(store.reserve(SAVED * LAYERS * page_bytes), np.uint8)
        inside = inside.reshape(SAVED, LAYERS, page_bytes).transpose(1, 0, 2)
        for number in range(ROUNDS + 1):
            keys = cascadekv.BlockKeys([space.key_of_id(f"{number} {n}") for n in range(SAVED)])
            first = number % (PAGES // SAVED) * SAVED
            pages, some = range(first, first + SAVED), np.s_[:, first : first + SAVED]

            def save(keys: cascadekv.BlockKeys = keys, pages: range = pages) -> None:
                with store.prepare(keys, saved.block_bytes) as prepared:
                    prepared.gather(saved, pages)
                    prepared.seal()

            def load(keys: cascadekv.BlockKeys = keys, pages: range = pages) -> None:
                with store.view(keys) as views:
                    views.scatter(loaded, pages)

            times = [seconds(save), seconds(load)]
            if not (target[some] == source[some]).all():
                raise AssertionError("a byte is wrong")
            times.append(seconds(lambda some=some: np.copyto(inside, source[some])))
            times.append(seconds(lambda some=some: np.copyto(target[some], inside)))
            store.delete(keys)
            rounds.append(times)
    # The first round has page faults.
    return [list(samples) for samples in zip(*rounds[1:], strict=True)]


def measure_pages() -> list[dict[str, object]]:
    """Measure blocks of 8 pages: large pages for the bandwidth, small ones for the overhead."""
    what = f"{SAVED} blocks of {LAYERS} pages of"
    gibibytes = SAVED * LAYERS * LARGE_PAGE_BYTES / 2**30
    large = [[gibibytes / one for one in some] for some in page_seconds(LARGE_PAGE_BYTES)]
    small = [[one / SAVED * 1e6 for one in some] for some in page_seconds(SMALL_PAGE_BYTES)]
    return [
        figure(f"python/save/{what} 64KiB", "GiB/s", large[0], large[2]),
        figure(f"python/load/{what} 64KiB", "GiB/s", large[1], large[3]),
        figure(f"python/save/{what} 1KiB", "us/block", small[0], []),
        figure(f"python/load/{what} 1KiB", "us/block", small[1], []),
    ]


if __name__ == "__main__":
    require_optimised()
    figures = measure() + measure_pages()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

"""Concurrent loads and saves with every class of memory; each page is compared.

Regression: a staging buffer that was shared between threads mixed the blocks of concurrent loads;
345 of 6,000 pages were wrong and none was reported.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import cascadekv
import numpy as np
import pytest
import torch
from cascadekv import BlockKeys
from cascadekv.connectors.vllm.layout import Region
from cascadekv.connectors.vllm.memory import DeviceMemory, HostMemory
from vllm_caches import SPACE

THREADS = 6
ROUNDS = 60
PAGES_EACH = 16
"""Pages that one thread alone uses."""
LAYERS, PAGE_BYTES = 3, 4096
BLOCKS = 64
"""Blocks that every thread loads from."""
LIMIT_S = 120


def block_of(number):
    """Return a block's bytes, layer after layer: a function of its number."""
    words = np.arange(LAYERS * PAGE_BYTES // 8, dtype=np.uint64) + np.uint64(number << 32)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8).reshape(LAYERS, PAGE_BYTES)


def key_of(number):
    return bytes(SPACE.key_of_id(number.to_bytes(8, "little")))


class Memory:
    """The pages of all threads, and the worker's memory object for them."""

    def __init__(self, kind):
        pages = THREADS * PAGES_EACH
        self.pages = np.zeros((LAYERS, pages, PAGE_BYTES), dtype=np.uint8)
        regions = [Region(n * pages * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES) for n in range(LAYERS)]
        self.memory = kind(torch.from_numpy(self.pages.reshape(-1)), regions, pages)

    def wrong(self, pages, numbers):
        """Return the number of pages that do not hold these blocks."""
        return sum(
            not np.array_equal(self.pages[:, page], block_of(number))
            for page, number in zip(pages, numbers, strict=True)
        )

    def fill(self, pages, numbers):
        """Write these blocks to the pages."""
        for page, number in zip(pages, numbers, strict=True):
            self.pages[:, page] = block_of(number)


@pytest.fixture(scope="module")
def store():
    with cascadekv.Store(dram="64MiB", huge_pages=False) as opened:
        keys = BlockKeys(b"".join(key_of(number) for number in range(BLOCKS)))
        assert all(each.ok for each in opened.put(keys, [block_of(n) for n in range(BLOCKS)]))
        yield opened


def load(store, memory, pages, numbers):
    keys = BlockKeys(b"".join(map(key_of, numbers)))
    with store.view(keys, timeout=LIMIT_S) as views:
        return memory.load(views, pages)


def save(store, memory, pages, numbers):
    keys = BlockKeys(b"".join(map(key_of, numbers)))
    with store.prepare(keys, memory.block_bytes, namespace=SPACE, timeout=LIMIT_S) as prepared:
        if prepared.needed:
            memory.save(prepared, pages)
        return [each.ok for each in prepared.seal(timeout=LIMIT_S)]


@pytest.mark.parametrize("kind", [HostMemory, DeviceMemory])
def test_concurrent_loads_and_saves_do_not_mix_blocks(store, kind):
    memory = Memory(kind)
    begin = threading.Barrier(THREADS)

    def work(thread):
        chance = np.random.default_rng(thread)
        own = np.arange(PAGES_EACH) + thread * PAGES_EACH
        wrong = compared = 0
        begin.wait(LIMIT_S)
        for turn in range(ROUNDS):
            count = int(chance.integers(1, PAGES_EACH + 1))
            pages = [int(page) for page in chance.permutation(own)[:count]]
            if thread % 3 == 0:
                # The saving thread: new blocks, read back from the store below.
                numbers = [1000 + (thread * ROUNDS + turn) * PAGES_EACH + n for n in range(count)]
                memory.fill(pages, numbers)
                assert save(store, memory.memory, pages, numbers) == [True] * count
                memory.pages[:, pages] = 0
            else:
                numbers = [int(number) for number in chance.integers(0, BLOCKS, count)]
            assert load(store, memory.memory, pages, numbers) == [True] * count
            wrong += memory.wrong(pages, numbers)
            compared += count
        return wrong, compared

    with ThreadPoolExecutor(THREADS) as pool:
        counts = list(pool.map(work, range(THREADS), timeout=LIMIT_S))
    wrong, compared = (sum(column) for column in zip(*counts, strict=True))
    assert compared > THREADS * ROUNDS
    assert wrong == 0, f"{wrong} of {compared} pages are wrong"


@pytest.mark.parametrize("kind", [HostMemory, DeviceMemory])
def test_missing_blocks_do_not_change_their_pages(store, kind):
    memory = Memory(kind)
    numbers = [5, 900, 7, 901, 902, 9, 903]
    pages = [3, 1, 4, 0, 5, 9, 2]
    there = load(store, memory.memory, pages, numbers)
    assert there == [number < BLOCKS for number in numbers]
    held = dict(zip(pages, numbers, strict=True))
    for page in range(THREADS * PAGES_EACH):
        number = held.get(page, BLOCKS)
        if number < BLOCKS:
            assert memory.wrong([page], [number]) == 0
        else:
            assert not memory.pages[:, page].any(), f"page {page} was not to be written"


def test_the_buffer_of_a_failed_copy_is_not_reused(store):
    # A device may still write to the buffer of a copy that raised.
    memory = Memory(DeviceMemory).memory

    class Broken:
        def scatter(self, *_):
            raise RuntimeError("raised by a test")

    with pytest.raises(RuntimeError, match="raised by a test"):
        memory.load(Broken(), [1])
    assert memory._free_buffers == []  # noqa: SLF001 # the buffers of later copies
    assert load(store, memory, [1], [5]) == [True]
    assert len(memory._free_buffers) == 1  # noqa: SLF001 # likewise

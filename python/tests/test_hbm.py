"""A node whose blocks are in the memory of a GPU, over the fake driver: real processes map it."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import cascadekv
import numpy as np
import pytest
from cascadekv import BlockKeys, ConfigError, Gpu, GpuMemory, RefusedError
from fake_gpu import FakeGpu, library

LAYERS, PAGES, PAGE = 3, 12, 4096
SPACE = cascadekv.Namespace(cascadekv.Manifest({"weights": "sha256:test"}), b"secret")
LIMIT_S = 60
FIRST_GPU = "GPU-fafafafa-fafa-fafa-fafa-fafafafafafa"


def block_of(number):
    """Return a block's bytes: a function of its number."""
    return np.random.default_rng(number).integers(0, 256, LAYERS * PAGE, np.uint8).tobytes()


def keys_of(numbers):
    return BlockKeys([SPACE.key_of_id(f"block {number}") for number in numbers])


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def serve_hbm(serve, fake):
    """Start a node with 16 MiB of the memory of the first GPU, or of another one."""

    def start(*flags, gpu=FIRST_GPU, **settings):
        return serve("--gpu", gpu, "--hbm", "16MiB", *flags, cuda_library=library(), **settings)

    return start


def test_blocks_of_a_gpu_are_put_and_read_by_copies(serve_hbm):
    with cascadekv.connect(serve_hbm().socket, gpu=Gpu(0)) as store:
        keys = keys_of(range(3))
        results = store.put(keys, [block_of(number) for number in range(3)], namespace=SPACE)
        assert all(result.ok for result in results), results
        assert store.lookup_prefix(keys_of(range(4))).blocks == 3
        buffers = [bytearray(LAYERS * PAGE) for _ in range(4)]
        found = store.get(keys_of(range(4)), buffers)
        assert [result.ok for result in found] == [True, True, True, False]
        assert [bytes(it) for it in buffers[:3]] == [block_of(number) for number in range(3)]


class Engine:
    """An engine's KV in the memory of a GPU, layer by layer, and its stream."""

    def __init__(self, fake, device=0):
        self.fake, self.stream = fake, fake.stream()
        self.array = fake.array(LAYERS * PAGES * PAGE)
        fake.write(self.array, 0, bytes(self.array.size), self.stream)
        self.gpu = Gpu(device)
        regions = [(self.array, layer * PAGES * PAGE, PAGE, PAGE) for layer in range(LAYERS)]
        self.memory = GpuMemory(self.gpu, regions, PAGES)

    def compute(self, page, block):
        """Write a page, in the order of the engine's stream."""
        for layer in range(LAYERS):
            place = (layer * PAGES + page) * PAGE
            self.fake.write(self.array, place, block[layer * PAGE :][:PAGE], self.stream)

    def page(self, page):
        """Return a page as the engine's next kernel reads it."""
        places = [(layer * PAGES + page) * PAGE for layer in range(LAYERS)]
        return b"".join(self.fake.read(self.array, at, PAGE, self.stream) for at in places)

    def save(self, store, numbers, pages):
        """Save pages as the connector does."""
        size = LAYERS * PAGE
        with store.prepare(
            keys_of(numbers), size, namespace=SPACE, timeout=LIMIT_S
        ) as prepared:
            prepared.start_gather(self.memory, pages, after=self.gpu.mark(self.stream))
            prepared.hold_back(self.stream)
            return prepared.seal(timeout=LIMIT_S)

    def load(self, store, numbers, pages):
        """Load pages as the connector does."""
        with store.view(keys_of(numbers)) as views:
            load = views.start_scatter(self.memory, pages, after=self.gpu.mark(self.stream))
        load.hold_back(self.stream)
        return load


def test_pages_are_saved_and_loaded_within_the_gpu(fake, serve_hbm):
    engine = Engine(fake)
    with cascadekv.connect(serve_hbm().socket, gpu=engine.gpu) as store:
        for number, page in enumerate([7, 3, 11]):
            engine.compute(page, block_of(number))
        assert all(result.ok for result in engine.save(store, range(3), [7, 3, 11]))
        load = engine.load(store, range(4), [1, 10, 4, 5])
        assert load.copied == [True, True, True, False]
        assert [engine.page(page) for page in (1, 10, 4)] == [block_of(n) for n in range(3)]
        load.wait(timeout=LIMIT_S)
        assert engine.page(5) == bytes(LAYERS * PAGE)
        with store.view(keys_of(range(1))) as views, pytest.raises(BufferError, match="device"):
            memoryview(views[0])
        # The pool in host memory was never used, so nothing was registered.
        assert engine.gpu.report()["registered_bytes"] == 0


def test_clients_that_cannot_map_the_memory_are_refused(serve_hbm):
    socket = serve_hbm().socket
    with pytest.raises(RefusedError, match="in the memory of a GPU; connect with a GPU"):
        cascadekv.connect(socket)
    with pytest.raises(RefusedError, match='connect with the access "write"'):
        cascadekv.connect(socket, gpu=Gpu(0), access="read")

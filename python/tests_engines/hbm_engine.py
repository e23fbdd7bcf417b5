"""An engine with its KV in the memory of a fake GPU, beside a node in such memory.

The bytes of a block are a function of its number, so that every process can tell right from wrong.
"""

import json
import subprocess
import sys
from pathlib import Path

import cascadekv
import numpy as np
from cascadekv import BlockKeys, Gpu, GpuMemory

LAYERS, PAGES, PAGE = 3, 12, 4096
SPACE = cascadekv.Namespace(cascadekv.Manifest({"weights": "sha256:test"}), b"secret")
LIMIT_S = 60
FIRST_GPU = "GPU-fafafafa-fafa-fafa-fafa-fafafafafafa"


def block_of(number):
    """Return a block's bytes: a function of its number."""
    return np.random.default_rng(number).integers(0, 256, LAYERS * PAGE, np.uint8).tobytes()


def keys_of(numbers):
    return BlockKeys([SPACE.key_of_id(f"block {number}") for number in numbers])


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
        with store.prepare(keys_of(numbers), size, namespace=SPACE, timeout=LIMIT_S) as prepared:
            prepared.start_gather(self.memory, pages, after=self.gpu.mark(self.stream))
            prepared.hold_back(self.stream)
            return prepared.seal(timeout=LIMIT_S)

    def load(self, store, numbers, pages):
        """Load pages as the connector does."""
        with store.view(keys_of(numbers)) as views:
            load = views.start_scatter(self.memory, pages, after=self.gpu.mark(self.stream))
        load.hold_back(self.stream)
        return load


def save(engine, store, numbers, pages):
    """Compute pages and save them; returns how many blocks the store took."""
    for number, page in zip(numbers, pages, strict=True):
        engine.compute(page, block_of(number))
    return sum(result.ok for result in engine.save(store, numbers, pages))


def load(engine, store, numbers, pages):
    """Load blocks and compare them; returns the number of hits."""
    for page in pages:
        engine.compute(page, bytes(LAYERS * PAGE))
    started = engine.load(store, numbers, pages)
    started.wait(timeout=LIMIT_S)
    for number, page, copied in zip(numbers, pages, started.copied, strict=True):
        assert engine.page(page) == (block_of(number) if copied else bytes(LAYERS * PAGE)), number
    return sum(started.copied)


def mappings(pid="self"):
    """Return how often a process maps memory of fake GPUs."""
    return Path(f"/proc/{pid}/maps").read_text().count("cascade-fake-gpu-memory")


def run(*arguments):
    return subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "cascadekv", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def leases_of(node):
    """Return the blocks of a node that are under lease."""
    status = run("status", "--json", "--socket", str(node.socket))
    return json.loads(status.stdout)["clients"]["leases"]

"""Measures saves and loads of paged KV on a GPU: `python gpu_pages.py --json F`. Needs torch only.

The pages have the geometry of real models: one tensor, layer by layer, pages of 16 tokens (64 for
MLA) in a random order. Blocks have 64 tokens or more: the pages of a block are saved and loaded
together. Every row has the rate of one plain pinned copy of 1 GiB in the same direction as its
limit, measured in the same run. Loaded bytes are compared with the saved ones, outside of the
measured time. Times are medians of five.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import cascadekv
from cascadekv import BlockKeys, Gpu, GpuMemory, Manifest, Namespace

Array: TypeAlias = Any
"""Memory of a device: a tensor of torch, or of a fake device."""
GIB = 1 << 30
ROUNDS = 5
BATCH_BYTES = 64 << 20
"""Most bytes of one call, as in the connector for vLLM."""
SPACE = Namespace(Manifest({"weights": "bench"}))
LIMIT_S = 300.0


@dataclass(frozen=True)
class Geometry:
    """The KV of one rank of a model."""

    name: str
    layers: int
    token_bytes: int
    """K and V of one token in one layer, in bytes."""
    page_tokens: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.token_bytes * self.page_tokens


# Heads x dimension x (K and V) x 2 bytes, from the models' published configurations.
GEOMETRIES = (
    Geometry("llama-3.1-8b", 32, 8 * 128 * 2 * 2, 16),
    Geometry("llama-3.1-70b tp 8", 80, 1 * 128 * 2 * 2, 16),
    # The latent has 512 dimensions, and 64 with the position.
    Geometry("deepseek-v3", 61, (512 + 64) * 2, 64),
)
TOKENS = (8 << 10, 32 << 10, 128 << 10)


@dataclass(frozen=True)
class Row:
    """A figure with its limit."""

    name: str
    value: float
    unit: str
    limit: float | None
    share: float | None
    device: str
    fake: bool


class Device(Protocol):
    """What the benchmark needs of a GPU."""

    name: str
    is_fake: bool

    def array(self, size: int) -> Array:
        """Allocate bytes on the device."""
        ...

    def fill(self, array: Array, seed: int) -> None:
        """Write a pattern, and wait."""
        ...

    def is_equal(self, one: Array, other: Array, page: int, other_page: int, size: int) -> bool:
        """Compare a page of two arrays; `page` counts pages of `size` bytes."""
        ...

    def stream(self) -> int:
        """Return the number of the stream on which an engine would compute."""
        ...

    def finish(self) -> None:
        """Wait for all work."""
        ...

    def plain_copy(self, size: int, *, to_device: bool) -> float:
        """Return the seconds of one pinned copy of consecutive bytes."""
        ...


class TorchDevice:
    """A GPU through torch."""

    is_fake = False

    def __init__(self) -> None:
        """Use the first device. Raises `SystemExit` without CUDA."""
        import torch  # noqa: PLC0415 # the machine may have none

        if not torch.cuda.is_available():
            raise SystemExit("gpu_pages: torch finds no GPU, so nothing was measured")
        self._torch = torch
        torch.cuda.set_device(0)
        self.name = torch.cuda.get_device_name(0)

    def array(self, size: int) -> Array:
        """Allocate bytes on the device."""
        return self._torch.empty(size, dtype=self._torch.uint8, device="cuda")

    def fill(self, array: Array, seed: int) -> None:
        """Write random bytes, and wait."""
        generator = self._torch.Generator(device="cuda").manual_seed(seed)
        array.random_(0, 256, generator=generator)
        self.finish()

    def is_equal(self, one: Array, other: Array, page: int, other_page: int, size: int) -> bool:
        """Compare a page of two arrays."""
        first, second = page * size, other_page * size
        return bool(self._torch.equal(one[first : first + size], other[second : second + size]))

    def stream(self) -> int:
        """Return the number of torch's current stream."""
        return int(self._torch.cuda.current_stream().cuda_stream)

    def finish(self) -> None:
        """Wait for all work."""
        self._torch.cuda.synchronize()

    def plain_copy(self, size: int, *, to_device: bool) -> float:
        """Return the seconds of one pinned copy of consecutive bytes."""
        host = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        device = self.array(size)
        source, target = (host, device) if to_device else (device, host)
        times = []
        for _ in range(ROUNDS + 1):
            self.finish()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self.finish()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])


class Harness:
    """Pages of a source and a target on the device, and blocks of a store between them."""

    def __init__(self, device: Device, gpu: Gpu, geometry: Geometry, tokens: int) -> None:
        """Allocate the pages."""
        self.device, self.gpu, self.geometry = device, gpu, geometry
        self.pages = tokens // geometry.page_tokens
        size = geometry.page_bytes * self.pages * geometry.layers
        self.source, self.target = device.array(size), device.array(size)
        device.fill(self.source, 1)
        self.saving, self.loading = self._memory(self.source), self._memory(self.target)
        chance = random.Random(7)  # noqa: S311 # the same order in each run
        self.saved = chance.sample(range(self.pages), self.pages)
        self.loaded = chance.sample(range(self.pages), self.pages)
        self.bytes = self.saving.block_bytes * self.pages

    def _memory(self, array: Array) -> GpuMemory:
        page = self.geometry.page_bytes
        layer = page * self.pages
        regions = [(array, at * layer, page, page) for at in range(self.geometry.layers)]
        return GpuMemory(self.gpu, regions, self.pages)

    def _batches(self, pages: list[int]) -> Iterator[tuple[BlockKeys, list[int]]]:
        most = max(1, BATCH_BYTES // self.saving.block_bytes)
        for first in range(0, len(pages), most):
            batch = pages[first : first + most]
            names = [f"{self.geometry.name} {first + at}" for at in range(len(batch))]
            yield BlockKeys([SPACE.key_of_id(name) for name in names]), batch

    def save(self, store: cascadekv.Store) -> tuple[float, float]:
        """Save all pages; returns the seconds until they are stored, and those of the caller."""
        stream = self.device.stream()
        store.clear()
        self.device.finish()
        started = time.perf_counter()
        puts = []
        for keys, pages in self._batches(self.saved):
            prepared = store.prepare(
                keys, self.saving.block_bytes, namespace=SPACE, timeout=LIMIT_S
            )
            if len(prepared.needed) != len(pages):
                raise SystemExit("gpu_pages: the pool has no room; give more with --dram")
            prepared.start_gather(self.saving, pages, after=self.gpu.mark(stream))
            prepared.hold_back(stream)
            puts.append(prepared)
        submitted = time.perf_counter() - started
        for prepared in puts:
            if not all(result.ok for result in prepared.seal(timeout=LIMIT_S)):
                raise SystemExit("gpu_pages: a block was not stored; give more with --dram")
        return time.perf_counter() - started, submitted

    def load(self, store: cascadekv.Store) -> tuple[float, float]:
        """Load all pages; returns the seconds until all are written, and those of layer 0."""
        stream = self.device.stream()
        self.device.fill(self.target, 2)
        started = time.perf_counter()
        first_layer, rest = [], []
        for keys, pages in self._batches(self.loaded):
            with store.view(keys, timeout=LIMIT_S) as views:
                after = self.gpu.mark(stream)
                load = views.start_scatter(self.loading, pages, after=after, count=1)
                if not all(load.copied):
                    raise SystemExit("gpu_pages: a block is missing")
                first_layer.append(load)
                if self.loading.regions > 1:
                    rest.append(views.start_scatter(self.loading, pages, after=after, first=1))
        for load in first_layer:
            load.wait(timeout=LIMIT_S)
        layer = time.perf_counter() - started
        for load in rest:
            load.wait(timeout=LIMIT_S)
        return time.perf_counter() - started, layer

    def check(self) -> None:
        """Compare every page with the one that it was saved from."""
        for source, target in zip(self.saved, self.loaded, strict=True):
            for layer in range(self.geometry.layers):
                place = layer * self.pages
                if not self.device.is_equal(
                    self.source,
                    self.target,
                    place + source,
                    place + target,
                    self.geometry.page_bytes,
                ):
                    raise SystemExit(f"gpu_pages: page {target} of layer {layer} is wrong")


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    geometries: tuple[Geometry, ...] = GEOMETRIES
    token_counts: tuple[int, ...] = TOKENS
    plain_bytes: int = GIB


def measure(
    device: Device, store: cascadekv.Store, sizes: Sizes, tell: Callable[[str], None] = print
) -> list[Row]:
    """Measure all geometries and token counts, on the first GPU."""
    gpu = Gpu(0)
    plain_bytes = sizes.plain_bytes
    rows: list[Row] = []

    def add(name: str, value: float, unit: str, limit: float | None = None) -> None:
        share = value / limit if limit else None
        rows.append(Row(name, value, unit, limit, share, device.name, device.is_fake))
        of_limit = f", {share:.0%} of {limit:.2f}" if share is not None else ""
        tell(f"{name}: {value:.4g} {unit}{of_limit}")

    limits = {}
    for way, to_device in (("save", False), ("load", True)):
        limits[way] = plain_bytes / device.plain_copy(plain_bytes, to_device=to_device) / 1e9
        add(f"{way}/plain copy", limits[way], "GB/s")
    _register(gpu, device, store, sizes.geometries[0], tell)
    report = gpu.report()
    gib = float(report["registered_bytes"] or 0) / GIB
    if gib:
        add("registration", float(report["registration_seconds"] or 0) / gib, "s/GiB")
    for geometry in sizes.geometries:
        for tokens in sizes.token_counts:
            name = f"{geometry.name}/{tokens} tokens"
            harness = Harness(device, gpu, geometry, tokens)
            saves = [harness.save(store) for _ in range(ROUNDS)]
            loads = [harness.load(store) for _ in range(ROUNDS)]
            harness.check()
            saved, submitted = (statistics.median(times) for times in zip(*saves, strict=True))
            loaded, layer = (statistics.median(times) for times in zip(*loads, strict=True))
            add(f"save/{name}", harness.bytes / saved / 1e9, "GB/s", limits["save"])
            add(f"save/{name}/submit", submitted * 1e3, "ms")
            add(f"load/{name}", harness.bytes / loaded / 1e9, "GB/s", limits["load"])
            add(f"load/{name}/first layer", layer * 1e3, "ms")
    return rows


def _register(
    gpu: Gpu,
    device: Device,
    store: cascadekv.Store,
    geometry: Geometry,
    tell: Callable[[str], None],
) -> None:
    """Wait until the pool is registered: the first copy starts it."""
    Harness(device, gpu, geometry, geometry.page_tokens).save(store)
    end = time.monotonic() + LIMIT_S
    while not gpu.report()["is_complete"]:
        if time.monotonic() > end:
            raise SystemExit(f"gpu_pages: the pool is not registered after {LIMIT_S:.0f} s")
        time.sleep(0.01)
    if gpu.report()["refusal"] is not None:
        tell(f"the driver did not register the whole pool: {gpu.report()['refusal']}")


def main() -> None:
    """Measure on a GPU and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the rows")
    parser.add_argument("--dram", default="40GiB", help="size of the store; 40GiB")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    given = parser.parse_args()
    device = TorchDevice()
    with cascadekv.Store(dram=given.dram) as store:
        rows = measure(device, store, Sizes(token_counts=tuple(given.tokens)))
    facts = {
        "command": ["gpu_pages.py", *sys.argv[1:]],
        "machine": platform.platform(),
        "rows": [asdict(row) for row in rows],
    }
    given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Measures saves and loads of paged KV on a GPU: `python gpu_pages.py --json F`. Needs torch only.

The pages have the geometry of real models: one tensor, layer by layer, pages of 16 tokens (64 for
MLA) in a random order. Blocks have 64 tokens or more: the pages of a block are saved and loaded
together. Every row has the rate of one plain pinned copy of 1 GiB in the same direction as its
limit, measured in the same run. Loaded bytes are compared with the saved ones, outside of the
measured time. Times are medians of five.

Rows of `beside/` are slowdowns: the time of a matrix product, or of a step of small ones, while
pages are copied, less that of the same alone. Copies go on during all counted products: those that
end after the copies are left out. Rows of `torch/` and `vllm/` copy the same pages by other means.
"""

import argparse
import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import cascadekv
from cascadekv import (
    BlockKeys,
    CascadeError,
    Gpu,
    GpuLoad,
    GpuMemory,
    Manifest,
    Namespace,
    PreparedPut,
)
from cascadekv.bench.optimised import require_optimised
from gpu_device import BATCH_BYTES, ROUNDS, Array, Device, Mark, Others, TorchDevice

GIB = 1 << 30
WAYS = ("direct", "staged", "mapped")
MOST_SLOWDOWN = {"direct": 3.0, "staged": 10.0, "mapped": 10.0}
"""The targets: percent of a product's time."""
SAMPLES_MIN = 100
"""Fewer products beside copies are no 99th percentile."""
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
OTHERS_TOKENS = 32 << 10
"""Other means are measured up to here: they need as much pinned memory again."""


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
    target: float | None = None
    """The most; a limit of shares has none here."""
    is_reached: bool | None = None
    """`None` without a target, and on a fake device."""


@dataclass
class Table:
    """Rows as they are measured, and what was left out."""

    device: str
    is_fake: bool
    tell: Callable[[str], None] = print
    rows: list[Row] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        limit: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Add a row and print it."""
        share = value / limit if limit else None
        is_reached = None if at_most is None or self.is_fake else value <= at_most
        target = None if self.is_fake else at_most
        row = Row(name, value, unit, limit, share, self.device, self.is_fake, target, is_reached)
        self.rows.append(row)
        of_limit = f", {share:.0%} of {limit:.2f}" if share is not None else ""
        verdict = {None: "", True: f", <= {at_most} met", False: f", <= {at_most} MISSED"}
        fake = "  FAKE" if self.is_fake else ""
        self.tell(f"{name}: {value:.4g} {unit}{of_limit}{verdict[is_reached]}{fake}")

    def leave_out(self, name: str, reason: str) -> None:
        """Say that a row was not measured, and why."""
        self.not_measured.append(f"{name}: {reason}")
        self.tell(f"not measured: {name}: {reason}")


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

    def _batches(self, pages: list[int], kind: str = "") -> Iterator[tuple[BlockKeys, list[int]]]:
        most = max(1, BATCH_BYTES // self.saving.block_bytes)
        for first in range(0, len(pages), most):
            batch = pages[first : first + most]
            names = [f"{self.geometry.name} {kind}{first + at}" for at in range(len(batch))]
            yield BlockKeys([SPACE.key_of_id(name) for name in names]), batch

    def start_saves(
        self, store: cascadekv.Store, stream: int, kind: str = ""
    ) -> Iterator[PreparedPut]:
        """Start the save of each batch after a stream. `kind` is a part of the blocks' names."""
        for keys, pages in self._batches(self.saved, kind):
            prepared = store.prepare(
                keys, self.saving.block_bytes, namespace=SPACE, timeout=LIMIT_S
            )
            if len(prepared.needed) != len(pages):
                raise SystemExit("gpu_pages: the pool has no room; give more with --dram")
            prepared.start_gather(self.saving, pages, after=self.gpu.mark(stream))
            yield prepared

    def start_loads(self, store: cascadekv.Store, stream: int) -> Iterator[GpuLoad]:
        """Start the load of each batch after a stream."""
        for keys, pages in self._batches(self.loaded):
            with store.view(keys, timeout=LIMIT_S) as views:
                load = views.start_scatter(self.loading, pages, after=self.gpu.mark(stream))
            if not all(load.copied):
                raise SystemExit("gpu_pages: a block is missing")
            yield load

    def delete(self, store: cascadekv.Store, kind: str) -> None:
        """Delete the blocks of a save."""
        for keys, _ in self._batches(self.saved, kind):
            store.delete(keys)

    def save(self, store: cascadekv.Store) -> tuple[float, float]:
        """Save all pages; returns the seconds until they are stored, and those of the caller."""
        stream = self.device.stream()
        store.clear()
        self.device.finish()
        started = time.perf_counter()
        puts = []
        for prepared in self.start_saves(store, stream):
            prepared.hold_back(stream)
            puts.append(prepared)
        submitted = time.perf_counter() - started
        _seal(puts)
        return time.perf_counter() - started, submitted

    def load(self, store: cascadekv.Store) -> tuple[float, float]:
        """Load all pages; returns the seconds until all are written, and those of layer 0.

        Layer 0 of all pages is submitted before the other layers of any.
        """
        stream = self.device.stream()
        self.device.fill(self.target, 2)
        started = time.perf_counter()
        first_layer, rest = [], []
        with ExitStack() as stack:
            batches = []
            for keys, pages in self._batches(self.loaded):
                views = stack.enter_context(store.view(keys, timeout=LIMIT_S))
                after = self.gpu.mark(stream)
                load = views.start_scatter(self.loading, pages, after=after, count=1)
                if not all(load.copied):
                    raise SystemExit("gpu_pages: a block is missing")
                first_layer.append(load)
                batches.append((views, pages, after))
            if self.loading.regions > 1:
                rest = [
                    views.start_scatter(self.loading, pages, after=after, first=1)
                    for views, pages, after in batches
                ]
        for load in first_layer:
            load.wait(timeout=LIMIT_S)
        layer = time.perf_counter() - started
        for load in rest:
            load.wait(timeout=LIMIT_S)
        return time.perf_counter() - started, layer

    def check(self) -> None:
        """Compare every page with the one that it was saved from."""
        for layer in range(self.geometry.layers):
            places = [
                [layer * self.pages + page for page in pages] for pages in (self.saved, self.loaded)
            ]
            if not self.device.are_equal(
                self.source, self.target, *places, self.geometry.page_bytes
            ):
                raise SystemExit(f"gpu_pages: a page of layer {layer} is wrong")


def _seal(puts: list[PreparedPut]) -> None:
    for prepared in puts:
        if not all(result.ok for result in prepared.seal(timeout=LIMIT_S)):
            raise SystemExit("gpu_pages: a block was not stored; give more with --dram")


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    geometries: tuple[Geometry, ...] = GEOMETRIES
    token_counts: tuple[int, ...] = TOKENS
    plain_bytes: int = GIB
    beside_bytes: int = 2 * GIB
    """Copies of one direction beside products."""
    beside_steps: int = 8
    """Steps that are started after each batch: their stream must not run empty meanwhile, nor be
    so full that the caller waits."""
    beside_rounds: int = 6
    beside_samples: int = SAMPLES_MIN
    ways: tuple[str, ...] = WAYS
    """Ways of the copies beside products."""


def measure(table: Table, device: Device, store: cascadekv.Store, sizes: Sizes) -> None:
    """Measure all geometries and token counts, on the first GPU."""
    gpu = Gpu(0)
    plain_bytes = sizes.plain_bytes
    limits = {}
    for way, to_device in (("save", False), ("load", True)):
        limits[way] = plain_bytes / device.plain_copy(plain_bytes, to_device=to_device) / 1e9
        table.add(f"{way}/plain copy", limits[way], "GB/s")
    _register(gpu, device, store, sizes.geometries[0], table.tell)
    report = gpu.report()
    gib = float(report["registered_bytes"] or 0) / GIB
    if gib:
        seconds = float(report["registration_seconds"] or 0)
        table.add("registration", seconds / gib, "s/GiB", at_most=0.1)
    for geometry in sizes.geometries:
        for tokens in sizes.token_counts:
            name = f"{geometry.name}/{tokens} tokens"
            harness = Harness(device, gpu, geometry, tokens)
            saves = [harness.save(store) for _ in range(ROUNDS)]
            loads = [harness.load(store) for _ in range(ROUNDS)]
            harness.check()
            saved, submitted = (statistics.median(times) for times in zip(*saves, strict=True))
            loaded, layer = (statistics.median(times) for times in zip(*loads, strict=True))
            table.add(f"save/{name}", harness.bytes / saved / 1e9, "GB/s", limits["save"])
            table.add(f"save/{name}/submit", submitted * 1e3, "ms")
            table.add(f"load/{name}", harness.bytes / loaded / 1e9, "GB/s", limits["load"])
            table.add(f"load/{name}/first layer", layer * 1e3, "ms")
            if isinstance(device, TorchDevice) and tokens <= OTHERS_TOKENS:
                others = device.others(geometry.page_bytes, harness.pages * geometry.layers)
                measure_others(table, harness, others, name, limits)
    measure_beside(table, device, store, sizes)


def measure_others(
    table: Table, harness: Harness, others: Others, name: str, limits: dict[str, float]
) -> None:
    """Measure copies of the same pages by torch and by vLLM."""
    device, layers = harness.device, range(harness.geometry.layers)
    numbers = {
        kind: others.numbers([layer * harness.pages + page for page in pages for layer in layers])
        for kind, pages in (("save", harness.saved), ("load", harness.loaded))
    }
    means: dict[str, Callable[[Array, Array, bool], None]] = {
        "torch": lambda array, pages, is_save: (
            others.torch_save(array, pages) if is_save else others.torch_load(array, pages)
        )
    }
    try:
        means["vllm"] = others.vllm_copy()
    except ImportError as error:
        table.leave_out(f"vllm/{name}", f"vLLM's swap_blocks_batch is not there: {error}")
    for mean, copy in means.items():
        others.host.fill_(0)
        times: dict[str, list[float]] = {"save": [], "load": []}
        for _ in range(ROUNDS + 1):
            device.fill(harness.target, 3)
            for kind, array in (("save", harness.source), ("load", harness.target)):
                device.finish()
                started = time.perf_counter()
                copy(array, numbers[kind], kind == "save")
                device.finish()
                times[kind].append(time.perf_counter() - started)
        harness.check()
        for kind, seconds in times.items():
            rate = harness.bytes / statistics.median(seconds[1:]) / 1e9
            table.add(f"{mean}/{kind}/{name}", rate, "GB/s", limits[kind])


def measure_beside(table: Table, device: Device, store: cascadekv.Store, sizes: Sizes) -> None:
    """Measure how much copies slow what an engine computes."""
    steps = device.steps()
    alone = {name: _alone(device, step, sizes) for name, step in steps.items()}
    for way in sizes.ways:
        # Long pages for the driver, and short ones for the kernel: as a table would choose.
        geometry = sizes.geometries[0 if way == "direct" else min(1, len(sizes.geometries) - 1)]
        page = geometry.page_bytes * geometry.layers
        tokens = max(1, sizes.beside_bytes // page) * geometry.page_tokens
        name = f"beside/{way}/{geometry.name}"
        try:
            harness = Harness(device, Gpu(0, ways=way), geometry, tokens)
            harness.save(store)
            harness.load(store)
        except CascadeError as error:
            table.leave_out(name, str(error))
            continue
        harness.check()
        for direction in ("load", "save", "both"):
            for step_name, step in steps.items():
                times = _beside(harness, store, direction, step, sizes)
                row = f"{name}/{direction}/{step_name}"
                if len(times) < sizes.beside_samples:
                    reason = (
                        f"copies ended before {sizes.beside_samples} products, {len(times)} did"
                    )
                    table.leave_out(row, reason)
                    continue
                for kind, of in (("median", statistics.median), ("p99", _p99)):
                    slower = (of(times) / of(alone[step_name]) - 1) * 100
                    table.add(f"{row}/{kind}", slower, "%", at_most=MOST_SLOWDOWN[way])
            harness.check()
        store.clear()


def _p99(times: list[float]) -> float:
    return sorted(times)[int((len(times) - 1) * 0.99)]


def _run(device: Device, step: Callable[[], None], count: int) -> list[Mark]:
    """Start a step some times; returns the marks before, between and after."""
    stream = device.stream()
    marks = [device.mark(stream)]
    for _ in range(count):
        step()
        marks.append(device.mark(stream))
    return marks


def _alone(device: Device, step: Callable[[], None], sizes: Sizes) -> list[float]:
    """Return the times of steps without copies."""
    times = []
    for turn in range(sizes.beside_rounds + 1):
        marks = _run(device, step, max(sizes.beside_samples, sizes.beside_steps))
        device.finish()
        # The first steps find an empty stream: their time has that of their start in it.
        pairs = list(itertools.pairwise(marks))[2:]
        times += [device.seconds(*pair) for pair in pairs if turn]
    return times


def _beside(
    harness: Harness,
    store: cascadekv.Store,
    direction: str,
    step: Callable[[], None],
    sizes: Sizes,
) -> list[float]:
    """Return the times of steps during copies of a direction, or of both at once."""
    device, times = harness.device, []
    # Copies wait for nothing: they begin beside the steps that were started before.
    idle, saving, loading = (device.side_stream(number) for number in range(3))
    for turn in range(sizes.beside_rounds):
        kind = f"beside {turn} "
        lanes: list[Lane] = []
        if direction != "load":
            lanes.append((harness.start_saves(store, idle, kind), saving))
        if direction != "save":
            lanes.append((harness.start_loads(store, idle), loading))
        pairs, ends = _steps_beside(device, lanes, step, sizes.beside_steps)
        times += [
            device.seconds(first, last)
            for first, last in pairs
            if all(device.seconds(last, end) > 0 for end in ends)
        ]
        if direction != "load":
            harness.delete(store, kind)
    return times


Lane: TypeAlias = tuple[Iterator[PreparedPut | GpuLoad], int]
"""Copies, started one after the other, and the stream that waits for them."""


def _steps_beside(
    device: Device, lanes: list[Lane], step: Callable[[], None], count: int
) -> tuple[list[tuple[Mark, Mark]], list[Mark]]:
    """Start copies of each lane in turn and steps after each, and wait for all.

    Returns the marks before and after each step, and those at the end of each lane.
    """
    device.finish()
    started: list[PreparedPut | GpuLoad] = []
    pairs: list[tuple[Mark, Mark]] = []
    ends: dict[int, Mark] = {}
    while True:
        batches = [(next(lane, None), stream) for lane, stream in lanes]
        going = [(batch, stream) for batch, stream in batches if batch is not None]
        if not going:
            break
        for batch, stream in going:
            batch.hold_back(stream)
            ends[stream] = device.mark(stream)
            started.append(batch)
        marks = _run(device, step, count)
        # Without the first copies: steps after them may start before they do.
        if len(started) > len(lanes):
            pairs += itertools.pairwise(marks)
    for load in started:
        if isinstance(load, GpuLoad):
            load.wait(timeout=LIMIT_S)
    _seal([put for put in started if isinstance(put, PreparedPut)])
    device.finish()
    return pairs, list(ends.values())


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
    parser.add_argument(
        "--ways",
        nargs="*",
        choices=WAYS,
        default=list(WAYS),
        help="ways of copies beside products; all. All but direct use the kernel",
    )
    given = parser.parse_args()
    device = TorchDevice()
    table = Table(device.name, device.is_fake)
    try:
        with cascadekv.Store(dram=given.dram) as store:
            sizes = Sizes(token_counts=tuple(given.tokens), ways=tuple(given.ways))
            measure(table, device, store, sizes)
    finally:
        # Also after a failure: what was measured is kept.
        facts = {
            "command": ["gpu_pages.py", *sys.argv[1:]],
            "machine": platform.platform(),
            "rows": [asdict(row) for row in table.rows],
            "not_measured": table.not_measured,
        }
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    require_optimised()
    main()

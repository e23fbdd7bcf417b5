"""The benchmark of paged KV on GPUs runs over the fake driver and labels its rows."""

import importlib.util
import sys
import time
from pathlib import Path

import cascadekv
import numpy as np
import pytest
from fake_gpu import FakeGpu

_FILE = Path(__file__).parents[1] / "bench" / "gpu_pages.py"
_SPEC = importlib.util.spec_from_file_location("gpu_pages", _FILE)


@pytest.fixture(scope="module")
def bench():
    module = importlib.util.module_from_spec(_SPEC)
    # Its dataclasses look for their module.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gpu_pages", module)
        patch.syspath_prepend(_FILE.parent)
        _SPEC.loader.exec_module(module)
        yield module


class FakeDevice:
    """The fake driver's device, for the benchmark."""

    name, is_fake = "fake", True

    def __init__(self):
        """Start the driver."""
        self._fake = FakeGpu()
        self._stream = self._fake.stream()
        self._sides, self._marks = [], 0
        self.end = 1 << 30
        """The mark of the end of all copies."""

    def array(self, size):
        """Allocate bytes on the device."""
        return self._fake.array(size)

    def fill(self, array, seed):
        """Write random bytes."""
        noise = np.random.default_rng(seed).integers(0, 256, array.size, np.uint8)
        self._fake.write(array, 0, noise.tobytes(), self._stream)
        self.finish()

    def are_equal(self, one, other, pages, other_pages, size):
        """Compare pages of two arrays."""

        def read(array, page):
            return self._fake.read(array, page * size, size, self._stream)

        pairs = zip(pages, other_pages, strict=True)
        return all(read(one, page) == read(other, other_page) for page, other_page in pairs)

    def side_stream(self, number):
        """Return one of several other streams."""
        while len(self._sides) <= number:
            self._sides.append(self._fake.stream())
        return self._sides[number]

    def steps(self):
        """Return work that stands for a product."""
        array = self.array(64)
        return {"step": lambda: self._fake.write(array, 0, bytes(64), self._stream)}

    def mark(self, stream):
        """Return a number: the time of a fake means nothing."""
        self._marks += 1
        return self._marks if stream == self._stream else self.end

    def seconds(self, first, last):
        """Return the difference of two marks."""
        return float(last - first)

    def stream(self):
        """Return the number of a stream."""
        return self._stream

    def finish(self):
        """Wait for the stream."""
        for stream in (self._stream, *self._sides):
            self._fake.finish(stream)

    def plain_copy(self, size, *, to_device):
        """Copy and take the time, which stands for nothing."""
        array = self.array(size)
        started = time.perf_counter()
        if to_device:
            self._fake.write(array, 0, bytes(size), self._stream)
            self.finish()
        else:
            self._fake.read(array, 0, size, self._stream)
        return time.perf_counter() - started


def run(bench, device, **sizes):
    """Measure small pages over the fake driver."""
    small, short = bench.Geometry("small", 3, 64, 16), bench.Geometry("short", 2, 8, 16)
    table = bench.Table(device.name, device.is_fake, lambda _: None)
    chosen = {
        "geometries": (small, short),
        "token_counts": (256, 512),
        "plain_bytes": 1 << 20,
        "beside_bytes": 64 << 10,
        "beside_rounds": 2,
        "beside_samples": 4,
    } | sizes
    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        bench.measure(table, device, store, bench.Sizes(**chosen))
    return table


@pytest.fixture
def small_batches(bench, monkeypatch):
    """Divide pages into several calls."""
    monkeypatch.setattr(bench, "BATCH_BYTES", 16 << 10)


@pytest.mark.usefixtures("small_batches")
def test_rows_of_the_fake_driver_are_complete_and_labelled(bench):
    table = run(bench, FakeDevice())
    rows, names = table.rows, [row.name for row in table.rows]
    assert len(names) == len(set(names))
    assert {"save/plain copy", "load/plain copy", "registration"} <= set(names)
    for tokens in (256, 512):
        for end in ("", "/submit"):
            assert f"save/small/{tokens} tokens{end}" in names
        for end in ("", "/first layer"):
            assert f"load/small/{tokens} tokens{end}" in names
    for way, geometry in (("direct", "small"), ("staged", "short"), ("mapped", "short")):
        for direction in ("load", "save", "both"):
            for kind in ("median", "p99"):
                assert f"beside/{way}/{geometry}/{direction}/step/{kind}" in names
    assert table.not_measured == []
    assert all(row.fake and row.device == "fake" for row in rows)
    assert all(row.target is None and row.is_reached is None for row in rows), "none is judged"
    assert all(row.value > 0 for row in rows if not row.name.startswith("beside/"))
    shares = [row for row in rows if row.limit]
    assert shares
    assert all(row.share == row.value / row.limit for row in shares)


@pytest.mark.usefixtures("small_batches")
def test_steps_after_the_copies_are_not_counted(bench):
    device = FakeDevice()
    device.end = 0
    table = run(bench, device, ways=("direct",), token_counts=())
    assert len(table.not_measured) == 3, table.not_measured
    assert all("copies ended before" in reason for reason in table.not_measured)
    assert not [row for row in table.rows if row.name.startswith("beside/")]


@pytest.mark.usefixtures("small_batches")
def test_ways_that_the_driver_refuses_are_left_out(bench, monkeypatch):
    refused = bench.Gpu

    def gpu(device, ways="direct"):
        if ways != "direct":
            raise cascadekv.GpuError("no kernel")
        return refused(device)

    monkeypatch.setattr(bench, "Gpu", gpu)
    table = run(bench, FakeDevice(), token_counts=())
    expected = ["beside/staged/short: no kernel", "beside/mapped/short: no kernel"]
    assert table.not_measured == expected


def test_targets_are_judged_on_a_gpu_and_not_on_a_fake_one(bench):
    for is_fake, expected in ((True, [(None, None)] * 2), (False, [(3.0, True), (3.0, False)])):
        table = bench.Table("some", is_fake, lambda _: None)
        table.add("good", 2.9, "%", at_most=3.0)
        table.add("bad", 3.1, "%", at_most=3.0)
        assert [(row.target, row.is_reached) for row in table.rows] == expected


@pytest.mark.usefixtures("small_batches")
def test_the_first_layer_is_submitted_before_all_others(bench):
    """With several batches, the time of layer 0 was that of nearly all layers."""
    calls = []

    class Recorded:
        def __init__(self, views):
            self.views = views

        def __enter__(self):
            self.entered = self.views.__enter__()
            return self

        def __exit__(self, *error):
            return self.views.__exit__(*error)

        def start_scatter(self, *given, **keywords):
            calls.append(keywords.get("first", 0))
            return self.entered.start_scatter(*given, **keywords)

    class Store:
        def __init__(self, store):
            self.store = store

        def view(self, *given, **keywords):
            return Recorded(self.store.view(*given, **keywords))

    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        small = bench.Geometry("small", 3, 64, 16)
        harness = bench.Harness(FakeDevice(), cascadekv.Gpu(0), small, 512)
        harness.save(store)
        harness.load(Store(store))
        harness.check()
    assert len(calls) > 2
    assert calls == sorted(calls)


def test_other_means_copy_the_same_pages(bench):
    torch = pytest.importorskip("torch", reason="torch is optional and not installed")
    array = torch.randint(0, 256, (32 * 64,), dtype=torch.uint8)
    others = bench.Others(torch, "cpu", 64, 8)
    saved, loaded = others.numbers([3, 1, 31, 8]), others.numbers([5, 6, 7, 0])
    target = torch.zeros_like(array)
    others.torch_save(array, saved)
    others.torch_load(target, loaded)
    assert torch.equal(target.view(-1, 64)[loaded], array.view(-1, 64)[saved])
    assert int(target.view(-1, 64).any(1).sum()) == 4


def test_a_wrong_page_ends_the_benchmark(bench):
    small = bench.Geometry("small", 3, 64, 16)
    device = FakeDevice()
    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        harness = bench.Harness(device, cascadekv.Gpu(0), small, 256)
        harness.save(store)
        harness.load(store)
        harness.check()
        device.fill(harness.target, 3)
        with pytest.raises(SystemExit, match="is wrong"):
            harness.check()


def test_without_torch_or_a_gpu_nothing_is_measured(bench):
    torch = pytest.importorskip("torch", reason="torch is optional and not installed")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench.TorchDevice()

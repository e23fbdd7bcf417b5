"""The benchmark of paged KV on GPUs runs over the fake driver and labels its rows."""

import importlib.util
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
        patch.setitem(__import__("sys").modules, "gpu_pages", module)
        _SPEC.loader.exec_module(module)
        yield module


class FakeDevice:
    """The fake driver's device, for the benchmark."""

    name, is_fake = "fake", True

    def __init__(self):
        """Start the driver."""
        self._fake = FakeGpu()
        self._stream = self._fake.stream()

    def array(self, size):
        """Allocate bytes on the device."""
        return self._fake.array(size)

    def fill(self, array, seed):
        """Write random bytes."""
        noise = np.random.default_rng(seed).integers(0, 256, array.size, np.uint8)
        self._fake.write(array, 0, noise.tobytes(), self._stream)
        self.finish()

    def is_equal(self, one, other, page, other_page, size):
        """Compare a page of two arrays."""
        first = self._fake.read(one, page * size, size, self._stream)
        return first == self._fake.read(other, other_page * size, size, self._stream)

    def stream(self):
        """Return the number of a stream."""
        return self._stream

    def finish(self):
        """Wait for the stream."""
        self._fake.finish(self._stream)

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


def test_rows_of_the_fake_driver_are_complete_and_labelled(bench):
    small = bench.Geometry("small", 3, 64, 16)
    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        rows = bench.measure(
            FakeDevice(), store, bench.Sizes((small,), (256, 512), 1 << 20), lambda _: None
        )
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    assert {"save/plain copy", "load/plain copy", "registration"} <= set(names)
    for tokens in (256, 512):
        for end in ("", "/submit"):
            assert f"save/small/{tokens} tokens{end}" in names
        for end in ("", "/first layer"):
            assert f"load/small/{tokens} tokens{end}" in names
    assert all(row.fake and row.device == "fake" and row.value > 0 for row in rows)
    shares = [row for row in rows if row.limit]
    assert shares
    assert all(row.share == row.value / row.limit for row in shares)


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

"""A scheduled engine whose KV is in the memory of a GPU: the fake driver's, never a speed.

Its kernels are copies on a stream of its own: a page is read and written in the order of that
stream. Real libraries of CUDA refuse the fake driver, so there are no CUDA tensors here; the
connector gets an array with `__cuda_array_interface__` instead.
"""

import numpy as np
from cascadekv import Gpu
from cascadekv.connectors.vllm.memory import GpuPages
from fake_gpu import FakeGpu
from scheduled_engine import BLOCK, HEADS, LAYERS, WORDS, ScheduledEngine

PAGE_SHAPE = (HEADS, BLOCK, WORDS)
PAGE_BYTES = HEADS * BLOCK * WORDS * 8


class Page:
    """A page of a layer, as the engine's kernels read and write it."""

    def __init__(self, device, offset):
        """Name a page of the device's memory."""
        self._device, self._offset = device, offset

    def __getitem__(self, part):
        """Read a part after all earlier work of the engine's stream."""
        return self._read()[part]

    def __setitem__(self, part, content):
        """Write a part after all earlier work of the stream; returns before it is written."""
        page = self._read()
        page[part] = content
        fake, array, stream = self._device
        fake.write(array, self._offset, page.tobytes(), stream)

    def _read(self):
        fake, array, stream = self._device
        data = fake.read(array, self._offset, PAGE_BYTES, stream)
        return np.frombuffer(data, np.uint64).reshape(PAGE_SHAPE).copy()


class Layer:
    """The pages of a layer."""

    def __init__(self, device, offset):
        """Name a layer of the device's memory."""
        self._device, self._offset = device, offset

    def __getitem__(self, page):
        """Return a page."""
        return Page(self._device, self._offset + int(page) * PAGE_BYTES)


class GpuEngine(ScheduledEngine):
    """One engine on a device of the fake driver."""

    def __init__(self, model, store, *, pages=64, **options):
        """Start it, as a `ScheduledEngine`."""
        fake = FakeGpu()
        stream = fake.stream()
        arrays = []

        def memory(buffer, regions, count):
            # All parts of the connector share the engine's allocation.
            if not arrays:
                arrays.append(fake.array(buffer.numel()))
                fake.write(arrays[0], 0, bytes(buffer.numel()), stream)
            return GpuPages(Gpu(0), arrays[0], regions, count, lambda: stream)

        super().__init__(model, store, memory=memory, pages=pages, **options)
        self._fake = fake
        (array,) = arrays
        device = fake, array, stream
        self._kv = [Layer(device, at * pages * PAGE_BYTES) for at in range(len(LAYERS))]

    def run(self, *limits):
        """Step until all requests are finished and all blocks are sealed."""
        super().run(*limits)
        self.settle()

    def hold_saves(self):
        """Hold the copies of saves; the engine's next kernels then wait, too."""
        self._fake.hold("cuMemcpyBatchAsync_v2")

    def release_saves(self):
        """Let the copies go on."""
        self._fake.release()

    def settle(self):
        """Wait until the saves of all steps so far are over."""
        saves = self.worker._worker._gpu_saves  # noqa: SLF001 # the queue under test
        saves._finisher.submit(lambda: None).result()  # noqa: SLF001 # likewise

    def stored(self, prompt):
        """Return whether each block of a prompt is stored; raises if one is wrong."""
        self.settle()
        return super().stored(prompt)

"""Copies between the engine's KV memory and the store, by where that memory is.

- `HostMemory`: the store copies from and to the pages.
- `GpuPages`: an NVIDIA GPU copies between its pages and the store's pool, beside the engine's work.
- `DeviceMemory`: any other device copies to and from a staging buffer on the host, and the store
  copies that buffer: one copy more, and the engine waits.
"""

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from cascadekv import Gpu, GpuError, GpuEvent, GpuLoad, GpuMemory, PagedMemory

if TYPE_CHECKING:
    import torch

    from cascadekv import PreparedPut, Views
    from cascadekv.connectors.vllm.layout import Region

__all__ = [
    "SUBMISSION_BYTES",
    "DeviceMemory",
    "GpuPages",
    "GpuReport",
    "HostMemory",
    "LoadOrder",
    "Memory",
    "SynchronousOrder",
    "memory_of",
]

_LOG = logging.getLogger("vllm.cascade")
GpuReport = Mapping[str, str | int | float | bool | None]
"""What `Gpu.report` returns."""
STAGING_BYTES = 64 << 20
"""Most bytes of one call, and the size of a staging buffer."""
SUBMISSION_BYTES = STAGING_BYTES
"""Most bytes that a GPU copies in one submission for several requests."""


class LoadOrder(Protocol):
    """The place of a load in the engine's work, fixed when the engine plans it."""

    @property
    def has_copies(self) -> bool:
        """Whether copies were started that may go on."""
        ...

    @property
    def copy_seconds(self) -> float | None:
        """For how long a device made the copies that were waited for; `None` if it cannot tell.

        Without those from the memory of a GPU.
        """
        ...

    @property
    def within_seconds(self) -> float | None:
        """The same for copies from the memory of a GPU."""
        ...

    def another(self) -> "LoadOrder":
        """Return the same place for another load."""
        ...

    def wait(self) -> None:
        """Return once all pages of the load are written."""
        ...

    def hold_back_engine(self) -> None:
        """Make the engine's later work wait for the pages. Called by the engine's thread.

        After an exception, no copy is in flight.
        """
        ...

    def hold_back_for(self, layer: int) -> None:
        """Do so for the pages of a layer that was loaded by `load_layer`."""
        ...


class Memory(Protocol):
    """The pages of one part."""

    block_bytes: int
    batch_blocks: int
    """Most blocks of one call."""
    is_asynchronous: bool
    """Whether copies go on after `save` and `load` have returned."""

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into the memory of a prepared put.

        The engine's thread calls it. The copies come after the engine's work so far and before its
        later work.
        """
        ...

    def order(self) -> LoadOrder:
        """Return the place of a load after the engine's work so far."""
        ...

    def load(
        self, views: "Views", pages: Sequence[int], order: LoadOrder | None = None
    ) -> list[bool]:
        """Copy blocks to pages; false for each missing block.

        An asynchronous memory needs the order. Any thread calls it.
        """
        ...


class SynchronousOrder:
    """The order of loads that are over when the call returns."""

    has_copies = False
    copy_seconds = within_seconds = 0.0

    def another(self) -> "SynchronousOrder":
        """Return this order, which has no state."""
        return self

    def wait(self) -> None:
        """Return: the pages are written."""

    def hold_back_engine(self) -> None:
        """Return: the pages are written."""

    def hold_back_for(self, layer: int) -> None:
        """Return: the pages are written."""


class _SynchronousMemory:
    """A memory whose copies are over when the call returns."""

    is_asynchronous = False

    def order(self) -> LoadOrder:
        """Return an order without effect."""
        return SynchronousOrder()


class HostMemory(_SynchronousMemory):
    """Pages in host memory, which the store copies directly."""

    def __init__(self, buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> None:
        """Wrap a tensor of bytes in host memory."""
        whole = _bytes_of(buffer)
        self.paged = PagedMemory(
            [(whole, r.offset, r.stride, r.page_bytes) for r in regions], pages
        )
        self.block_bytes = self.paged.block_bytes
        self.batch_blocks = max(1, STAGING_BYTES // self.block_bytes)
        self.layers = self.paged.regions

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into the memory of a prepared put."""
        prepared.gather(self.paged, pages)

    def load(
        self,
        views: "Views",
        pages: Sequence[int],
        order: LoadOrder | None = None,  # noqa: ARG002 # the copies are over on return
    ) -> list[bool]:
        """Copy blocks to pages; false for each missing block."""
        return views.scatter(self.paged, pages)

    def load_layer(
        self,
        views: "Views",
        pages: Sequence[int],
        layer: int,
        order: LoadOrder,  # noqa: ARG002 # the copies are over on return
    ) -> list[bool]:
        """Copy one layer of blocks; false for each missing block."""
        return views.scatter(self.paged, pages, first=layer, count=1)


class GpuOrder:
    """A load of a GPU: after the engine's work so far, on a stream of its own."""

    def __init__(self, after: GpuEvent, stream: Callable[[], int]) -> None:
        """Begin without copies."""
        self.after = after
        self._stream = stream
        self._copies: list[tuple[GpuLoad, bool]] = []
        """Copies, and whether they are from the memory of a GPU."""
        self._of_layer: dict[int, list[GpuLoad]] = {}
        self.copy_seconds: float | None = 0.0
        self.within_seconds: float | None = 0.0

    def another(self) -> "GpuOrder":
        """Return the same place for another load."""
        return GpuOrder(self.after, self._stream)

    @property
    def has_copies(self) -> bool:
        """Whether copies were started and not waited for."""
        return bool(self._copies)

    def add(self, copies: GpuLoad, layer: int | None = None, *, is_within: bool = False) -> None:
        """Add copies that were started, of one layer or of all."""
        self._copies.append((copies, is_within))
        if layer is not None:
            self._of_layer.setdefault(layer, []).append(copies)

    def wait(self) -> None:
        """Return once all pages of the load are written, and release its blocks."""
        while self._copies:
            copies, is_within = self._copies[-1]
            copies.wait()
            took = copies.seconds
            if is_within:
                self.within_seconds = _sum(self.within_seconds, took)
            else:
                self.copy_seconds = _sum(self.copy_seconds, took)
            self._copies.pop()

    def hold_back_engine(self) -> None:
        """Make the engine's later work wait for the pages."""
        for copies, _ in self._copies:
            copies.hold_back(self._stream())

    def hold_back_for(self, layer: int) -> None:
        """Make the engine's later work wait for the pages of a layer."""
        for copies in self._of_layer.get(layer, ()):
            copies.hold_back(self._stream())


def _sum(known: float | None, more: float | None) -> float | None:
    return None if known is None or more is None else known + more


class GpuPages:
    """Pages in the memory of an NVIDIA GPU, which copies them on streams of its own."""

    is_asynchronous = True

    def __init__(
        self,
        gpu: Gpu,
        array: object,
        regions: Sequence["Region"],
        pages: int,
        stream: Callable[[], int],
    ) -> None:
        """Wrap an array of bytes on a GPU; `stream` returns the number of the engine's stream."""
        self._gpu = gpu
        self._stream = stream
        self._memory = GpuMemory(
            gpu, [(array, r.offset, r.stride, r.page_bytes) for r in regions], pages
        )
        self.block_bytes = self._memory.block_bytes
        self.batch_blocks = max(1, STAGING_BYTES // self.block_bytes)
        self.layers = self._memory.regions
        self._is_registration_logged = False

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        return self._gpu

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Start to copy pages into the memory of a prepared put, as `start_saves` does."""
        self.start_saves([(prepared, pages)])

    def start_saves(self, puts: Sequence[tuple["PreparedPut", Sequence[int]]]) -> None:
        """Start to copy pages into the memory of prepared puts, in one submission.

        The engine's later work waits for the copies, because it may write the pages.
        """
        stream = self._stream()
        copies = self._memory.start_gather(puts, after=self._gpu.mark(stream))
        copies.hold_back(stream)

    def mark(self) -> GpuEvent:
        """Return an event after the engine's work so far, with its time."""
        return self._gpu.mark(self._stream(), timed=True)

    def order(self) -> GpuOrder:
        """Return the place of a load after the engine's work so far."""
        return GpuOrder(self._gpu.mark(self._stream()), self._stream)

    def load(
        self, views: "Views", pages: Sequence[int], order: LoadOrder | None = None
    ) -> list[bool]:
        """Start to copy blocks to pages; false for each missing block."""
        return self.start_loads([(views, pages)], order).copied

    def load_layer(
        self, views: "Views", pages: Sequence[int], layer: int, order: LoadOrder
    ) -> list[bool]:
        """Start to copy one layer of blocks; false for each missing block."""
        return self.start_loads([(views, pages)], order, layer).copied

    def start_loads(
        self,
        batches: Sequence[tuple["Views", Sequence[int]]],
        order: LoadOrder | None,
        layer: int | None = None,
        *,
        is_within: bool = False,
    ) -> GpuLoad:
        """Start to copy batches of blocks to their pages, in one submission.

        All blocks are in the same pool; `is_within` says that it is in the memory of a GPU.
        """
        if not isinstance(order, GpuOrder):
            raise TypeError("a load of a GPU needs the order from `order()`")
        first, count = (0, None) if layer is None else (layer, 1)
        copies = self._memory.start_scatter(batches, after=order.after, first=first, count=count)
        if any(copies.copied):
            order.add(copies, layer, is_within=is_within)
        return copies

    def log_registration(self) -> None:
        """Log once how the registration of the pool ended."""
        report = self._gpu.report()
        if self._is_registration_logged or not report["is_complete"]:
            return
        self._is_registration_logged = True
        if report["refusal"] is None:
            _LOG.info(
                "Cascade: the driver registered %.1f GiB of the pool in %.1f s",
                float(report["registered_bytes"] or 0) / (1 << 30),
                report["registration_seconds"],
            )
        else:
            _LOG.warning(
                "Cascade: copies of this GPU are slow, because the driver registered only %s of "
                "%s bytes of the pool: %s",
                report["registered_bytes"],
                int(report["registered_bytes"] or 0) + int(report["staged_bytes"] or 0),
                report["refusal"],
            )

    def report(self) -> GpuReport:
        """Return what the GPU copied, and how much of the pool is registered."""
        return self._gpu.report()


class DeviceMemory(_SynchronousMemory):
    """Pages on a device, copied through staging buffers on the host.

    Several threads load and save at the same time. Each call uses a staging buffer of its own, and
    returns it to the free list once the device has finished the copy.
    """

    def __init__(self, buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> None:
        """Wrap a tensor of bytes on a device."""
        import torch  # noqa: PLC0415 # only engines have it

        self._pages = [
            torch.as_strided(buffer, (pages, r.page_bytes), (r.stride, 1), r.offset)
            for r in regions
        ]
        self._device = buffer.device
        self.block_bytes = sum(r.page_bytes for r in regions)
        self.batch_blocks = max(1, STAGING_BYTES // self.block_bytes)
        self._lock = threading.Lock()
        self._free_buffers: list[_StagingBuffer] = []

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into the memory of a prepared put."""
        import torch  # noqa: PLC0415 # only engines have it

        indices = torch.as_tensor(pages, device=self._device)
        with self._staging_buffer() as staging:
            for region, rows in zip(self._pages, staging.regions, strict=True):
                # Blocking: the engine may reuse the pages for another request after the step.
                rows[: len(pages)].copy_(region.index_select(0, indices))
            prepared.gather(staging.paged, range(len(pages)))

    def load(
        self,
        views: "Views",
        pages: Sequence[int],
        order: LoadOrder | None = None,  # noqa: ARG002 # the copies are over on return
    ) -> list[bool]:
        """Copy blocks to pages; false for each missing block.

        The caller must hold the views until this returns; the device has the bytes by then.
        """
        import torch  # noqa: PLC0415 # only engines have it

        with self._staging_buffer() as staging:
            copied = views.scatter(staging.paged, range(len(pages)))
            rows = [row for row, is_copied in enumerate(copied) if is_copied]
            if not rows:
                return copied
            selected = torch.as_tensor(rows, device=self._device)
            indices = torch.as_tensor([pages[row] for row in rows], device=self._device)
            for region, staged in zip(self._pages, staging.regions, strict=True):
                # One contiguous copy, rows of missing blocks included; the device selects.
                on_device = staged[: rows[-1] + 1].to(self._device, non_blocking=True)
                region[indices] = on_device[selected]
            if self._device.type == "cuda":
                # The staging buffer may be reused once the device has read it.
                torch.cuda.current_stream(self._device).synchronize()
        return copied

    @contextmanager
    def _staging_buffer(self) -> Generator["_StagingBuffer"]:
        """Lend a staging buffer. Buffers are kept: as many as there were concurrent calls."""
        with self._lock:
            staging = self._free_buffers.pop() if self._free_buffers else None
        if staging is None:
            widths = [region.shape[1] for region in self._pages]
            is_page_locked = self._device.type == "cuda"
            staging = _StagingBuffer(widths, self.batch_blocks, is_page_locked=is_page_locked)
        yield staging
        # Not after an exception: the device may still access the buffer, so it is not reused.
        with self._lock:
            self._free_buffers.append(staging)


class _StagingBuffer:
    """Host memory for the blocks of one call, region by region."""

    def __init__(self, widths: Sequence[int], blocks: int, *, is_page_locked: bool) -> None:
        import torch  # noqa: PLC0415 # only engines have it

        whole = torch.empty(sum(widths) * blocks, dtype=torch.uint8, pin_memory=is_page_locked)
        self.regions: list[torch.Tensor] = []
        places: list[tuple[memoryview, int, int, int]] = []
        at = 0
        for width in widths:
            self.regions.append(whole[at : at + width * blocks].view(blocks, width))
            places.append((_bytes_of(whole), at, width, width))
            at += width * blocks
        self.paged = PagedMemory(places, blocks)


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    array: Any = tensor.numpy()  # NumPy's types do not say that it is a buffer
    return memoryview(array)


def memory_of(buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> Memory:
    """Return the memory of a part; its class depends on the device of the engine's tensor."""
    if buffer.device.type == "cpu":
        return HostMemory(buffer, regions, pages)
    if buffer.device.type == "cuda":
        device: int = buffer.device.index or 0
        try:
            gpu = Gpu(device)
            if gpu.report()["is_fake"]:
                _LOG.warning("Cascade: the driver of this GPU is a FAKE, for tests only")
            return GpuPages(gpu, buffer, regions, pages, lambda: _current_stream(device))
        except GpuError as error:
            _LOG.warning("Cascade: copies go through pageable memory, and wait: %s", error)
    return DeviceMemory(buffer, regions, pages)


def _current_stream(device: int) -> int:
    """Return the number of the stream on which the engine computes."""
    import torch  # noqa: PLC0415 # only engines have it

    number: int = torch.cuda.current_stream(device).cuda_stream
    return number

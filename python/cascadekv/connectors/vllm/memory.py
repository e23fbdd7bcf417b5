"""Copies between the engine's KV memory and the store: direct on a CPU, else through host memory.

The store cannot access the pages of a GPU. The device copies them to and from a staging buffer on
the host, and the store copies that buffer: one copy more than on a CPU.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from cascadekv import PagedMemory

if TYPE_CHECKING:
    import torch

    from cascadekv import PreparedPut, Views
    from cascadekv.connectors.vllm.layout import Region

__all__ = ["DeviceMemory", "HostMemory", "Memory", "memory_of"]

STAGING_BYTES = 64 << 20
"""Most bytes of one call, and the size of a staging buffer."""


class Memory(Protocol):
    """The pages of one part."""

    block_bytes: int
    batch_blocks: int
    """Most blocks of one call."""

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into the memory of a prepared put."""
        ...

    def load(self, views: "Views", pages: Sequence[int]) -> list[bool]:
        """Copy blocks to pages; false for each missing block."""
        ...


class HostMemory:
    """Pages in host memory, which the store copies directly."""

    def __init__(self, buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> None:
        """Wrap a tensor of bytes in host memory."""
        whole = _bytes_of(buffer)
        self.paged = PagedMemory(
            [(whole, r.offset, r.stride, r.page_bytes) for r in regions], pages
        )
        self.block_bytes = self.paged.block_bytes
        self.batch_blocks = max(1, STAGING_BYTES // self.block_bytes)

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into the memory of a prepared put."""
        prepared.gather(self.paged, pages)

    def load(self, views: "Views", pages: Sequence[int]) -> list[bool]:
        """Copy blocks to pages; false for each missing block."""
        return views.scatter(self.paged, pages)


class DeviceMemory:
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

    def load(self, views: "Views", pages: Sequence[int]) -> list[bool]:
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
    kind = HostMemory if buffer.device.type == "cpu" else DeviceMemory
    return kind(buffer, regions, pages)

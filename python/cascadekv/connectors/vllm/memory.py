"""The engine's KV memory as the store's blocks: in place on a CPU, staged in host memory elsewhere.

The store's copies cannot reach a GPU's pages. The device gathers them into a staging buffer on the
host and scatters them from there, and that buffer is copied as on a CPU: one copy more than needed.
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
"""Most bytes of one call, and size of a staging buffer."""


class Memory(Protocol):
    """One part's pages."""

    block_bytes: int
    batch_blocks: int
    """Most blocks of one call."""

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into what the store gave for them."""
        ...

    def load(self, views: "Views", pages: Sequence[int]) -> list[bool]:
        """Copy blocks to pages; false for each that is not there."""
        ...


class HostMemory:
    """Pages that the store's copies reach."""

    def __init__(self, buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> None:
        """Take a tensor of bytes on the host."""
        whole = _bytes_of(buffer)
        self.paged = PagedMemory(
            [(whole, r.offset, r.stride, r.page_bytes) for r in regions], pages
        )
        self.block_bytes = self.paged.block_bytes
        self.batch_blocks = max(1, STAGING_BYTES // self.block_bytes)

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into what the store gave for them."""
        prepared.gather(self.paged, pages)

    def load(self, views: "Views", pages: Sequence[int]) -> list[bool]:
        """Copy blocks to pages; false for each that is not there."""
        return views.scatter(self.paged, pages)


class DeviceMemory:
    """Pages on a device, copied by way of staging buffers on the host.

    Several threads load and save at a time. Each call borrows a staging buffer that no other call
    uses, and returns it once the device has finished both directions of the copy.
    """

    def __init__(self, buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> None:
        """Take a tensor of bytes on a device."""
        import torch  # noqa: PLC0415 # only engines have it

        self._pages = [
            torch.as_strided(buffer, (pages, r.page_bytes), (r.stride, 1), r.offset)
            for r in regions
        ]
        self._device = buffer.device
        self.block_bytes = sum(r.page_bytes for r in regions)
        self.batch_blocks = max(1, STAGING_BYTES // self.block_bytes)
        self._lock = threading.Lock()
        self._idle: list[_Staging] = []

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into what the store gave for them."""
        import torch  # noqa: PLC0415 # only engines have it

        where = torch.as_tensor(pages, device=self._device)
        with self._borrowed() as staging:
            for region, rows in zip(self._pages, staging.regions, strict=True):
                # Blocking: another request may have the pages as soon as the step is over.
                rows[: len(pages)].copy_(region.index_select(0, where))
            prepared.gather(staging.paged, range(len(pages)))

    def load(self, views: "Views", pages: Sequence[int]) -> list[bool]:
        """Copy blocks to pages; false for each that is not there.

        The caller holds the views until this returns; by then the device has the bytes.
        """
        import torch  # noqa: PLC0415 # only engines have it

        with self._borrowed() as staging:
            there = views.scatter(staging.paged, range(len(pages)))
            rows = [row for row, is_there in enumerate(there) if is_there]
            if not rows:
                return there
            picked = torch.as_tensor(rows, device=self._device)
            where = torch.as_tensor([pages[row] for row in rows], device=self._device)
            for region, staged in zip(self._pages, staging.regions, strict=True):
                # One copy of consecutive rows to the device, which picks among them.
                arrived = staged[: rows[-1] + 1].to(self._device, non_blocking=True)
                region[where] = arrived[picked]
            if self._device.type == "cuda":
                # The staging buffer is free again when the device has read it.
                torch.cuda.current_stream(self._device).synchronize()
        return there

    @contextmanager
    def _borrowed(self) -> Generator["_Staging"]:
        """Lend a staging buffer; there are as many as there ever were calls at a time."""
        with self._lock:
            staging = self._idle.pop() if self._idle else None
        if staging is None:
            widths = [region.shape[1] for region in self._pages]
            is_page_locked = self._device.type == "cuda"
            staging = _Staging(widths, self.batch_blocks, is_page_locked=is_page_locked)
        yield staging
        # Not after a copy that raised: the device may still be reading or writing the buffer.
        with self._lock:
            self._idle.append(staging)


class _Staging:
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
    """Give the memory of a part, by where the engine's tensor of bytes is."""
    kind = HostMemory if buffer.device.type == "cpu" else DeviceMemory
    return kind(buffer, regions, pages)

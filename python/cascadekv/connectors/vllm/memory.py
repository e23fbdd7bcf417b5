"""The engine's KV memory as the store's blocks: in place on a CPU, through a host buffer elsewhere.

A GPU's pages cannot be reached by the store's own copies. They are gathered and scattered by the
device into a pinned host buffer, one block after the other, and that buffer is copied as on a CPU:
one copy more than needed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cascadekv import PagedMemory

if TYPE_CHECKING:
    import torch

    from cascadekv import PreparedPut, Views
    from cascadekv.connectors.vllm.layout import Region

__all__ = ["DeviceMemory", "HostMemory", "Memory", "memory_of"]

STAGING_BYTES = 64 << 20
"""Size of the host buffer for a device's blocks."""


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
    """Pages on a device."""

    def __init__(self, buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> None:
        """Take a tensor of bytes on a device."""
        import torch  # noqa: PLC0415 # only engines have it

        self._pages = [
            torch.as_strided(buffer, (pages, r.page_bytes), (r.stride, 1), r.offset)
            for r in regions
        ]
        self.block_bytes = sum(r.page_bytes for r in regions)
        self.batch_blocks = max(1, STAGING_BYTES // self.block_bytes)
        shape = (self.batch_blocks, self.block_bytes)
        pinned = buffer.device.type == "cuda"
        self._staging = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        self.paged = PagedMemory(
            [(_bytes_of(self._staging), 0, self.block_bytes, self.block_bytes)],
            self.batch_blocks,
        )

    def save(self, prepared: "PreparedPut", pages: Sequence[int]) -> None:
        """Copy pages into what the store gave for them."""
        import torch  # noqa: PLC0415 # only engines have it

        at = 0
        where = torch.as_tensor(pages, device=self._pages[0].device)
        for region in self._pages:
            width = region.shape[1]
            # Blocking: the pages are another request's as soon as the step is over.
            self._staging[: len(pages), at : at + width].copy_(region.index_select(0, where))
            at += width
        prepared.gather(self.paged, range(len(pages)))

    def load(self, views: "Views", pages: Sequence[int]) -> list[bool]:
        """Copy blocks to pages; false for each that is not there."""
        import torch  # noqa: PLC0415 # only engines have it

        there = views.scatter(self.paged, range(len(pages)))
        rows = [row for row, is_there in enumerate(there) if is_there]
        staged = self._staging[rows]
        where = torch.as_tensor([pages[row] for row in rows], device=self._pages[0].device)
        at = 0
        for region in self._pages:
            width = region.shape[1]
            region[where] = staged[:, at : at + width].to(region.device)
            at += width
        if where.device.type == "cuda":
            torch.cuda.current_stream(where.device).synchronize()
        return there


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    array: Any = tensor.numpy()  # NumPy's types do not say that it is a buffer
    return memoryview(array)


def memory_of(buffer: "torch.Tensor", regions: Sequence["Region"], pages: int) -> Memory:
    """Give the memory of a part, by where the engine's tensor of bytes is."""
    kind = HostMemory if buffer.device.type == "cpu" else DeviceMemory
    return kind(buffer, regions, pages)

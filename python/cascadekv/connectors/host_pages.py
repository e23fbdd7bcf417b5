"""Access to the pages of an SGLang host pool as plain memory, with bounds checks."""

import importlib
from collections.abc import Sequence
from typing import Any

from cascadekv.errors import ConfigError

__all__ = ["HostPages", "HostPoolError"]

PIECES_MAX = 8
"""Most contiguous pieces of a page. A page with more pieces is copied into a flat page instead."""


class HostPoolError(ValueError):
    """A request does not match the registered host pool."""


class HostPages:
    """The pages of one SGLang host pool, read and written in place where the layout allows it.

    The page-first layouts keep a page in few contiguous pieces (K and V, or one compressed piece);
    each piece is one block. In `layer_first` a page is spread over all layers; it is copied into
    one flat page, as SGLang itself does, which is one block.
    """

    def __init__(self, pool: Any, *, shards: int = 1) -> None:
        """Probe the pool's layout; raises `ConfigError` if its pages cannot be accessed."""
        self.pool = pool
        self.page_size: int = pool.page_size
        self.shards = shards
        """Number of equal shares into which the heads of a page are split."""
        self._regions = [_TensorMemory(tensor) for tensor in _tensors(pool)]
        pieces = self._probe()
        self.in_place = pieces is not None
        """Whether bytes move between the store and the pool without an intermediate copy."""
        self.piece_bytes: tuple[int, ...] = pieces or (self._flat_bytes(),)
        """Size of each piece of a page, in order."""
        if shards > 1 and not self.in_place:
            raise ConfigError(
                f"tp_lcm_size: in the layout {pool.layout!r} a share of the heads is not contiguous"
            )

    @property
    def pieces(self) -> int:
        """Number of pieces of a page."""
        return len(self.piece_bytes)

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of the pool that CUDA has not pinned; 0 in a process that does not use CUDA."""
        if not _torch().cuda.is_initialized():
            return 0
        return sum(region.end - region.start for region in self._regions if not region.is_pinned)

    def starts(self, host_indices: Any, pages: int) -> list[int]:
        """Return the first index of each page; raises `HostPoolError` for another page count."""
        indices: list[int] = host_indices.tolist()
        if len(indices) != pages * self.page_size:
            raise HostPoolError(
                f"{len(indices)} host indices for {pages} pages of {self.page_size} tokens"
            )
        return indices[:: self.page_size]

    def memory(self, host_indices: Any, pages: int) -> list[memoryview]:
        """Return the memory of the pieces of some pages, page by page.

        Raises `HostPoolError` if a piece has another size than at registration or lies outside the
        registered memory.
        """
        self.starts(host_indices, pages)
        addresses, sizes = self._meta(host_indices)
        if len(addresses) != pages * self.pieces:
            raise HostPoolError(
                f"{len(addresses)} pieces for {pages} pages of {self.pieces} pieces each"
            )
        if tuple(sizes) != self.piece_bytes * pages:
            raise HostPoolError(f"piece sizes differ from {self.piece_bytes} at registration")
        pieces = zip(addresses, sizes, strict=True)
        return [self._memory_at(address, size) for address, size in pieces]

    def flat_memory(self, tensor: Any) -> list[memoryview]:
        """Split a flat page, which has its pieces one after the other, into the stored pieces.

        Raises `HostPoolError` if the size is wrong or the tensor is not contiguous host memory.
        """
        whole = _bytes_of(tensor)
        if len(whole) != sum(self.piece_bytes):
            raise HostPoolError(
                f"the page has {len(whole)} bytes; expected {sum(self.piece_bytes)}"
            )
        pieces: list[memoryview] = []
        offset = 0
        for size in self.piece_bytes:
            pieces.append(whole[offset : offset + size])
            offset += size
        return pieces

    def new_page(self) -> Any:
        """Create an empty flat page."""
        return self.pool.get_dummy_flat_data_page()

    def read_page(self, start: int) -> Any:
        """Copy a page from the pool into a flat page."""
        return self.pool.get_data_page(start, flat=True)

    def write_page(self, start: int, page: Any) -> None:
        """Copy a flat page into the pool."""
        self.pool.set_from_flat_data_page(start, page)

    def _meta(self, host_indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        if self.shards > 1:
            return self.pool.get_split_heads_page_buffer_meta(host_indices, self.shards)
        return self.pool.get_page_buffer_meta(host_indices)

    def _probe(self) -> tuple[int, ...] | None:
        """Return the sizes of a page's pieces, from the first page of the pool.

        `None` if a page cannot be accessed in place. That includes `layer_first`, whose pieces are
        many and in another order than in a flat page.
        """
        if self.pool.layout == "layer_first":
            return None
        first = _torch().arange(self.page_size)
        try:
            addresses, sizes = self._meta(first)
        except (NotImplementedError, ValueError):
            return None
        if not 0 < len(addresses) == len(sizes) <= PIECES_MAX * self.shards or 0 in sizes:
            return None
        try:
            for address, size in zip(addresses, sizes, strict=True):
                self._memory_at(address, size)
        except HostPoolError:
            return None
        return tuple(sizes)

    def _flat_bytes(self) -> int:
        try:
            page = self.read_page(0)
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"{type(self.pool).__name__} cannot read pages in the layout {self.pool.layout}: "
                f"{error}"
            ) from error
        return len(_bytes_of(page))

    def _memory_at(self, address: int, size: int) -> memoryview:
        for region in self._regions:
            if region.start <= address and address + size <= region.end:
                offset = address - region.start
                return region.memory[offset : offset + size]
        raise HostPoolError(f"{size} bytes at {address:#x} are not in the registered pool")


class _TensorMemory:
    """The memory of one tensor of the pool. Keeps the tensor alive."""

    def __init__(self, tensor: Any) -> None:
        self.memory = _bytes_of(tensor)
        self.start: int = tensor.data_ptr()
        self.end = self.start + len(self.memory)
        self._tensor = tensor

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA has pinned it."""
        return self._tensor.is_pinned()


def _tensors(pool: Any) -> list[Any]:
    """Return the tensors that hold the pool's pages, as the pool lists them for zero-copy I/O."""
    list_buffers = getattr(pool, "get_hybrid_pool_buffer", None)
    buffers: Any = list_buffers() if list_buffers is not None else pool.kv_buffer
    tensors: list[Any] = [buffers] if hasattr(buffers, "data_ptr") else list(buffers)
    return [tensor for tensor in tensors if tensor is not None and _is_host_memory(tensor)]


def _torch() -> Any:
    """Return the engine's torch."""
    return importlib.import_module("torch")


def _is_host_memory(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel())


def _bytes_of(tensor: Any) -> memoryview:
    """Return a tensor's memory; raises `HostPoolError` if it is not contiguous host memory."""
    if not _is_host_memory(tensor):
        raise HostPoolError("the tensor is not contiguous host memory")
    return memoryview(tensor.detach().reshape(-1).view(_torch().uint8).numpy())

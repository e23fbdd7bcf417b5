"""The pages of an SGLang host pool as plain memory: where each page's bytes lie, and no others."""

import importlib
from collections.abc import Sequence
from typing import Any

from cascadekv.errors import ConfigError

__all__ = ["HostPages", "HostPoolError"]

PIECES_MAX = 8
"""Most runs of memory that a page may consist of; one of more is copied into one run instead."""


class HostPoolError(ValueError):
    """What the engine asks for is not in the pool that it registered."""


class HostPages:
    """One host pool of SGLang's, read and written in place where its layout allows it.

    The page-first layouts keep a page in few runs of memory (K and V, or one where both are
    compressed together): those are the pieces that are stored. In `layer_first` a page is spread
    over every layer; it is copied into one flat page, as SGLang itself does, and is one piece.
    """

    def __init__(self, pool: Any, *, shards: int = 1) -> None:
        """Find out how the pool lays out a page; raises `ConfigError` where it has no way."""
        self.pool = pool
        self.page_size: int = pool.page_size
        self.shards = shards
        """Equal shares of the heads that a page is cut into."""
        self._regions = [_Region(tensor) for tensor in _tensors(pool)]
        pieces = self._probe()
        self.in_place = pieces is not None
        """Whether bytes move between the store and the pool without a copy of the page."""
        self.piece_bytes: tuple[int, ...] = pieces or (self._flat_bytes(),)
        """Size of each piece of a page, in order."""
        if shards > 1 and not self.in_place:
            raise ConfigError(f"tp_lcm_size: the layout {pool.layout!r} keeps no share together")

    @property
    def pieces(self) -> int:
        """Pieces of a page."""
        return len(self.piece_bytes)

    def starts(self, host_indices: Any, pages: int) -> list[int]:
        """Give the first index of each page; raises `HostPoolError` unless there are `pages`."""
        indices: list[int] = host_indices.tolist()
        if len(indices) != pages * self.page_size:
            raise HostPoolError(
                f"{len(indices)} host indices for {pages} pages of {self.page_size} tokens"
            )
        return indices[:: self.page_size]

    def memory(self, host_indices: Any, pages: int) -> list[memoryview]:
        """Give the pieces of pages that lie in place, page by page.

        Raises `HostPoolError` for a piece of another size than at registration, and for one that
        is not in the memory that the pool showed then.
        """
        self.starts(host_indices, pages)
        addresses, sizes = self._meta(host_indices)
        if len(addresses) != pages * self.pieces:
            raise HostPoolError(f"{len(addresses)} pieces for {pages} pages of {self.pieces}")
        if tuple(sizes) != self.piece_bytes * pages:
            raise HostPoolError(f"pieces of other sizes than {self.piece_bytes} at registration")
        places = zip(addresses, sizes, strict=True)
        return [self._memory_at(address, size) for address, size in places]

    def flat_memory(self, tensor: Any) -> list[memoryview]:
        """Cut a flat page as SGLang hands it around into the pieces that are stored.

        A flat page is its pieces one after the other. Raises `HostPoolError` for another size, and
        for a tensor that is not one run of this machine's memory.
        """
        whole = _bytes_of(tensor)
        if len(whole) != sum(self.piece_bytes):
            raise HostPoolError(f"a page of {len(whole)} bytes instead of {sum(self.piece_bytes)}")
        cut: list[memoryview] = []
        at = 0
        for size in self.piece_bytes:
            cut.append(whole[at : at + size])
            at += size
        return cut

    def new_page(self) -> Any:
        """Make an empty flat page."""
        return self.pool.get_dummy_flat_data_page()

    def read_page(self, start: int) -> Any:
        """Copy a page out of the pool."""
        return self.pool.get_data_page(start, flat=True)

    def write_page(self, start: int, page: Any) -> None:
        """Copy a flat page into the pool."""
        self.pool.set_from_flat_data_page(start, page)

    def _meta(self, host_indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        if self.shards > 1:
            return self.pool.get_split_heads_page_buffer_meta(host_indices, self.shards)
        return self.pool.get_page_buffer_meta(host_indices)

    def _probe(self) -> tuple[int, ...] | None:
        """Give the sizes of a page's pieces, by asking for the first page of the pool.

        None for `layer_first`: its runs are many, and in another order than in a flat page.
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
                f"no pages of {type(self.pool).__name__} in {self.pool.layout}: {error}"
            ) from error
        return len(_bytes_of(page))

    def _memory_at(self, address: int, size: int) -> memoryview:
        for region in self._regions:
            if region.start <= address and address + size <= region.end:
                at = address - region.start
                return region.memory[at : at + size]
        raise HostPoolError(f"{size} bytes at {address:#x} are not in the registered pool")


class _Region:
    """The memory of one of the pool's tensors, which it keeps alive."""

    def __init__(self, tensor: Any) -> None:
        self.memory = _bytes_of(tensor)
        self.start: int = tensor.data_ptr()
        self.end = self.start + len(self.memory)


def _tensors(pool: Any) -> list[Any]:
    """Give the tensors that the pool keeps pages in, as it lists them for zero-copy transfer."""
    listed = getattr(pool, "get_hybrid_pool_buffer", None)
    kept: Any = listed() if listed is not None else pool.kv_buffer
    several: list[Any] = [kept] if hasattr(kept, "data_ptr") else list(kept)
    return [tensor for tensor in several if tensor is not None and _is_plain(tensor)]


def _torch() -> Any:
    """Give the engine's torch."""
    return importlib.import_module("torch")


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel())


def _bytes_of(tensor: Any) -> memoryview:
    """Give a tensor's memory; raises `HostPoolError` where it is not one run of this machine's."""
    if not _is_plain(tensor):
        raise HostPoolError("a tensor that is not one run of this machine's memory")
    return memoryview(tensor.detach().reshape(-1).view(_torch().uint8).numpy())

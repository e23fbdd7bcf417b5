"""The memory layout of a worker's KV: from vLLM's description of its tensors to parts and pages.

A stored block of a part is the pages of its layers, one after the other, as opaque bytes: on a CPU,
a page is packed for the instruction set. A page can only be split by heads, and only if each head
is contiguous in it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from cascadekv.connectors.vllm.metadata import Part

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = [
    "HEAD_CONTIGUOUS",
    "PAGE_CONTIGUOUS",
    "HeldPart",
    "LayoutError",
    "Rank",
    "Region",
    "describe",
    "group_specs",
]

HEAD_CONTIGUOUS = ("LBHNC", "BLHNC")
"""Layouts in which each head of a page is contiguous."""
PAGE_CONTIGUOUS = (*HEAD_CONTIGUOUS, "LBNHC", "BLNHC")
"""Layouts in which a page is contiguous."""


class LayoutError(Exception):
    """The KV of this engine cannot be stored, with the reason."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's position in the parallel groups, and the model's KV heads."""

    tensor: int = 0
    tensor_size: int = 1
    context: int = 0
    context_size: int = 1
    kv_heads: int = 1
    """KV heads of the whole model; 1 for multi-head latent attention."""


@dataclass(frozen=True, slots=True)
class Region:
    """The pages of one layer, or of a share of its heads, in the worker's KV memory."""

    offset: int
    stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part that a worker holds, and its memory."""

    part: Part
    regions: tuple[Region, ...]
    is_writer: bool
    """Whether this worker writes the part; of the workers with the same bytes, one does."""
    share: str = ""
    """Which heads and tokens of its layers it has; the same text in every engine."""
    layers: tuple[str, ...] = ()
    """The layer of each region."""


def group_specs(config: "KVCacheConfig") -> list[dict[str, "KVCacheSpec"]]:
    """Return the specification of each layer, by group."""
    groups: list[dict[str, KVCacheSpec]] = []
    for group in config.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        own: Mapping[str, KVCacheSpec] | None = getattr(spec, "kv_cache_specs", None)
        groups.append({name: own[name] if own else spec for name in group.layer_names})
    return groups


def describe(
    config: "KVCacheConfig", rank: Rank, shards: int | None = None, *, pieces: int = 1
) -> list[HeldPart]:
    """Return the parts that a worker holds.

    `shards` is the number of shares into which the whole model's heads are split, so that engines
    of any tensor parallel size up to it can read each other's blocks. Without it, the heads of each
    worker are one share. `pieces` is the number of the attention backend's blocks in one block of
    the engine. Raises `LayoutError` for KV that cannot be stored.
    """
    layout = config.kv_cache_layout or HEAD_CONTIGUOUS[0]
    if layout not in PAGE_CONTIGUOUS:
        raise LayoutError(f"in the KV layout {layout} a page is not contiguous")
    places = {
        layer: (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
    held: list[HeldPart] = []
    for number, specs in enumerate(group_specs(config)):
        if not specs:
            # Another stage of the pipeline has the layers of the group.
            continue
        shares = _shares(rank, shards, _heads_of(specs, rank), layout)
        if len(shares) > 1 and pieces > 1:
            raise LayoutError(
                f"cascade.shards: the attention backend splits a block into {pieces} pieces, so "
                f"that a head is not contiguous; remove the setting, or divide the engine's "
                f"--block-size by {pieces}"
            )
        for each in shares:
            regions = tuple(each.region(*places[layer], specs[layer]) for layer in specs)
            share = each.name
            if rank.context_size > 1:
                share += f"; context {rank.context}/{rank.context_size}"
            name = f"{_layers(list(specs))}; {share}"
            part = Part(name, number, sum(region.page_bytes for region in regions))
            held.append(HeldPart(part, regions, each.is_writer, share, tuple(specs)))
    return held


@dataclass(frozen=True, slots=True)
class _HeadShare:
    """A share of a worker's KV heads that is stored as one part."""

    name: str
    first: int
    """Index of the first head, among this worker's heads."""
    count: int
    worker_heads: int
    is_writer: bool

    def region(self, offset: int, stride: int, spec: "KVCacheSpec") -> Region:
        """Return the share's region in a layer."""
        attention: Any = spec
        # Without the padding at the end of a page, whose size differs between ranks.
        page: int = attention.unpadded_page_size_bytes
        is_by_head = attention.num_heads == self.worker_heads
        if self.count < self.worker_heads and (page % self.worker_heads or not is_by_head):
            message = f"a page of {page} bytes is not {self.worker_heads} heads of equal size"
            raise LayoutError(f"cascade.shards: {message}; remove the setting")
        head = page // self.worker_heads
        if self.count == self.worker_heads:
            return Region(offset, stride, page)
        return Region(offset + self.first * head, stride, self.count * head)


def _heads_of(specs: Mapping[str, "KVCacheSpec"], rank: Rank) -> int:
    """Return the number of this worker's KV heads in each layer of a group."""
    counts = {getattr(spec, "num_kv_heads", None) for spec in specs.values()}
    if len(counts) != 1 or None in counts:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs.values()}))
        raise LayoutError(f"layers of type {kinds} keep a state that is not a sequence of blocks")
    heads = cast("int", counts.pop())
    expected = max(1, rank.kv_heads // rank.tensor_size)
    if rank.kv_heads > 1 and heads != expected:
        raise LayoutError(
            f"a worker has {heads} KV heads; expected {expected}, because {rank.tensor_size} ranks "
            f"share {rank.kv_heads}"
        )
    return heads


def _shares(rank: Rank, shards: int | None, heads: int, layout: str) -> list[_HeadShare]:
    """Split this worker's heads into the shares that are stored separately."""
    replicas = max(1, rank.tensor_size // rank.kv_heads)
    # Ranks with the same heads are replicas or hold the tokens of different contexts. The first
    # rank of each context writes.
    is_writer = rank.tensor % replicas == rank.context
    if rank.kv_heads == 1:
        return [_HeadShare("latent", 0, heads, heads, is_writer)]
    start = rank.tensor // replicas * heads
    size = heads if shards is None else rank.kv_heads // min(shards, rank.kv_heads)
    if shards is not None and (rank.kv_heads % min(shards, rank.kv_heads) or heads % size):
        raise LayoutError(
            f"cascade.shards: {rank.kv_heads} KV heads of {rank.tensor_size} ranks cannot be split "
            f"into {shards} equal shares; use a multiple of the tensor parallel size that divides "
            f"the number of heads"
        )
    if size < heads and layout not in HEAD_CONTIGUOUS:
        raise LayoutError(
            f"cascade.shards: in the KV layout {layout} a head is not contiguous; remove the "
            f"setting, or set VLLM_KV_CACHE_LAYOUT to one of {', '.join(HEAD_CONTIGUOUS)}"
        )
    return [
        _HeadShare(
            f"heads {start + at}-{start + at + size - 1} of {rank.kv_heads}",
            at,
            size,
            heads,
            is_writer,
        )
        for at in range(0, heads, size)
    ]


def _layers(names: Sequence[str]) -> str:
    """Return a readable and unique name for a set of layers."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"{len(names)} layers {names[0]} to {names[-1]} ({digest})"

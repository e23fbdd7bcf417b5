"""Where a worker's KV lies: from vLLM's description of its tensors to parts and pages.

A stored block of a part is the pages of its layers one after the other, as opaque bytes: on a CPU
the inside of a page is packed for the instruction set. Heads are the one thing that is cut out of
a page, and only where each head is one run of bytes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from cascadekv.connectors.vllm.metadata import Part

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = ["HEAD_RUNS", "Held", "LayoutError", "Rank", "Region", "describe", "group_specs"]

HEAD_RUNS = ("LBHNC", "BLHNC")
"""Layouts in which a head of a page is one run of bytes."""
COMPACT = (*HEAD_RUNS, "LBNHC", "BLNHC")
"""Layouts in which a page is one run of bytes."""


class LayoutError(Exception):
    """Why the KV of this engine cannot be kept."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which share of the model a worker has."""

    tensor: int = 0
    tensor_size: int = 1
    context: int = 0
    context_size: int = 1
    kv_heads: int = 1
    """KV heads of the whole model; 1 where one latent stands for all."""


@dataclass(frozen=True, slots=True)
class Region:
    """The pages of one layer, or of some of its heads, in the worker's KV memory."""

    offset: int
    stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """A part that a worker holds, and where."""

    part: Part
    regions: tuple[Region, ...]
    is_writer: bool
    """Whether this worker writes it; another has the same bytes otherwise."""


def group_specs(config: "KVCacheConfig") -> list[dict[str, "KVCacheSpec"]]:
    """Give the specification of each layer, group by group."""
    groups: list[dict[str, KVCacheSpec]] = []
    for group in config.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        own: Mapping[str, KVCacheSpec] | None = getattr(spec, "kv_cache_specs", None)
        groups.append({name: own[name] if own else spec for name in group.layer_names})
    return groups


def describe(config: "KVCacheConfig", rank: Rank, shards: int | None = None) -> list[Held]:
    """Give the parts that a worker holds.

    `shards` is into how many shares of heads the whole model is cut, so that engines of any tensor
    parallel size up to it read each other's blocks; each worker's heads are one share otherwise.
    Raises `LayoutError` for KV that cannot be kept.
    """
    layout = config.kv_cache_layout or HEAD_RUNS[0]
    if layout not in COMPACT:
        raise LayoutError(f"in the KV layout {layout} a block's page is not one run of bytes")
    places = {
        layer: (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
    held: list[Held] = []
    for number, specs in enumerate(group_specs(config)):
        for share in _shares(rank, shards, _heads_of(specs, rank), layout):
            regions = tuple(share.region(*places[layer], specs[layer]) for layer in specs)
            name = f"{_layers(list(specs))}; {share.name}"
            if rank.context_size > 1:
                name += f"; context {rank.context}/{rank.context_size}"
            part = Part(name, number, sum(region.page_bytes for region in regions))
            held.append(Held(part, regions, share.is_writer))
    return held


@dataclass(frozen=True, slots=True)
class _Share:
    name: str
    first: int
    """Of this worker's heads."""
    count: int
    of: int
    """Heads that this worker has."""
    is_writer: bool

    def region(self, offset: int, stride: int, spec: "KVCacheSpec") -> Region:
        page = spec.page_size_bytes
        if page % self.of:
            message = f"a page of {page} bytes is not {self.of} heads of equal size"
            raise LayoutError(message)
        head = page // self.of
        return Region(offset + self.first * head, stride, self.count * head)


def _heads_of(specs: Mapping[str, "KVCacheSpec"], rank: Rank) -> int:
    """Give the KV heads that this worker has in each layer of a group."""
    counts = {getattr(spec, "num_kv_heads", None) for spec in specs.values()}
    if len(counts) != 1 or None in counts:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs.values()}))
        raise LayoutError(f"layers of the kind {kinds} keep a state that is no sequence of blocks")
    heads = cast("int", counts.pop())
    whole = max(1, rank.kv_heads // rank.tensor_size)
    if rank.kv_heads > 1 and heads != whole:
        message = f"a worker has {heads} KV heads where {rank.kv_heads} among {rank.tensor_size}"
        raise LayoutError(f"{message} ranks give {whole}")
    return heads


def _shares(rank: Rank, shards: int | None, heads: int, layout: str) -> list[_Share]:
    """Cut this worker's heads into the shares that are stored apart."""
    if rank.kv_heads == 1:
        return [_Share("latent", 0, heads, heads, rank.tensor == 0)]
    replicas = max(1, rank.tensor_size // rank.kv_heads)
    start = rank.tensor // replicas * heads
    is_writer = rank.tensor % replicas == 0
    size = heads if shards is None else rank.kv_heads // min(shards, rank.kv_heads)
    if shards is not None and (rank.kv_heads % min(shards, rank.kv_heads) or heads % size):
        raise LayoutError(
            f"cascade.shards: {rank.kv_heads} KV heads among {rank.tensor_size} ranks cannot be "
            f"cut into {shards} equal shares; a multiple of the tensor parallel size that divides "
            f"the heads can"
        )
    if size < heads and layout not in HEAD_RUNS:
        raise LayoutError(
            f"cascade.shards: in the KV layout {layout} a head is not one run of bytes; leave "
            f"it out, or set VLLM_KV_CACHE_LAYOUT to one of {', '.join(HEAD_RUNS)}"
        )
    return [
        _Share(
            f"heads {start + at}-{start + at + size - 1} of {rank.kv_heads}",
            at,
            size,
            heads,
            is_writer,
        )
        for at in range(0, heads, size)
    ]


def _layers(names: Sequence[str]) -> str:
    """Name layers for people, and surely."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"{len(names)} layers {names[0]} to {names[-1]} ({digest})"

"""What the blocks of two processes hold, and which runs of bytes they have in common."""

from __future__ import annotations

import contextlib
import json
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from cascadekv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

VERSION = 2
"""Version of the geometry that endpoints exchange, and of their notices."""

Run = tuple[int, int, int, int, int, int, int]
"""Region, offset and bytes of a block here; the same at the peer; bytes that are moved."""


def whole_number(name: str, value: object, *, least: int | None = None) -> int:
    """Return a whole number, which may be NumPy's, as `int`. Raises `ConfigError`."""
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        # An array has the method, too, and raises.
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None or (least is not None and number < least):
        limit = "" if least is None else f" from {least} on"
        raise ConfigError(f"{name}: {value!r} is not a whole number{limit}")
    return number


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the blocks of a process hold. Peers refuse each other if their shapes do not fit."""

    layers: int
    """Layers of the model."""
    block_tokens: int
    """Tokens of a block."""
    heads: int
    """KV heads of the whole model; 1 for MLA, whose keys all ranks have."""
    head_bytes: int
    """Bytes of one head of one token: its elements times their size."""
    heads_first: bool = False
    """Whether a block has all tokens of a head together (HND), or all heads of a token (NHD)."""
    dtype: str = ""
    """The format of an element, such as `bfloat16`. Only compared."""
    model: str = ""
    """What identifies the weights. Only compared."""
    rank: int = 0
    """This process's tensor-parallel rank."""
    ranks: int = 1
    """Number of tensor-parallel ranks. More ranks than heads share heads."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        for name in ("layers", "block_tokens", "heads", "head_bytes", "ranks"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=1))
        object.__setattr__(self, "rank", whole_number("rank", self.rank))
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank: {self.rank} is not below ranks={self.ranks}")
        larger, smaller = max(self.heads, self.ranks), min(self.heads, self.ranks)
        if larger % smaller:
            raise ConfigError(f"heads: {self.heads} heads cannot be split over {self.ranks} ranks")

    @property
    def own_heads(self) -> range:
        """The heads of this rank."""
        count = max(1, self.heads // self.ranks)
        first = self.rank * self.heads // self.ranks
        return range(first, first + count)

    @property
    def region_block_bytes(self) -> int:
        """Bytes of one block in one of the arrays of this rank."""
        return self.block_tokens * len(self.own_heads) * self.head_bytes


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory at an address, such as a tensor's: `Memory(address=t.data_ptr(), bytes=n, owner=t)`.

    It must stay mapped while `owner` lives.
    """

    address: int
    bytes: int
    owner: object
    gpu: int | None = None
    """Index of the GPU whose memory it is; only RDMA reaches it. Default: memory of the host."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The paged KV of one layer. MLA has keys alone; formats with scales have them beside.

    Each is a writable buffer, or `Memory`, with `block_count` blocks one after the other.
    """

    keys: Buffer | Memory
    values: Buffer | Memory | None = None
    scales: Buffer | Memory | None = None
    scale_bytes: int = 0
    """Bytes of the scales of one block. They are copied whole."""


def parts_of(layer: Layer, shape: Shape) -> dict[str, int]:
    """Return the arrays of a layer, in the order of registration, and the bytes of a block."""
    parts = {"keys": shape.region_block_bytes}
    if layer.values is not None:
        parts["values"] = shape.region_block_bytes
    if layer.scales is not None:
        parts["scales"] = whole_number("scale_bytes", layer.scale_bytes, least=1)
    return parts


@dataclass(frozen=True)
class Geometry:
    """The geometry of a peer, compared with that of this process."""

    shape: Shape
    block_count: int
    regions: dict[tuple[int, str], int]

    @classmethod
    def parse(cls, geometry: bytes, own: Shape, parts: Sequence[dict[str, int]]) -> Geometry:
        """Read the peer's geometry; raise `ConfigError` if blocks cannot be exchanged.

        `parts` has the arrays of each layer of this process, and the bytes of a block in each.
        """
        try:
            fields = json.loads(geometry)
            version = fields["version"]
            if version != VERSION:
                raise ConfigError(f"the peer has geometry version {version}, this one {VERSION}")
            shape = Shape(**fields["shape"])
            regions = {(layer, part): number for layer, part, number, _ in fields["regions"]}
            theirs = {(layer, part): count for layer, part, _, count in fields["regions"]}
            other = cls(shape, fields["block_count"], regions)
            sizes = [shape.layers, shape.block_tokens, shape.heads, shape.head_bytes, shape.rank]
            numbers = [*sizes, shape.ranks, other.block_count, *regions.values(), *theirs.values()]
            if not all(type(it) is int and 0 <= it < 1 << 63 for it in numbers):
                raise ConfigError("the peer's geometry has numbers that are none")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the peer's geometry cannot be read: {error}") from error
        _check_shape(own, shape)
        ours = {(layer, part): it[part] for layer, it in enumerate(parts) for part in it}
        _check_parts(ours, theirs)
        return other


def _check_shape(own: Shape, shape: Shape) -> None:
    # Ranks may differ, and with more than one rank the order of heads and tokens must agree.
    for name in ("layers", "block_tokens", "heads", "head_bytes", "heads_first"):
        ours, theirs = getattr(own, name), getattr(shape, name)
        if ours != theirs:
            raise ConfigError(f"{name}: the peer has {theirs}, this process {ours}")
    for name in ("dtype", "model"):
        ours, theirs = getattr(own, name), getattr(shape, name)
        if ours and theirs and ours != theirs:
            raise ConfigError(f"{name}: the peer has {theirs!r}, this process {ours!r}")


def _check_parts(ours: dict[tuple[int, str], int], theirs: dict[tuple[int, str], int]) -> None:
    for layer, part in ours:
        if (layer, part) not in theirs:
            raise ConfigError(f"layer {layer}: the peer has no {part}")
    for layer, part in theirs:
        if (layer, part) not in ours:
            raise ConfigError(f"layer {layer}: this process has no {part}, the peer has")
    # Keys and values of a rank follow from its shape.
    for (layer, part), count in ours.items():
        if part == "scales" and theirs[layer, part] != count:
            raise ConfigError(
                f"layer {layer}: scales: the peer has {theirs[layer, part]} bytes in a block, "
                f"this process {count}"
            )


def common_runs(own: Shape, other: Shape) -> list[tuple[int, int, int]]:
    """Return the runs of a block that both ranks have: offset here, offset there, bytes."""
    common = range(
        max(own.own_heads.start, other.own_heads.start),
        min(own.own_heads.stop, other.own_heads.stop),
    )
    if not common:
        return []
    here, there = common.start - own.own_heads.start, common.start - other.own_heads.start
    if own.heads_first:
        head_bytes = own.block_tokens * own.head_bytes
        return [(here * head_bytes, there * head_bytes, len(common) * head_bytes)]
    token_here = len(own.own_heads) * own.head_bytes
    token_there = len(other.own_heads) * own.head_bytes
    bytes_each = len(common) * own.head_bytes
    if token_here == token_there == bytes_each:
        return [(0, 0, own.block_tokens * bytes_each)]
    return [
        (
            token * token_here + here * own.head_bytes,
            token * token_there + there * own.head_bytes,
            bytes_each,
        )
        for token in range(own.block_tokens)
    ]

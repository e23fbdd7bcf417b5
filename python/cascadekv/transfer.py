"""Move blocks of paged KV between the memory of two processes, such as prefill and decode engines.

Each process makes an `Endpoint` over its paged KV and connects to the other. Blocks are written
into the peer's pages, or read from them, layer by layer; the receiver is told by request and layer,
after the bytes have arrived.

>>> import numpy
>>> from cascadekv import transfer
>>> shape = transfer.Shape(layers=2, block_tokens=16, heads=4, head_bytes=64)
>>> def engine():
...     pages = [numpy.zeros((8, shape.region_block_bytes), "uint8") for _ in range(4)]
...     layers = [transfer.Layer(keys=pages[0], values=pages[1]),
...               transfer.Layer(keys=pages[2], values=pages[3])]
...     return pages, transfer.Endpoint(layers, shape=shape, block_count=8)
>>> (source, prefill), (target, decode) = engine(), engine()
>>> source[2][5] = 7
>>> address = decode.listen("127.0.0.1:0")
>>> with prefill, decode:
...     peer = prefill.connect(address, timeout=10)
...     peer.write("request 1", transfer.Blocks([5], [3]), layers=[1], timeout=10).wait(timeout=10)
...     print(decode.next_arrival(timeout=10))
...     bool((target[2][3] == 7).all())
Arrival(request='request 1', layer=1, blocks=[3], group=0, start=0)
True
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from cascadekv._native import TransportConnection, TransportEndpoint, TransportTicket
from cascadekv.errors import AwayError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Buffer

__all__ = ["Arrival", "Blocks", "Endpoint", "Layer", "Memory", "Peer", "Shape", "Transfer"]

VERSION = 1
"""Version of the geometry that endpoints exchange, and of their notices."""

_NOTICE_BYTES_MAX = 4096


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
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is less than 1")
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

    It must be host memory and stay mapped while `owner` lives.
    """

    address: int
    bytes: int
    owner: object


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


@dataclass(frozen=True)
class Blocks:
    """Which pages are moved: `local[i]` of this process belongs to `remote[i]` of the peer."""

    local: Sequence[int]
    remote: Sequence[int]
    group: int = 0
    """The engine's group of KV caches. Only handed over."""
    start: int = 0
    """Position in the request of the first block of the lists. Only handed over."""


class Arrival(NamedTuple):
    """Blocks of a request that have arrived in this process."""

    request: str
    layer: int
    blocks: list[int]
    """Pages of this process; empty if the list did not fit the notice."""
    group: int
    start: int
    """Position in the request of the first of the blocks."""


class Endpoint:
    """The paged KV of this process, for peers to read and write."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        shape: Shape,
        block_count: int,
        name: str = "cascade",
        token: str | bytes | None = None,
    ) -> None:
        """Register the memory of all layers.

        `token`, of at least 16 characters, must be the same in both processes. Without one, only
        addresses of this host are listened on.
        """
        if len(layers) != shape.layers:
            raise ConfigError(f"layers: {len(layers)} are given, the shape has {shape.layers}")
        self.shape = shape
        self.block_count = block_count
        self.parts = [_parts(layer, shape) for layer in layers]
        """The arrays of each layer, and the bytes of a block in each."""
        # Regions are numbered from 0 in the order in which they are registered below.
        names = [(index, part) for index, parts in enumerate(self.parts) for part in parts]
        numbered = [[layer, part, number] for number, (layer, part) in enumerate(names)]
        geometry = {
            "version": VERSION,
            "shape": asdict(shape),
            "block_count": block_count,
            "regions": numbered,
        }
        self._native = TransportEndpoint(
            name=name, geometry=json.dumps(geometry).encode(), accepts=self._refusal, token=token
        )
        self.regions: dict[tuple[int, str], int] = {}
        """Numbers of the regions of this process, by layer and part."""
        for index, layer in enumerate(layers):
            for part, block_bytes in self.parts[index].items():
                number = self._register(getattr(layer, part), part, block_bytes)
                self.regions[index, part] = number

    def _register(self, memory: Buffer | Memory, part: str, block_bytes: int) -> int:
        expected = self.block_count * block_bytes
        given = memory.bytes if isinstance(memory, Memory) else memoryview(memory).nbytes
        if given != expected:
            raise ConfigError(
                f"{part}: {given} bytes are given; {self.block_count} blocks of {block_bytes} "
                f"bytes are {expected}"
            )
        if isinstance(memory, Memory):
            return self._native.register_address(
                memory.address, memory.bytes, access="both", owner=memory.owner
            )
        return self._native.register(memory, access="both")

    def _refusal(self, geometry: bytes) -> str | None:
        try:
            _Other.parse(geometry, self.shape)
        except ConfigError as error:
            return str(error)
        return None

    @property
    def id(self) -> bytes:
        """Identifies this endpoint: 16 random bytes."""
        return self._native.id

    @property
    def peer_count(self) -> int:
        """Peers that are connected to this process."""
        return self._native.peer_count

    def listen(self, address: str) -> str:
        """Listen on `IP:PORT` or `unix:PATH`. Port 0 takes a free one; returns the address."""
        return self._native.listen(address)

    def connect(self, address: str, *, timeout: float) -> Peer:
        """Connect to `HOST:PORT` or `unix:PATH`.

        Raises `RefusedError` if the shapes, versions or tokens do not fit.
        """
        return Peer(self, address, *self.open(address, timeout=timeout))

    def open(self, address: str, *, timeout: float) -> tuple[TransportConnection, _Other]:
        """Make a connection; for `Peer`."""
        connection = self._native.connect(address, timeout=timeout)
        return connection, _Other.parse(connection.geometry, self.shape)

    def next_arrival(self, *, timeout: float) -> Arrival | None:
        """Return the oldest arrival that was not returned yet, or `None` if none comes in time."""
        notice = self._native.next_notice(timeout=timeout)
        return None if notice is None else _arrival(notice[1])

    def close(self) -> None:
        """End the listeners and the connections that they accepted."""
        self._native.close()

    def __enter__(self) -> Self:
        """Use as a context manager that closes the endpoint."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the endpoint."""
        self.close()


def _parts(layer: Layer, shape: Shape) -> dict[str, int]:
    """Return the arrays of a layer, in the order of registration, and the bytes of a block."""
    parts = {"keys": shape.region_block_bytes}
    if layer.values is not None:
        parts["values"] = shape.region_block_bytes
    if layer.scales is not None:
        if layer.scale_bytes < 1:
            raise ConfigError("scale_bytes: give the bytes of the scales of one block")
        parts["scales"] = layer.scale_bytes
    return parts


@dataclass(frozen=True)
class _Other:
    """The geometry of a peer, compared with that of this process."""

    shape: Shape
    block_count: int
    regions: dict[tuple[int, str], int]

    @classmethod
    def parse(cls, geometry: bytes, own: Shape) -> _Other:
        """Read the peer's geometry; raise `ConfigError` if blocks cannot be exchanged."""
        try:
            fields = json.loads(geometry)
            version = fields["version"]
            if version != VERSION:
                raise ConfigError(f"the peer has geometry version {version}, this one {VERSION}")
            shape = Shape(**fields["shape"])
            regions = {(layer, part): number for layer, part, number in fields["regions"]}
            other = cls(shape, int(fields["block_count"]), regions)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the peer's geometry cannot be read: {error}") from error
        # Ranks may differ, and with more than one rank the order of heads and tokens must agree.
        for name in ("layers", "block_tokens", "heads", "head_bytes", "heads_first"):
            ours, theirs = getattr(own, name), getattr(shape, name)
            if ours != theirs:
                raise ConfigError(f"{name}: the peer has {theirs}, this process {ours}")
        for name in ("dtype", "model"):
            ours, theirs = getattr(own, name), getattr(shape, name)
            if ours and theirs and ours != theirs:
                raise ConfigError(f"{name}: the peer has {theirs!r}, this process {ours!r}")
        return other


class Peer:
    """A connected peer. Any number of threads may use it."""

    def __init__(
        self, endpoint: Endpoint, address: str, connection: TransportConnection, other: _Other
    ) -> None:
        """Use `Endpoint.connect`."""
        self._endpoint = endpoint
        self._connection = connection
        self._other = other
        self.address = address

    @property
    def shape(self) -> Shape:
        """What the blocks of the peer hold."""
        return self._other.shape

    @property
    def is_connected(self) -> bool:
        """Whether blocks can be moved: false once the connection was lost or closed."""
        return self._connection.is_open

    def reconnect(self, *, timeout: float) -> None:
        """Connect again after the connection was lost."""
        self._connection.close()
        self._connection, self._other = self._endpoint.open(self.address, timeout=timeout)

    def write(
        self,
        request: str,
        blocks: Blocks,
        *,
        layers: Iterable[int] | None = None,
        tell: bool = True,
        timeout: float,
    ) -> Transfer:
        """Start to write pages of this process into pages of the peer, of these layers or of all.

        With `tell`, the peer gets an `Arrival` for each layer after its bytes. The pages must not
        change until the transfer has ended. `timeout` is that of the start.
        """
        told = request if tell else None
        return self._move(self._connection.write, blocks, layers, told, timeout)

    def read(
        self,
        request: str,
        blocks: Blocks,
        *,
        layers: Iterable[int] | None = None,
        tell: bool = False,
        timeout: float,
    ) -> Transfer:
        """Start to read pages of the peer into pages of this process.

        With `tell`, the peer gets an `Arrival` for each layer after its bytes have left, with its
        own pages. The local pages must not be used until the transfer has ended.
        """
        told = request if tell else None
        return self._move(self._connection.read, blocks, layers, told, timeout)

    def _move(
        self,
        post: Callable[..., TransportTicket],
        blocks: Blocks,
        layers: Iterable[int] | None,
        request: str | None,
        timeout: float,
    ) -> Transfer:
        own = self._endpoint
        _check_blocks("local", blocks.local, own.block_count)
        _check_blocks("remote", blocks.remote, self._other.block_count)
        lists = list(blocks.local), list(blocks.remote)
        tickets: dict[int, TransportTicket] = {}
        for layer in range(own.shape.layers) if layers is None else layers:
            notice = None if request is None else _notice(request, layer, blocks)
            tickets[layer] = post(self._runs(layer), lists, notice=notice, timeout=timeout)
        return Transfer(tickets)

    def _runs(self, layer: int) -> list[tuple[int, int, int, int, int, int, int]]:
        """Return the runs of bytes of one block of a layer, for all of its arrays."""
        own, other = self._endpoint, self._other
        if not 0 <= layer < own.shape.layers:
            raise ConfigError(f"layers: there is no layer {layer} of {own.shape.layers}")
        runs: list[tuple[int, int, int, int, int, int, int]] = []
        for part, block_bytes in own.parts[layer].items():
            here = own.regions[layer, part]
            there = other.regions.get((layer, part))
            if there is None:
                raise ConfigError(f"layer {layer}: the peer has no {part}")
            if part == "scales":
                runs.append((here, 0, block_bytes, there, 0, block_bytes, block_bytes))
                continue
            strides = own.shape.region_block_bytes, other.shape.region_block_bytes
            runs += [
                (here, at, strides[0], there, other_at, strides[1], count)
                for at, other_at, count in _common_runs(own.shape, other.shape)
            ]
        return runs

    def close(self) -> None:
        """Close the connection. Transfers that have not ended fail."""
        self._connection.close()


class Transfer:
    """Blocks that are being moved, layer by layer."""

    def __init__(self, tickets: dict[int, TransportTicket]) -> None:
        """Use `Peer.write` or `Peer.read`."""
        self._tickets = tickets

    def wait_for_layer(self, layer: int, *, timeout: float) -> None:
        """Wait until the blocks of one layer have arrived."""
        ticket = self._tickets.get(layer)
        if ticket is None:
            raise ConfigError(f"layer {layer} is not part of this transfer")
        ticket.wait(timeout=timeout)

    def wait(self, *, timeout: float) -> None:
        """Wait until all blocks have arrived. After `DeadlineError` the transfer goes on."""
        for ticket in self._tickets.values():
            ticket.wait(timeout=timeout)

    def cancel(self, *, timeout: float) -> None:
        """End the transfer. Afterwards it does not access pages of this process any more.

        Pages of the peer that were to be written hold arbitrary bytes. A connection that does not
        answer in time is closed.
        """
        for ticket in self._tickets.values():
            ticket.cancel(timeout=timeout)


def _check_blocks(name: str, blocks: Sequence[int], count: int) -> None:
    wrong = [block for block in blocks if not 0 <= block < count]
    if wrong:
        raise ConfigError(f"{name}: there is no block {wrong[0]} of {count}")


def _common_runs(own: Shape, other: Shape) -> list[tuple[int, int, int]]:
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


def _notice(request: str, layer: int, blocks: Blocks) -> bytes:
    position = blocks.group, blocks.start
    full = json.dumps([VERSION, request, layer, list(blocks.remote), *position]).encode()
    if len(full) <= _NOTICE_BYTES_MAX:
        return full
    short = json.dumps([VERSION, request, layer, [], *position]).encode()
    if len(short) > _NOTICE_BYTES_MAX:
        raise ConfigError(f"request: its name has {len(request)} characters, which is too long")
    return short


def _arrival(notice: bytes) -> Arrival:
    try:
        version, request, layer, blocks, group, start = json.loads(notice)
        blocks = [int(block) for block in blocks]
        arrival = Arrival(str(request), int(layer), blocks, int(group), int(start))
    except (ValueError, TypeError) as error:
        raise AwayError(f"a peer sent a notice that cannot be read: {error}") from error
    if version != VERSION:
        raise AwayError(f"a peer sent a notice of version {version}, this is {VERSION}")
    return arrival

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

import contextlib
import json
import logging
import operator
import threading
import time
import weakref
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from cascadekv._native import TransportConnection, TransportEndpoint, TransportTicket
from cascadekv.errors import ConfigError, DeadlineError, ForkError
from cascadekv.transfer.notices import Arrival, Blocks, arrival_of, notice_of
from cascadekv.transfer.settings import (
    DEFAULT_HEARTBEAT,
    Heartbeat,
    Rdma,
    Tls,
    times_of,
    use_rdma,
)
from cascadekv.transfer.shape import (
    VERSION,
    Geometry,
    Layer,
    Memory,
    Run,
    Shape,
    common_runs,
    parts_of,
    whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Buffer

__all__ = [
    "Arrival",
    "Blocks",
    "Endpoint",
    "Heartbeat",
    "Layer",
    "Memory",
    "Peer",
    "Rdma",
    "Shape",
    "Tls",
    "Transfer",
]

log = logging.getLogger(__name__)


class Endpoint:
    """The paged KV of this process, for peers to read and write."""

    def __init__(  # noqa: PLR0913 # each is named by its caller
        self,
        layers: Sequence[Layer],
        *,
        shape: Shape,
        block_count: int,
        name: str = "cascade",
        token: str | bytes | None = None,
        tls: Tls | None = None,
        rdma: Rdma | None = None,
        streams: int = 1,
        heartbeat: Heartbeat | None = DEFAULT_HEARTBEAT,
    ) -> None:
        """Register the memory of all layers.

        `token`, of at least 16 characters, must be the same in both processes. Without one, and
        without `tls` that requires client certificates, only addresses of this host are listened
        on, for processes of this user. A Unix socket has no TLS. `rdma` makes connections over TCP
        use RDMA. Large batches to a peer are divided among `streams` TCP streams, at most 16. With
        `heartbeat=None`, a peer that freezes is noticed by the deadlines of calls only.
        """
        if len(layers) != shape.layers:
            raise ConfigError(f"layers: {len(layers)} are given, the shape has {shape.layers}")
        self.shape = shape
        self.block_count = block_count = whole_number("block_count", block_count, least=1)
        self.parts = [parts_of(layer, shape) for layer in layers]
        """The arrays of each layer, and the bytes of a block in each."""
        # Regions are numbered from 0 in the order in which they are registered below.
        names = [(index, part) for index, parts in enumerate(self.parts) for part in parts]
        numbered = [
            [layer, part, number, self.parts[layer][part]]
            for number, (layer, part) in enumerate(names)
        ]
        geometry = {
            "version": VERSION,
            "shape": asdict(shape),
            "block_count": block_count,
            "regions": numbered,
        }
        self._native = TransportEndpoint(
            name=name,
            geometry=json.dumps(geometry).encode(),
            # Not a method: the native endpoint would keep this one, and its pages, for ever.
            accepts=partial(_refusal, shape, self.parts),
            token=token,
            tls=tls,
            streams=streams,
            heartbeat=times_of(heartbeat),
        )
        # At the exit of the interpreter, too, while handshakes that wait for it can still end.
        weakref.finalize(self, _end, self._native)
        self.rdma_device = None if rdma is None else use_rdma(self._native, rdma)
        """Name of the RDMA device; `None` if there is none."""
        self.regions: dict[tuple[int, str], int] = {}
        """Numbers of the regions of this process, by layer and part."""
        for index, layer in enumerate(layers):
            for part, block_bytes in self.parts[index].items():
                name = f"layer {index}: {part}"
                number = self._register(getattr(layer, part), name, block_bytes)
                self.regions[index, part] = number

    def _register(self, memory: Buffer | Memory, name: str, block_bytes: int) -> int:
        expected = self.block_count * block_bytes
        given = memory.bytes if isinstance(memory, Memory) else _buffer_bytes(name, memory)
        if given != expected:
            raise ConfigError(
                f"{name}: {given} bytes are given; {self.block_count} blocks of {block_bytes} "
                f"bytes are {expected}"
            )
        if isinstance(memory, Memory) and memory.gpu is not None:
            return self._native.register_gpu(
                memory.address,
                memory.bytes,
                device=memory.gpu,
                access="both",
                owner=memory.owner,
            )
        if isinstance(memory, Memory):
            return self._native.register_address(
                memory.address, memory.bytes, access="both", owner=memory.owner
            )
        return self._native.register(memory, access="both")

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

        Raises `RefusedError` if the shapes, versions, tokens or certificates do not fit, or if only
        one side has TLS; `ConfigError` if RDMA is required and the peer has none, or if the address
        has no port.
        """
        return Peer(self, address, *self.open(address, timeout=timeout))

    def open(self, address: str, *, timeout: float) -> tuple[TransportConnection, Geometry]:
        """Make a connection; for `Peer`."""
        connection = self._native.connect(address, timeout=timeout)
        if connection.no_rdma is not None:
            log.warning("%s: blocks move by TCP: %s", address, connection.no_rdma)
        return connection, Geometry.parse(connection.geometry, self.shape, self.parts)

    def next_arrival(self, *, timeout: float) -> Arrival | None:
        """Return the oldest arrival that was not returned yet, or `None` if none comes in time.

        Raises `AwayError` if the endpoint is closed and none waits.
        """
        notice = self._native.next_notice(timeout=timeout)
        return (
            None if notice is None else arrival_of(notice[1], self.shape.layers, self.block_count)
        )

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


def _end(native: TransportEndpoint) -> None:
    """End the listeners of an endpoint that is not used any more, in the process that made it."""
    with contextlib.suppress(ForkError):
        native.close()


def _buffer_bytes(name: str, memory: Buffer) -> int:
    """Return the length of a writable buffer."""
    try:
        view = memoryview(memory)
    except TypeError as error:
        raise ConfigError(f"{name}: neither a buffer nor `Memory`: {error}") from error
    if view.readonly or not view.c_contiguous:
        raise ConfigError(f"{name}: the buffer is read-only or has gaps")
    return view.nbytes


def _refusal(shape: Shape, parts: list[dict[str, int]], geometry: bytes) -> str | None:
    try:
        Geometry.parse(geometry, shape, parts)
    except ConfigError as error:
        return str(error)
    return None


class Peer:
    """A connected peer. Any number of threads may use it."""

    def __init__(
        self, endpoint: Endpoint, address: str, connection: TransportConnection, other: Geometry
    ) -> None:
        """Use `Endpoint.connect`."""
        self._endpoint = endpoint
        self._connection = connection
        self._other = other
        self._reconnecting = threading.Lock()
        self.address = address

    @property
    def shape(self) -> Shape:
        """What the blocks of the peer hold."""
        return self._other.shape

    @property
    def shares_heads(self) -> bool:
        """Whether the ranks of both processes have heads in common, and so blocks to exchange."""
        return bool(common_runs(self._endpoint.shape, self._other.shape))

    @property
    def transport(self) -> str:
        """How blocks move: `tcp`, `unix` (through a Unix socket), `shm` or `rdma`."""
        return self._connection.transport

    @property
    def tls(self) -> Literal["kernel", "userspace"] | None:
        """What encrypts the connection; `None` without TLS."""
        return self._connection.tls

    @property
    def is_connected(self) -> bool:
        """Whether blocks can be moved: false once the connection was lost or closed.

        Also without a call, by the heartbeat of the endpoint.
        """
        return self._connection.is_open

    def reconnect(self, *, timeout: float) -> None:
        """Connect again after the connection was lost; by one thread at a time.

        Does nothing while the connection is there: another thread has made it again.
        """
        end = time.monotonic() + timeout
        if not self._reconnecting.acquire(timeout=max(0.0, timeout)):
            raise DeadlineError(f"{self.address}: another thread still connects")
        try:
            if not self._connection.is_open:
                self._connection.close()
                left = max(0.0, end - time.monotonic())
                self._connection, self._other = self._endpoint.open(self.address, timeout=left)
        finally:
            self._reconnecting.release()

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
        told = _told(request) if tell else None
        return self._move(blocks, layers, told, timeout, is_write=True)

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
        told = _told(request) if tell else None
        return self._move(blocks, layers, told, timeout, is_write=False)

    def _move(
        self,
        blocks: Blocks,
        layers: Iterable[int] | None,
        request: str | None,
        timeout: float,
        *,
        is_write: bool,
    ) -> Transfer:
        own = self._endpoint
        post = self._connection.write if is_write else self._connection.read
        lists = (
            _checked("local", blocks.local, own.block_count, is_target=not is_write),
            _checked("remote", blocks.remote, self._other.block_count, is_target=is_write),
        )
        place = whole_number("group", blocks.group), whole_number("start", blocks.start)
        blocks = Blocks(*lists, *place)
        # Everything is checked before anything is moved.
        runs: dict[int, list[Run]] = {}
        for given in range(own.shape.layers) if layers is None else layers:
            layer = operator.index(given)
            if layer in runs:
                raise ConfigError(f"layers: layer {layer} is given twice")
            runs[layer] = self._runs(layer)
        tickets: dict[int, TransportTicket] = {}
        left = _countdown(timeout)
        for layer, runs_of_layer in runs.items():
            notice = None if request is None else notice_of(request, layer, blocks)
            tickets[layer] = post(runs_of_layer, lists, notice=notice, timeout=left())
        return Transfer(tickets)

    def _runs(self, layer: int) -> list[Run]:
        """Return the runs of bytes of one block of a layer, for all of its arrays."""
        own, other = self._endpoint, self._other
        if not 0 <= layer < own.shape.layers:
            raise ConfigError(f"layers: there is no layer {layer} of {own.shape.layers}")
        runs: list[Run] = []
        common = common_runs(own.shape, other.shape)
        if not common:
            raise ConfigError(
                f"rank {own.shape.rank} of {own.shape.ranks} here and rank {other.shape.rank} of "
                f"{other.shape.ranks} at the peer have no heads in common"
            )
        for part, block_bytes in own.parts[layer].items():
            here = own.regions[layer, part]
            there = other.regions[layer, part]
            if part == "scales":
                runs.append((here, 0, block_bytes, there, 0, block_bytes, block_bytes))
                continue
            strides = own.shape.region_block_bytes, other.shape.region_block_bytes
            runs += [
                (here, at, strides[0], there, other_at, strides[1], count)
                for at, other_at, count in common
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
        left = _countdown(timeout)
        for ticket in self._tickets.values():
            ticket.wait(timeout=left())

    def cancel(self, *, timeout: float) -> None:
        """End the transfer. Afterwards it does not access pages of this process any more.

        Pages of the peer that were to be written hold arbitrary bytes. Over TCP and Unix sockets it
        returns within 0.2 s. It waits for what RDMA has begun, and closes a connection that has
        not ended it in time.
        """
        left = _countdown(timeout)
        for ticket in self._tickets.values():
            ticket.cancel(timeout=left())


def _told(request: object) -> str:
    """Return the name of a request that the peer is told of."""
    if not isinstance(request, str):
        raise ConfigError(f"request: {request!r} is no text")
    return request


def _countdown(timeout: float) -> Callable[[], float]:
    """Return what is left of a time-out that several calls share; the first one has all of it."""
    start, is_first = time.monotonic(), True

    def left() -> float:
        nonlocal is_first
        if is_first:
            is_first = False
            return timeout
        return max(0.0, start + timeout - time.monotonic())

    return left


def _checked(name: str, blocks: Sequence[int], count: int, *, is_target: bool) -> list[int]:
    """Return a list of blocks as plain numbers. Nothing is written to a block twice."""
    numbers = [operator.index(block) for block in blocks]
    wrong = [block for block in numbers if not 0 <= block < count]
    if wrong:
        raise ConfigError(f"{name}: there is no block {wrong[0]} of {count}")
    if is_target and len(set(numbers)) < len(numbers):
        twice = next(block for block, times in Counter(numbers).items() if times > 1)
        raise ConfigError(f"{name}: block {twice} is given twice")
    return numbers

"""What engines tell each other when a prefill engine writes into a decode engine's pages.

The decode engine announces where a request's blocks belong; the prefill engine tells it of each
layer after its bytes, or that it will not write. Messages are notices of the transport, in JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

__all__ = [
    "ANNOUNCE",
    "LAYER",
    "LIST_BYTES_MAX",
    "REFUSE",
    "SECONDS_MAX",
    "WITHDRAW",
    "Announcement",
    "PartTarget",
    "Written",
    "message",
    "page_list",
    "parse_page_list",
]

VERSION = 2
ANNOUNCE, WITHDRAW = "announce", "withdraw"
"""From the decode engine: its pages; that it does not wait any more."""
LAYER, REFUSE = "layer", "refuse"
"""From the prefill engine: blocks of a layer that have arrived; that it will not write."""
LIST_BYTES_MAX = 16 << 20
"""Most bytes of a list of pages."""
SECONDS_MAX = 3600.0
NOT_KEPT = -1
"""In a list of pages: the decode engine does not keep the block."""


@dataclass(frozen=True)
class Announcement:
    """Where a worker of a decode engine wants the blocks of one request."""

    push: int
    """A random number that names this push."""
    transfer: str
    """What both requests are known by."""
    prompt: str
    """Digest of the prompt: blocks of another one are not wanted."""
    tokens: int
    """Tokens of the prompt."""
    address: str
    endpoint: str
    """Of the worker: where it listens, and the ID of its endpoint."""
    rank: int
    workers: int
    window: int
    """The region that the pages are written through. It exists while they may be written."""
    list_region: int
    list_bytes: int
    """Where the list of pages can be read."""
    seconds: float
    """How long the worker waits."""
    is_declined: bool = False
    """The worker wants no blocks: there is neither a window nor a list."""

    def to_message(self) -> bytes:
        """Return the notice."""
        return json.dumps([ANNOUNCE, VERSION, asdict(self)]).encode()

    @classmethod
    def parse(cls, version: object, fields: Mapping[str, Any]) -> "Announcement":
        """Read what a peer sent. Raises `ValueError`, `TypeError` or `KeyError`."""
        if version != VERSION:
            raise ValueError(f"version {version!r} of an announcement, this is {VERSION}")
        read = cls(
            push=int(fields["push"]),
            transfer=str(fields["transfer"]),
            prompt=str(fields["prompt"]),
            tokens=int(fields["tokens"]),
            address=str(fields["address"]),
            endpoint=str(fields["endpoint"]),
            rank=int(fields["rank"]),
            workers=int(fields["workers"]),
            window=int(fields["window"]),
            list_region=int(fields["list_region"]),
            list_bytes=int(fields["list_bytes"]),
            seconds=min(float(fields["seconds"]), SECONDS_MAX),
            is_declined=fields.get("is_declined") is True,
        )
        has_list = read.is_declined or 0 < read.list_bytes <= LIST_BYTES_MAX
        if not 0 <= read.rank < read.workers or not has_list:
            raise ValueError(f"rank {read.rank} of {read.workers}, {read.list_bytes} bytes")
        return read


@dataclass(frozen=True, slots=True)
class PartTarget:
    """Where the units of one part belong."""

    sources: list[int]
    """By layer: rank of the prefill engine's worker that writes it."""
    first: int
    """Number of the first unit in the prompt."""
    units: list[int]
    """By unit of the prompt from the first on: its place, or `NOT_KEPT`."""


@dataclass(frozen=True, slots=True)
class Written:
    """Units of one layer that have arrived."""

    push: int
    part: str
    layer: int
    """The part of the decode engine's worker, and the number of the layer in it."""
    first: int
    end: int

    def to_message(self) -> bytes:
        """Return the notice."""
        return json.dumps(
            [LAYER, VERSION, [self.push, self.part, self.layer, self.first, self.end]]
        ).encode()

    @classmethod
    def parse(cls, version: object, fields: Sequence[Any]) -> "Written":
        """Read what a peer sent. Raises `ValueError` or `TypeError`."""
        if version != VERSION:
            raise ValueError(f"version {version!r} of a notice, this is {VERSION}")
        push, part, layer, first, end = fields
        return cls(int(push), str(part), int(layer), int(first), int(end))


def message(kind: str, push: int, reason: str = "") -> bytes:
    """Return the notice that a push is withdrawn or refused."""
    return json.dumps([kind, VERSION, [push, reason[:500]]]).encode()


def page_list(parts: Mapping[str, PartTarget]) -> bytearray:
    """Return a list of pages as peers read it."""
    listed = {name: [part.sources, part.first, part.units] for name, part in parts.items()}
    return bytearray(json.dumps(listed).encode())


def parse_page_list(text: bytes | bytearray) -> dict[str, PartTarget]:
    """Read a list of pages. Raises `ValueError` or `TypeError`."""
    listed = json.loads(text)
    if not isinstance(listed, dict):
        raise TypeError("a list of pages is no mapping")
    parts = cast("dict[str, Any]", listed)
    return {
        str(name): PartTarget(
            [int(source) for source in sources], int(first), [int(unit) for unit in units]
        )
        for name, (sources, first, units) in parts.items()
    }

"""Where a worker's blocks are in its registered memory, as peers learn it when they connect.

Engines may have blocks of different sizes: pages are moved in units that both have, which are the
blocks of the attention backend. They may also have different numbers of ranks: the layers and heads
of a worker are then those of several workers of the peer, or some of one's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.layout import HeldPart
    from cascadekv.connectors.vllm.metadata import Load
    from cascadekv.connectors.vllm.offers import Offer

__all__ = ["Geometry", "GeometryError", "HeldLayer", "PartPages", "Ranks", "holders"]

VERSION = 2
_OWN_FIELDS = frozenset(("block_tokens", "attention"))
"""Fields of the manifest that depend on the size of a block, and are compared otherwise."""


class GeometryError(ValueError):
    """Pages cannot be moved between two engines, with the reason."""


@dataclass(frozen=True)
class Ranks:
    """The numbers of an engine's parallel ranks, for messages."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __str__(self) -> str:
        """Return them as a message has them."""
        text = f"{self.tensor} tensor and {self.pipeline} pipeline parallel ranks"
        return text if self.context == 1 else f"{text}, {self.context} of them for the context"


@dataclass(frozen=True)
class PartPages:
    """The pages of a part: some layers and heads."""

    name: str
    group: int
    regions: tuple[tuple[int, int, int], ...]
    """By layer: offset of page 0, distance between units, bytes of a unit."""
    pieces: int
    """Units of a block."""
    share: str
    """Which heads and tokens of the layers these are."""
    layers: tuple[str, ...]
    """Their names: a layer with the same name and share has the same bytes in every engine."""
    window: int | None = None
    """Tokens that a token sees in these layers, with itself; `None`: all. Of this engine's only."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.pieces * sum(unit for _, _, unit in self.regions)

    def run(
        self, layer: int, theirs: "PartPages", their_layer: int, here: int, there: int
    ) -> tuple[int, int, int, int, int, int, int]:
        """Return the run of a unit of a layer, in the transport's form.

        `here` and `there` are the regions. Raises `GeometryError`.
        """
        own, own_stride, unit = self.regions[layer]
        other, their_stride, their_unit = theirs.regions[their_layer]
        if unit != their_unit:
            raise GeometryError(
                f"{self.layers[layer]}, {self.share}: the peer's pages have {their_unit} bytes a "
                f"unit, this engine's {unit}"
            )
        return here, own, own_stride, there, other, their_stride, unit


@dataclass(frozen=True)
class HeldLayer:
    """A layer of a part at a worker of a peer."""

    worker: int
    """Number of the worker."""
    part: PartPages
    """The part of it there."""
    layer: int
    """Its number in that part."""


@dataclass(frozen=True)
class Geometry:
    """The pages of one worker."""

    facts: Mapping[str, str]
    """What must be equal in both engines."""
    rank: int
    workers: int
    block_tokens: int
    unit_tokens: int
    parts: tuple[PartPages, ...]
    ranks: Ranks = Ranks()

    @classmethod
    def of(  # noqa: PLR0913 # each is named by its caller
        cls,
        held: Sequence["HeldPart"],
        manifest: Mapping[str, str],
        *,
        rank: int,
        workers: int,
        block_tokens: int,
        pieces: int,
        interleave: int = 1,
        ranks: Ranks | None = None,
        windows: Mapping[int, int] | None = None,
    ) -> "Geometry":
        """Describe a worker whose blocks are `pieces` blocks of the attention backend each.

        With context parallel ranks, `block_tokens` are those of a block on all of them, of which
        each has `interleave` in turn. `windows` are the groups that have a sliding window.
        """
        ranks = ranks or Ranks()
        if ranks.context > 1 and block_tokens // ranks.context // pieces % interleave:
            # The tokens of a piece are not in sequence over all ranks: whole blocks move.
            pieces = 1
        attention = manifest.get("attention", "").partition(";")[0]
        facts = {name: text for name, text in manifest.items() if name not in _OWN_FIELDS}
        parts = tuple(_part(each, pieces, (windows or {}).get(each.part.group)) for each in held)
        own = {**facts, "attention": attention}
        return cls(own, rank, workers, block_tokens, block_tokens // pieces, parts, ranks)

    def to_json(self) -> bytes:
        """Return what peers get. Shares of a group have the same layers, which are sent once."""
        layers = list(dict.fromkeys(part.layers for part in self.parts))
        fields = {
            "version": VERSION,
            "facts": dict(self.facts),
            "rank": self.rank,
            "workers": self.workers,
            "ranks": [self.ranks.tensor, self.ranks.pipeline, self.ranks.context],
            "block_tokens": self.block_tokens,
            "unit_tokens": self.unit_tokens,
            "layers": layers,
            "parts": [
                [p.name, p.group, p.pieces, p.share, layers.index(p.layers), p.regions]
                for p in self.parts
            ],
        }
        return json.dumps(fields).encode()

    @classmethod
    def parse(cls, text: bytes) -> "Geometry":
        """Read what a peer sent. Raises `GeometryError`."""
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields["version"]
            read = cls._of_fields(fields) if version == VERSION else None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise GeometryError(f"the peer's geometry cannot be read: {error!r}") from error
        if read is None:
            raise GeometryError(f"the peer's geometry has version {version}, this is {VERSION}")
        if min((read.block_tokens, read.unit_tokens, *(part.pieces for part in read.parts))) < 1:
            raise GeometryError("the peer's geometry has blocks without tokens")
        if any(len(part.layers) != len(part.regions) for part in read.parts):
            raise GeometryError("the peer's geometry has layers without pages")
        return read

    @classmethod
    def _of_fields(cls, fields: Mapping[str, Any]) -> "Geometry":
        layers = [tuple(str(name) for name in names) for names in fields["layers"]]
        parts = tuple(
            PartPages(
                str(name),
                int(group),
                tuple((int(o), int(s), int(u)) for o, s, u in regions),
                int(pieces),
                str(share),
                layers[int(number)],
            )
            for name, group, pieces, share, number, regions in fields["parts"]
        )
        tensor, pipeline, context = fields["ranks"]
        return cls(
            {str(name): str(text) for name, text in fields["facts"].items()},
            int(fields["rank"]),
            int(fields["workers"]),
            int(fields["block_tokens"]),
            int(fields["unit_tokens"]),
            parts,
            Ranks(int(tensor), int(pipeline), int(context)),
        )

    def check(self, other: "Geometry") -> None:
        """Raise `GeometryError` if the peer's KV is not this engine's byte for byte."""
        for name in sorted({*self.facts, *other.facts}):
            if self.facts.get(name) != other.facts.get(name):
                raise GeometryError(
                    f"{name}: the peer has {other.facts.get(name)!r}, this engine "
                    f"{self.facts.get(name)!r}"
                )
        if self.unit_tokens != other.unit_tokens:
            raise GeometryError(
                f"the peer moves pages in units of {other.unit_tokens} tokens, this engine in "
                f"units of {self.unit_tokens}; use the same --block-size and attention backend in "
                f"both"
            )

    def page_lists(
        self, part: PartPages, theirs: PartPages, load: "Load", offer: "Offer"
    ) -> tuple[list[int], list[int]]:
        """Return the units of a load's blocks here, and those of the same tokens at the peer.

        Raises `GeometryError` if the offer lacks one.
        """
        their_pieces = theirs.pieces
        remote = offer.blocks[theirs.group] if theirs.group < len(offer.blocks) else []
        units = -(-offer.tokens // self.unit_tokens)
        here: list[int] = []
        there: list[int] = []
        for at, page in enumerate(load.blocks[part.group]):
            if not page:
                continue
            first = (load.first + at) * part.pieces
            for unit in range(first, min(first + part.pieces, units)):
                block, piece = divmod(unit, their_pieces)
                if block >= len(remote) or not remote[block]:
                    raise GeometryError(f"the offer has no page for block {block} of {part.name}")
                here.append(page * part.pieces + unit - first)
                there.append(remote[block] * their_pieces + piece)
        return here, there


def holders(own: Geometry, peers: Sequence[Geometry]) -> list[list[HeldLayer]]:
    """Return who holds each layer of each part of a worker, of all workers of a peer.

    Of workers with the same bytes, that is the first one. Raises `GeometryError` if none does.
    """
    known: dict[tuple[str, str], HeldLayer] = {}
    for worker, peer in enumerate(peers):
        for part in peer.parts:
            for number, layer in enumerate(part.layers):
                known.setdefault((layer, part.share), HeldLayer(worker, part, number))
    found: list[list[HeldLayer]] = []
    for part in own.parts:
        held = [known.get((layer, part.share)) for layer in part.layers]
        missing = [layer for layer, each in zip(part.layers, held, strict=True) if each is None]
        if missing:
            theirs = peers[0].ranks if peers else Ranks()
            raise GeometryError(
                f"no worker of the prefill engine has {part.share} of {missing[0]}: it has "
                f"{theirs}, this engine has {own.ranks}; with different numbers of tensor parallel "
                f"ranks, both need the same setting cascade.shards"
            )
        found.append([each for each in held if each is not None])
    return found


def _part(held: "HeldPart", pieces: int, window: int | None) -> PartPages:
    regions: list[tuple[int, int, int]] = []
    for region in held.regions:
        if pieces > 1 and region.stride != region.page_bytes:
            raise GeometryError(
                f"{held.part.name}: blocks of {pieces} pieces are not contiguous in this layout"
            )
        regions.append((region.offset, region.stride // pieces, region.page_bytes // pieces))
    part = held.part
    return PartPages(part.name, part.group, tuple(regions), pieces, held.share, held.layers, window)

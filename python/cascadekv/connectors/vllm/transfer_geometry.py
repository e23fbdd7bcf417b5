"""Where a worker's blocks are in its registered memory, as peers learn it when they connect.

Engines may have blocks of different sizes: pages are moved in units that both have, which are the
blocks of the attention backend.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.layout import HeldPart
    from cascadekv.connectors.vllm.metadata import Load
    from cascadekv.connectors.vllm.offers import Offer

__all__ = ["Geometry", "GeometryError", "PartPages"]

VERSION = 1
_OWN_FIELDS = frozenset(("block_tokens", "attention"))
"""Fields of the manifest that depend on the size of a block, and are compared otherwise."""


class GeometryError(ValueError):
    """Pages cannot be moved between two engines, with the reason."""


@dataclass(frozen=True)
class PartPages:
    """The pages of a part: some layers and heads."""

    name: str
    group: int
    regions: tuple[tuple[int, int, int], ...]
    """By layer: offset of page 0, distance between units, bytes of a unit."""
    pieces: int
    """Units of a block."""
    window: int | None = None
    """Tokens that a token sees in these layers, with itself; `None`: all. Of this engine's only."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.pieces * sum(unit for _, _, unit in self.regions)

    def runs(
        self, theirs: "PartPages", here: int, there: int, layer: int | None = None
    ) -> list[tuple[int, int, int, int, int, int, int]]:
        """Return the runs of a unit, in the transport's form, of all layers or of one.

        `here` and `there` are the regions. Raises `GeometryError`.
        """
        units = [unit for _, _, unit in self.regions], [unit for _, _, unit in theirs.regions]
        if units[0] != units[1]:
            raise GeometryError(
                f"{self.name}: the peer's pages have {sum(units[1])} bytes a unit, this engine's "
                f"{sum(units[0])}"
            )
        both = list(zip(self.regions, theirs.regions, strict=True))
        return [
            (here, own, own_stride, there, other, their_stride, unit)
            for (own, own_stride, unit), (other, their_stride, _) in (
                both if layer is None else both[layer : layer + 1]
            )
        ]


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
        windows: Mapping[int, int] | None = None,
    ) -> "Geometry":
        """Describe a worker whose blocks are `pieces` blocks of the attention backend each.

        `windows` are the groups that have a sliding window.
        """
        attention = manifest.get("attention", "").partition(";")[0]
        facts = {name: text for name, text in manifest.items() if name not in _OWN_FIELDS}
        parts = tuple(_part(each, pieces, (windows or {}).get(each.part.group)) for each in held)
        own = {**facts, "attention": attention}
        return cls(own, rank, workers, block_tokens, block_tokens // pieces, parts)

    def to_json(self) -> bytes:
        """Return what peers get."""
        fields = {
            "version": VERSION,
            "facts": dict(self.facts),
            "rank": self.rank,
            "workers": self.workers,
            "block_tokens": self.block_tokens,
            "unit_tokens": self.unit_tokens,
            "parts": [[p.name, p.group, p.pieces, list(p.regions)] for p in self.parts],
        }
        return json.dumps(fields).encode()

    @classmethod
    def parse(cls, text: bytes) -> "Geometry":
        """Read what a peer sent. Raises `GeometryError`."""
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields["version"]
            parts = tuple(
                PartPages(
                    str(name),
                    int(group),
                    tuple((int(o), int(s), int(u)) for o, s, u in regions),
                    int(pieces),
                )
                for name, group, pieces, regions in fields["parts"]
            )
            facts = {str(name): str(text) for name, text in fields["facts"].items()}
            rank, workers = int(fields["rank"]), int(fields["workers"])
            block_tokens, unit_tokens = int(fields["block_tokens"]), int(fields["unit_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GeometryError(f"the peer's geometry cannot be read: {error!r}") from error
        if version != VERSION:
            raise GeometryError(f"the peer's geometry has version {version}, this is {VERSION}")
        if block_tokens < 1 or unit_tokens < 1 or any(part.pieces < 1 for part in parts):
            raise GeometryError("the peer's geometry has blocks without tokens")
        return cls(facts, rank, workers, block_tokens, unit_tokens, parts)

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
                f"the peer's attention backend has blocks of {other.unit_tokens} tokens, this "
                f"engine's of {self.unit_tokens}"
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


def _part(held: "HeldPart", pieces: int, window: int | None) -> PartPages:
    regions: list[tuple[int, int, int]] = []
    for region in held.regions:
        if pieces > 1 and region.stride != region.page_bytes:
            raise GeometryError(
                f"{held.part.name}: blocks of {pieces} pieces are not contiguous in this layout"
            )
        regions.append((region.offset, region.stride // pieces, region.page_bytes // pieces))
    return PartPages(held.part.name, held.part.group, tuple(regions), pieces, window)

"""What a receiver is told of blocks: a notice for each layer of a request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from cascadekv.errors import AwayError, ConfigError
from cascadekv.transfer.shape import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOTICE_BYTES_MAX = 4096


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


def notice_of(request: str, layer: int, blocks: Blocks) -> bytes:
    """Write the notice of a layer, without the pages where they do not fit."""
    position = blocks.group, blocks.start
    full = json.dumps([VERSION, request, layer, list(blocks.remote), *position]).encode()
    if len(full) <= _NOTICE_BYTES_MAX:
        return full
    short = json.dumps([VERSION, request, layer, [], *position]).encode()
    if len(short) > _NOTICE_BYTES_MAX:
        raise ConfigError(f"request: its name has {len(request)} characters, which is too long")
    return short


def arrival_of(notice: bytes, layers: int, block_count: int) -> Arrival:
    """Read a notice; raise `AwayError` if it is not one, or names what this process has not."""
    try:
        fields: list[object] = json.loads(notice)
        version, request, layer, blocks, group, start = fields
        numbers = [layer, group, start, *cast("list[object]", blocks)]
    except (ValueError, TypeError, RecursionError) as error:
        raise AwayError(f"a peer sent a notice that cannot be read: {error}") from error
    if version != VERSION:
        raise AwayError(f"a peer sent a notice of version {version}, this is {VERSION}")
    if not isinstance(request, str) or any(type(it) is not int for it in numbers):
        raise AwayError("a peer sent a notice whose fields have other types")
    layer, group, start, *listed = cast("list[int]", numbers)
    if not 0 <= layer < layers or not all(0 <= block < block_count for block in listed):
        raise AwayError(f"a peer sent a notice of layer {layer} or of blocks that are not here")
    return Arrival(request, layer, listed, group, start)

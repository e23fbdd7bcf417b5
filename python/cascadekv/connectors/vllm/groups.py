"""How much of a request each of the engine's KV cache groups needs to go on from a block.

Full attention needs every block before it; a sliding window only the last ones. A prefix is usable
as far as all groups have what they need there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cascadekv import Hints, Store
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.layout import LayoutError, group_specs
from cascadekv.connectors.vllm.metadata import Part

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["Group", "groups_of", "usable"]


@dataclass(frozen=True, slots=True)
class Group:
    """One of the engine's KV cache groups."""

    number: int
    window_blocks: int | None = None
    """Last blocks that it needs; every one when there is no window."""


def groups_of(config: "KVCacheConfig", block_tokens: int, context_size: int = 1) -> list[Group]:
    """Describe the groups. Raises `LayoutError` for one whose KV cannot be kept.

    `block_tokens` are those of a block on all of `context_size` context parallel ranks.
    """
    groups: list[Group] = []
    for number, specs in enumerate(group_specs(config)):
        kinds = {type(spec).__name__ for spec in specs.values()}
        spec: Any = next(iter(specs.values()))
        tokens = spec.block_size * (context_size if versions.is_context_sharded(spec) else 1)
        if tokens != block_tokens:
            raise LayoutError(f"groups with blocks of {tokens} and {block_tokens} tokens")
        if kinds <= {"FullAttentionSpec", "MLAAttentionSpec"}:
            groups.append(Group(number))
        elif kinds == {"SlidingWindowSpec"}:
            groups.append(Group(number, -(-(spec.sliding_window - 1) // block_tokens)))
        else:
            raise LayoutError(f"layers of the kind {', '.join(sorted(kinds))} are not supported")
    return groups


def usable(
    store: Store,
    groups: Sequence[Group],
    parts: Sequence[Part],
    keys: RequestKeys,
    hints: Hints,
) -> tuple[str, ...]:
    """Give the slowest tier of each leading block that every group can use."""
    whole = {group.number for group in groups if group.window_blocks is None}
    tiers: list[str] | None = None
    for part in parts:
        if part.group not in whole:
            continue
        most = keys.blocks if tiers is None else len(tiers)
        match = store.lookup_prefix(keys.keys(part.name, 0, most), hints=hints)
        tiers = _slower(match.tiers, tiers)
        if not tiers:
            return ()
    windows = {group.number: group.window_blocks for group in groups if group.window_blocks}
    present = [
        (windows[part.group], store.contains(keys.keys(part.name, 0, keys.blocks)))
        for part in parts
        if part.group in windows
    ]
    most = keys.blocks if tiers is None else len(tiers)
    for end in range(most, 0, -1):
        if all(all(there[max(0, end - window) : end]) for window, there in present):
            return tuple((tiers or [""] * most)[:end])
    return ()


def _slower(tiers: Sequence[str], others: Sequence[str] | None) -> list[str]:
    """Join what two parts say of the same blocks. DRAM is the fastest tier."""
    if others is None:
        return list(tiers)
    pairs = zip(tiers, others, strict=False)
    return [there if there != "dram" else other for there, other in pairs]

"""Which blocks of a prefix each of the engine's KV cache groups needs.

Full attention needs every block of the prefix; a sliding window needs the last ones. A prefix is
usable if every group has the blocks that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cascadekv import Hints, Store
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.layout import LayoutError, group_specs
from cascadekv.connectors.vllm.metadata import Part
from cascadekv.connectors.windows import complete_windows

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["CacheGroup", "groups_of", "usable_prefix"]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of the engine's KV cache groups."""

    number: int
    window_blocks: int | None = None
    """Number of last blocks that the group needs; `None`: all blocks."""


def groups_of(
    config: "KVCacheConfig", block_tokens: int, context_size: int = 1
) -> list[CacheGroup]:
    """Return the KV cache groups. Raises `LayoutError` if the KV of one cannot be stored.

    `block_tokens` counts the tokens of a block on all `context_size` context parallel ranks.
    """
    groups: list[CacheGroup] = []
    for number, specs in enumerate(group_specs(config)):
        kinds = {type(spec).__name__ for spec in specs.values()}
        spec: Any = next(iter(specs.values()))
        tokens = spec.block_size * (context_size if versions.is_context_sharded(spec) else 1)
        if tokens != block_tokens:
            raise LayoutError(
                f"its KV cache groups have blocks of {tokens} and {block_tokens} tokens"
            )
        if kinds <= {"FullAttentionSpec", "MLAAttentionSpec"}:
            groups.append(CacheGroup(number))
        elif kinds == {"SlidingWindowSpec"}:
            # The next token sees itself and `sliding_window - 1` tokens of the prefix.
            groups.append(CacheGroup(number, -(-(spec.sliding_window - 1) // block_tokens)))
        else:
            raise LayoutError(f"layers of type {', '.join(sorted(kinds))} are not supported")
    return groups


def usable_prefix(
    store: Store,
    groups: Sequence[CacheGroup],
    parts: Sequence[Part],
    keys: RequestKeys,
    hints: Hints,
) -> tuple[str, ...]:
    """Return the slowest tier of each block of the longest prefix that every group can use."""
    full_groups = {group.number for group in groups if group.window_blocks is None}
    tiers: list[str] | None = None
    for part in parts:
        if part.group not in full_groups:
            continue
        # Each part can only shorten the prefix.
        most = keys.blocks if tiers is None else len(tiers)
        match = store.lookup_prefix(keys.keys(part.name, 0, most), hints=hints)
        tiers = _slower(match.tiers, tiers)
        if not tiers:
            return ()
    most = keys.blocks if tiers is None else len(tiers)
    windows = {group.number: group.window_blocks for group in groups if group.window_blocks}
    complete = [
        complete_windows(store.contains(keys.keys(part.name, 0, most)), windows[part.group])
        for part in parts
        if part.group in windows
    ]
    # The longest prefix first: a window may be complete at a long prefix and not at shorter ones.
    for end in range(most, 0, -1):
        if all(ends[end - 1] for ends in complete):
            return tuple((tiers or [""] * most)[:end])
    return ()


def _slower(tiers: Sequence[str], others: Sequence[str] | None) -> list[str]:
    """Return the slower tier of each block, for two parts of a prefix. DRAM is the fastest."""
    if others is None:
        return list(tiers)
    pairs = zip(tiers, others, strict=False)
    return [tier if tier != "dram" else other for tier, other in pairs]

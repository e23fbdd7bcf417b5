"""Which blocks of a prefix each of the engine's KV cache groups needs.

Full attention needs every block of the prefix; a sliding window needs the last ones. A prefix is
usable if every group has the blocks that it needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cascadekv import Hints, Store
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.layout import LayoutError, group_specs
from cascadekv.connectors.vllm.metadata import Part
from cascadekv.connectors.windows import (
    complete_windows,
    first_needed_block,
    next_computed_token,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = [
    "CacheGroup",
    "UsablePrefix",
    "groups_of",
    "lacks_pages",
    "pages_of",
    "usable_prefix",
    "windows_of",
]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of the engine's KV cache groups."""

    number: int
    window: int | None = None
    """Tokens that a token sees, with itself; `None`: all tokens before it."""


@dataclass(frozen=True, slots=True)
class UsablePrefix:
    """The longest prefix that every group can use, and the shorter ones."""

    tiers: tuple[str, ...] = ()
    """The slowest tier of each of its blocks."""
    ends: tuple[bool, ...] | None = None
    """For each block, whether the prefix that ends there is usable; `None`: every one is."""

    def longest(self, most: int) -> int:
        """Return the number of blocks of the longest usable prefix of at most `most` blocks."""
        end = max(0, min(most, len(self.tiers)))
        while self.ends is not None and end and not self.ends[end - 1]:
            end -= 1
        return end


def groups_of(
    config: "KVCacheConfig", block_tokens: int, context_size: int = 1
) -> list[CacheGroup]:
    """Return the KV cache groups. Raises `LayoutError` if the KV of one cannot be stored.

    `block_tokens` counts the tokens of a block on all `context_size` context parallel ranks.
    """
    windows = windows_of(config)
    groups: list[CacheGroup] = []
    for number, specs in enumerate(_specs(config)):
        kinds = {type(spec).__name__ for spec in specs}
        spec: Any = specs[0]
        tokens = spec.block_size * (context_size if versions.is_context_sharded(spec) else 1)
        if tokens != block_tokens:
            raise LayoutError(
                f"its KV cache groups have blocks of {tokens} and {block_tokens} tokens"
            )
        if not (kinds <= {"FullAttentionSpec", "MLAAttentionSpec"} or number in windows):
            raise LayoutError(f"layers of type {', '.join(sorted(kinds))} are not supported")
        groups.append(CacheGroup(number, windows.get(number)))
    return groups


def windows_of(config: "KVCacheConfig") -> dict[int, int]:
    """Return the window of each group that has one."""
    return {
        number: max(_kept_window(spec) for spec in specs)
        for number, specs in enumerate(_specs(config))
        if {type(spec).__name__ for spec in specs} == {"SlidingWindowSpec"}
    }


def _specs(config: "KVCacheConfig") -> list[list["KVCacheSpec"]]:
    """Return the specifications of each group, also of one whose layers are in other stages."""
    return [
        list(specs.values()) or [group.kv_cache_spec]
        for specs, group in zip(group_specs(config), config.kv_cache_groups, strict=True)
    ]


def _kept_window(spec: "KVCacheSpec") -> int:
    """Return the window for which the engine keeps pages.

    Some draft models compute tokens again, so that it keeps more pages than attention reads. It
    shares them later, so they are loaded too.
    """
    window: Any = spec
    return window.sliding_window + getattr(window, "extra_retained_tokens", 0)


def pages_of(
    tables: Sequence[Sequence[int]], groups: Sequence[CacheGroup], first: int, last: int
) -> dict[int, list[int]]:
    """Return blocks `first` to `last` of each group's table, the latter excluded."""
    return {group.number: list(tables[group.number][first:last]) for group in groups}


def lacks_pages(
    pages: Mapping[int, Sequence[int]], groups: Sequence[CacheGroup], prefix: tuple[int, int, int]
) -> bool:
    """Whether the engine keeps no page for a block that it needs, of blocks that are loaded.

    `pages` has the page of each block by group, 0 for one that is not kept. `prefix` are the first
    of these blocks, the next token to be computed, and the tokens of a block.
    """
    first, next_token, block_tokens = prefix
    return any(
        not all(pages[group.number][max(0, needed - first) :])
        for group in groups
        for needed in (first_needed_block(next_token, group.window, block_tokens),)
    )


def usable_prefix(  # noqa: PLR0913 # each is independent
    store: Store,
    groups: Sequence[CacheGroup],
    parts: Sequence[Part],
    keys: RequestKeys,
    hints: Hints,
    *,
    tokens: int,
    block_tokens: int,
) -> UsablePrefix:
    """Return the longest prefix of a request of `tokens` tokens that every group can use.

    `keys` may have more blocks: a request may grow while its blocks are looked up.
    """
    windows = {group.number: group.window for group in groups if group.window is not None}
    most = min(keys.blocks, tokens // block_tokens)
    tiers: list[str] | None = None
    for part in parts:
        if part.group in windows or not most:
            continue
        # Each part can only shorten the prefix.
        match = store.lookup_prefix(keys.keys(part.name, 0, most), hints=hints)
        tiers = _slower(match.tiers, tiers)
        most = len(tiers)
    if not most:
        return UsablePrefix()
    usable = [True] * most
    for part in parts:
        if part.group not in windows:
            continue
        window = windows[part.group]

        def first_needed(end: int, window: int = window) -> int:
            next_token = next_computed_token(end * block_tokens, tokens)
            return first_needed_block(next_token, window, block_tokens)

        present = store.contains(keys.keys(part.name, 0, most))
        complete = complete_windows(present, first_needed)
        usable = [both and own for both, own in zip(usable, complete, strict=True)]
    # A window may be complete at a long prefix and not at shorter ones.
    whole = UsablePrefix(tuple(tiers or [""] * most), tuple(usable) if windows else None)
    end = whole.longest(most)
    return UsablePrefix(whole.tiers[:end], whole.ends and whole.ends[:end])


def _slower(tiers: Sequence[str], others: Sequence[str] | None) -> list[str]:
    """Return the slower tier of each block, for two parts of a prefix. DRAM is the fastest."""
    if others is None:
        return list(tiers)
    pairs = zip(tiers, others, strict=False)
    return [tier if tier != "dram" else other for tier, other in pairs]

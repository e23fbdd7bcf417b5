"""The types of `Store.stats()`: plain dictionaries, ready for JSON."""

from typing import Literal, TypedDict


class TierHits(TypedDict):
    """Hits of one tier; `matched_blocks` over all tiers is the number of matched blocks."""

    blocks: int
    bytes: int
    matched_blocks: int


class PoolStats(TypedDict):
    """The memory pool."""

    capacity_bytes: int
    requested_bytes: int
    reserved_bytes: int
    magazine_bytes: int
    free_bytes: int
    largest_free_bytes: int
    huge_bytes: int


class StageStats(TypedDict):
    """One tier below DRAM."""

    blocks: int
    used_bytes: int
    capacity_bytes: int
    files: int
    damaged_blocks: int
    damaged_structures: int
    encryption: str | None
    notes: list[str]


class StageHealth(TypedDict):
    """Circuit breakers of a tier below DRAM. While reads are `open`, its blocks count as absent."""

    state: Literal["healthy", "open", "probing"]
    since_unix_ms: int
    opened_count: int
    last_error: str | None
    stuck_calls: int
    reads: Literal["healthy", "open", "probing"]
    writes: Literal["healthy", "open", "probing"]


class ShadowRates(TypedDict):
    """Blocks of chain lookups: actual matches, and matches simulated by a shadow cache."""

    blocks_requested: int
    blocks_matched: int
    blocks_simulated: int
    blocks_predicted: int


class ShadowFigure(TypedDict):
    """The shadow cache of a tier at another capacity; 100 percent calibrates the others."""

    tier: str
    capacity_percent: int
    capacity_bytes: int
    sampled_one_in: int
    recent: ShadowRates
    since_start: ShadowRates


class Stats(TypedDict):
    """Counters since the store was opened, and its present contents.

    `hits + misses + get_failures == gets`. `hits_by_tier` sums to `hits`. `content_bytes` counts
    deduplicated bytes once. The hit rate is
    `(blocks_matched + direct_matched) / (blocks_requested + direct_requested)`.
    """

    requests: int
    blocks_requested: int
    blocks_matched: int
    direct_requested: int
    direct_matched: int
    gets: int
    hits: int
    misses: int
    shed_gets: int
    get_failures: int
    bytes_read: int
    puts: int
    stored: int
    deduplicated: int
    present: int
    conflicts: int
    declined: int
    put_failures: int
    bytes_written: int
    evicted_blocks: int
    evicted_bytes: int
    lost_blocks: int
    demoted_blocks: int
    demoted_bytes: int
    promoted_blocks: int
    promoted_bytes: int
    demote_failures: int
    shed_puts: int
    demote_declines: int
    name_failures: int
    reclaimed_blocks: int
    damaged_blocks: int
    prefetched_blocks: int
    prefetched_used: int
    hits_by_tier: dict[str, TierHits]
    keys: int
    contents: int
    content_bytes: int
    dram_blocks: int
    dram_bytes: int
    protected_blocks: int
    protection_refused: int
    catalog_bytes: int
    pending_bytes: int
    insight_bytes: int
    shadows: list[ShadowFigure]
    pool: PoolStats
    stages: dict[str, StageStats]
    health: dict[str, StageHealth]
    notes: list[str]

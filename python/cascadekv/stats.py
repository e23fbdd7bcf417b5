"""What a store holds and did, at one moment: plain dictionaries, ready for JSON."""

from typing import Literal, TypedDict


class TierHits(TypedDict):
    """One tier's share of the hits; `matched_blocks` over all tiers is what was matched."""

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
    notes: list[str]


class StageHealth(TypedDict):
    """Whether a tier below DRAM is read and written; not read, it counts as having no block."""

    state: Literal["healthy", "open", "probing"]
    since_unix_ms: int
    opened_count: int
    last_error: str | None
    stuck_calls: int
    reads: Literal["healthy", "open", "probing"]
    writes: Literal["healthy", "open", "probing"]


class ShadowRates(TypedDict):
    """Blocks of chain lookups: what was, and what a shadow's size would have given."""

    blocks_requested: int
    blocks_matched: int
    blocks_simulated: int
    blocks_predicted: int


class ShadowFigure(TypedDict):
    """A tier at another size; 100 percent is the calibration."""

    tier: str
    capacity_percent: int
    capacity_bytes: int
    sampled_one_in: int
    recent: ShadowRates
    since_start: ShadowRates


class Stats(TypedDict):
    """Counters since the store was opened (`hits + misses + get_failures == gets`), and contents.

    `content_bytes` counts equal bytes once; `hits_by_tier` adds up to `hits`. The hit rate is
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

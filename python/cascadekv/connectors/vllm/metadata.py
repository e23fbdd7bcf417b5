"""Messages between the scheduler and the workers: plain data that is sent between processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cascadekv.connectors.vllm.adapters import AdapterUse
from cascadekv.connectors.vllm.offers import PullPlan, PushPlan, TransferPlan

__all__ = [
    "SLOW_TIERS",
    "Load",
    "LoadResult",
    "LoadTime",
    "Part",
    "Save",
    "SaveResult",
    "StepPlan",
    "WorkerFacts",
    "WorkerReport",
]

SLOW_TIERS = frozenset(("files",))
"""Tiers whose blocks take long to read: their loads do not block a step."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of every block that is stored separately: some layers and some KV heads of the model.

    Workers that hold the same part hold the same bytes; one of them writes it.
    """

    name: str
    """The layers and heads; the same text on every rank and in every process."""
    group: int
    """The engine's KV cache group of the layers."""
    block_bytes: int
    """Bytes of the part in one block."""


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """A worker's description of its KV cache, sent to the scheduler once."""

    manifest: dict[str, str]
    """The fields of the compatibility manifest; the same on every worker."""
    parts: list[Part]
    """The parts that this worker holds."""
    is_timed: bool = True
    """Whether loads and steps are measured by the clock of the device that makes them."""
    listener: tuple[str, str] | None = None
    """Where peers read its pages: address, and ID of the endpoint."""
    refusal: str | None = None
    """Why this worker's KV cannot be stored; if set, the engine stores and loads nothing."""
    doubt: str | None = None
    """Why its KV must not be used by other runs of the engine; `None` if it may."""


@dataclass(slots=True)
class Load:
    """Blocks of one request to load."""

    request: str
    is_async: bool
    first: int
    """Index in the request of the first block to load."""
    keys: dict[str, bytes]
    """By part: 32 bytes for each block."""
    blocks: dict[int, list[int]]
    """By group: the page of each block; 0 for a block that the group does not keep."""
    tier: str
    """The slowest tier of the blocks, of those that the scheduler looks up."""
    trace: str | None = None
    """The request's trace, as a `traceparent` header."""
    parents: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """By part: the key of the block before the first one."""
    pull: PullPlan | None = None
    """If set, the blocks are read from a prefill engine instead of the store."""
    push: PushPlan | None = None
    """If set, a prefill engine writes the blocks."""
    has_windows: bool = False
    """Whether a group has a sliding window: then the load succeeds or fails as a whole."""
    adapter: AdapterUse | None = None
    """The adapter that the blocks depend on."""


@dataclass(slots=True)
class Save:
    """Blocks of one request to save."""

    request: str
    first: int
    """Index in the request of the first block to save."""
    keys: dict[str, bytes]
    """By part: 32 bytes for each block."""
    parents: dict[str, bytes | None]
    """By part: the key of the block before the first one."""
    blocks: dict[int, list[int]]
    """By group: the page of each block; 0 for a block that the group does not keep any more."""
    depends_on: dict[int, list[int]]
    """By group: the pages of all blocks that these blocks were computed from."""
    trace: str | None = None
    """The request's trace, as a `traceparent` header."""
    plan: int = 0
    """The number of the plan that it is part of."""
    adapter: AdapterUse | None = None
    """The adapter that the blocks were computed with."""


@dataclass
class StepPlan(KVConnectorMetadata):
    """The loads and saves of one step."""

    number: int = 0
    """The sequence number of the plan."""
    completed: int = 0
    """The latest plan whose outcome the scheduler knew when it made this one."""
    generation: str = ""
    """The generation of the keys' namespace; it changes when the engine resets its cache."""
    loads: list[Load] = field(default_factory=list[Load])
    saves: list[Save] = field(default_factory=list[Save])
    tokens: int = 0
    """Tokens that the step computes."""
    context_tokens: int = 0
    """Tokens before them; only meaningful if the step has one request."""
    requests: int = 0
    """Requests whose tokens the step computes."""
    transfer: TransferPlan | None = None
    """What changes in leases of pages."""
    asks_adapters: bool = False
    """Whether the workers report their adapters although they have not changed."""


@dataclass(slots=True)
class LoadResult:
    """The outcome of a load on one worker."""

    request: str
    first: int
    tier: str
    blocks: int
    """Number of requested blocks."""
    bad: list[int]
    """Indices in the request of blocks that were missing, late or damaged."""
    bytes: int
    seconds: float
    cpu_seconds: float
    hbm_blocks: int = 0
    """Blocks that came from the memory of a GPU, with all of their parts."""
    hbm_bytes: int = 0
    """Bytes that came from there."""
    hbm_seconds: float = 0.0
    """The time of the reads from there."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """How long a load from one tier took whose copies are over, with the lookup of its blocks."""

    tier: str
    blocks: int
    seconds: float


@dataclass(slots=True)
class SaveResult:
    """The outcome of a save on one worker."""

    request: str
    first: int
    stored: list[bool]
    """For each block, whether the store has it now."""
    bytes: int
    """Number of copied bytes: of the blocks that the store did not have."""
    seconds: float
    cpu_seconds: float
    plan: int = 0
    """The number of the plan with the save."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The outcomes of loads and saves since the last report, and the time of the step."""

    loaded: list[LoadResult] = field(default_factory=list[LoadResult])
    saved: list[SaveResult] = field(default_factory=list[SaveResult])
    times: list[LoadTime] = field(default_factory=list[LoadTime])
    """Of the loads whose copies are over; on a GPU some time after their results."""
    prefill: tuple[int, int, float] | None = None
    """Tokens of the step, tokens before them, seconds."""
    workers: int = 1
    plan: int = 0
    """The number of the latest executed plan."""
    adapters: dict[int, dict[int, str]] | None = None
    """By rank and adapter: the fingerprint of the loaded weights, after a change."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge the reports of two workers on one step."""
        if not isinstance(other, WorkerReport):
            message = f"expected a {WorkerReport.__name__} from a worker, not a"
            raise TypeError(f"{message} {type(other).__name__}")
        slower = max(filter(None, (self.prefill, other.prefill)), key=lambda p: p[2], default=None)
        return WorkerReport(
            [*self.loaded, *other.loaded],
            [*self.saved, *other.saved],
            [*self.times, *other.times],
            slower,
            self.workers + other.workers,
            max(self.plan, other.plan),
            {**(self.adapters or {}), **(other.adapters or {})} or None,
        )

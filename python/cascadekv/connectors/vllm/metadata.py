"""What scheduler and workers tell each other: plain data that crosses processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = ["Load", "Loaded", "Part", "Plan", "Progress", "Save", "Saved", "WorkerFacts"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one stored object of a block holds: some layers and some KV heads of the whole model.

    Workers that hold the same part hold the same bytes; one of them writes it.
    """

    name: str
    """Layers and heads, in words that are the same on every rank and in every process."""
    group: int
    """Which of the engine's KV cache groups its layers are in."""
    block_bytes: int
    """Bytes of one block."""


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once its KV cache is there."""

    manifest: dict[str, str]
    """The fields of the compatibility manifest; the same on every worker."""
    parts: list[Part]
    """What this worker holds."""
    is_on_host: bool = True
    """Whether its KV lies in host memory, so that copies are over when their calls return."""
    refusal: str | None = None
    """Why this worker takes no part; then no blocks are kept for this engine."""


@dataclass(slots=True)
class Load:
    """Blocks of one request that workers read."""

    request: str
    is_async: bool
    first: int
    """Index of the first of these blocks in the request."""
    keys: dict[str, bytes]
    """By part: 32 bytes for each block."""
    blocks: dict[int, list[int]]
    """By group: where each block goes; 0 for one that the engine does not keep."""
    tier: str
    """The slowest tier that has one of them."""
    trace: str | None = None
    """The request's trace, as a `traceparent` header."""


@dataclass(slots=True)
class Save:
    """Blocks of one request that workers write."""

    request: str
    first: int
    """Index of the first of these blocks in the request."""
    keys: dict[str, bytes]
    """By part: 32 bytes for each block."""
    parents: dict[str, bytes | None]
    """By part: the key before the first."""
    blocks: dict[int, list[int]]
    """By group: where each block is; 0 for one that the engine does not keep any more."""
    stands_on: dict[int, list[int]]
    """By group: every block that these were computed from."""
    trace: str | None = None
    """The request's trace, as a `traceparent` header."""


@dataclass
class Plan(KVConnectorMetadata):
    """What one step loads and saves."""

    number: int = 0
    """Plans are numbered in the order in which they are made."""
    learned: int = 0
    """The latest plan of which the scheduler knew the outcome when it made this one."""
    generation: str = ""
    """Which namespace the keys are of; a new one after the engine forgot its cache."""
    loads: list[Load] = field(default_factory=list[Load])
    saves: list[Save] = field(default_factory=list[Save])
    tokens: int = 0
    """Tokens that the step computes."""
    context_tokens: int = 0
    """Tokens before them, where the step is of one request."""
    requests: int = 0
    """Requests that the step computes tokens of."""


@dataclass(slots=True)
class Loaded:
    """How one worker's load ended."""

    request: str
    first: int
    tier: str
    blocks: int
    """Blocks that were asked for."""
    bad: list[int]
    """Indices in the request of those that were not there, late or damaged."""
    bytes: int
    seconds: float
    cpu_seconds: float


@dataclass(slots=True)
class Saved:
    """How one worker's save ended."""

    request: str
    first: int
    kept: list[bool]
    """For each block whether the store has it now."""
    bytes: int
    """Bytes that were copied: of blocks that the store did not have."""
    seconds: float
    cpu_seconds: float


@dataclass
class Progress(KVConnectorWorkerMetadata):
    """What became of loads and saves, and how fast the step was."""

    loaded: list[Loaded] = field(default_factory=list[Loaded])
    saved: list[Saved] = field(default_factory=list[Saved])
    prefill: tuple[int, int, float] | None = None
    """Tokens of the step, tokens before them, seconds."""
    workers: int = 1
    plan: int = 0
    """Which plan this is the outcome of."""
    failures: dict[str, int] = field(default_factory=dict[str, int])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Progress":
        """Join what two workers say of one step."""
        if not isinstance(other, Progress):
            message = f"Cascade's workers report {Progress.__name__}, not {type(other).__name__}"
            raise TypeError(message)
        slower = max(filter(None, (self.prefill, other.prefill)), key=lambda p: p[2], default=None)
        failures = dict(self.failures)
        for kind, count in other.failures.items():
            failures[kind] = failures.get(kind, 0) + count
        return Progress(
            [*self.loaded, *other.loaded],
            [*self.saved, *other.saved],
            slower,
            self.workers + other.workers,
            max(self.plan, other.plan),
            failures,
        )

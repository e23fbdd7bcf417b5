"""What the scheduler's side knows of a request: keys, lookup, and what is planned for it."""

import dataclasses
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cascadekv import Hints
from cascadekv.connectors.vllm.adapters import AdapterUse
from cascadekv.connectors.vllm.groups import UsablePrefix
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.offers import Offer, PushPlan

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["LookupResult", "PendingLookup", "TrackedRequest"]

RESULT_MAX_AGE_S = 1.0
"""How long a lookup result is valid while the request waits."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The result of a lookup."""

    prefix: UsablePrefix = field(default_factory=UsablePrefix)
    """The leading blocks of the request that are stored and that every group can use."""
    preemptions: int = 0
    """The request's preemptions at the time of the lookup."""
    at: float = 0.0
    """The time of the lookup, by the monotonic clock."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The slowest tier of each of these blocks."""
        return self.prefix.tiers

    @property
    def blocks(self) -> int:
        """Number of these blocks."""
        return len(self.prefix.tiers)

    def is_fresh(self, preemptions: int) -> bool:
        """Whether the result is still valid, for a request with so many preemptions."""
        return self.preemptions == preemptions and time.monotonic() < self.at + RESULT_MAX_AGE_S


@dataclass(slots=True)
class PendingLookup:
    """A lookup in flight."""

    prefix: Future[UsablePrefix]
    started: float
    """By the performance counter."""
    preemptions: int


@dataclass(slots=True)
class TrackedRequest:
    """The state of one request."""

    request: "Request"
    keys: RequestKeys
    hints: Hints
    result: LookupResult | None = None
    pending: PendingLookup | None = None
    lookup_counted: int = -1
    """Preemptions when its lookup was last counted, so that a waiting request counts once."""
    choice_counted: int = -1
    """Preemptions when the choice of blocks to load was last counted, for the same reason."""
    is_logged: bool = False
    may_load: bool = True
    """False after a failed load: the request is computed from then on."""
    may_save: bool = True
    """False if the engine's cache was reset while the request was computed."""
    is_async: bool = False
    offer: Offer | PushPlan | None = None
    """Set if the next load is from a prefill engine."""
    load: tuple[int, int] | None = None
    """First and last block to load, the last excluded."""
    saved: int = 0
    """Number of leading blocks that need no save."""
    trace: str | None = None
    """The request's trace, as a `traceparent` header."""
    adapter: AdapterUse | None = None
    """The adapter that the keys cover."""
    save_after: float = 0.0
    """Earliest time of the next save, by the monotonic clock."""

    def restart(self, keys: RequestKeys) -> bool:
        """Forget what was found under other keys; return whether the request has no KV yet.

        KV that was computed or loaded before must not be saved under the new keys. Only a request
        that starts from its first token has none.
        """
        status = self.request.status.name
        is_new = self.request.num_computed_tokens == 0 and status != "WAITING_FOR_REMOTE_KVS"
        self.keys, self.may_save = keys, self.may_save and is_new
        self.result, self.pending, self.load, self.offer = None, None, None, None
        self.saved, self.may_load = 0, False
        return is_new

    def note_plan(self, number: int) -> None:
        """Note a plan that computes the request."""
        if self.adapter is not None and not self.adapter.first_plan:
            self.adapter = dataclasses.replace(self.adapter, first_plan=number)

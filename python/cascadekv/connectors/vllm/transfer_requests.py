"""The scheduler's side of transfers between engines: offers given, and offers taken.

A prefill engine keeps the pages of a finished request until the decode engine has read them or the
lease ends. A decode engine reads each offer once; whatever goes wrong, it computes the prompt.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.leases import LEASES_MAX
from cascadekv.connectors.vllm.offers import (
    Offer,
    OfferError,
    TransferPlan,
    wants_decode,
    wants_prefill,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["TransferRequests"]

_LOG = logging.getLogger("vllm.cascade")
RENEWALS = 4
"""How often a lease is renewed during its time."""
RENEW_S = 1.0
"""Time between looking for leases that are due: there may be many waiting requests."""


@dataclass(slots=True)
class _Given:
    """A lease of a request that is computed here."""

    slot: int
    lease: int
    is_ended: bool = False
    """Whether the request has finished and its pages are offered."""


@dataclass(slots=True)
class _Taken:
    """An offer to a request that waits here."""

    offer: Offer
    renewed: float
    """When it was last renewed, by the monotonic clock."""


class TransferRequests:
    """The requests of one engine whose KV moves between engines. Used by the scheduler's thread."""

    def __init__(
        self,
        engine: str,
        workers: Sequence[tuple[str, str]],
        *,
        token: bytes | None,
        lease_s: float,
        digest_of: Callable[["Request"], str | None],
    ) -> None:
        """`workers` has the address and endpoint of each worker; `digest_of` digests a prompt."""
        self._engine = engine
        self._workers = list(workers)
        self._token = token
        self._lease_s = lease_s
        self._digest_of = digest_of
        self._free = list(reversed(range(LEASES_MAX)))
        self._given: dict[str, _Given] = {}
        self._taken: dict[str, _Taken | None] = {}
        """By request; `None` once its offer was used or was refused."""
        self._plan = TransferPlan(workers=len(self._workers))
        self._renew_after = 0.0
        self._failures = FailureLog(_LOG)

    @property
    def workers(self) -> int:
        """Number of this engine's workers."""
        return len(self._workers)

    # Pages of this engine.

    def add(self, request: "Request", block_tokens: int) -> None:
        """Read the offer to a new request, or open a lease if another engine will read its pages.

        The offer is renewed while the request waits, and given back if it ends before its turn.
        """
        params = request.kv_transfer_params
        self.offer(request)
        is_known = request.request_id in self._given
        if is_known or not wants_decode(params) or request.num_prompt_tokens < block_tokens:
            return
        if not self._free:
            self._failures.count("offering pages", f"{LEASES_MAX} leases are open")
            return
        given = _Given(self._free.pop(), secrets.randbits(63) | 1)
        self._given[request.request_id] = given
        self._plan.opened.append((request.request_id, given.slot, given.lease))

    def finish(
        self, request: "Request", pages: Sequence[Sequence[int]], block_tokens: int
    ) -> dict[str, Any] | None:
        """Return the offer of a request that ends, whose pages must be kept; `None` without one."""
        self.give_back(request.request_id)
        self._taken.pop(request.request_id, None)
        given = self._given.get(request.request_id)
        if given is None or given.is_ended:
            return None
        tokens = request.num_prompt_tokens
        is_whole = request.num_computed_tokens >= tokens and any(pages)
        is_whole = is_whole and request.status.name in (
            "FINISHED_STOPPED",
            "FINISHED_LENGTH_CAPPED",
        )
        digest = self._digest_of(request) if is_whole else None
        if digest is None:
            self._plan.dropped.append(request.request_id)
            self._close(request.request_id)
            return None
        blocks = -(-tokens // block_tokens)
        offer = Offer(
            self._engine,
            request.request_id,
            self._workers,
            [list(group[:blocks]) for group in pages],
            tokens,
            given.slot,
            given.lease,
            self._lease_s,
            digest,
        )
        params = offer.params(self._token)
        # Last: the workers report the end of a lease only for a request whose pages are kept.
        given.is_ended = True
        self._plan.ended.append((request.request_id, self._lease_s))
        return params

    def sent(self, requests: Iterable[str]) -> None:
        """Forget leases that have ended in all workers."""
        for request in requests:
            self._close(request)

    def _close(self, request: str) -> None:
        given = self._given.pop(request, None)
        if given is not None:
            self._free.append(given.slot)

    # Pages of other engines.

    def offer(self, request: "Request") -> Offer | None:
        """Return the offer to a request, if it is usable and was not used."""
        params = request.kv_transfer_params
        name = request.request_id
        if name not in self._taken:
            if not wants_prefill(params):
                return None
            self._taken[name] = self._read(request)
        taken = self._taken[name]
        return None if taken is None else taken.offer

    def _read(self, request: "Request") -> _Taken | None:
        try:
            params, tokens = request.kv_transfer_params or {}, request.num_prompt_tokens
            offer = Offer.parse(params, self._token, tokens=tokens)
        except OfferError as error:
            self._failures.count("reading the offer of a prefill engine", error)
            return None
        if offer.prompt != self._digest_of(request):
            reason = "it is for another prompt: do both engines get the same request?"
            self._failures.count("reading the offer of a prefill engine", reason)
            self._plan.released.append(offer)
            return None
        return _Taken(offer, 0.0)

    def use(self, request: str) -> None:
        """Note that a request's load is planned: its workers end the lease."""
        if request in self._taken:
            self._taken[request] = None

    def give_back(self, request: str) -> None:
        """Give back an offer that a request does not use."""
        taken = self._taken.get(request)
        if taken is not None:
            self._taken[request] = None
            self._plan.released.append(taken.offer)

    def take_plan(self) -> TransferPlan | None:
        """Return what has changed since the last step; `None` for nothing."""
        now = time.monotonic()
        if now >= self._renew_after and self._taken:
            self._renew_after = now + RENEW_S
            for taken in self._taken.values():
                if taken is not None and now - taken.renewed > taken.offer.seconds / RENEWALS:
                    taken.renewed = now
                    self._plan.renewed.append(taken.offer)
        if not self._plan:
            return None
        plan, self._plan = self._plan, TransferPlan(workers=len(self._workers))
        return plan

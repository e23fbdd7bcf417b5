"""The scheduler's side of transfers between engines: offers given, and offers taken.

A prefill engine keeps the pages of a finished request until the decode engine has read them or the
lease ends. A decode engine reads each offer once, or waits once for a prefill engine that writes;
whatever goes wrong, it computes the prompt.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.adapters import AdapterUse
from cascadekv.connectors.vllm.groups import CacheGroup
from cascadekv.connectors.vllm.leases import LEASES_MAX
from cascadekv.connectors.vllm.offers import (
    OTHER_PROMPT,
    Computed,
    Offer,
    OfferError,
    Opened,
    OtherLengthError,
    PushPlan,
    PushSource,
    TransferPlan,
    transfer_name,
    wants_decode,
    wants_prefill,
)
from cascadekv.connectors.vllm.pinned_pages import PinnedPages
from cascadekv.connectors.windows import first_needed_block, next_computed_token
from cascadekv.errors import CascadeError

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Finished", "TransferRequests"]

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
    digest: str | None
    """Of the prompt; `None` if other engines may not use its KV."""
    adapter: AdapterUse | None = None
    """The adapter that the digest covers."""
    siblings: tuple[str, str] | None = None
    """What it has in common with the other outputs of one request (`n` > 1), if it may be one."""
    params: dict[str, Any] | None = None
    """Its offer, once the request has finished."""
    tables: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """By group: the page of each block in the last step that computed the request."""

    @property
    def is_ended(self) -> bool:
        """Whether the request has finished and its pages are offered."""
        return self.params is not None


@dataclass(slots=True)
class _Taken:
    """What another engine offers to a request that waits here: its pages, or to write."""

    offer: Offer | PushPlan
    renewed: float
    """When an offer of pages was last renewed, by the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What other engines may use of a request that has ended."""

    params: dict[str, Any] | None = None
    """The offer, for the response."""
    is_kept: bool = False
    """Whether the engine must keep the request's pages."""


class TransferRequests:
    """The requests of one engine whose KV moves between engines. Used by the scheduler's thread."""

    def __init__(  # noqa: PLR0913 # each is named by its caller
        self,
        engine: str,
        workers: Sequence[tuple[str, str]],
        groups: Sequence[CacheGroup],
        pins: PinnedPages,
        *,
        block_tokens: int,
        seal_key: Callable[[], bytes | None],
        lease_s: float,
        sizes: Mapping[str, int],
        digest_of: Callable[["Request"], str | None],
        adapter_of: Callable[["Request"], AdapterUse | None] = lambda _: None,
    ) -> None:
        """`workers` has the address and endpoint of each worker; `digest_of` digests a prompt.

        `seal_key` returns the secret with which offers are sealed, if they are. `sizes` are the
        engine's parallel sizes by the names that NIXL's parameters have.
        `adapter_of` returns the adapter that the digest covers.
        """
        self._engine = engine
        self._workers = list(workers)
        self._groups = list(groups)
        self._pins = pins
        self._block_tokens = block_tokens
        self._seal_key = seal_key
        self._sizes = dict(sizes)
        # An integer would be sealed as one, and read as another number by the decode engine.
        self._lease_s = float(lease_s)
        self._digest_of = digest_of
        self._adapter_of = adapter_of
        self._free = list(reversed(range(LEASES_MAX)))
        self._given: dict[str, _Given] = {}
        self._leaders: dict[tuple[str, str], str] = {}
        """By what outputs of one request have in common: the one that has their lease."""
        self._joined: dict[str, str] = {}
        """Requests that use the lease of another output of their request."""
        self._taken: dict[str, _Taken | None] = {}
        """By request; `None` once its offer was used or was refused."""
        self._pushed: set[str] = set()
        """Requests whose blocks a prefill engine writes, or has written."""
        self._plan = TransferPlan(workers=len(self._workers))
        self._renew_after = 0.0
        self._failures = FailureLog(_LOG)

    @property
    def workers(self) -> int:
        """Number of this engine's workers."""
        return len(self._workers)

    # Pages of this engine.

    def add(self, request: "Request") -> None:
        """Read the offer to a new request, or open a lease if another engine will read its pages.

        The offer is renewed while the request waits, and given back if it ends before its turn.
        """
        self.offer(request)
        self.open(request)

    def open(self, request: "Request") -> None:
        """Open a lease if another engine will read a request's pages, or get them written."""
        params = request.kv_transfer_params
        is_known = request.request_id in self._given or request.request_id in self._joined
        if is_known or not wants_decode(params):
            return
        name = transfer_name(params, request.request_id)
        if request.num_prompt_tokens < self._block_tokens:
            self._plan.refused.append(name)
            return
        digest = self._digest_of(request)
        siblings = _siblings(name, request.request_id, digest)
        if siblings is not None and siblings in self._leaders:
            # The decode engine gets one offer, so that no one would end a second lease.
            self._joined[request.request_id] = self._leaders[siblings]
            return
        if not self._free:
            self._plan.refused.append(name)
            self._failures.count("offering pages", f"{LEASES_MAX} leases are open")
            return
        adapter = None if digest is None else self._adapter_of(request)
        given = _Given(self._free.pop(), secrets.randbits(63) | 1, digest, adapter, siblings)
        self._given[request.request_id] = given
        if siblings is not None:
            self._leaders[siblings] = request.request_id
        opened = Opened(request.request_id, given.slot, given.lease)
        if digest is None:
            self._plan.refused.append(name)
        else:
            opened = replace(opened, transfer=name, prompt=digest, tokens=request.num_prompt_tokens)
        self._plan.opened.append(opened)

    def compute(self, request: "Request", tokens: int, tables: Sequence[Sequence[int]]) -> None:
        """Note that the next step computes tokens of a request; `tables` are its pages by group."""
        given = self._given.get(request.request_id)
        if given is None or given.is_ended or given.digest is None:
            return
        first = request.num_computed_tokens
        given.tables = {group: list(table) for group, table in enumerate(tables)}
        last = first + tokens
        computed = Computed(request.request_id, first, last, given.tables, given.adapter)
        self._plan.computed.append(computed)

    @property
    def has_given(self) -> bool:
        """Whether other engines may get pages of this one."""
        return bool(self._given)

    def is_given(self, request: str) -> bool:
        """Whether other engines may get the pages of a request that is computed here."""
        given = self._given.get(request)
        return given is not None and not given.is_ended

    def stop(self, requests: Iterable[str]) -> None:
        """Note that requests lose their pages before the next step."""
        for request in requests:
            if request in self._given:
                self._plan.stopped.append(request)
                self._given[request].tables = {}

    def finish(self, request: "Request", pages: Sequence[Sequence[int]]) -> Finished:
        """Return the offer of a request that ends."""
        self.give_back(request.request_id)
        self._taken.pop(request.request_id, None)
        if request.request_id in self._pushed:
            self._pushed.discard(request.request_id)
            self._plan.withdrawn.append(request.request_id)
        leader = self._given.get(self._joined.pop(request.request_id, ""))
        if leader is not None:
            return Finished(leader.params, is_kept=False)
        given = self._given.get(request.request_id)
        if given is None or given.is_ended:
            return Finished()
        tokens = request.num_prompt_tokens
        is_whole = request.num_computed_tokens >= tokens and any(pages)
        is_whole = is_whole and request.status.name in (
            "FINISHED_STOPPED",
            "FINISHED_LENGTH_CAPPED",
        )
        digest, key = given.digest if is_whole else None, None
        try:
            key = self._seal_key()
        except CascadeError as error:
            self._failures.count("sealing an offer", error)
            digest = None
        blocks = None if digest is None else self._keep(request, given, pages)
        if digest is None or blocks is None:
            self._plan.dropped.append(request.request_id)
            self._close(request.request_id)
            return Finished()
        offer = Offer(
            self._engine,
            request.request_id,
            self._workers,
            blocks,
            tokens,
            given.slot,
            given.lease,
            self._lease_s,
            digest,
        )
        # Last: the workers report the end of a lease only for a request whose pages are kept.
        given.params = {**offer.params(key), **self._sizes}
        self._plan.ended.append((request.request_id, self._lease_s))
        return Finished(given.params, is_kept=True)

    def _keep(
        self, request: "Request", given: _Given, pages: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """Return the page of each block by group, 0 for one that a decode engine does not need.

        Pins those that the engine has just freed. `None` if it has freed one before.
        """
        tokens = request.num_prompt_tokens
        following = next_computed_token(tokens, tokens)
        blocks = -(-tokens // self._block_tokens)
        kept: list[list[int]] = []
        freed: list[int] = []
        for group, table in zip(self._groups, pages, strict=True):
            first = first_needed_block(following, group.window, self._block_tokens)
            needed = list(table[first:blocks])
            # They were the request's in its last step, so no other request has had them since.
            before = given.tables.get(group.number, [])[first:blocks]
            for at, page in enumerate(before[: len(needed)]):
                if not needed[at]:
                    needed[at] = page
                    freed.append(page)
            if len(needed) < blocks - first or not all(needed):
                self._failures.count("offering pages", "the engine has freed a page of a window")
                return None
            kept.append([0] * first + needed)
        if freed and not self._pins.pin(request.request_id, freed):
            self._failures.count("offering pages", "a page of a window cannot be kept")
            return None
        return kept

    def reset(self) -> None:
        """End all leases and drop all offers, because the weights may have changed.

        `open` gives a request a new lease. Pages of finished requests stay taken until the workers
        have reported that no one reads them.
        """
        for request in list(self._taken):
            self.give_back(request)
        self._plan.withdrawn += self._pushed
        for request in [name for name, given in self._given.items() if not given.is_ended]:
            self._close(request)
        self._joined.clear()
        self._plan.opened.clear()
        self._plan.is_reset = True

    def sent(self, requests: Iterable[str]) -> None:
        """Forget leases that have ended in all workers."""
        for request in requests:
            self._close(request)

    def _close(self, request: str) -> None:
        self._pins.unpin(request)
        given = self._given.pop(request, None)
        if given is not None:
            self._free.append(given.slot)
            if given.siblings is not None:
                del self._leaders[given.siblings]

    # Pages of other engines.

    def offer(self, request: "Request") -> Offer | PushPlan | None:
        """Return what another engine offers to a request, if it is usable and was not used."""
        params = request.kv_transfer_params
        name = request.request_id
        if name not in self._taken:
            if not wants_prefill(params):
                return None
            self._taken[name] = self._read(request)
        taken = self._taken[name]
        return None if taken is None else taken.offer

    def _read(self, request: "Request") -> _Taken | None:
        params, tokens = request.kv_transfer_params or {}, request.num_prompt_tokens
        try:
            source = PushSource.parse(params)
            if source is not None:
                digest = self._digest_of(request)
                plan = PushPlan(source, digest or "", tokens, self.workers, self._lease_s)
                if digest is None:
                    self._plan.declined.append(plan)
                return None if digest is None else _Taken(plan, 0.0)
            offer = Offer.parse(params, self._seal_key(), tokens=tokens)
        except OtherLengthError as error:
            self._failures.count("reading the offer of a prefill engine", error)
            self._plan.released.append(error.offer)
            return None
        except (OfferError, CascadeError) as error:
            self._failures.count("reading the offer of a prefill engine", error)
            return None
        digest = self._digest_of(request)
        if offer.prompt != digest:
            if digest is not None:
                self._failures.count("reading the offer of a prefill engine", OTHER_PROMPT)
            self._plan.released.append(offer)
            return None
        return _Taken(offer, 0.0)

    def use(self, request: str) -> None:
        """Note that a request's load is planned: its workers end the lease."""
        taken = self._taken.get(request)
        if taken is not None and isinstance(taken.offer, PushPlan):
            self._pushed.add(request)
        if request in self._taken:
            self._taken[request] = None

    def give_back(self, request: str) -> None:
        """Give back an offer that a request does not use."""
        taken = self._taken.get(request)
        if taken is not None:
            self._taken[request] = None
            if isinstance(taken.offer, Offer):
                self._plan.released.append(taken.offer)
            else:
                self._plan.declined.append(taken.offer)

    def take_plan(self) -> TransferPlan | None:
        """Return what has changed since the last step; `None` for nothing."""
        now = time.monotonic()
        if now >= self._renew_after and self._taken:
            self._renew_after = now + RENEW_S
            for taken in self._taken.values():
                if taken is None or not isinstance(taken.offer, Offer):
                    continue
                if now - taken.renewed > taken.offer.seconds / RENEWALS:
                    taken.renewed = now
                    self._plan.renewed.append(taken.offer)
        if not self._plan:
            return None
        plan, self._plan = self._plan, TransferPlan(workers=len(self._workers))
        return plan


def _siblings(transfer: str, request: str, digest: str | None) -> tuple[str, str] | None:
    """Return what all outputs of a request have in common; `None` for one that has no others.

    The engine makes a request of each output, and puts its number before the name: `0_NAME`.
    """
    if digest is None:
        return None
    if transfer != request:
        return transfer, digest
    number, _, name = request.partition("_")
    return (name, digest) if number.isdecimal() and name else None

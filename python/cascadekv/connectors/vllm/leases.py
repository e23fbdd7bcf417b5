"""A worker's table of leases: which requests' pages other engines may read.

Peers read the table's entry after the pages: only if it still holds the lease were the pages the
request's while they were read. An entry is cleared before the engine may use the pages again.
"""

import json
import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.offers import TransferPlan

__all__ = [
    "DONE",
    "ENTRY_BYTES",
    "EXPIRED",
    "GIVEN_BACK",
    "LEASES_MAX",
    "READ",
    "RENEW",
    "RESET",
    "UNREADABLE",
    "UNUSED",
    "LeaseTable",
    "lease_notice",
]

_LOG = logging.getLogger("vllm.cascade")
LEASES_MAX = 4096
"""Most leases at a time: entries of the table."""
ENTRY_BYTES = 8
DONE, UNUSED, RENEW = "done", "unused", "renew"
"""Messages of a decode engine: it has read the pages, will not read them, will read them later."""
READ, GIVEN_BACK, EXPIRED, RESET = "read", "given_back", "expired", "reset"
"""How leases end."""
_SECONDS_MAX = 3600.0
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, ArithmeticError, RecursionError)
"""What reading a message of a peer can fail with, whatever it has sent."""


def lease_notice(kind: str, lease: int, *, rank: int = 0, workers: int = 1) -> bytes:
    """Return the message that renews a lease, or ends it for one of a peer's workers."""
    return json.dumps([kind, lease, rank, workers]).encode()


@dataclass(slots=True)
class _Lease:
    """The lease of one request."""

    slot: int
    number: int
    expires: float | None = None
    """By the monotonic clock; `None` while the request is computed."""
    seconds: float = 0.0
    done: set[int] = field(default_factory=set[int])
    """Ranks of the decode engine that are done."""
    is_done: bool = False
    end: str = EXPIRED
    """How it ends, as far as is known."""

    def finish_rank(self, rank: int, workers: int, end: str) -> None:
        """Note that one of the decode engine's workers is done."""
        self.done.add(rank)
        self.end = READ if READ in (end, self.end) else end
        self.is_done = len(self.done) >= workers


class LeaseTable:
    """The leases of one worker. The engine's thread and the thread of messages use it."""

    def __init__(self) -> None:
        """Start without leases."""
        self.memory = array("Q", bytes(ENTRY_BYTES * LEASES_MAX))
        """What peers read: for each entry the number of its lease, or 0."""
        self._lock = threading.Lock()
        self._by_request: dict[str, _Lease] = {}
        self._by_number: dict[int, _Lease] = {}
        self._offered = 0
        self._ended: Counter[str] = Counter()
        self._failures = FailureLog(_LOG)

    def apply(self, plan: TransferPlan) -> None:
        """Carry out what the scheduler planned."""
        with self._lock:
            if plan.is_reset:
                self._end_all({request for request, _ in plan.ended})
            for opened in plan.opened:
                lease = _Lease(opened.slot, opened.lease)
                self._by_request[opened.request] = self._by_number[opened.lease] = lease
                self.memory[opened.slot] = opened.lease
            for request, seconds in plan.ended:
                if (lease := self._by_request.get(request)) is not None:
                    lease.seconds = seconds
                    lease.expires = time.monotonic() + seconds
                    self._offered += 1
            for request in plan.dropped:
                self._close(request)

    def finish_rank(self, request: str, rank: int, workers: int, end: str) -> None:
        """Note that nothing more is written for one of a decode engine's workers."""
        with self._lock:
            lease = self._by_request.get(request)
            if lease is not None:
                lease.finish_rank(rank, workers, end)

    def revoke(self, request: str) -> None:
        """Let every read of a request's pages fail. The lease ends as others do."""
        with self._lock:
            lease = self._by_request.get(request)
            if lease is not None:
                self.memory[lease.slot] = 0

    def receive(self, message: bytes) -> None:
        """Apply a message of a peer; one that cannot be read is counted."""
        try:
            kind, number, rank, workers = json.loads(message)
            rank, workers = int(rank), int(workers)
            with self._lock:
                lease = self._by_number.get(int(number))
                if lease is None:
                    return
                if kind == RENEW:
                    if lease.expires is not None:
                        lease.expires = time.monotonic() + min(lease.seconds, _SECONDS_MAX)
                elif kind in (DONE, UNUSED) and 0 <= rank < workers:
                    lease.finish_rank(rank, workers, READ if kind == DONE else GIVEN_BACK)
                else:
                    self._failures.count("reading a message of a decode engine", repr(message))
        except UNREADABLE as error:
            self._failures.count("reading a message of a decode engine", error)

    def take_ended(self, unfinished: AbstractSet[str] = frozenset()) -> set[str]:
        """Close the leases that are over and return their requests, whose pages can be freed.

        Those of `unfinished` requests end by their time only: they may have several readers.
        """
        with self._lock:
            if not self._by_request:
                return set()
            now = time.monotonic()
            ended: set[str] = set()
            for request, lease in self._by_request.items():
                is_done = lease.is_done and request not in unfinished
                if lease.expires is None or not (is_done or now >= lease.expires):
                    continue
                self._ended[lease.end if is_done else EXPIRED] += 1
                if not lease.is_done:
                    reason = f"the pages of request {request} were not read for {lease.seconds:g} s"
                    self._failures.count("waiting for a decode engine", reason)
                ended.add(request)
            for request in ended:
                self._close(request)
            return ended

    def take_counts(self) -> tuple[int, Mapping[str, int]]:
        """Return the leases of finished requests since the last call, and how leases ended."""
        with self._lock:
            counts = self._offered, self._ended
            self._offered, self._ended = 0, Counter()
            return counts

    def open_leases(self) -> Mapping[str, int]:
        """Return the open leases by request."""
        with self._lock:
            return {request: lease.number for request, lease in self._by_request.items()}

    def _end_all(self, finished: AbstractSet[str]) -> None:
        """End all leases. Those of finished requests are reported, which frees their pages.

        `finished` are the requests that have finished since the last plan.
        """
        for request, lease in list(self._by_request.items()):
            if lease.expires is None and request not in finished:
                self._close(request)
            else:
                self.memory[lease.slot] = 0
                lease.is_done, lease.end = True, RESET

    def _close(self, request: str) -> None:
        lease = self._by_request.pop(request, None)
        if lease is not None:
            del self._by_number[lease.number]
            self.memory[lease.slot] = 0

"""One prefill engine as a worker of a decode engine sees it: connections, reads and messages.

Each prefill engine has threads of its own, so that one that does not answer delays no other.
"""

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from cascadekv._native import TransportEndpoint, TransportTicket
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.leases import DONE, ENTRY_BYTES, LEASES_MAX, lease_notice
from cascadekv.connectors.vllm.offers import WORKERS_MAX, Offer, PullPlan
from cascadekv.connectors.vllm.peer_workers import (
    FAILURES,
    PAGES,
    SCRATCH,
    TABLE,
    PeerConnection,
    PeerThreads,
    PeerWorker,
    cancel,
    left,
)
from cascadekv.connectors.vllm.transfer_geometry import (
    Geometry,
    GeometryError,
    HeldLayer,
    holders,
)
from cascadekv.errors import BusyError, DeadlineError, RefusedError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cascadekv.connectors.vllm.metadata import Load

__all__ = ["PrefillEngine", "Scratch"]

_LOG = logging.getLogger("vllm.cascade")
THREADS = 2
"""Threads for each prefill engine."""
MESSAGE_S = 1.0
"""Time-out of a message."""
PORTS = 65536
MESSAGES_MAX = 1024
"""Most messages that wait to be sent; more are dropped, and their leases expire."""
Result = TypeVar("Result")


class Scratch:
    """Memory that entries of peers' tables of leases are read into."""

    def __init__(self) -> None:
        """Allocate an entry for each read at a time."""
        self.memory = array("Q", bytes(ENTRY_BYTES * LEASES_MAX))
        self._lock = threading.Lock()
        self._free = list(range(LEASES_MAX))

    def take(self) -> int:
        """Return the number of an unused entry."""
        with self._lock:
            if not self._free:
                raise BusyError(f"{LEASES_MAX} reads of leases have not ended")
            return self._free.pop()

    def give_back(self, entry: int) -> None:
        """Return an entry that nothing is read into any more."""
        with self._lock:
            self._free.append(entry)


class PrefillEngine:
    """One prefill engine: its workers, and threads that read from them. Any thread may use it."""

    def __init__(
        self,
        workers: Sequence[tuple[str, str]],
        own: TransportEndpoint,
        geometry: Geometry,
        scratch: Scratch,
        *,
        is_any_host: bool,
    ) -> None:
        """`is_any_host` permits workers on other hosts, which a token or TLS makes safe.

        Workers without the ID of an endpoint were named by a router, which may not know how many
        there are: the first one says it.
        """
        self._own = own
        self._geometry = geometry
        self._scratch = scratch
        self._is_any_host = is_any_host
        self._first = workers[0]
        self._workers = [self._worker(*each) for each in workers]
        self.threads = PeerThreads(self._workers, THREADS, "cascade-pull")
        self._lock = threading.Lock()
        self._waiting_messages = 0
        self._failures = FailureLog(_LOG)

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Run a call in a thread of this engine."""
        return self.threads.submit(call)

    def read(self, load: "Load", plan: PullPlan, deadline: float) -> None:
        """Read the blocks of a load; raises if one of their bytes is not known to be right."""
        offer = plan.offer
        connections = self.connect(deadline)
        sources = self._read_pages(load, offer, connections, deadline)
        # Every worker learns that this one is done. Those that were read from also answer whether
        # the lease still held.
        message = lease_notice(DONE, offer.lease, rank=self._geometry.rank, workers=plan.workers)
        for at, connection in enumerate(connections):
            held = self._read_lease(connection, offer.slot, message, deadline)
            if at in sources and held != offer.lease:
                raise RefusedError(
                    f"the lease of request {offer.request} ended while its pages were read"
                )

    def connect(self, deadline: float) -> list[PeerConnection]:
        """Return the connections to all workers."""
        connections = [self._connect(0, deadline)]
        while len(connections) < len(self._workers):
            connections.append(self._connect(len(connections), deadline))
        return connections

    def holders(self, connections: Sequence[PeerConnection]) -> list[list[HeldLayer]]:
        """Return which worker has each layer of each part of this worker.

        Raises `GeometryError` if none does.
        """
        return holders(self._geometry, [each.geometry for each in connections])

    def tell(self, connections: Sequence[PeerConnection], message: bytes, deadline: float) -> None:
        """Send a message to all workers; returns after they have received it."""
        for connection in connections:
            self._read_lease(connection, 0, message, deadline)

    def send_later(self, offer: Offer, kind: str, workers: int) -> None:
        """Send a message about an offer to all workers, in another thread."""
        message = lease_notice(kind, offer.lease, rank=self._geometry.rank, workers=workers)
        self.tell_later(message)

    def tell_later(self, message: bytes) -> None:
        """Send a message to all workers, in another thread."""
        with self._lock:
            if self._waiting_messages >= MESSAGES_MAX:
                return
            self._waiting_messages += 1
        try:
            self.threads.submit(lambda: self._send(message))
        except RuntimeError:
            # Closed: its leases expire.
            with self._lock:
                self._waiting_messages -= 1

    def _read_pages(
        self, load: "Load", offer: Offer, connections: "Sequence[PeerConnection]", deadline: float
    ) -> set[int]:
        """Read all parts; returns the numbers of the workers that they came from."""
        tickets: list[tuple[PeerConnection, TransportTicket]] = []
        sources: set[int] = set()
        reads = [
            (part, each)
            for part, held in zip(self._geometry.parts, self.holders(connections), strict=True)
            for each in _by_source(held)
        ]
        try:
            for part, layers in reads:
                (_, first), *_ = layers
                pages = self._geometry.page_lists(part, first.part, load, offer)
                if pages[0]:
                    runs = [part.run(at, it.part, it.layer, PAGES, PAGES) for at, it in layers]
                    connection = connections[first.worker]
                    sources.add(first.worker)
                    ticket = connection.native.read(runs, pages, timeout=left(deadline))
                    tickets.append((connection, ticket))
            for _, ticket in tickets:
                ticket.wait(timeout=left(deadline))
        except BaseException as error:
            # The engine uses the pages for other requests once the load has ended.
            for connection, ticket in tickets:
                cancel(connection, ticket)
            if isinstance(error, DeadlineError):
                for source in sources:
                    self._workers[source].avoid(error)
            raise
        return sources

    def _worker(self, address: str, endpoint: str) -> PeerWorker:
        own, geometry = self._own, self._geometry
        return PeerWorker(address, endpoint, own, geometry, is_any_host=self._is_any_host)

    def _connect(
        self, number: int, deadline: float, *, for_message: bool = False
    ) -> PeerConnection:
        """Return the connection to a worker that is known to have this number."""
        connection = self._workers[number].connect(deadline, for_message=for_message)
        address, endpoint = self._first
        theirs = connection.geometry
        if number == 0 and not endpoint:
            self._set_count(theirs.workers)
        if theirs.rank != number or theirs.workers != len(self._workers):
            raise GeometryError(
                f"worker {number} of {len(self._workers)} of the engine at {address} is worker "
                f"{theirs.rank} of {theirs.workers}: remote_port must be that of the first worker, "
                f"and the engine needs a fixed port in cascade.transfer_listen"
            )
        return connection

    def _set_count(self, count: int) -> None:
        """Know as many workers as there are: they listen at the ports behind the first one."""
        host, _, port = self._first[0].rpartition(":")
        with self._lock:
            if count == len(self._workers):
                return
            if not 1 <= count <= WORKERS_MAX or int(port) + count > PORTS:
                raise GeometryError(f"{self._first[0]} is one of {count} workers")
            for worker in self._workers[count:]:
                worker.disconnect()
            # The threads have this list, too.
            self._workers[count:] = [
                self._worker(f"{host}:{int(port) + number}", "")
                for number in range(len(self._workers), count)
            ]

    def _read_lease(
        self, connection: "PeerConnection", slot: int, message: bytes, deadline: float
    ) -> int:
        """Read an entry of a worker's table of leases, and send it a message."""
        own = self._scratch.take()
        run = (SCRATCH, 0, ENTRY_BYTES, TABLE, 0, ENTRY_BYTES, ENTRY_BYTES)
        pages = [own], [slot]
        try:
            time_left = left(deadline)
            ticket = connection.native.read([run], pages, notice=message, timeout=time_left)
            try:
                ticket.wait(timeout=left(deadline))
            except BaseException:
                cancel(connection, ticket)
                raise
            return self._scratch.memory[own]
        finally:
            # A cancelled read does not write any more.
            self._scratch.give_back(own)

    def _send(self, message: bytes) -> None:
        number = 0
        try:
            while number < len(self._workers):
                deadline = time.monotonic() + MESSAGE_S
                try:
                    connection = self._connect(number, deadline, for_message=True)
                    self._read_lease(connection, 0, message, deadline)
                except DeadlineError as error:
                    self._workers[number].avoid(error)
                    raise
                number += 1
        except FAILURES as error:
            self._failures.count("sending a message to a prefill engine", error)
        finally:
            with self._lock:
                self._waiting_messages -= 1


def _by_source(held: Sequence[HeldLayer]) -> list[list[tuple[int, HeldLayer]]]:
    """Split the numbered layers of a part into those that come from one part of one worker."""
    split: dict[tuple[int, str], list[tuple[int, HeldLayer]]] = {}
    for number, each in enumerate(held):
        split.setdefault((each.worker, each.part.name), []).append((number, each))
    return list(split.values())

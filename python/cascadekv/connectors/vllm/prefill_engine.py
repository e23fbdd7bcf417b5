"""One prefill engine as a worker of a decode engine sees it: connections, reads and messages.

Each prefill engine has threads of its own, so that one that does not answer delays no other.
"""

import ipaddress
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cascadekv import CascadeError
from cascadekv._native import TransportConnection, TransportEndpoint, TransportTicket
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.leases import DONE, ENTRY_BYTES, LEASES_MAX, lease_notice
from cascadekv.connectors.vllm.offers import Offer, PullPlan
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError, PartPages
from cascadekv.errors import AwayError, BusyError, DeadlineError, RefusedError

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.metadata import Load

__all__ = ["FAILURES", "PAGES", "SCRATCH", "TABLE", "PrefillEngine", "Scratch"]

_LOG = logging.getLogger("vllm.cascade")
PAGES, TABLE, SCRATCH = 0, 1, 2
"""Numbers of a worker's regions: its pages, its leases, and where leases of others are read to."""
FAILURES = (CascadeError, GeometryError, OSError)
"""What a read of a prefill engine can fail with."""
THREADS = 2
"""Threads for each prefill engine."""
CONNECT_S = 2.0
"""Most time to connect to a worker."""
AVOID_S = 5.0
"""How long a worker that did not answer is not tried again."""
CANCEL_S = 1.0
MESSAGE_S = 1.0
"""Time-outs of a cancellation and of a message."""
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
        """`is_any_host` permits workers on other hosts, which a token makes safe."""
        self._geometry = geometry
        self._scratch = scratch
        self._workers = [
            _Worker(address, endpoint, own, geometry, is_any_host=is_any_host)
            for address, endpoint in workers
        ]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="cascade-pull")
        self._lock = threading.Lock()
        self._waiting_messages = 0
        self._failures = FailureLog(_LOG)

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Run a call in a thread of this engine."""
        return self._pool.submit(call)

    def read(self, load: "Load", plan: PullPlan, deadline: float) -> None:
        """Read the blocks of a load; raises if one of their bytes is not known to be right."""
        offer = plan.offer
        connections = [worker.connect(deadline) for worker in self._workers]
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

    def send_later(self, offer: Offer, kind: str, workers: int) -> None:
        """Send a message about an offer to all workers, in another thread."""
        with self._lock:
            if self._waiting_messages >= MESSAGES_MAX:
                return
            self._waiting_messages += 1
        try:
            self._pool.submit(self._send, offer, kind, workers)
        except RuntimeError:
            # Closed: its leases expire.
            with self._lock:
                self._waiting_messages -= 1

    def close_later(self) -> None:
        """Close the connections after the calls that were submitted."""
        self._pool.submit(self._close_workers)
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Wait for calls in flight, which end by their deadlines, and close the connections."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._close_workers()

    def _close_workers(self) -> None:
        for worker in self._workers:
            worker.close()

    def _read_pages(
        self, load: "Load", offer: Offer, connections: "Sequence[_Connection]", deadline: float
    ) -> set[int]:
        """Read all parts; returns the numbers of the workers that they came from."""
        tickets: list[tuple[_Connection, TransportTicket]] = []
        sources: set[int] = set()
        try:
            for part in self._geometry.parts:
                source, theirs = self._holder(part, connections)
                pages = self._geometry.page_lists(part, theirs, load, offer)
                if pages[0]:
                    runs = part.runs(theirs, PAGES)
                    connection = connections[source]
                    sources.add(source)
                    ticket = connection.native.read(runs, pages, timeout=_left(deadline))
                    tickets.append((connection, ticket))
            for _, ticket in tickets:
                ticket.wait(timeout=_left(deadline))
        except BaseException as error:
            # The engine uses the pages for other requests once the load has ended.
            for connection, ticket in tickets:
                _cancel(connection, ticket)
            if isinstance(error, DeadlineError):
                for source in sources:
                    self._workers[source].avoid(error)
            raise
        return sources

    def _holder(
        self, part: PartPages, connections: "Sequence[_Connection]"
    ) -> tuple[int, PartPages]:
        """Return the number of a worker that holds a part, and its pages there."""
        for at, connection in enumerate(connections):
            for theirs in connection.geometry.parts:
                if theirs.name == part.name:
                    return at, theirs
        raise GeometryError(
            f"no worker of the prefill engine holds {part.name}: engines with different numbers of "
            f"tensor parallel ranks need the same setting cascade.shards"
        )

    def _read_lease(
        self, connection: "_Connection", slot: int, message: bytes, deadline: float
    ) -> int:
        """Read an entry of a worker's table of leases, and send it a message."""
        own = self._scratch.take()
        run = (SCRATCH, 0, ENTRY_BYTES, TABLE, 0, ENTRY_BYTES, ENTRY_BYTES)
        left = _left(deadline)
        try:
            ticket = connection.native.read([run], ([own], [slot]), notice=message, timeout=left)
            try:
                ticket.wait(timeout=_left(deadline))
            except BaseException:
                _cancel(connection, ticket)
                raise
            return self._scratch.memory[own]
        finally:
            # A cancelled read does not write any more.
            self._scratch.give_back(own)

    def _send(self, offer: Offer, kind: str, workers: int) -> None:
        message = lease_notice(kind, offer.lease, rank=self._geometry.rank, workers=workers)
        try:
            for worker in self._workers:
                deadline = time.monotonic() + MESSAGE_S
                try:
                    connection = worker.connect(deadline)
                    self._read_lease(connection, offer.slot, message, deadline)
                except DeadlineError as error:
                    worker.avoid(error)
                    raise
        except FAILURES as error:
            self._failures.count("sending a message to a prefill engine", error)
        finally:
            with self._lock:
                self._waiting_messages -= 1


@dataclass(frozen=True)
class _Connection:
    """A connection to one worker, and what it said of its pages."""

    native: TransportConnection
    geometry: Geometry


class _Worker:
    """One worker of a prefill engine. Any number of threads may use it."""

    def __init__(
        self,
        address: str,
        endpoint: str,
        own: TransportEndpoint,
        geometry: Geometry,
        *,
        is_any_host: bool,
    ) -> None:
        self._address = address
        self._endpoint = endpoint
        self._own = own
        self._geometry = geometry
        self._is_any_host = is_any_host
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._avoid_until = 0.0
        self._reason: Exception | None = None

    def connect(self, deadline: float) -> _Connection:
        """Return the connection, made anew if it was lost; raises at once after a failure."""
        if not self._lock.acquire(timeout=_left(deadline)):
            raise DeadlineError(f"{self._address}: another thread still connects to it")
        try:
            if time.monotonic() < self._avoid_until:
                raise AwayError(f"{self._address} is not tried again yet: {self._reason}")
            current = self._connection
            if current is None or not current.native.is_open:
                try:
                    current = self._connection = self._open(deadline)
                except FAILURES as error:
                    self.avoid(error)
                    raise
            return current
        finally:
            self._lock.release()

    def avoid(self, error: Exception) -> None:
        """Do not use the worker for some seconds."""
        self._reason, self._avoid_until = error, time.monotonic() + AVOID_S

    def _open(self, deadline: float) -> _Connection:
        if not self._is_any_host and not _is_loopback(self._address):
            raise RefusedError(
                f"{self._address} is another host: set cascade.transfer_token_file in both engines"
            )
        native = self._own.connect(self._address, timeout=min(CONNECT_S, _left(deadline)))
        try:
            return _Connection(native, self._checked(native))
        except BaseException:
            native.close()
            raise

    def _checked(self, native: TransportConnection) -> Geometry:
        """Return the geometry of the peer; raises if it is not the worker of the offer."""
        if native.peer_id.hex() != self._endpoint:
            raise RefusedError(f"{self._address} is another engine than that of the offer")
        geometry = Geometry.parse(native.geometry)
        self._geometry.check(geometry)
        return geometry

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._connection is not None:
                self._connection.native.close()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _cancel(connection: _Connection, ticket: TransportTicket) -> None:
    """End a read: afterwards no byte is written. A worker that does not answer is disconnected."""
    try:
        ticket.cancel(timeout=CANCEL_S)
    except CascadeError:
        connection.native.close()

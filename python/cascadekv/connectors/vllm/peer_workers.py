"""Connections to the workers of other engines."""

import contextlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cascadekv import CascadeError
from cascadekv._native import TransportConnection, TransportEndpoint, TransportTicket
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError
from cascadekv.errors import AwayError, DeadlineError, RefusedError

__all__ = [
    "FAILURES",
    "PAGES",
    "SCRATCH",
    "TABLE",
    "PeerConnection",
    "PeerThreads",
    "PeerWorker",
    "cancel",
    "left",
]

_LOG = logging.getLogger("vllm.cascade")
PAGES, TABLE, SCRATCH = 0, 1, 2
"""Numbers of a worker's regions: its pages, its leases, and where leases of others are read to."""
FAILURES = (CascadeError, GeometryError, OSError)
"""What a transfer with another engine can fail with."""
CONNECT_S = 2.0
"""Most time to connect to a worker."""
AVOID_S = 5.0
"""How long a worker that did not answer is not tried again."""
LOST_S = 10.0
"""Threads for another engine end if it is not connected and was not used for this time."""
CANCEL_S = 1.0
"""Time-out of a cancellation."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class PeerConnection:
    """A connection to one worker, and what it said of its pages."""

    native: TransportConnection
    geometry: Geometry
    misfit: str = ""
    """Why no pages can be moved: it gets messages only."""


class PeerWorker:
    """One worker of another engine. Any number of threads may use it."""

    def __init__(
        self,
        address: str,
        endpoint: str,
        own: TransportEndpoint,
        geometry: Geometry,
        *,
        is_any_host: bool,
    ) -> None:
        """`endpoint` is its ID, or empty if it is not known. `is_any_host` permits other hosts."""
        self._address = address
        self._endpoint = endpoint
        self._own = own
        self._geometry = geometry
        self._is_any_host = is_any_host
        self._lock = threading.Lock()
        self._connection: PeerConnection | None = None
        self._avoid_until = 0.0
        self._reason: Exception | None = None

    def connect(self, deadline: float, *, for_message: bool = False) -> PeerConnection:
        """Return the connection, made anew if it was lost; raises at once after a failure.

        A worker whose pages do not fit gets messages: it frees what it keeps for this engine.
        """
        if not self._lock.acquire(timeout=left(deadline)):
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
            if current.misfit and not for_message:
                raise GeometryError(current.misfit)
            return current
        finally:
            self._lock.release()

    def avoid(self, error: Exception) -> None:
        """Do not use the worker for some seconds."""
        self._reason, self._avoid_until = error, time.monotonic() + AVOID_S

    def _open(self, deadline: float) -> PeerConnection:
        if not self._is_any_host and not _is_loopback(self._address):
            raise RefusedError(
                f"{self._address} is another host: set cascade.transfer_token_file or "
                "cascade.transfer_tls_authority in both engines"
            )
        native = self._own.connect(self._address, timeout=min(CONNECT_S, left(deadline)))
        if native.no_rdma is not None:
            _LOG.warning("Cascade: %s: pages move by TCP: %s", self._address, native.no_rdma)
        try:
            return self._checked(native)
        except BaseException:
            native.close()
            raise

    def _checked(self, native: TransportConnection) -> PeerConnection:
        """Return what the peer said of its pages; raises if it is not the worker of the offer."""
        if self._endpoint and native.peer_id.hex() != self._endpoint:
            raise RefusedError(f"{self._address} is another engine than was named")
        geometry = Geometry.parse(native.geometry)
        try:
            self._geometry.check(geometry)
        except GeometryError as error:
            return PeerConnection(native, geometry, str(error))
        return PeerConnection(native, geometry)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        current = self._connection
        return current is not None and current.native.is_open

    def disconnect(self) -> None:
        """Close the connection, also while another thread uses it or connects."""
        current = self._connection
        if current is not None:
            current.native.close()


class PeerThreads:
    """Threads that talk to some workers of another engine, so that no other engine is delayed.

    Not locked: `use` and `is_lost` are called under the lock of the table that has the threads.
    """

    def __init__(self, workers: Sequence[PeerWorker], count: int, name: str) -> None:
        """Start up to `count` threads when they are needed."""
        self._workers = workers
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._used = time.monotonic()

    def use(self) -> None:
        """Note that the threads are about to be used."""
        self._used = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether no worker is connected, and the threads were not used for some time."""
        is_connected = any(worker.is_connected for worker in self._workers)
        return not is_connected and time.monotonic() - self._used > LOST_S

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Run a call in a thread. Raises `RuntimeError` after they were closed."""
        return self._pool.submit(call)

    def close_later(self) -> None:
        """End the threads and close the connections after the calls that were submitted."""
        # Refused after `close` or `abort`, which have done both.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self.disconnect)
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Wait for calls in flight, which end by their deadlines, and close the connections."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.disconnect()

    def abort(self) -> None:
        """Close the connections, which ends calls in flight, and wait for these."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.disconnect()
        self._pool.shutdown(wait=True)

    def disconnect(self) -> None:
        """Close the connections: calls that use them fail. The next one connects again."""
        for worker in self._workers:
            worker.disconnect()


def left(deadline: float) -> float:
    """Return the seconds until a deadline by the monotonic clock."""
    return max(0.0, deadline - time.monotonic())


def _is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def cancel(connection: PeerConnection, ticket: TransportTicket) -> None:
    """End a read: afterwards no byte is written. A worker that does not answer is disconnected."""
    try:
        ticket.cancel(timeout=CANCEL_S)
    except CascadeError:
        connection.native.close()

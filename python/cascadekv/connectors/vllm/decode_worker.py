"""One worker of a decode engine as a prefill worker sees it: its pages, and writes into them."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cascadekv._native import TransportEndpoint, TransportTicket
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.announcements import (
    NOT_KEPT,
    Announcement,
    PartTarget,
    Written,
    parse_page_list,
)
from cascadekv.connectors.vllm.peer_workers import (
    FAILURES,
    PAGES,
    PeerConnection,
    PeerThreads,
    PeerWorker,
    cancel,
    left,
)
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError, PartPages
from cascadekv.connectors.windows import first_needed_block, next_computed_token

__all__ = ["DecodeWorker", "Target"]

_LOG = logging.getLogger("vllm.cascade")
THREADS = 2
"""Threads for each worker of a decode engine: one that does not answer delays no other."""
MESSAGE_S = 2.0
"""Time-out of a message."""


@dataclass(slots=True)
class Target:
    """Where the blocks of one request belong, and what was written."""

    connection: PeerConnection
    parts: list[tuple[PartPages, PartTarget] | None]
    """By part of this worker: the peer's pages, and its places; `None` if it wants none."""
    end: int
    """Number of the prompt's units."""
    written: list[list[int]]
    """By part and layer: the first unit that was not written."""
    tickets: deque[TransportTicket] = field(default_factory=deque[TransportTicket])
    """Writes that are not confirmed."""

    def left(self, part: int, layer: int, ready: int) -> tuple[int, int]:
        """Return the first and the last unit to write of those that are ready."""
        if self.parts[part] is None:
            return 0, 0
        return self.written[part][layer], min(ready, self.end)

    @property
    def is_complete(self) -> bool:
        """Whether everything was written."""
        return all(
            units >= self.end
            for wanted, layers in zip(self.parts, self.written, strict=True)
            for units in layers
            if wanted is not None
        )


class DecodeWorker:
    """One worker of a decode engine. Any thread may use it."""

    def __init__(
        self,
        address: str,
        endpoint: str,
        own: TransportEndpoint,
        geometry: Geometry,
        *,
        is_any_host: bool,
    ) -> None:
        """`is_any_host` permits other hosts, which a token makes safe."""
        self._own = own
        self._geometry = geometry
        self._worker = PeerWorker(address, endpoint, own, geometry, is_any_host=is_any_host)
        self.threads = PeerThreads([self._worker], THREADS, "cascade-push")
        self._failures = FailureLog(_LOG)

    def submit(self, call: Callable[[], None]) -> bool:
        """Run a call in a thread of this worker; false after `close`."""
        try:
            self.threads.submit(call)
        except RuntimeError:
            return False
        return True

    def tell_later(self, notice: bytes) -> None:
        """Send a message in another thread."""
        self.submit(lambda: self._tell(notice))

    def read_target(self, announced: Announcement, deadline: float) -> Target:
        """Read the list of pages. Raises one of `FAILURES`."""
        connection = self._worker.connect(deadline)
        listed = self._read_list(connection, announced, deadline)
        end = -(-announced.tokens // self._geometry.unit_tokens)
        parts: list[tuple[PartPages, PartTarget] | None] = []
        for part in self._geometry.parts:
            wanted = listed.get(part.name)
            if wanted is None or wanted.source != self._geometry.rank:
                parts.append(None)
                continue
            theirs = next((it for it in connection.geometry.parts if it.name == part.name), None)
            if theirs is None or wanted.first + len(wanted.units) != end or wanted.first < 0:
                raise GeometryError(f"the list of pages does not fit {part.name}")
            parts.append((theirs, wanted))
        written = [
            [0 if wanted is None else wanted[1].first] * len(part.regions)
            for part, wanted in zip(self._geometry.parts, parts, strict=True)
        ]
        return Target(connection, parts, end, written)

    def write(
        self,
        announced: Announcement,
        target: Target,
        taken: tuple[int, int, int, int],
        tables: Mapping[int, Sequence[int]],
        deadline: float,
    ) -> None:
        """Write units of one layer, with a notice behind them. Raises one of `FAILURES`.

        Returns when this worker's pages are not accessed any more.
        """
        number, layer, first, end = taken
        part, wanted = self._geometry.parts[number], target.parts[number]
        if wanted is None:
            raise GeometryError(f"the decode engine wants nothing of {part.name}")
        theirs, places = wanted
        following = next_computed_token(announced.tokens, announced.tokens)
        needed = first_needed_block(following, part.window, self._geometry.block_tokens)
        # Pages before the window may be other requests' by now.
        table = [0] * needed + list(tables.get(part.group, ())[needed:])
        here, there = _page_lists(part, places, table, first, end)
        notice = Written(announced.push, part.name, layer, first, end).to_message()
        runs = part.runs(theirs, PAGES, announced.window, layer)
        native = target.connection.native
        ticket = native.write(runs, (here, there), notice=notice, timeout=left(deadline))
        target.tickets.append(ticket)
        target.written[number][layer] = end

    def has_unconfirmed(self, target: Target) -> bool:
        """Whether writes were not confirmed."""
        return bool(target.tickets)

    def confirm(self, target: Target, most: int, deadline: float) -> None:
        """Wait until at most that many writes are not confirmed. Raises one of `FAILURES`."""
        while len(target.tickets) > most:
            ticket = target.tickets.popleft()
            try:
                ticket.wait(timeout=left(deadline))
            except BaseException:
                cancel(target.connection, ticket)
                raise

    def _read_list(
        self, connection: PeerConnection, announced: Announcement, deadline: float
    ) -> dict[str, PartTarget]:
        memory, count = bytearray(announced.list_bytes), announced.list_bytes
        region = self._own.register(memory, access="local")
        try:
            run = (region, 0, count, announced.list_region, 0, count, count)
            ticket = connection.native.read([run], ([0], [0]), timeout=left(deadline))
            try:
                ticket.wait(timeout=left(deadline))
            except BaseException:
                cancel(connection, ticket)
                raise
        finally:
            # The read is over. Other batches may hold the table of regions a little longer.
            self._forget(region)
        try:
            return parse_page_list(memory)
        except (ValueError, TypeError) as error:
            raise GeometryError(f"a list of pages cannot be read: {error}") from error

    def _forget(self, region: int) -> None:
        try:
            self._own.unregister(region, timeout=0)
        except FAILURES as error:
            _LOG.debug("Cascade: a list of pages is still in use: %s", error)

    def _tell(self, notice: bytes) -> None:
        deadline = time.monotonic() + MESSAGE_S
        try:
            connection = self._worker.connect(deadline, for_message=True)
            ticket = connection.native.read([], ([], []), notice=notice, timeout=left(deadline))
            try:
                ticket.wait(timeout=left(deadline))
            except BaseException:
                cancel(connection, ticket)
                raise
        except FAILURES as error:
            self._failures.count("sending a message to a decode engine", error)


def _page_lists(
    part: PartPages,
    places: PartTarget,
    table: Sequence[int],
    first: int,
    end: int,
) -> tuple[list[int], list[int]]:
    """Return the units here and at the peer. Raises `GeometryError` if one is not here."""
    here: list[int] = []
    there: list[int] = []
    for unit in range(first, end):
        place = places.units[unit - places.first]
        if place == NOT_KEPT:
            continue
        block, piece = divmod(unit, part.pieces)
        if block >= len(table) or not table[block]:
            raise GeometryError(f"this engine does not keep block {block} of {part.name}")
        here.append(table[block] * part.pieces + piece)
        there.append(place)
    return here, there

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where the blocks of a layer belong."""

    part: PartPages
    """The part of the decode worker."""
    layer: int
    """The number of the layer in it."""
    target: PartTarget


@dataclass(slots=True)
class Target:
    """Where the blocks of one request belong, and what was written."""

    connection: PeerConnection
    places: list[list[Place | None]]
    """By part and layer of this worker: where it belongs; `None` if the peer does not want it."""
    end: int
    """Number of the prompt's units."""
    written: list[list[int]]
    """By part and layer: the first unit that was not written."""
    tickets: deque[TransportTicket] = field(default_factory=deque[TransportTicket])
    """Writes that are not confirmed."""

    def left(self, part: int, layer: int, ready: int) -> tuple[int, int]:
        """Return the first and the last unit to write of those that are ready."""
        if self.places[part][layer] is None:
            return 0, 0
        return self.written[part][layer], min(ready, self.end)

    @property
    def is_complete(self) -> bool:
        """Whether everything was written."""
        return all(
            units >= self.end
            for places, layers in zip(self.places, self.written, strict=True)
            for place, units in zip(places, layers, strict=True)
            if place is not None
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
        wanted = self._wanted(connection.geometry, listed, end)
        places = [
            [wanted.pop((layer, part.share), None) for layer in part.layers]
            for part in self._geometry.parts
        ]
        for layer, share in wanted:
            raise GeometryError(f"the decode engine waits for {share} of {layer}, not held here")
        written = [
            [0 if place is None else place.target.first for place in layers] for layers in places
        ]
        return Target(connection, places, end, written)

    def _wanted(
        self, theirs: Geometry, listed: Mapping[str, PartTarget], end: int
    ) -> dict[tuple[str, str], Place]:
        """Return what the peer waits for from this worker, by layer and share."""
        parts = {part.name: part for part in theirs.parts}
        wanted: dict[tuple[str, str], Place] = {}
        for name, target in listed.items():
            part = parts.get(name)
            fits = part is not None and len(target.sources) == len(part.layers)
            if part is None or not fits or target.first < 0:
                raise GeometryError(f"the list of pages does not fit {name}")
            if target.first + len(target.units) != end:
                raise GeometryError(f"the list of pages of {name} is not the whole prompt")
            for number, source in enumerate(target.sources):
                if source == self._geometry.rank:
                    key = part.layers[number], part.share
                    wanted[key] = Place(part, number, target)
        return wanted

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
        part, place = self._geometry.parts[number], target.places[number][layer]
        if place is None:
            raise GeometryError(f"the decode engine does not want {part.layers[layer]}")
        following = next_computed_token(announced.tokens, announced.tokens)
        needed = first_needed_block(following, part.window, self._geometry.block_tokens)
        # Pages before the window may be other requests' by now.
        table = [0] * needed + list(tables.get(part.group, ())[needed:])
        here, there = _page_lists(part, place.target, table, first, end)
        notice = Written(announced.push, place.part.name, place.layer, first, end).to_message()
        run = part.run(layer, place.part, place.layer, PAGES, announced.window)
        native = target.connection.native
        ticket = native.write([run], (here, there), notice=notice, timeout=left(deadline))
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

"""A decode worker's side of pushes: announces pages, waits, and frees them when no one can write.

A push has a window: a region of its own, through which its pages are written. The pages are given
back to the engine after the window was closed. From then on, the transport refuses every write
through it, whatever the prefill engine does or believes.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cascadekv import CascadeError
from cascadekv._native import TransportEndpoint
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.announcements import (
    LIST_BYTES_MAX,
    NOT_KEPT,
    WITHDRAW,
    Announcement,
    PartTarget,
    Written,
    message,
    page_list,
)
from cascadekv.connectors.vllm.offers import PushPlan
from cascadekv.connectors.vllm.peer_workers import FAILURES, PeerConnection
from cascadekv.connectors.vllm.prefill_engine import PrefillEngine
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError, PartPages
from cascadekv.errors import BusyError, DeadlineError

if TYPE_CHECKING:
    import torch

    from cascadekv.connectors.vllm.metadata import Load, LoadResult
    from cascadekv.connectors.vllm.running_load import RunningLoad

__all__ = ["Arrivals"]

_LOG = logging.getLogger("vllm.cascade")
ENDS = 4
"""Threads that close windows."""
ANNOUNCE_S = 5.0
"""Most time for an announcement."""
CLOSE_S = 1.0
"""How long one attempt to close a window waits for a write that has begun."""
STUCK_S = 60.0
"""A window that is still in use after this time is reported: the transport ends stuck writes."""


@dataclass(slots=True)
class _Expected:
    """A load whose blocks a prefill engine writes."""

    running: "RunningLoad"
    engine: PrefillEngine
    push: int
    window: int
    listed: int
    """The region of the list of pages."""
    deadline: float
    seconds: float
    result: "Future[LoadResult]"
    left: dict[tuple[str, int], tuple[int, int]]
    """By part and layer: the next unit to arrive, and the end. Without the ones that arrived."""
    started: float
    connections: list[PeerConnection] = field(default_factory=list[PeerConnection])
    is_ended: bool = False


class Arrivals:
    """The pushes that one worker waits for. The engine's thread and the receiver use it."""

    def __init__(
        self,
        own: TransportEndpoint,
        memory: "torch.Tensor",
        geometry: Geometry,
        listener: Callable[[], tuple[str, str]],
    ) -> None:
        """Wait for nothing. `listener` returns the address and the ID of the endpoint."""
        self._own = own
        self._memory = memory
        self._geometry = geometry
        self._listener = listener
        self._lock = threading.Lock()
        self._expected: dict[int, _Expected] = {}
        self._ends = ThreadPoolExecutor(ENDS, thread_name_prefix="cascade-arrive")
        self._failures = FailureLog(_LOG)
        self.completed = 0
        """Loads that were written completely."""

    # The engine's thread.

    def expect(self, running: "RunningLoad", engine: PrefillEngine) -> "Future[LoadResult]":
        """Announce the pages of a load; the result comes when no one can write them any more."""
        load, plan = running.load, running.load.push
        if plan is None:
            raise ValueError("the load has no prefill engine")
        for part in self._geometry.parts:
            running.expect(part.name, _needed(load, part))
        result: Future[LoadResult] = Future()
        engine.submit(lambda: self._announce(running, plan, engine, result))
        return result

    def decline(self, plan: PushPlan, engine: PrefillEngine) -> None:
        """Tell a prefill engine that this worker wants nothing of a request: it frees the pages."""
        declined = self._announcement(plan, secrets.randbits(63))
        engine.tell_later(replace(declined, is_declined=True).to_message())

    def withdraw(self, requests: "set[str]") -> None:
        """End the waiting of requests that ended."""
        with self._lock:
            ended = [it for it in self._expected.values() if it.running.load.request in requests]
        for each in ended:
            self._fail(each, "the request has ended")

    def close(self) -> None:
        """End all waiting. The endpoint is closed already."""
        with self._lock:
            left = list(self._expected.values())
        for each in left:
            self._fail(each, "the engine ends")
        self._ends.shutdown(wait=True)

    # The receiver's thread.

    def receive(self, written: Written) -> None:
        """Note that units of a layer have arrived."""
        with self._lock:
            expected = self._expected.get(written.push)
            if expected is None:
                return
            key = written.part, written.layer
            following, end = expected.left.get(key, (-1, -1))
            is_next = written.first == following < written.end <= end
            if is_next and written.end == end:
                del expected.left[key]
            elif is_next:
                expected.left[key] = written.end, end
            is_whole = not expected.left
        if not is_next:
            self._fail(expected, f"blocks arrived in the wrong order: {written}")
        elif is_whole:
            self._complete(expected)

    def refused(self, push: int, reason: str) -> None:
        """Note that a prefill engine will not write."""
        with self._lock:
            expected = self._expected.get(push)
        if expected is not None:
            self._fail(expected, reason)

    def check(self) -> None:
        """End the waiting that is over its deadline, or whose prefill engine is gone."""
        now = time.monotonic()
        with self._lock:
            everything = list(self._expected.values())
        for each in everything:
            if now >= each.deadline:
                self._fail(each, f"nothing more was written within {each.seconds:g} s")
            elif not all(connection.native.is_open for connection in each.connections):
                self._fail(each, "the connection to the prefill engine was lost")

    # Threads of the prefill engine.

    def _announce(
        self,
        running: "RunningLoad",
        plan: PushPlan,
        engine: PrefillEngine,
        result: "Future[LoadResult]",
    ) -> None:
        started = time.perf_counter()
        try:
            deadline = time.monotonic() + min(ANNOUNCE_S, plan.seconds)
            connections = engine.connect(deadline)
            targets = self._targets(running.load, plan, engine, connections)
            expected = self._open(running, plan, engine, result, targets)
        except Exception as error:  # noqa: BLE001 # whatever it is, the engine computes
            self._failures.count("announcing pages to a prefill engine", error)
            result.set_result(running.result(seconds=time.perf_counter() - started))
            self.decline(plan, engine)
            return
        with self._lock:
            expected.connections = connections
            self._expected[expected.push] = expected
        announced = replace(
            self._announcement(plan, expected.push),
            window=expected.window,
            list_region=expected.listed,
            list_bytes=len(targets[1]),
        )
        try:
            engine.tell(connections, announced.to_message(), deadline)
        except FAILURES as error:
            self._fail(expected, f"the announcement failed: {error}")

    def _announcement(self, plan: PushPlan, push: int) -> Announcement:
        """Return an announcement without places for blocks."""
        address, endpoint = self._listener()
        return Announcement(
            push=push,
            transfer=plan.source.transfer,
            prompt=plan.prompt,
            tokens=plan.tokens,
            address=address,
            endpoint=endpoint,
            rank=self._geometry.rank,
            workers=plan.workers,
            window=0,
            list_region=0,
            list_bytes=0,
            seconds=plan.seconds,
        )

    def _targets(
        self,
        load: "Load",
        plan: PushPlan,
        engine: PrefillEngine,
        connections: "list[PeerConnection]",
    ) -> tuple[Mapping[str, PartTarget], bytearray]:
        """Return where the units of each part belong, and that as a list for peers."""
        end = -(-plan.tokens // self._geometry.unit_tokens)
        targets: dict[str, PartTarget] = {}
        for part, held in zip(self._geometry.parts, engine.holders(connections), strict=True):
            first = load.first * part.pieces
            pages = load.blocks[part.group]
            units = [
                page * part.pieces + piece if page else NOT_KEPT
                for page in pages
                for piece in range(part.pieces)
            ][: end - first]
            # The engine may have no page for the last token yet, which it computes again.
            if (first + len(units)) * self._geometry.unit_tokens < plan.tokens - 1:
                raise GeometryError(f"{part.name}: {len(pages)} pages are not the whole prompt")
            units += [NOT_KEPT] * (end - first - len(units))
            targets[part.name] = PartTarget([each.worker for each in held], first, units)
        listed = page_list(targets)
        if len(listed) > LIST_BYTES_MAX:
            raise GeometryError(f"a list of pages has {len(listed)} bytes")
        return targets, listed

    def _open(
        self,
        running: "RunningLoad",
        plan: PushPlan,
        engine: PrefillEngine,
        result: "Future[LoadResult]",
        targets: tuple[Mapping[str, PartTarget], bytearray],
    ) -> _Expected:
        """Open the window of a push, and let its list of pages be read."""
        parts, listed = targets
        left = {
            (part.name, layer): (parts[part.name].first, parts[part.name].first + count)
            for part in self._geometry.parts
            for layer in range(len(part.regions))
            if (count := len(parts[part.name].units))
        }
        address, size = self._memory.data_ptr(), self._memory.numel()
        list_region = self._own.register(listed, access="read")
        try:
            window = self._own.register_address(address, size, access="write", owner=self._memory)
        except CascadeError:
            self._forget(list_region)
            raise
        return _Expected(
            running,
            engine,
            secrets.randbits(63),
            window,
            list_region,
            time.monotonic() + plan.seconds,
            plan.seconds,
            result,
            left,
            time.perf_counter(),
        )

    # The end of a push.

    def _take(self, expected: _Expected) -> bool:
        """Remove a push; false if another thread has done so."""
        with self._lock:
            if expected.is_ended:
                return False
            expected.is_ended = True
            self._expected.pop(expected.push, None)
            return True

    def _complete(self, expected: _Expected) -> None:
        if not self._take(expected):
            return
        # Frames of a connection are served in their order: with the last notice, all writes of the
        # push are over. Whatever may still come through the window is refused from here on.
        self._forget(expected.window)
        self._forget(expected.listed)
        running = expected.running
        for part in self._geometry.parts:
            positions = _needed(running.load, part)
            running.note_copies(part.name, positions, part.block_bytes, is_on_gpu=False)
        with self._lock:
            self.completed += 1
        seconds = time.perf_counter() - expected.started
        expected.result.set_result(running.result(seconds=seconds))

    def _fail(self, expected: _Expected, reason: str) -> None:
        if self._take(expected):
            self._failures.count("waiting for a prefill engine", reason)
            expected.engine.tell_later(message(WITHDRAW, expected.push, reason))
            self._ends.submit(self._close_window, expected)

    def _close_window(self, expected: _Expected) -> None:
        """Report a failed push, after its window was closed and no write through it is left."""
        since = time.monotonic()
        is_reported = False
        self._forget(expected.listed)
        while True:
            try:
                self._own.unregister(expected.window, timeout=CLOSE_S)
                break
            except (BusyError, DeadlineError) as error:
                # A write has begun. The transport ends it if it makes no progress.
                if not is_reported and time.monotonic() - since > STUCK_S:
                    is_reported = True
                    self._failures.count("waiting for the end of a write", error)
        seconds = time.perf_counter() - expected.started
        expected.result.set_result(expected.running.result(seconds=seconds))

    def _forget(self, region: int) -> None:
        """Remove a region without waiting for what still holds the table of regions."""
        try:
            self._own.unregister(region, timeout=0)
        except (BusyError, DeadlineError):
            # Its number is refused from now on; the memory is kept until then.
            return


def _needed(load: "Load", part: PartPages) -> list[int]:
    """Return the positions of the blocks of a load that the part's group keeps."""
    return [at for at, page in enumerate(load.blocks[part.group]) if page]

"""A worker's side of transfers between engines: its pages for peers, and reads of peers' pages.

A read is complete if all bytes arrived with their checksums and the peer's table still held the
lease afterwards. A push is complete if all blocks of all layers have arrived. Anything else is a
failed load: the engine computes the blocks.
"""

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cascadekv import CascadeError
from cascadekv._native import TransportEndpoint
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.announcements import (
    ANNOUNCE,
    LAYER,
    REFUSE,
    WITHDRAW,
    Announcement,
    Written,
)
from cascadekv.connectors.vllm.arrivals import Arrivals
from cascadekv.connectors.vllm.leases import RENEW, UNREADABLE, UNUSED, LeaseTable
from cascadekv.connectors.vllm.offers import Opened, TransferPlan
from cascadekv.connectors.vllm.peer_workers import FAILURES
from cascadekv.connectors.vllm.prefill_engine import PrefillEngine, Scratch
from cascadekv.connectors.vllm.pushes import Pushes
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError
from cascadekv.transfer import Rdma, Tls
from cascadekv.transfer.settings import use_rdma

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from cascadekv.connectors.vllm.metadata import LoadResult
    from cascadekv.connectors.vllm.running_load import RunningLoad

__all__ = ["Transfers"]

_LOG = logging.getLogger("vllm.cascade")
ENGINES_MAX = 64
"""Most prefill engines with open connections; the one whose use is longest ago is closed."""
RECEIVE_S = 0.25
"""How often deadlines of pushes are looked at."""
HEARTBEAT_S = 2.0, 10.0
"""Interval and limit after which a frozen engine is disconnected."""


class Transfers:
    """One worker's pages, its leases, and the prefill engines that it reads from."""

    def __init__(  # noqa: PLR0913 # each is named by its caller
        self,
        memory: "torch.Tensor",
        geometry: Geometry,
        *,
        listen: str,
        advertise: str | None = None,
        token: bytes | None,
        tls: Tls | None = None,
        rdma: Rdma | None = None,
    ) -> None:
        """Register the pages in host memory and listen. Raises `CascadeError` or `OSError`.

        Engines of other hosts need the token or the certificates. They are told of the host
        `advertise`, if it is not that of `listen`.
        """
        self._geometry = geometry
        self._is_any_host = token is not None or tls is not None
        self._endpoint = TransportEndpoint(
            name=f"vllm rank {geometry.rank}",
            geometry=geometry.to_json(),
            accepts=self._refusal,
            token=token,
            heartbeat=HEARTBEAT_S,
            tls=tls,
        )
        if rdma is not None:
            device = use_rdma(self._endpoint, rdma)
            _LOG.info("Cascade: pages move by %s", f"RDMA ({device})" if device else "TCP")
        self._leases = LeaseTable()
        self._scratch = Scratch()
        # Numbered from 0: the regions PAGES, TABLE and SCRATCH.
        address, size = memory.data_ptr(), memory.numel()
        self._endpoint.register_address(address, size, access="read", owner=memory)
        self._endpoint.register(self._leases.memory, access="read")
        self._endpoint.register(self._scratch.memory, access="local")
        self.address = self._endpoint.listen(listen)
        if advertise is not None:
            host = f"[{advertise}]" if ":" in advertise else advertise
            self.address = f"{host}:{self.address.rpartition(':')[2]}"
        self.id = self._endpoint.id.hex()
        self._engines: dict[tuple[tuple[str, str], ...], PrefillEngine] = {}
        self._pushes = Pushes(
            self._endpoint,
            geometry,
            is_any_host=self._is_any_host,
            on_done=self._note_push_end,
        )
        self._arrivals = Arrivals(self._endpoint, memory, geometry, lambda: (self.address, self.id))
        self._lock = threading.Lock()
        self._failures = FailureLog(_LOG)
        self._is_closed = False
        self.reads = 0
        """Loads that were read from prefill engines, without those that failed."""
        self._receiver = threading.Thread(target=self._receive, name="cascade-leases", daemon=True)
        self._receiver.start()

    def apply(self, plan: TransferPlan) -> None:
        """Carry out a step's changes, before its kernels. Messages are sent by other threads."""
        if plan.is_reset:
            self._pushes.close_all("the cache of the engine was reset")
        self._pushes.stop(plan.stopped, "the engine needed the pages of the request")
        self._pushes.close_requests(plan.dropped, "the request has ended")
        self._leases.apply(plan)
        for opened in plan.opened:
            self._pushes.open(opened)
        self._pushes.refuse(plan.refused)
        self._pushes.begin_step(plan.computed)
        for declined in plan.declined:
            self._arrivals.decline(declined, self._engine(declined.source.workers))
        if plan.withdrawn:
            self._arrivals.withdraw(set(plan.withdrawn))
        for offer in plan.renewed:
            self._engine(offer.workers).send_later(offer, RENEW, plan.workers)
        for offer in plan.released:
            self._engine(offer.workers).send_later(offer, UNUSED, plan.workers)

    def take_ended(self) -> set[str]:
        """Return requests whose leases have ended: the engine may use their pages again."""
        ended = self._leases.take_ended(self._pushes.unfinished())
        self._pushes.close_requests(ended, "its lease has ended")
        return ended

    def layer_computed(self, layer: str, requests: Iterable[str]) -> None:
        """Write what the step has computed of a layer to decode engines that wait for it."""
        self._pushes.layer_computed(layer, requests)

    def end_step(self, right: Iterable[str], wrong: Iterable[str]) -> None:
        """Write what the step has computed, except of requests whose KV may be wrong."""
        self._pushes.stop(wrong, "a block that the prompt depends on could not be loaded")
        self._pushes.end_step(right)

    def revoke(self, request: str) -> None:
        """Give nothing of a request to other engines: its KV is not that of its prompt's digest."""
        self._pushes.close_requests([request], "its adapter was loaded again from other files")
        self._leases.revoke(request)

    def pull(self, running: "RunningLoad", deadline: float) -> "Future[LoadResult]":
        """Start to read the blocks of a load; the deadline is by the monotonic clock."""
        plan = running.load.pull
        if plan is None:
            raise ValueError("the load has no offer")
        return self._engine(plan.offer.workers).submit(lambda: self._pull(running, deadline))

    def expect(self, running: "RunningLoad") -> "Future[LoadResult]":
        """Let a prefill engine write the blocks of a load."""
        plan = running.load.push
        if plan is None:
            raise ValueError("the load has no prefill engine")
        return self._arrivals.expect(running, self._engine(plan.source.workers))

    @property
    def pushes(self) -> tuple[int, int]:
        """How many pushes this worker has written completely, and how many it has got."""
        return self._pushes.completed, self._arrivals.completed

    def take_lease_counts(self) -> tuple[int, Mapping[str, int]]:
        """Return the leases of finished requests since the last call, and how leases ended."""
        return self._leases.take_counts()

    def close(self) -> None:
        """End reads, pushes, messages and connections."""
        self._is_closed = True
        self._pushes.close()
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.threads.close()
        self._endpoint.close()
        self._receiver.join()
        self._arrivals.close()

    def _pull(self, running: "RunningLoad", deadline: float) -> "LoadResult":
        started, cpu = time.perf_counter(), time.thread_time()
        load, plan = running.load, running.load.pull
        if plan is None:
            raise ValueError("the load has no offer")
        engine = self._engine(plan.offer.workers)
        needed = {
            part.name: [at for at, page in enumerate(load.blocks[part.group]) if page]
            for part in self._geometry.parts
        }
        for name, positions in needed.items():
            running.expect(name, positions)
        try:
            engine.read(load, plan, deadline)
        except FAILURES as error:
            self._failures.count("reading from a prefill engine", error)
            engine.send_later(plan.offer, UNUSED, plan.workers)
        else:
            with self._lock:
                self.reads += 1
            for part in self._geometry.parts:
                positions = needed[part.name]
                running.note_copies(part.name, positions, part.block_bytes, is_on_gpu=False)
        seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu
        return running.result(seconds=seconds, cpu_seconds=cpu_seconds)

    def _engine(self, workers: Sequence[tuple[str, str]]) -> PrefillEngine:
        key = tuple(workers)
        oldest = None
        with self._lock:
            engine = self._engines.pop(key, None)
            if engine is None:
                engine = PrefillEngine(
                    workers,
                    self._endpoint,
                    self._geometry,
                    self._scratch,
                    is_any_host=self._is_any_host,
                )
                if len(self._engines) >= ENGINES_MAX:
                    oldest = self._engines.pop(next(iter(self._engines)))
            self._engines[key] = engine
            engine.threads.use()
        if oldest is not None:
            oldest.threads.close_later()
        return engine

    def _end_lost_threads(self) -> None:
        with self._lock:
            for key, engine in list(self._engines.items()):
                if engine.threads.is_lost:
                    self._engines.pop(key).threads.close_later()

    def _note_push_end(self, opened: Opened, announced: Announcement, end: str) -> None:
        self._leases.finish_rank(opened.request, announced.rank, announced.workers, end)

    def _refusal(self, geometry: bytes) -> str | None:
        """Return why a peer is refused; for the endpoint.

        One whose pages do not fit is accepted: it says which leases it does not use. Only the side
        that connects moves pages, and it checks whether they fit.
        """
        try:
            Geometry.parse(geometry)
        except GeometryError as error:
            return str(error)
        return None

    def _receive(self) -> None:
        """Receive the messages of other engines."""
        while not self._is_closed:
            try:
                notice = self._endpoint.next_notice(timeout=RECEIVE_S)
            except CascadeError as error:
                if not self._is_closed:
                    self._failures.count("receiving messages of other engines", error)
                return
            try:
                if notice is not None:
                    self._apply_message(notice[1])
                self._arrivals.check()
                self._pushes.check()
                self._end_lost_threads()
            except Exception as error:  # noqa: BLE001 # a bug here must not end all messages
                _LOG.exception("Cascade: a message of another engine was not applied")
                self._failures.count("receiving messages of other engines", error)

    def _apply_message(self, notice: bytes) -> None:
        """Apply a message of a peer; one that cannot be read is counted."""
        try:
            fields: Any = json.loads(notice)
            kind = fields[0]
            if kind == ANNOUNCE:
                self._pushes.announce(Announcement.parse(fields[1], fields[2]))
            elif kind == LAYER:
                self._arrivals.receive(Written.parse(fields[1], fields[2]))
            elif kind == WITHDRAW:
                self._pushes.withdraw(int(fields[2][0]))
            elif kind == REFUSE:
                self._arrivals.refused(int(fields[2][0]), str(fields[2][1]))
            else:
                self._leases.receive(notice)
        except UNREADABLE as error:
            self._failures.count("reading a message of another engine", error)

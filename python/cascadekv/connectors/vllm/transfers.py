"""A worker's side of transfers between engines: its pages for peers, and reads of peers' pages.

A read is complete if all bytes arrived with their checksums and the peer's table still held the
lease afterwards. Anything else is a failed load: the engine computes the blocks.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING

from cascadekv import CascadeError
from cascadekv._native import TransportEndpoint
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.leases import DONE, RENEW, LeaseTable
from cascadekv.connectors.vllm.offers import Offer, TransferPlan
from cascadekv.connectors.vllm.prefill_engine import FAILURES, PrefillEngine, Scratch
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError

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


class Transfers:
    """One worker's pages, its leases, and the prefill engines that it reads from."""

    def __init__(
        self, memory: "torch.Tensor", geometry: Geometry, *, listen: str, token: bytes | None
    ) -> None:
        """Register the pages in host memory and listen. Raises `CascadeError` or `OSError`."""
        self._geometry = geometry
        self._is_any_host = token is not None
        self._endpoint = TransportEndpoint(
            name=f"vllm rank {geometry.rank}",
            geometry=geometry.to_json(),
            accepts=self._refusal,
            token=token,
        )
        self._leases = LeaseTable()
        self._scratch = Scratch()
        # Numbered from 0: the regions PAGES, TABLE and SCRATCH.
        address, size = memory.data_ptr(), memory.numel()
        self._endpoint.register_address(address, size, access="read", owner=memory)
        self._endpoint.register(self._leases.memory, access="read")
        self._endpoint.register(self._scratch.memory, access="local")
        self.address = self._endpoint.listen(listen)
        self.id = self._endpoint.id.hex()
        self._engines: dict[tuple[tuple[str, str], ...], PrefillEngine] = {}
        self._lock = threading.Lock()
        self._failures = FailureLog(_LOG)
        self._is_closed = False
        self.reads = 0
        """Loads that were read from prefill engines, without those that failed."""
        self._receiver = threading.Thread(target=self._receive, name="cascade-leases", daemon=True)
        self._receiver.start()

    def apply(self, plan: TransferPlan) -> None:
        """Carry out a step's changes. Messages are sent by other threads."""
        self._leases.apply(plan)
        for offer in plan.renewed:
            self._engine(offer).send_later(offer, RENEW, plan.workers)
        for offer in plan.released:
            self._engine(offer).send_later(offer, DONE, plan.workers)

    def take_ended(self) -> set[str]:
        """Return requests whose leases have ended: the engine may use their pages again."""
        return self._leases.take_ended()

    def pull(self, running: "RunningLoad", deadline: float) -> "Future[LoadResult]":
        """Start to read the blocks of a load; the deadline is by the monotonic clock."""
        plan = running.load.pull
        if plan is None:
            raise ValueError("the load has no offer")
        return self._engine(plan.offer).submit(lambda: self._pull(running, deadline))

    def close(self) -> None:
        """End reads, messages and connections."""
        self._is_closed = True
        for engine in self._engines.values():
            engine.close()
        self._endpoint.close()
        self._receiver.join()

    def _pull(self, running: "RunningLoad", deadline: float) -> "LoadResult":
        started, cpu = time.perf_counter(), time.thread_time()
        load, plan = running.load, running.load.pull
        if plan is None:
            raise ValueError("the load has no offer")
        engine = self._engine(plan.offer)
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
            engine.send_later(plan.offer, DONE, plan.workers)
        else:
            with self._lock:
                self.reads += 1
            for part in self._geometry.parts:
                positions = needed[part.name]
                running.note_copies(part.name, positions, part.block_bytes, is_on_gpu=False)
        seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu
        return running.result(seconds=seconds, cpu_seconds=cpu_seconds)

    def _engine(self, offer: Offer) -> PrefillEngine:
        key = tuple(offer.workers)
        oldest = None
        with self._lock:
            engine = self._engines.pop(key, None)
            if engine is None:
                engine = PrefillEngine(
                    offer.workers,
                    self._endpoint,
                    self._geometry,
                    self._scratch,
                    is_any_host=self._is_any_host,
                )
                if len(self._engines) >= ENGINES_MAX:
                    oldest = self._engines.pop(next(iter(self._engines)))
            self._engines[key] = engine
        if oldest is not None:
            oldest.close_later()
        return engine

    def _refusal(self, geometry: bytes) -> str | None:
        """Return why a peer is refused; for the endpoint."""
        try:
            self._geometry.check(Geometry.parse(geometry))
        except GeometryError as error:
            return str(error)
        return None

    def _receive(self) -> None:
        """Receive the messages of decode engines."""
        while not self._is_closed:
            try:
                notice = self._endpoint.next_notice(timeout=RECEIVE_S)
            except CascadeError as error:
                if not self._is_closed:
                    self._failures.count("receiving messages of decode engines", error)
                return
            if notice is not None:
                self._leases.receive(notice[1])

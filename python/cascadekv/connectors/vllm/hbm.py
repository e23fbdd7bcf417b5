"""The tier above the store: a node of its own in the memory of a GPU (`cascade.hbm`).

A block there is also in the store, so the node may end at any time. Blocks are saved to both, and
loaded from the GPU's memory if all blocks of a call are there.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cascadekv import BlockKeys, CascadeError, Gpu, Namespace, PreparedPut, Store, Views
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.settings import StoreAddress, StoreLink
from cascadekv.connectors.vllm.batches import SaveRun
from cascadekv.connectors.vllm.memory import GpuPages, Memory
from cascadekv.connectors.vllm.settings import ConnectorSettings

__all__ = ["TIER", "CopyPuts", "HbmTier", "TieredReader", "open_hbm"]

_LOG = logging.getLogger("vllm.cascade")
TIER = "hbm"
"""The name of the tier."""
CALL_S = 0.02
"""Most time of a call: the store has the blocks, too."""
SEAL_S = 30.0
"""Time-out of the copies of a put. They wait for the step that computes the blocks."""


class HbmTier:
    """A client of the node. While it is unavailable, every read is a miss and nothing is saved."""

    def __init__(self, socket: str, token: bytes | None, gpu: Gpu, *, name: str) -> None:
        """Connect to the node at this socket, for copies of this GPU."""
        self._failures = FailureLog(_LOG)
        self._link: StoreLink | None = None
        try:
            address = StoreAddress(node=socket, token=token, timeout=CALL_S)
            self._link = StoreLink(address, name=name, gpu=gpu)
        except CascadeError as error:
            _LOG.warning("Cascade: cascade.hbm is not used: %s", error)

    def _store(self) -> Store | None:
        return None if self._link is None else self._link.store()

    def view(self, keys: BlockKeys, timeout: float) -> Views | None:
        """Return views of blocks; `None` unless all of them are there."""
        store = self._store()
        if store is None:
            return None
        try:
            views = store.view(keys, timeout=min(timeout, CALL_S))
        except STORE_FAILURES as error:
            self._failures.count("reading blocks from the memory of a GPU", error)
            return None
        if views.hits == len(keys):
            return views
        views.release()
        return None

    def prepare(self, run: SaveRun, block_bytes: int, namespace: Namespace) -> PreparedPut | None:
        """Reserve memory for the blocks of a save; `None` if there is none."""
        store = self._store()
        if store is None:
            return None
        try:
            return store.prepare(
                run.keys(),
                block_bytes,
                parent=run.parent(),
                namespace=namespace,
                timeout=CALL_S,
            )
        except STORE_FAILURES as error:
            self._failures.count("saving blocks to the memory of a GPU", error)
            return None

    def seal(self, prepared: PreparedPut, deadline: float) -> None:
        """Store the blocks of a put whose copies were started."""
        try:
            with prepared:
                prepared.seal(timeout=max(CALL_S, deadline - time.monotonic()))
        except STORE_FAILURES as error:
            self._failures.count("saving blocks to the memory of a GPU", error)

    def close(self) -> None:
        """Close the connection. Blocks in use keep the memory."""
        link, self._link = self._link, None
        if link is not None:
            try:
                link.close()
            except CascadeError as error:
                _LOG.warning("Cascade: closing the connection of cascade.hbm failed: %s", error)


def open_hbm(settings: ConnectorSettings, memories: Sequence[Memory]) -> HbmTier | None:
    """Connect to the node that the settings name, if the KV is in the memory of a GPU."""
    gpus = [memory.gpu for memory in memories if isinstance(memory, GpuPages)]
    if settings.hbm is None:
        return None
    if not gpus:
        _LOG.warning(
            "Cascade: cascade.hbm is ignored: the KV is not in the memory of an NVIDIA GPU"
        )
        return None
    return HbmTier(settings.hbm, settings.address.token, gpus[0], name="vllm")


@dataclass(slots=True)
class _Copy:
    first: int
    last: int
    prepared: PreparedPut
    has_failed: bool = False


class CopyPuts:
    """The puts of one save in the memory of a GPU, beside those in the store."""

    def __init__(self, tier: HbmTier) -> None:
        """Begin without puts."""
        self._tier = tier
        self._puts: list[_Copy] = []

    def add(
        self,
        first: int,
        last: int,
        prepared: PreparedPut,
        memory: GpuPages,  # noqa: ARG002 # as the puts in the store
    ) -> None:
        """Add the put of a run of blocks, whose copies are started next."""
        self._puts.append(_Copy(first, last, prepared))

    def fail(self, first: int, last: int) -> None:
        """Drop the put of a run of blocks."""
        for put in self._puts:
            put.has_failed |= (put.first, put.last) == (first, last)

    def finish(self, stored: Sequence[bool]) -> None:
        """Seal the puts whose blocks the store has, and drop the others."""
        deadline = time.monotonic() + SEAL_S
        for put in self._puts:
            if put.has_failed or not all(stored[put.first : put.last]):
                put.prepared.release()
            else:
                self._tier.seal(put.prepared, deadline)
        self._puts = []


class TieredReader:
    """Reads blocks from the memory of a GPU if all of a call are there, and else from the store."""

    def __init__(self, store: Store, hbm: HbmTier) -> None:
        """Read from both."""
        self._store = store
        self._hbm = hbm

    def view(self, keys: BlockKeys, *, timeout: float) -> Views:
        """Return views of blocks, all of them of one of the two."""
        found = self._hbm.view(keys, timeout)
        return self._store.view(keys, timeout=timeout) if found is None else found

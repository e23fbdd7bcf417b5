"""The tier above the store: a node of its own in the memory of a GPU (`cascade.hbm`).

A block there is also in the store, so the node may end at any time, and start at any time. Blocks
are saved to both. Those that are loaded from the store are put there, too.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cascadekv import (
    AwayError,
    BlockKeys,
    CascadeError,
    Gpu,
    Namespace,
    PreparedPut,
    Store,
    Views,
)
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.settings import StoreAddress, StoreLink
from cascadekv.connectors.vllm.memory import GpuPages, Memory
from cascadekv.connectors.vllm.settings import ConnectorSettings

__all__ = ["CALL_S", "SEAL_S", "CopyPuts", "HbmTier", "open_hbm"]

_LOG = logging.getLogger("vllm.cascade")
SOCKET_SUFFIX = ".hbm"
"""What follows the socket of a node in DRAM in that of its node in the memory of a GPU."""
CALL_S = 0.02
"""Most time of a call: the store has the blocks, too."""
CONNECT_S = 1.0
"""Most time of an attempt to connect, which also maps the memory."""
RETRY_S = 10.0
"""Interval of these attempts, which a thread of their own makes."""
SEAL_S = 30.0
"""Time-out of the copies of a put. They wait for the step that computes the blocks."""


class HbmTier:
    """A client of the node. While it is unavailable, every read is a miss and nothing is saved."""

    def __init__(  # noqa: PLR0913 # each is named by its caller
        self,
        socket: str,
        token: bytes | None,
        gpu: Gpu,
        *,
        name: str,
        is_expected: bool = True,
        retry_s: float = RETRY_S,
    ) -> None:
        """Connect to the node at this socket, for copies of this GPU, now or later.

        `is_expected` says that its absence is worth a warning.
        """
        self._failures = FailureLog(_LOG)
        self._socket = socket
        self._is_logged = False
        address = StoreAddress(node=socket, token=token, timeout=CONNECT_S)
        self._link: StoreLink | None = StoreLink(
            address, name=name, retry_s=retry_s, gpu=gpu, is_refusal_final=False
        )
        error = self._link.last_error
        if error is not None and (is_expected or not isinstance(error, AwayError)):
            _LOG.warning("Cascade: cascade.hbm is not used until its node can be: %s", error)

    def _store(self) -> Store | None:
        store = None if self._link is None else self._link.store()
        if store is not None and not self._is_logged:
            self._is_logged = True
            _LOG.info("Cascade: the node at %s keeps blocks in the memory of a GPU", self._socket)
        return store

    @property
    def is_available(self) -> bool:
        """Whether there was a connection to the node; if there was none, it is tried again."""
        return self._store() is not None

    def view(self, keys: BlockKeys, timeout: float) -> Views | None:
        """Return views of blocks; `None` if none of them is there."""
        store = self._store()
        if store is None:
            return None
        try:
            views = store.view(keys, timeout=min(timeout, CALL_S))
        except STORE_FAILURES as error:
            self._failures.count("reading blocks from the memory of a GPU", error)
            return None
        if views.hits:
            return views
        views.release()
        return None

    def prepare(
        self, keys: BlockKeys, parent: bytes | None, block_bytes: int, namespace: Namespace
    ) -> PreparedPut | None:
        """Reserve memory for consecutive blocks; `None` if there is none."""
        store = self._store()
        if store is None:
            return None
        try:
            return store.prepare(
                keys,
                block_bytes,
                parent=parent,
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
    """Connect to the node that the settings name, if the KV is in the memory of a GPU.

    Without the setting, it is the node that a node in DRAM has started beside itself.
    """
    gpus = [memory.gpu for memory in memories if isinstance(memory, GpuPages)]
    node, token = settings.address.node, settings.address.token
    if settings.hbm is False or settings.lite:
        return None
    if isinstance(settings.hbm, str):
        if gpus:
            return HbmTier(settings.hbm, token, gpus[0], name="vllm")
        _LOG.warning(
            "Cascade: cascade.hbm is ignored: the KV is not in the memory of an NVIDIA GPU"
        )
    elif gpus and node is not None:
        return HbmTier(node + SOCKET_SUFFIX, token, gpus[0], name="vllm", is_expected=False)
    return None


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

"""The store of one engine: embedded in its process, in a private node, or in a shared node.

If the scheduler and the worker are one process, the store is embedded there. An engine with several
processes uses a private node: its first worker starts and ends the node, and the other processes
find its socket by the engine's id.
"""

import logging
import threading
import time

from cascadekv import Store
from cascadekv.connectors.settings import RETRY_S, StoreAddress, StoreLink
from cascadekv.errors import CascadeError

__all__ = ["EngineStore"]

_LOG = logging.getLogger("vllm.cascade")
POLL_INTERVAL_S = 0.25
"""Interval of attempts to connect to a private node that has not started."""
MISSING_WARNING_S = 30.0
"""Delay before the warning about a private node that has not started."""
_SHARED: dict[str, tuple[StoreLink, int]] = {}
_LOCK = threading.Lock()


class EngineStore:
    """A handle on an engine's store; several handles of one process share one store."""

    def __init__(
        self, address: StoreAddress, *, key: str, name: str, is_private: bool = False
    ) -> None:
        """Open a handle; handles with an equal `key` share one store.

        A private node may start later, or never: it does not on hosts without the engine's first
        worker. Nothing waits for it, and every lookup is a miss until it has started.
        """
        self._key = key
        self._private_socket = address.node if is_private else None
        self._warn_at = time.monotonic() + MISSING_WARNING_S
        retry = POLL_INTERVAL_S if is_private else RETRY_S
        with _LOCK:
            link, users = _SHARED.get(key, (None, 0))
            link = link or StoreLink(address, name=name, retry_s=retry)
            _SHARED[key] = (link, users + 1)
        self._link: StoreLink | None = link

    def store(self) -> Store | None:
        """Return the store; `None` while it is unavailable."""
        store = None if self._link is None else self._link.store()
        if store is None and self._private_socket and time.monotonic() > self._warn_at:
            self._warn_missing(self._private_socket)
        return store

    def _warn_missing(self, socket: str) -> None:
        """Log once that the private node has not started."""
        self._private_socket = None
        _LOG.warning(
            "Cascade: no private node at %s after %.0f s; nothing is saved or loaded here. The "
            "engine's first worker starts the node on its own host. If workers run on several "
            "hosts, start `cascade serve` on each host and set cascade.node",
            socket,
            MISSING_WARNING_S,
        )

    def close(self) -> None:
        """Close the handle; the last handle closes the store."""
        if self._link is None:
            return
        self._link = None
        with _LOCK:
            link, users = _SHARED.pop(self._key)
            if users > 1:
                _SHARED[self._key] = (link, users - 1)
                return
        try:
            link.close()
        except CascadeError as error:
            _LOG.warning("Cascade: closing the store failed: %s", error)

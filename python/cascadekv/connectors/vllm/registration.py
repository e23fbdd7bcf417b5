"""Registers an engine's manifest with its store, for the comparisons of `cascade explain`."""

import functools
import logging
from collections.abc import Callable

from cascadekv import AwayError, CascadeError, Namespace, Store
from cascadekv.connectors.vllm.background import BackgroundThread

__all__ = ["ManifestRegistration"]

_LOG = logging.getLogger("vllm.cascade")


class ManifestRegistration:
    """Registers a manifest once with each store, in a background thread: the store writes it."""

    def __init__(
        self, store: Callable[[], Store | None], namespace: Callable[[], Namespace]
    ) -> None:
        """`store` returns the store, or `None` while it is unavailable."""
        self._store = store
        self._namespace = namespace
        self._background = BackgroundThread("register")
        self._registered_with: Store | None = None
        """The store of the last registration, which may be in progress."""

    def start(self) -> None:
        """Start the registration unless it was started.

        Called for every request, because a node may become available after the engine's start.
        """
        store = self._store()
        if store is not None and store is not self._registered_with:
            self._registered_with = store
            self._background.run(functools.partial(self._register, store))

    def close(self) -> None:
        """Wait for the registration in progress."""
        self._background.close()

    def _register(self, store: Store) -> None:
        try:
            store.register(self._namespace())
        except AwayError:
            # The next request starts it again.
            self._registered_with = None
        except CascadeError as error:
            _LOG.warning("Cascade: registering this engine's manifest failed: %s", error)

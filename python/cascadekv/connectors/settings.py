"""Parses the store's keys of an engine's configuration strictly, and opens the store."""

import os
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cascadekv._native import Gpu, Store, connect
from cascadekv.config import StoreConfig
from cascadekv.errors import AwayError, CascadeError, ConfigError, PipelineError
from cascadekv.messages import advice

__all__ = ["KEYS", "StoreAddress", "StoreLink", "open_store", "read_settings"]

PREFIX = "cascade."
_EMBEDDED = ("pipeline", "dram", "files", "files_capacity", "direct_io", "io_engine")
_NODE = ("node", "token_file")
_NAMES = (*_EMBEDDED, *_NODE, "timeout")
KEYS = tuple(PREFIX + name for name in _NAMES)
"""All keys of an engine's configuration that concern the store."""

TIMEOUT_S = 5.0
"""Default of `cascade.timeout`: the deadline of a call."""
RETRY_S = 5.0
"""Interval of connection attempts to a node that was unavailable when the engine started."""
TIMEOUT_MAX_S = 3600
"""Largest value of `cascade.timeout`."""
_FORBIDDEN_MODE_BITS = 0o037
"""Permission bits that a token file must not have: group write and execute, and all of others."""


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Where an engine's blocks are stored: in a node, or in a store in the engine's process."""

    node: str | None
    """Path of the node's Unix socket; `None` for an embedded store."""
    token: bytes | None = field(default=None, repr=False)
    """The token that authenticates the tenant."""
    embedded: StoreConfig | None = None
    """The embedded store's settings."""
    timeout: float = TIMEOUT_S
    """Deadline of a call in seconds."""


def read_settings(options: Mapping[str, object]) -> StoreAddress:
    """Parse the keys that begin with `cascade.`; other keys are the engine's and are ignored.

    Raises `ConfigError` that names the key: for an unknown key, for a key that cannot be combined
    with `cascade.node`, and for an invalid value.
    """
    given: dict[str, object] = {}
    for key, value in options.items():
        if not key.startswith(PREFIX):
            continue
        if key not in KEYS:
            raise ConfigError(f"{key}: no such setting; {advice(key, _NAMES, prefix=PREFIX)}")
        given[key.removeprefix(PREFIX)] = value
    timeout = _seconds(given.pop("timeout", TIMEOUT_S))
    if "node" in given:
        return _served(given, timeout)
    if "token_file" in given:
        raise ConfigError(
            "cascade.token_file: requires cascade.node; an embedded store has no tenants"
        )
    return StoreAddress(node=None, embedded=_embedded(given, timeout), timeout=timeout)


def open_store(address: StoreAddress, *, name: str, gpu: Gpu | None = None) -> Store:
    """Open the store; `name` labels this client in the node's status.

    `gpu` maps the pool of a node whose blocks are in the memory of a GPU.

    Raises what `connect` and `Store` raise: `AwayError` if no node answers, `RefusedError` if the
    node refuses this client.
    """
    if address.node is None:
        try:
            return Store(address.embedded)
        except PipelineError as error:
            raise PipelineError(f"cascade.pipeline: {error}") from error
    return connect(address.node, token=address.token, name=name, timeout=address.timeout, gpu=gpu)


class StoreLink:
    """The store of one engine process; its node may be unavailable when the engine starts.

    Until the first connection, a thread of its own retries it, so that no call of `store` waits:
    a node that accepts connections and does not answer takes the whole time-out of a call. After
    that, the client reconnects by itself.
    """

    def __init__(
        self,
        address: StoreAddress,
        *,
        name: str,
        retry_s: float = RETRY_S,
        gpu: Gpu | None = None,
        is_refusal_final: bool = True,
    ) -> None:
        """Open the store; raises what `open_store` raises, except `AwayError`.

        An unavailable node is retried every `retry_s` seconds, and unless `is_refusal_final` one
        that refuses this client, too.
        """
        self._address = address
        self._retry_s = retry_s
        self._name = name
        self._gpu = gpu
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._closed = False
        self._is_connecting = False
        self._store: Store | None = None
        self.last_error: CascadeError | None = None
        """Why there is no store, for the caller's log."""
        try:
            self._store = open_store(address, name=name, gpu=gpu)
        except CascadeError as error:
            if is_refusal_final and not isinstance(error, AwayError):
                raise
            self._schedule_retry(error)

    def store(self) -> Store | None:
        """Return the store; `None` before the first connection and after `close`. Never waits."""
        if self._store is not None or self._closed or time.monotonic() < self._retry_at:
            return self._store
        with self._lock:
            is_due = self._store is None and not self._closed and not self._is_connecting
            self._is_connecting = self._is_connecting or is_due
        if is_due:
            # A daemon: the interpreter must be able to exit although the node does not answer.
            threading.Thread(target=self._connect, name="cascade-connect", daemon=True).start()
        return self._store

    def _connect(self) -> None:
        """Try to connect once; the store is closed again if the link was closed meanwhile."""
        store = None
        try:
            store = open_store(self._address, name=self._name, gpu=self._gpu)
        except CascadeError as error:
            self._schedule_retry(error)
        finally:
            with self._lock:
                self._is_connecting = False
                if not self._closed:
                    self._store, store = store, None
        if store is not None:
            store.close()

    def close(self) -> None:
        """Close the store; may be called again. Raises what `Store.close` raises."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _schedule_retry(self, error: CascadeError) -> None:
        self.last_error = error
        self._retry_at = time.monotonic() + self._retry_s


def _served(given: Mapping[str, object], timeout: float) -> StoreAddress:
    for name in _EMBEDDED:
        if name in given:
            raise ConfigError(
                f"{PREFIX}{name}: cannot be combined with cascade.node, because the node has this "
                f"setting; remove it here and set it for cascade serve"
            )
    place = _text("node", given["node"])
    scheme, separator, path = place.partition(":")
    if not separator or scheme != "unix" or not path:
        raise ConfigError(f"cascade.node: {place!r} is not the address of a node; write unix:PATH")
    token = None
    if "token_file" in given:
        token = _token(Path(_text("token_file", given["token_file"])))
    return StoreAddress(node=path, token=token, timeout=timeout)


def _embedded(given: Mapping[str, object], timeout: float) -> StoreConfig:
    for name in ("pipeline", "files"):
        if name in given:
            _text(name, given[name])
    for name in ("dram", "files_capacity"):
        size = given.get(name, 0)
        if isinstance(size, bool) or not isinstance(size, int | str):
            raise ConfigError(f"{PREFIX}{name}: {size!r} is not a size; write 1073741824 or '1GiB'")
    try:
        return StoreConfig.from_dict({**given, "timeout": timeout})
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}{error}") from error


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{PREFIX}{name}: {value!r} is not text")
    return value


def _seconds(value: object) -> float:
    most = TIMEOUT_MAX_S
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ConfigError(f"cascade.timeout: {value!r} is not a number of seconds from 0 to {most}")
    return float(value)


def _token(path: Path) -> bytes:
    """Read a token file; its permissions are checked as nodes check files with secrets."""
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"cascade.token_file: {path} is not a regular file")
            if facts.st_mode & _FORBIDDEN_MODE_BITS:
                raise ConfigError(
                    f"cascade.token_file: {path} is accessible to others than its owner and group; "
                    f"chmod 600 it"
                )
            token = file.read().strip()
    except OSError as error:
        raise ConfigError(f"cascade.token_file: {path} cannot be read: {error.strerror}") from error
    if not token:
        raise ConfigError(f"cascade.token_file: {path} is empty")
    return token

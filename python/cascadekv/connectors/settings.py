"""What an engine's configuration says about the store: read strictly, and opened."""

import difflib
import os
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cascadekv._native import Store, connect
from cascadekv.config import StoreConfig
from cascadekv.errors import AwayError, CascadeError, ConfigError, PipelineError

__all__ = ["KEYS", "StoreAddress", "StoreLink", "open_store", "read_settings"]

PREFIX = "cascade."
_EMBEDDED = ("pipeline", "dram", "files", "files_capacity", "direct_io", "io_engine")
_NODE = ("node", "token_file")
_NAMES = (*_EMBEDDED, *_NODE, "timeout")
KEYS = tuple(PREFIX + name for name in _NAMES)
"""Every key that an engine's configuration may have for the store."""

TIMEOUT_S = 5.0
"""How long a call may take unless `cascade.timeout` says otherwise."""
RETRY_S = 5.0
"""How often a node that was away when the engine started is asked again."""
LONGEST_S = 3600
"""The longest timeout that makes sense."""
_READABLE_BY_OTHERS = 0o037


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Where an engine's blocks are kept: a node's socket, or a store in the engine's process."""

    node: str | None
    """Path of the node's Unix socket; `None` for an embedded store."""
    token: bytes | None = field(default=None, repr=False)
    """What proves the tenant to the node."""
    embedded: StoreConfig | None = None
    """The embedded store's settings."""
    timeout: float = TIMEOUT_S
    """Seconds that a call may take."""


def read_settings(options: Mapping[str, object]) -> StoreAddress:
    """Read the keys that begin with `cascade.`; others are the engine's and are left alone.

    Raises `ConfigError` that names the key: for an unknown one, for one without a use beside
    `cascade.node`, and for a value that makes no sense.
    """
    given: dict[str, object] = {}
    for key, value in options.items():
        if not key.startswith(PREFIX):
            continue
        if key not in KEYS:
            near = difflib.get_close_matches(key.removeprefix(PREFIX), _NAMES, n=1)
            advice = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(KEYS)}"
            raise ConfigError(f"{key}: no such setting; {advice}")
        given[key.removeprefix(PREFIX)] = value
    timeout = _seconds(given.pop("timeout", TIMEOUT_S))
    if "node" in given:
        return _served(given, timeout)
    if "token_file" in given:
        raise ConfigError(
            "cascade.token_file: needs cascade.node; an embedded store has no tenants"
        )
    return StoreAddress(node=None, embedded=_embedded(given, timeout), timeout=timeout)


def open_store(address: StoreAddress, *, name: str) -> Store:
    """Open the store; `name` is how a node lists this client.

    Raises what `connect` and `Store` raise: `AwayError` when no node answers, `RefusedError` when
    it does not want this client.
    """
    if address.node is None:
        try:
            return Store(address.embedded)
        except PipelineError as error:
            raise PipelineError(f"cascade.pipeline: {error}") from error
    return connect(address.node, token=address.token, name=name, timeout=address.timeout)


class StoreLink:
    """The store of one engine process, also when its node is away while the engine starts.

    Once connected, the client finds the node again by itself; until then calls of `store` ask for
    it, seconds apart, from one thread at a time.
    """

    def __init__(self, address: StoreAddress, *, name: str, retry_s: float = RETRY_S) -> None:
        """Open the store; raises what `open_store` does, except that a node may be away.

        Such a node is asked again every `retry_s` seconds.
        """
        self._address = address
        self._retry_s = retry_s
        self._name = name
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._closed = False
        self._store: Store | None = None
        self.last_error: CascadeError | None = None
        """Why there is no store; the caller's to report."""
        try:
            self._store = open_store(address, name=name)
        except AwayError as away:
            self._put_off(away)

    def store(self) -> Store | None:
        """Give the store; `None` while its node has never answered, and after `close`."""
        if self._store is not None or self._closed or time.monotonic() < self._retry_at:
            return self._store
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._store is None and not self._closed:
                self._store = open_store(self._address, name=self._name)
        except CascadeError as error:
            self._put_off(error)
        finally:
            self._lock.release()
        return self._store

    def close(self) -> None:
        """Close the store; may be repeated. Raises what `Store.close` raises."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _put_off(self, error: CascadeError) -> None:
        self.last_error = error
        self._retry_at = time.monotonic() + self._retry_s


def _served(given: Mapping[str, object], timeout: float) -> StoreAddress:
    for name in _EMBEDDED:
        if name in given:
            raise ConfigError(
                f"{PREFIX}{name}: is the node's to say when cascade.node is given; remove it, or "
                f"start the node with it (cascade serve)"
            )
    place = _text("node", given["node"])
    scheme, found, path = place.partition(":")
    if not found or scheme != "unix" or not path:
        raise ConfigError(f"cascade.node: {place!r} is no place of a node; write unix:PATH")
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
            raise ConfigError(f"{PREFIX}{name}: {size!r} is no size; write 1073741824 or '1GiB'")
    try:
        return StoreConfig.from_dict({**given, "timeout": timeout})
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}{error}") from error


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{PREFIX}{name}: {value!r} is no text")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_S:
        raise ConfigError(
            f"cascade.timeout: {value!r} is no number of seconds from 0 to {LONGEST_S}"
        )
    return float(value)


def _token(path: Path) -> bytes:
    """Read a file that holds a token, by the rule that nodes have for files of secrets."""
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"cascade.token_file: {path} is no regular file")
            if facts.st_mode & _READABLE_BY_OTHERS:
                raise ConfigError(
                    f"cascade.token_file: {path} is open to others than its owner and group; "
                    f"chmod 600 it"
                )
            token = file.read().strip()
    except OSError as error:
        raise ConfigError(f"cascade.token_file: {path} cannot be read: {error.strerror}") from error
    if not token:
        raise ConfigError(f"cascade.token_file: {path} is empty")
    return token

"""The store of one engine: embedded in its process, in a private node, or in a shared node.

If the scheduler and the worker are one process, the store is embedded there. An engine with several
processes uses a private node: its first worker starts and ends the node, and the other processes
find its socket by the engine's id.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from cascadekv import Store
from cascadekv._program import program
from cascadekv.connectors.settings import RETRY_S, StoreAddress, StoreLink
from cascadekv.errors import CascadeError

__all__ = ["EngineStore", "private_socket"]

_LOG = logging.getLogger("vllm.cascade")
SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: 108 bytes of `sockaddr_un` with the final NUL."""
START_S = 60.0
"""Time-out for the start of a private node; a new pool of many GiB takes seconds."""
KILL_S = 5.0
"""How long to wait for the end of a killed private node."""
POLL_INTERVAL_S = 0.25
"""Interval of attempts to connect to a private node that has not started."""
MISSING_WARNING_S = 30.0
"""Delay before the warning about a private node that has not started."""
_FLAGS = {
    "cascade.pipeline": "--pipeline",
    "cascade.dram": "--dram",
    "cascade.files": "--files",
    "cascade.files_capacity": "--files-capacity",
}
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


def private_socket(engine: str) -> Path:
    """Return the socket of an engine's private node, in a directory of this user's alone."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    # Hashed to keep the socket's path short. All of the id counts: ranks differ at its end.
    name = hashlib.sha256(engine.encode()).hexdigest()[:16]
    socket = root / f"cascade-{os.getuid()}-{name}" / "node.sock"
    if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
        # Scratch directories of batch systems can exceed the length of a socket path.
        socket = Path("/tmp") / socket.parent.name / socket.name  # noqa: S108 # created 0700
    return socket


class PrivateNode:
    """A node that serves one engine, as a child process of its first worker."""

    def __init__(self, socket: Path, options: Mapping[str, object]) -> None:
        """Start the node and wait until it is ready. Raises `OSError` if it does not start."""
        self._directory = socket.parent
        self._directory.mkdir(mode=0o700, exist_ok=True)
        command = [str(program()), "serve", "--socket", str(socket)]
        for key, flag in _FLAGS.items():
            if key in options:
                command += [flag, str(options[key])]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CASCADE_")}
        # The pool is not kept for a restart: the next engine has another id. One client may use all
        # of it: the clients are the processes of one engine.
        settings = inherited | {
            "CASCADE_KEEP_POOL": "never",
            "CASCADE_CLIENT_SHARE": "100%",
        }
        self._process = subprocess.Popen(  # noqa: S603 # our own command
            command,
            env=settings,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 # one system call, takes no locks
        )
        watchdog = threading.Timer(START_S, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline() if self._process.stdout else ""
        watchdog.cancel()
        if "ready" not in line:
            self.close()
            raise OSError(f"the engine's private node did not start: {' '.join(command)}")
        atexit.register(self.close)

    def close(self) -> None:
        """End the node, by force after a time-out, and remove its directory."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(START_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._reap()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _reap(self) -> None:
        """Wait for the killed node. The kernel keeps it while a call to a failed disk hangs."""
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            _LOG.warning(
                "Cascade: the engine's private node (process %d) has not ended %.0f s after it was "
                "killed; check the disk of cascade.files",
                self._process.pid,
                KILL_S,
            )


def _die_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)

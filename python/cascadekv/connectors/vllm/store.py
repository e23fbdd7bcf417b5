"""The store of one engine: in its process, in a private node beside it, or in a shared node.

An engine whose scheduler and worker are one process keeps its blocks there. One of several
processes starts a private node: its first worker does, the others find it by the engine's id, and
it ends with that worker.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from cascadekv import Store
from cascadekv.connectors.settings import RETRY_S, StoreAddress, StoreLink
from cascadekv.errors import CascadeError

__all__ = ["EngineStore", "private_socket"]

_LOG = logging.getLogger("vllm.cascade")
SOCKET_PATH_BYTES_MAX = 107
"""Longest path that the address of a Unix socket holds."""
START_S = 60.0
"""How long a private node may take to be ready; a new pool of many GiB takes seconds."""
LOOK_S = 0.25
"""How often a private node that is not there yet is looked for; that costs microseconds."""
MISSING_S = 30.0
"""After which time a private node that is not there is told of."""
_FLAGS = {
    "cascade.pipeline": "--pipeline",
    "cascade.dram": "--dram",
    "cascade.files": "--files",
    "cascade.files_capacity": "--files-capacity",
}
_SHARED: dict[str, tuple[StoreLink, int]] = {}
_LOCK = threading.Lock()


class EngineStore:
    """A handle on an engine's store; several handles of one process share what is behind it."""

    def __init__(
        self, address: StoreAddress, *, key: str, name: str, is_private: bool = False
    ) -> None:
        """`key` is the same for all handles that are to share one store.

        A private node may start later than this, or never, as on a host without the engine's first
        worker: nothing waits for it, and everything is a miss until it is there.
        """
        self._key = key
        self._private = address.node if is_private else None
        self._tell_at = time.monotonic() + MISSING_S
        retry = LOOK_S if is_private else RETRY_S
        with _LOCK:
            link, users = _SHARED.get(key, (None, 0))
            link = link or StoreLink(address, name=name, retry_s=retry)
            _SHARED[key] = (link, users + 1)
        self._link: StoreLink | None = link

    def store(self) -> Store | None:
        """Give the store; nothing while there is none."""
        store = None if self._link is None else self._link.store()
        if store is None and self._private and time.monotonic() > self._tell_at:
            self._tell_missing(self._private)
        return store

    def _tell_missing(self, socket: str) -> None:
        """Say once that a private node never came."""
        self._private = None
        _LOG.warning(
            "Cascade: no private node at %s after %.0f s; nothing is kept or loaded here. The "
            "engine's first worker starts one on its own host: where workers are on several hosts, "
            "start `cascade serve` on each and set cascade.node",
            socket,
            MISSING_S,
        )

    def close(self) -> None:
        """Let go of it; the last handle closes the store."""
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
            _LOG.warning("Cascade: closing the store: %s", error)


def private_socket(engine: str) -> Path:
    """Give where an engine's private node listens: a directory of this user's alone."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    # Short for the sake of the socket's path, and of the whole name: ranks differ in its end.
    name = hashlib.sha256(engine.encode()).hexdigest()[:16]
    socket = root / f"cascade-{os.getuid()}-{name}" / "node.sock"
    if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
        # Scratch directories of batch systems are longer than the address of a Unix socket.
        socket = Path("/tmp") / socket.parent.name / socket.name  # noqa: S108 # made 0700, ours
    return socket


class PrivateNode:
    """A node that serves one engine, as a child of its first worker."""

    def __init__(self, socket: Path, options: Mapping[str, object]) -> None:
        """Start it and wait until it serves. Raises `OSError` when it does not."""
        self._directory = socket.parent
        self._directory.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "cascadekv", "serve", "--socket", str(socket)]
        for key, flag in _FLAGS.items():
            if key in options:
                command += [flag, str(options[key])]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CASCADE_")}
        # The pool ends with the engine: nobody would find it again.
        settings = inherited | {
            "CASCADE_KEEP_POOL": "never",
            "CASCADE_CLIENT_SHARE": "100%",
        }
        self._process = subprocess.Popen(  # noqa: S603 # our own command
            command,
            env=settings,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 # one call of the kernel, no locks
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
        """End it: cleanly, or by force after a while; nothing of it is left."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(START_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _die_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)

"""A node that serves one engine, as a child process of its first worker."""

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from cascadekv._program import program

__all__ = ["PrivateNode", "private_socket"]

_LOG = logging.getLogger("vllm.cascade")
SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: 108 bytes of `sockaddr_un` with the final NUL."""
START_S = 60.0
"""Time-out for the start of a node; a new pool of many GiB takes seconds."""
KILL_S = 5.0
"""How long to wait for the end of a killed node."""
RESTART_MIN_S, RESTART_MAX_S = 1.0, 60.0
"""Pause before a node that has ended is started again; doubled after each failure."""
STEADY_S = 60.0
"""A node that ran for this time has started well: the next pause is the shortest one."""
LEFT_S = 600.0
"""Least age of a directory without a node that is removed."""
_ID_DIGITS = 16
_NOT_STARTED = (OSError, subprocess.SubprocessError)
_FLAGS = {
    "cascade.pipeline": "--pipeline",
    "cascade.dram": "--dram",
    "cascade.files": "--files",
    "cascade.files_capacity": "--files-capacity",
    "cascade.direct_io": "--direct-io",
    "cascade.io_engine": "--io-engine",
}
"""The flag of each key of an embedded store."""


def private_socket(engine: str) -> Path:
    """Return the socket of an engine's private node, in a directory of this user's alone."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    # Hashed to keep the socket's path short. All of the id counts: ranks differ at its end.
    name = hashlib.sha256(engine.encode()).hexdigest()[:_ID_DIGITS]
    path = root / f"cascade-{os.getuid()}-{name}" / "node.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        # Scratch directories of batch systems can exceed the length of a socket path.
        path = Path("/tmp") / path.parent.name / path.name  # noqa: S108 # created 0700
    return path


class PrivateNode:
    """A node that serves one engine, as a child process. One that ends is started again."""

    def __init__(self, path: Path, options: Mapping[str, object]) -> None:
        """Start the node and wait until it is ready. Raises `OSError` if it does not start."""
        self._directory = path.parent
        _remove_left(self._directory)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._command = [str(program()), "serve", "--socket", str(path)]
        for key, flag in _FLAGS.items():
            if key in options:
                value = options[key]
                self._command += [
                    flag,
                    str(value).lower() if isinstance(value, bool) else str(value),
                ]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._is_started = threading.Event()
        self._error: Exception | None = None
        self.restarts = 0
        """How often the node was started again."""
        # The kernel ends the node when the thread that started it ends. This one does not.
        self._thread = threading.Thread(target=self._run, name="cascade-node", daemon=True)
        self._thread.start()
        if not self._is_started.wait(START_S + KILL_S):
            self._error = OSError("the engine's private node neither starts nor ends")
        if self._error is not None:
            self.close()
            raise OSError(str(self._error)) from self._error
        atexit.register(self.close)

    def close(self) -> None:
        """End the node, by force after a time-out, and remove its directory."""
        with self._lock:
            self._closed.set()
            process = self._process
        if process is not None:
            _end(process)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        """Start the node, and start it again whenever it has ended."""
        try:
            process = self._start()
        except _NOT_STARTED as error:
            self._error = error
            return
        finally:
            self._is_started.set()
        pause = RESTART_MIN_S
        while process is not None:
            since = time.monotonic()
            status = process.wait()
            if self._closed.is_set():
                return
            if time.monotonic() - since > STEADY_S:
                pause = RESTART_MIN_S
            _LOG.warning(
                "Cascade: the engine's private node (process %d) has ended: %s. Nothing is saved "
                "or loaded until it has been started again, in %.0f s",
                process.pid,
                f"signal {-status}" if status < 0 else f"exit status {status}",
                pause,
            )
            process, pause = self._start_again(pause)

    def _start_again(self, pause: float) -> tuple[subprocess.Popen[str] | None, float]:
        """Start the node after a pause; returns the next pause, and no node once it is closed."""
        while not self._closed.wait(pause):
            pause = min(2 * pause, RESTART_MAX_S)
            try:
                process = self._start()
            except _NOT_STARTED as error:
                _LOG.warning("Cascade: %s; the next try is in %.0f s", error, pause)
                continue
            self.restarts += 1
            _LOG.warning(
                "Cascade: the engine's private node runs again (process %d). Blocks that were only "
                "in its memory are lost",
                process.pid,
            )
            return process, pause
        return None, pause

    def _start(self) -> subprocess.Popen[str]:
        """Start the node and wait until it is ready. Raises `OSError` if it is not in time."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CASCADE_")}
        # The pool is not kept for a restart: the next engine has another id. One client may use all
        # of it: the clients are the processes of one engine.
        settings = {"CASCADE_KEEP_POOL": "never", "CASCADE_CLIENT_SHARE": "100%"}
        with self._lock:
            if self._closed.is_set():
                raise OSError("the engine ends")
            process = subprocess.Popen(  # noqa: S603 # our own command
                self._command,
                env=inherited | settings,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 # one system call, takes no locks
            )
            self._process = process
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        line = process.stdout.readline() if process.stdout else ""
        watchdog.cancel()
        if "ready" not in line:
            _end(process)
            command = " ".join(self._command)
            raise OSError(f"the engine's private node did not start: {command}")
        return process


def _remove_left(own: Path) -> None:
    """Remove the directories of nodes whose engines were killed."""
    for place in own.parent.glob(f"cascade-{os.getuid()}-{'[0-9a-f]' * _ID_DIGITS}"):
        try:
            found = place.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            # One that has just been made has no socket yet.
            is_old = time.time() - found.st_mtime > LEFT_S
            if place != own and is_ours and is_old and not _is_served(place / "node.sock"):
                shutil.rmtree(place)
        except OSError as error:
            _LOG.debug("Cascade: %s is left: %s", place, error)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # A node that is busy, or cannot be asked.
            return True
    return True


def _end(process: subprocess.Popen[str]) -> None:
    """End a node, by force after a time-out."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _reap(process)


def _reap(process: subprocess.Popen[str]) -> None:
    """Wait for a killed node. The kernel keeps it while a call to a failed disk hangs."""
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        _LOG.warning(
            "Cascade: the engine's private node (process %d) has not ended %.0f s after it was "
            "killed; check the disk of cascade.files",
            process.pid,
            KILL_S,
        )


def _die_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)

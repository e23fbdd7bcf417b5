"""An engine's private node: connected to once it has started, without blocking anything."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import cascadekv
import pytest
from cascadekv.connectors import settings
from cascadekv.connectors.settings import StoreAddress
from cascadekv.connectors.vllm import private_node
from cascadekv.connectors.vllm import store as module
from cascadekv.connectors.vllm.private_node import PrivateNode, private_socket
from cascadekv.connectors.vllm.registration import ManifestRegistration
from cascadekv.connectors.vllm.store import EngineStore


@pytest.fixture
def no_sleep(monkeypatch):
    """Fail a test that waits in a loop."""

    def sleep(_):
        raise AssertionError("a worker or the scheduler sleeps to wait for a node")

    monkeypatch.setattr(module.time, "sleep", sleep)


def test_without_a_private_node_nothing_waits_and_one_warning_is_logged(
    tmp_path, monkeypatch, caplog, no_sleep
):
    # Regression: the scheduler, and hosts without the first worker, waited 60 s for the node.
    assert no_sleep is None
    address = StoreAddress(node=str(tmp_path / "node.sock"), timeout=1.0)
    opened = EngineStore(address, key=str(tmp_path), name="test", is_private=True)
    assert opened.store() is None
    assert "no private node" not in caplog.text
    monkeypatch.setattr(opened, "_warn_at", 0.0)
    for _ in range(3):
        assert opened.store() is None
    assert caplog.text.count("no private node") == 1
    assert "set cascade.node" in caplog.text
    opened.close()


def test_a_private_node_that_starts_later_is_found(tmp_path, eventually):
    socket = tmp_path / "private" / "node.sock"
    address = StoreAddress(node=str(socket), timeout=5.0)
    opened = EngineStore(address, key=str(tmp_path), name="test", is_private=True)
    assert opened.store() is None
    node = PrivateNode(socket, {"cascade.dram": "16MiB"})
    try:
        eventually(lambda: opened.store() is not None)
        assert isinstance(opened.store(), cascadekv.Store)
    finally:
        opened.close()
        node.close()
    assert not socket.parent.exists()


class HangingProcess:
    """A killed process that the kernel keeps, because a call to its disk hangs."""

    pid = 1

    def poll(self):  # noqa: D102
        return None

    def terminate(self):  # noqa: D102
        pass

    def kill(self):  # noqa: D102
        pass

    def wait(self, timeout=None):  # noqa: D102
        assert timeout is not None, "an engine's end waits without a time-out"
        raise subprocess.TimeoutExpired("cascade serve", timeout)


def test_a_private_node_that_cannot_be_killed_does_not_keep_an_engine_from_ending(tmp_path, caplog):
    node = PrivateNode(tmp_path / "private" / "node.sock", {"cascade.dram": "16MiB"})
    process, node._process = node._process, HangingProcess()  # noqa: SLF001
    node.close()
    assert "has not ended" in caplog.text
    process.kill()
    node._process = process  # noqa: SLF001


def test_a_private_node_has_every_setting_of_an_embedded_store(tmp_path):
    """`cascade.direct_io` and `cascade.io_engine` were dropped."""
    assert set(private_node._FLAGS) == {f"cascade.{name}" for name in settings._EMBEDDED}  # noqa: SLF001
    files = {"cascade.files": str(tmp_path / "files"), "cascade.files_capacity": "64MiB"}
    own = {"cascade.dram": "16MiB", "cascade.direct_io": False, "cascade.io_engine": "psync"}
    node = PrivateNode(tmp_path / "private" / "node.sock", files | own)
    try:
        command = Path(f"/proc/{node._process.pid}/cmdline").read_text().split("\0")  # noqa: SLF001
        assert command[command.index("--direct-io") + 1] == "false"
        assert command[command.index("--io-engine") + 1] == "psync"
    finally:
        node.close()


def test_directories_of_killed_engines_are_removed(monkeypatch):
    # The paths of sockets are short.
    place = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # made with mode 0700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    left, new, served = (private_socket(name) for name in ("left", "new", "served"))
    for path in (left, new, served):
        path.parent.mkdir()
    for path in (left, served):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    served.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(served))
        listener.listen()
        for path in (left, served):
            os.utime(path.parent, (0, 0))
        node = PrivateNode(private_socket("own"), {"cascade.dram": "16MiB"})
        node.close()
    assert sorted(place.iterdir()) == sorted([new.parent, served.parent])
    shutil.rmtree(place)


def test_a_private_node_that_ends_is_started_again(tmp_path, eventually, monkeypatch, caplog):
    """It was never started again, and nothing said so."""
    monkeypatch.setattr(private_node, "RESTART_MIN_S", 0.05)
    socket = tmp_path / "private" / "node.sock"
    node = PrivateNode(socket, {"cascade.dram": "16MiB"})
    try:
        first = node._process.pid  # noqa: SLF001
        os.kill(first, signal.SIGKILL)
        eventually(lambda: node.restarts == 1)
        assert f"process {first}) has ended: signal 9" in caplog.text
        assert "runs again" in caplog.text
        with cascadekv.connect(str(socket)) as store:
            assert store.stats() is not None
        # What it needs is gone: it is tried again and again, at longer and longer intervals.
        node._command[0] = "/nonexistent"  # noqa: SLF001
        os.kill(node._process.pid, signal.SIGKILL)  # noqa: SLF001
        eventually(lambda: caplog.text.count("the next try is in") >= 2)
    finally:
        node.close()
    node._thread.join(30)  # noqa: SLF001
    assert not node._thread.is_alive()  # noqa: SLF001
    assert not socket.parent.exists()


def test_a_restart_that_cannot_fork_is_tried_again(tmp_path, eventually, monkeypatch, caplog):
    """`Popen` raises `SubprocessError` too, which ended the thread: no restart ever came."""
    monkeypatch.setattr(private_node, "RESTART_MIN_S", 0.05)
    node = PrivateNode(tmp_path / "private" / "node.sock", {"cascade.dram": "16MiB"})
    start, starts = subprocess.Popen, []

    def fail_twice(*args, **options):
        starts.append(args)
        if len(starts) <= 2:
            raise subprocess.SubprocessError("Exception occurred in preexec_fn.")
        return start(*args, **options)

    try:
        monkeypatch.setattr(private_node.subprocess, "Popen", fail_twice)
        os.kill(node._process.pid, signal.SIGKILL)  # noqa: SLF001
        eventually(lambda: node.restarts == 1)
    finally:
        node.close()
    assert len(starts) == 3
    lines = [it for it in caplog.messages if "preexec_fn" in it]
    assert [line.rpartition(" in ")[2] for line in lines] == ["0 s", "0 s"]


class RecordingStore:
    """A store that records the threads that register a manifest with it, and fails at first."""

    def __init__(self):
        self.gate, self.callers = threading.Event(), []

    def register(self, _namespace):  # noqa: D102
        self.callers.append(threading.current_thread())
        assert self.gate.wait(60)
        if len(self.callers) < 3:
            raise cascadekv.AwayError("the node has ended")


def test_a_manifest_is_registered_once_and_by_a_thread_of_its_own(eventually):
    # Regression: with an embedded store, the scheduler's thread wrote the manifest to the disk.
    store = RecordingStore()
    stores = [None]
    registration = ManifestRegistration(lambda: stores[0], lambda: None)
    registration.start()
    stores[0] = store
    for _ in range(5):
        registration.start()
    eventually(lambda: store.callers)
    assert len(store.callers) == 1
    store.gate.set()
    # While the node is away, every request tries again.
    eventually(lambda: registration.start() or len(store.callers) == 3)
    for _ in range(5):
        registration.start()
    registration.close()
    assert len(store.callers) == 3
    assert threading.current_thread() not in store.callers

"""Fixtures: blocks whose bytes are a function of their key, and embedded and served stores.

A test that uses `store` or `two_tiers` runs twice: with an embedded store, and with a store that a
node serves. These tests ensure that the two are interchangeable.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cascadekv
import pytest
from cascadekv import BlockKey, BlockKeys, Namespace, Store
from stopping import stop

MIB = 1 << 20
START_S = 100
"""Time-out for the start of a node."""
STOP_S = 30
"""Time-out for the end of a node."""
BOTH = ["embedded", "served"]


class Node:
    """`cascade serve` in a child process, on a socket of its own."""

    def __init__(self, home: Path, pools: Path, *flags: str, **settings: str) -> None:
        """Prepare the command; `settings` are keys of the configuration as in TOML."""
        self.socket = home / "node.sock"
        self.ready_line = ""
        self._command = [sys.executable, "-m", "cascadekv", "serve"]
        self._command += ["--socket", str(self.socket), *flags]
        # Settings in the caller's environment must not affect this node.
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("CASCADE_")}
        fixed = {
            "huge_pages": "false",
            "pool_directory": str(pools),
            "client_share": "100%",
        }
        variables = {f"CASCADE_{key.upper()}": value for key, value in (fixed | settings).items()}
        self._environment = inherited | variables
        self._log = home / "node.log"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *within: str) -> "Node":
        """Start the node and wait until it is ready; `within` is a wrapper such as `unshare`."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen(  # noqa: S603 # our own command
                [*within, *self._command],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        self.ready_line = self.process.stdout.readline()
        watchdog.cancel()
        if "ready" not in self.ready_line:
            self._wait()
        assert "ready" in self.ready_line, self.log()
        return self

    def log(self) -> str:
        """Return what the node wrote to standard error."""
        return self._log.read_text()

    def suspend(self) -> None:
        """Suspend the node, and return once all of its threads are stopped."""
        stop(self.process.pid)

    def resume(self) -> None:
        """Resume the suspended node."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the node, as in a crash."""
        self.process.kill()
        self._wait()

    def stop(self) -> int:
        """End the node cleanly; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        self.process.stdout.close()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextlib.contextmanager
def nodes(home: Path) -> Iterator[Callable[..., Node]]:
    """Yield a function that starts nodes; ends the nodes and removes their pools afterwards."""
    pools = Path(tempfile.mkdtemp(prefix="cascade-test-", dir="/dev/shm"))
    started: list[Node] = []

    def start(*flags: str, within: tuple[str, ...] = (), **settings: str) -> Node:
        own = home / f"node-{len(started)}"
        own.mkdir()
        node = Node(own, pools, *flags, **settings)
        started.append(node)
        return node.start(*within)

    try:
        yield start
    finally:
        for node in started:
            if node.process is not None and node.process.poll() is None:
                node.kill()
        shutil.rmtree(pools)


@pytest.fixture(scope="session")
def space() -> Namespace:
    return cascadekv.Namespace(cascadekv.Manifest({"weights": "sha256:test"}), b"secret")


@pytest.fixture(scope="session")
def keys_of(space: Namespace) -> Callable[[range], BlockKeys]:
    """Return the keys of numbered blocks."""
    return lambda numbers: BlockKeys([space.key_of_id(f"block {n}") for n in numbers])


@pytest.fixture(scope="session")
def bytes_of() -> Callable[..., bytes]:
    """Return the right bytes of a block, a function of its key."""

    def make(key: BlockKey, size: int = 10_000) -> bytes:
        return hashlib.shake_128(bytes(key)).digest(size)

    return make


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds that depends on another process."""

    def wait(condition: Callable[[], object], limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"the condition did not hold within {limit_s} s"
            time.sleep(0.01)

    return wait


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start nodes for one test."""
    with nodes(tmp_path) as start:
        yield start


@pytest.fixture
def serve_alice(serve: Callable[..., Node], tmp_path: Path) -> tuple[Node, str]:
    """Start a node with a tenant `alice`; return it and the tenant's token."""
    token = "0123456789abcdef-alice"  # noqa: S105 # of one test alone
    secret = tmp_path / "alice.token"
    secret.write_text(token + "\n")
    secret.chmod(0o600)
    config = tmp_path / "cascade.toml"
    config.write_text(f'[[tenant]]\nname = "alice"\ntoken_file = "{secret}"\ndram = "8MiB"\n')
    return serve("--config", str(config), "--dram", "8MiB"), token


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Run one node for all tests that do not need their own."""
    with nodes(tmp_path_factory.mktemp("shared")) as start:
        node = start("--dram", "16MiB")
        yield node
        assert node.stop() == 0, node.log()


@pytest.fixture(params=BOTH)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Open an empty store with 16 MiB of DRAM; counters of a served store may be above 0."""
    if request.param == "embedded":
        opened = Store(dram="16MiB", huge_pages=False)
    else:
        opened = cascadekv.connect(request.getfixturevalue("shared_node").socket)
        opened.clear()
    with opened:
        yield opened


@pytest.fixture(params=BOTH)
def two_tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Open a store with DRAM and files; the file tier has room for all blocks that leave DRAM."""
    files = tmp_path / "files"
    if request.param == "embedded":
        settings = {"files_capacity": "256MiB", "segment_size": "8MiB"}
        opened = Store(dram="8MiB", huge_pages=False, files=files, **settings)
    else:
        serve = request.getfixturevalue("serve")
        flags = ["--dram", "8MiB", "--files", str(files), "--files-capacity", "256MiB"]
        opened = cascadekv.connect(serve(*flags, segment_size="8MiB").socket)
    with opened:
        yield opened


@pytest.fixture
def authority(tmp_path) -> Callable[[str], Path]:
    """Return a function that makes an authority of that name, and a certificate for loopback.

    It returns their directory, with `authority.pem`, `certificate.pem` and `key.pem`.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")

    def make(name: str) -> Path:
        directory = tmp_path / f"authority-{name}"
        directory.mkdir()
        new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
        by = "-CA authority.pem -CAkey ca.key -copy_extensions copy -days 2"
        for command in (
            f"req -x509 {new_key} -keyout ca.key -out authority.pem -subj /CN={name} -days 2",
            f"req {new_key} -keyout key.pem -out request.pem -subj /CN=peer -addext {names}",
            f"x509 -req -in request.pem {by} -out certificate.pem",
        ):
            subprocess.run(  # noqa: S603 # our own arguments
                [openssl, *command.split()], cwd=directory, check=True, capture_output=True
            )
        return directory

    return make

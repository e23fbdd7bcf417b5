"""Engines with several processes, engines that share a node, and killed nodes."""

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import cascadekv
import engine_calls
import pytest
from cascadekv.bench.prompts import prompt, with_prefix
from cascadekv.connectors.vllm.private_node import private_socket
from forked_engines import BLOCK

pytest_plugins = ["forked_engines"]

ALWAYS = {
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}
REQUESTS = int(os.environ.get("CASCADE_ENGINE_REQUESTS", "60"))
"""Number of requests while nodes are killed."""


def processes_below(root: int) -> dict[int, str]:
    """Return the command lines of all descendants of a process, by process id."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
                commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    found = {root}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return {each: commands[each] for each in found - {root}}


def nodes_among(processes: dict[int, str]) -> dict[int, str]:
    """Return those processes that are nodes."""
    return {each: line for each, line in processes.items() if " serve --socket " in line}


def is_gone(process: int) -> bool:
    """Whether a process ended."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


def socket_of(line: str) -> Path:
    """Return a node's socket from its command line."""
    words = line.split()
    return Path(words[words.index("--socket") + 1])


@pytest.fixture
def short_path():
    """Return a directory whose path is short enough for sockets; those of pytest may not be."""
    with tempfile.TemporaryDirectory(prefix="cascade-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_engine_with_several_processes_starts_a_private_node(
    start, reference, eventually, short_path, is_killed
):
    runtime, files = short_path / "run", short_path / "files"
    runtime.mkdir()
    place = {"cascade.pipeline": "Dram|Files", "cascade.files": str(files), "cascade.dram": "64MiB"}
    environment = {"XDG_RUNTIME_DIR": str(runtime)}
    engine = start({**place, **ALWAYS}, is_one_process=False, environment=environment)
    below = processes_below(engine.process.pid)
    ((node, line),) = nodes_among(below).items()
    socket = socket_of(line)
    assert socket.is_relative_to(runtime)
    assert socket.exists()
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    request = prompt(3 * BLOCK + 9, "processes", is_killed)
    assert reference.check_one(engine, request) == 0
    assert reference.check_one(engine, request) == 3 * BLOCK
    assert reference.check_one(engine, with_prefix(request, 200, "tail")) == BLOCK
    if is_killed:
        # The workers end with the core, and the node with its worker.
        (core,) = (each for each, line in below.items() if "EngineCore" in line)
        os.kill(core, signal.SIGKILL)
        eventually(lambda: is_gone(node), 60)
        engine.kill()
    else:
        engine.close()
    eventually(lambda: all(is_gone(each) for each in below), 60)
    if not is_killed:
        assert list(runtime.iterdir()) == []


def test_each_engine_has_its_own_private_socket():
    engine = "f3c9a1f2-6b1e-4a53-9d3a-0a3f4f6d2b11"
    sockets = {private_socket(name) for name in (engine, f"{engine}_dp0", f"{engine}_dp1")}
    assert len(sockets) == 3
    # The path of a Unix socket has at most 107 bytes.
    assert all(len(os.fsencode(each)) < 108 for each in sockets)


def test_engines_that_share_a_node_share_their_blocks(start, reference, serve):
    node = serve("--dram", "64MiB")
    place = {"cascade.node": f"unix:{node.socket}", **ALWAYS}
    one, two = start(place), start({**place, "cascade.load": "sync"}, enable_prefix_caching=True)
    for number, (writer, reader) in enumerate([(one, two), (two, one)]):
        request = prompt(4 * BLOCK + 1, "shared", number)
        assert reference.check_one(writer, request) == 0
        assert reference.check_one(reader, request) == 4 * BLOCK
        longer = [*request, *prompt(2 * BLOCK, "shared longer", number)]
        assert reference.check_one(reader, longer) == 4 * BLOCK
        assert reference.check_one(writer, longer) == 6 * BLOCK
    # Requests with a cache salt share nothing, nor does an engine after a cache reset.
    assert two.one(request, salt="mine").cached == 0
    assert two.call(engine_calls.reset_all_caches)
    assert reference.check_one(two, request) == 0
    assert reference.check_one(one, request) == 4 * BLOCK
    one.close()
    two.close()


def test_an_engine_starts_without_its_node_and_connects_later(start, reference, serve, eventually):
    node = serve("--dram", "64MiB")
    node.kill()
    node.socket.unlink(missing_ok=True)
    engine = start({"cascade.node": f"unix:{node.socket}", **ALWAYS})
    request = prompt(2 * BLOCK + 5, "later")
    for _ in range(2):
        assert reference.check_one(engine, request) == 0
    node.start()
    eventually(lambda: reference.check_one(engine, request) == 2 * BLOCK, 60)
    engine.close()


class NodeKiller(threading.Thread):
    """Kills a node at random intervals and restarts it."""

    def __init__(self, node, chance: random.Random) -> None:
        super().__init__()
        self._node, self._chance = node, chance
        self._end = threading.Event()
        self.kills = 0
        self.fault: BaseException | None = None

    def run(self) -> None:
        """Kill and restart the node until `stop`."""
        try:
            while not self._end.wait(self._chance.uniform(0.2, 3.0)):
                self._node.process.send_signal(signal.SIGKILL)
                self._node.process.wait()
                self._end.wait(self._chance.uniform(0, 1.0))
                self._node.process.stdout.close()
                self._node.start()
                self.kills += 1
        except BaseException as fault:
            self.fault = fault
            raise

    def stop(self) -> None:
        """End the thread; the node is running afterwards."""
        self._end.set()
        self.join()
        assert self.fault is None


def mixed_requests(count: int, chance: random.Random):
    """Yield batches of short requests, many of them with shared prefixes."""
    bases = [prompt(4 * BLOCK + 40, "mixed", number) for number in range(12)]
    made = 0
    while made < count:
        batch = []
        for _ in range(min(chance.randint(1, 6), count - made)):
            base = chance.choice(bases)
            length = chance.randint(20, len(base))
            shared = chance.choice([0, length, chance.randint(0, length)])
            batch.append(with_prefix(base[:length], shared, "mixed", made + len(batch)))
        made += len(batch)
        yield batch


def check_while_nodes_are_killed(start, reference, serve, tmp_path, count: int) -> None:
    """Compare the answers to many requests with the reference while the node is killed."""
    flags = ("--pipeline", "Dram|Files", "--dram", "32MiB")
    flags += ("--files", str(tmp_path / "files"), "--files-capacity", "128MiB")
    node = serve(*flags, segment_size="8MiB")
    engine = start({"cascade.node": f"unix:{node.socket}", **ALWAYS, "cascade.load_timeout": 10})
    chance = random.Random(count)
    batches = list(mixed_requests(count, chance))
    killer = NodeKiller(node, chance)
    hits = 0
    # The reference first, so that the engine does not wait for it between two kills.
    for batch in batches:
        reference.answers(batch, 6)
    killer.start()
    began = time.monotonic()
    try:
        for batch in batches:
            hits += sum(reference.check(engine, batch, 6))
        while killer.kills < 2:
            hits += sum(reference.check(engine, batches[-1], 6))
            assert time.monotonic() < began + 300
    finally:
        killer.stop()
    assert hits > 0
    # Afterwards the engine hits as before.
    again = prompt(3 * BLOCK + 1, "mixed again", count)
    end = time.monotonic() + 60
    while reference.check_one(engine, again) != 3 * BLOCK:
        assert time.monotonic() < end
    with cascadekv.connect(node.socket, timeout=30) as store:
        assert store.stats()["damaged_blocks"] == 0
    engine.close()


def test_answers_are_correct_while_nodes_are_killed(start, reference, serve, tmp_path):
    check_while_nodes_are_killed(start, reference, serve, tmp_path, REQUESTS)


@pytest.mark.stress
def test_a_thousand_answers_are_correct_while_nodes_are_killed(start, reference, serve, tmp_path):
    check_while_nodes_are_killed(start, reference, serve, tmp_path, max(REQUESTS, 1000))

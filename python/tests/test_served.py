"""Served stores: workers that share a node, and killed or stopped nodes and workers."""

import hashlib
import json
import multiprocessing
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import cascadekv
import pytest
from cascadekv import BlockKeys, PutStatus

MIB = 1 << 20
SHARE = 50
"""Blocks that each worker puts."""


def _keys(numbers) -> BlockKeys:
    space = cascadekv.Namespace(cascadekv.Manifest({"weights": "sha256:test"}), b"secret")
    return BlockKeys([space.key_of_id(f"block {n}") for n in numbers])


def _bytes(key) -> bytes:
    return hashlib.shake_128(bytes(key)).digest(10_000)


def _work(place, number: int, workers: int, barrier, answers) -> None:
    """Put a share of the blocks, wait for the other workers, and read all blocks."""
    with cascadekv.connect(place, name=f"worker {number}") as store:
        own = _keys(range(number * SHARE, (number + 1) * SHARE))
        put = store.put(own, [_bytes(key) for key in own], chain=False)
        barrier.wait(60)
        every = _keys(range(workers * SHARE))
        with store.view(every) as views:
            seen = zip(every, views, strict=True)
            right = sum(view is not None and bytes(view) == _bytes(key) for key, view in seen)
            del seen
        answers.put((sum(result.ok for result in put), right))


def _hold(place, ready) -> None:
    """Hold leases and a reservation until killed."""
    store = cascadekv.connect(place, name="holder")
    views = store.view(_keys(range(100)))
    reservation = store.reserve(MIB)
    ready.put(views.hits)
    signal.pause()
    del views, reservation


def cascade(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "cascadekv", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def query(node, *arguments: str):
    """Run a command against the node, and parse its JSON."""
    run = cascade(*arguments, "--socket", str(node.socket), "--json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture
def filled(serve):
    """Start a node with a hundred blocks."""
    node = serve("--dram", "16MiB")
    with cascadekv.connect(node.socket) as store:
        keys = _keys(range(100))
        assert all(result.ok for result in store.put(keys, [_bytes(key) for key in keys]))
    return node


def right(keys, views) -> int:
    """Return the number of hits; all of them must have the right bytes."""
    found = [(key, view) for key, view in zip(keys, views, strict=True) if view is not None]
    assert all(bytes(view) == _bytes(key) for key, view in found)
    return len(found)


def test_workers_share_blocks(serve):
    workers = 3
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(workers), context.Queue()
    place = serve("--dram", "16MiB").socket
    started = [
        context.Process(target=_work, args=(place, number, workers, barrier, answers))
        for number in range(workers)
    ]
    for worker in started:
        worker.start()
    for _ in started:
        assert answers.get(timeout=90) == (SHARE, workers * SHARE)
    for worker in started:
        worker.join()
    answers.close()
    answers.join_thread()
    with cascadekv.connect(place) as store:
        keys = _keys(range(workers * SHARE))
        assert right(keys, store.view(keys)) == len(keys)


def test_memory_of_a_killed_worker_is_reclaimed(filled, eventually):
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    worker = context.Process(target=_hold, args=(filled.socket, ready))
    with cascadekv.connect(filled.socket) as store:
        before = store.stats()["pool"]["requested_bytes"]
        worker.start()
        assert ready.get(timeout=60) == 100
        # The blocks are deleted, but their memory is leased.
        store.delete(_keys(range(100)))
        assert store.stats()["pool"]["requested_bytes"] >= before + MIB
        worker.kill()
        worker.join()
        eventually(lambda: store.stats()["pool"]["requested_bytes"] == 0)
    ready.close()
    ready.join_thread()


def test_a_view_outlives_its_client_and_evictions(filled):
    keys = _keys(range(100))
    store = cascadekv.connect(filled.socket)
    views = store.view(keys)
    store.close()
    with cascadekv.connect(filled.socket) as other:
        other.delete(keys)
        for number in range(1000, 1100):
            other.put(_keys([number]), [b"f" * (MIB // 2)])
    assert right(keys, views) == 100


def test_a_read_only_client_cannot_write(filled):
    keys = _keys(range(101))
    with cascadekv.connect(filled.socket, access="read") as reader:
        assert right(keys, reader.view(keys)) == 100
        result = reader.put(keys[100:], [b"block"])[0]
        assert result.status is PutStatus.FAILED
        assert isinstance(result.error, cascadekv.ConfigError)
        with pytest.raises(cascadekv.ConfigError, match="connect with access to write"):
            reader.reserve(100)
        assert reader.contains(keys[100:]) == [False]


def test_a_token_authenticates_a_tenant(serve_alice):
    node, token = serve_alice
    keys = _keys(range(1))
    with (
        cascadekv.connect(node.socket, token=token) as alice,
        cascadekv.connect(node.socket, token=token.encode()) as alice_again,
        cascadekv.connect(node.socket) as other,
    ):
        assert alice.put(keys, [b"hers"])[0].ok
        assert alice_again.contains(keys) == [True]
        assert other.contains(keys) == [False]
        assert other.put(keys, [b"ours"])[0].status is PutStatus.STORED
        assert bytes(alice_again.view(keys)[0]) == b"hers"
    with pytest.raises(cascadekv.RefusedError, match="token"):
        cascadekv.connect(node.socket, token="0123456789abcdef-mallory")  # noqa: S106 # no secret
    assert [tenant["name"] for tenant in query(node, "status")["tenants"]] == ["default", "alice"]


def test_a_client_in_another_process_namespace_needs_a_pool_that_is_not_kept(serve):
    within = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:  # noqa: S603
        pytest.skip("this user cannot create a process namespace")
    blind = serve("--dram", "8MiB", within=within)
    with pytest.raises(cascadekv.RefusedError, match="share the process namespace"):
        cascadekv.connect(blind.socket)
    node = serve("--dram", "8MiB", within=within, keep_pool="never")
    keys = _keys(range(1))
    with cascadekv.connect(node.socket) as store:
        assert store.put(keys, [b"block"])[0].ok
        assert bytes(store.view(keys)[0]) == b"block"


def test_a_node_with_too_little_disk_space_warns_and_serves(serve, tmp_path):
    node = serve("--dram", "8MiB", "--files", str(tmp_path / "files"), "--files-capacity", "900TiB")
    assert "files_space" in node.log()
    assert "lower files_capacity" in node.log()
    with cascadekv.connect(node.socket) as store:
        assert store.put(_keys(range(1)), [b"block"])[0].ok


def test_connecting_without_a_node_says_what_to_do(tmp_path):
    place = tmp_path / "missing.sock"
    with pytest.raises(cascadekv.AwayError, match="cascade serve") as caught:
        cascadekv.connect(place)
    assert str(place) in str(caught.value)
    assert isinstance(caught.value, ConnectionError)


def test_invalid_connect_arguments_are_refused(filled):
    with pytest.raises(ValueError, match='"write" or "read"'):
        cascadekv.connect(filled.socket, access="all")
    with pytest.raises(cascadekv.ConfigError, match="timeout"):
        cascadekv.connect(filled.socket, timeout=0)


def test_clients_of_a_killed_node_miss_and_reconnect(filled, eventually):
    keys = _keys(range(100))
    store = cascadekv.connect(filled.socket, timeout=60)
    held = store.view(keys)
    filled.kill()
    # If these calls waited for their deadline of a minute, the test would time out.
    for _ in range(100):
        assert store.view(keys).hits == 0
    assert [result.status.value for result in store.get(keys[:1], bytearray(10_000))] == ["miss"]
    assert store.lookup_prefix(keys).blocks == 0
    assert store.contains(keys[:1]) == [False]
    result = store.put(keys[:1], [_bytes(keys[0])])[0]
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, cascadekv.AwayError)
    with pytest.raises(cascadekv.AwayError):
        store.flush()
    assert right(keys, held) == 100
    filled.start()
    eventually(lambda: store.put(_keys([100]), [b"new"])[0].ok)
    # The next node takes over the pool of the killed one, with every block.
    assert right(keys, store.view(keys)) == 100
    # Memory that is leased since before the kill is not reused, however many blocks are put.
    for number in range(1000, 1100):
        store.put(_keys([number]), [b"f" * (MIB // 2)])
    assert right(keys, held) == 100
    store.close()


def test_a_stopped_node_costs_one_deadline(filled, eventually):
    keys = _keys(range(100))
    with cascadekv.connect(filled.socket, timeout=0.5) as store:
        assert right(keys, store.view(keys)) == 100
        filled.suspend()
        try:
            views = store.view(keys)
            assert views.hits == 0
            # If each of these calls waited for its deadline, the test would time out.
            for _ in range(1000):
                assert store.view(keys).hits == 0
        finally:
            filled.resume()
        eventually(lambda: store.view(keys).hits == 100)


def test_a_terminated_node_writes_back_pending_blocks(serve, tmp_path, eventually):
    files = str(tmp_path / "files")
    flags = ("--dram", "8MiB", "--files", files, "--files-capacity", "64MiB")
    node = serve(*flags, segment_size="8MiB")
    keys = _keys(range(100))
    with cascadekv.connect(node.socket) as store:
        assert all(result.ok for result in store.put(keys, [_bytes(key) for key in keys]))
        assert node.stop() == 0, node.log()
        assert not node.socket.exists()
        assert store.view(keys).hits == 0
        node.start()
        eventually(lambda: store.view(keys[:1]).hits == 1)
        assert right(keys, store.view(keys)) == 100
        assert store.stats()["hits_by_tier"]["files"]["blocks"] > 0


def test_the_start_line_and_endpoints_follow_the_contract(serve, tmp_path):
    port = free_port()
    files = ("--files", str(tmp_path / "files"), "--files-capacity", "64MiB")
    node = serve("--dram", "16MiB", *files, "--listen", f"127.0.0.1:{port}")
    assert node.ready_line.count("ready") == 1
    assert str(node.socket) in node.ready_line
    assert f"127.0.0.1:{port}" in node.ready_line
    keys = _keys(range(3))
    with cascadekv.connect(node.socket) as store:
        store.put(keys, [b"block"] * 3)
        assert store.view(keys).hits == 3
        assert fetch(port, "/healthz")[0] == 200
        assert fetch(port, "/readyz")[0] == 200
        status, metrics = fetch(port, "/metrics")
        assert status == 200
        assert "# HELP cascade_" in metrics
        assert fetch(port, "/nothing")[0] == 404


def test_commands_query_a_running_node(filled):
    with cascadekv.connect(filled.socket, name="a worker") as store:
        keys = _keys(range(101))
        views = store.acquire(keys)
        status = query(filled, "status")
        assert status["node"]["state"] == "serving"
        assert status["node"]["pid"] == filled.process.pid
        assert status["tenants"][0]["puts"]["stored"] == 100
        assert "a worker" in [client["name"] for client in status["clients"]["list"]]
        assert views.hits == 100
        explained = query(filled, "explain", *(key.hex() for key in keys))
        assert explained["leading"] == 100
        assert len(explained["blocks"]) == 101
        assert explained["blocks"][0]["here"]["tiers"] == ["dram"]
        assert explained["first_missing"]


def test_the_doctor_reports_in_json():
    run = cascade("doctor", "--dram", "16MiB", "--json")
    report = json.loads(run.stdout)
    assert run.returncode == (0 if report["is_ready"] else 1)
    assert {"id", "state", "found"} <= set(report["checks"][0])


def test_a_command_without_a_node_says_what_to_do(tmp_path):
    run = cascade("status", "--json", "--socket", str(tmp_path / "missing.sock"))
    assert run.returncode != 0
    assert "cascade serve" in run.stderr

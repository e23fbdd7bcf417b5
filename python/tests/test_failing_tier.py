"""A node whose file tier hangs or fails: its clients continue, and the tier recovers.

Requires root, loop devices, ext4 and fsfreeze. Where one is missing, the tests are skipped with the
error of the command. A command that fails later fails the test.
"""

import time
import urllib.request

import cascadekv
import pytest
from cascadekv import GetStatus
from failing_disks import LIMIT_S, ext4, frozen, run

BLOCK = 64 << 10
PIECE = 16
"""Blocks per call."""
CALL_S = 2.0
"""The clients' time-out."""
HEALTH = {
    "durable": "true",
    "segment_size": "4MiB",
    "probe_interval": "50ms",
    "probe_timeout": "1s",
}


@pytest.fixture
def disk(tmp_path):
    """Mount a new file system that can be frozen; skips the test if that is not possible here."""
    with ext4(tmp_path / "mount") as place:
        yield place


def pieces(keys_of, first, last):
    return [keys_of(range(at, min(at + PIECE, last))) for at in range(first, last, PIECE)]


def put(store, keys, bytes_of):
    return store.put(keys, [bytes_of(key, BLOCK) for key in keys], chain=False)


def read(store, keys, bytes_of):
    """Return the number of hits; all of them must have the right bytes."""
    buffers = [bytearray(BLOCK) for _ in range(len(keys))]
    results = store.get(keys, buffers)
    hits = 0
    for key, buffer, result in zip(keys, buffers, results, strict=True):
        if result.status is GetStatus.HIT:
            assert buffer == bytes_of(key, BLOCK)
            hits += 1
    return hits


def is_healthy(node):
    """Return whether the file tier is healthy, by the node's metrics."""
    port = node.ready_line.split("127.0.0.1:")[1].split()[0].rstrip("/,")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
        lines = answer.read().decode().splitlines()
    states = [line for line in lines if line.startswith("cascade_tier_health{")]
    (line,) = [line for line in states if 'tier="files"' in line and 'state="healthy"' in line]
    return line.endswith(" 1")


@pytest.fixture
def node(serve, disk):
    flags = ("--dram", "16MiB", "--files", str(disk), "--files-capacity", "64MiB")
    return serve(*flags, "--listen", "127.0.0.1:0", **HEALTH)


def test_a_hanging_tier_does_not_block_clients(node, disk, keys_of, bytes_of, eventually):
    with (
        cascadekv.connect(node.socket, timeout=CALL_S) as writer,
        cascadekv.connect(node.socket, timeout=CALL_S) as reader,
    ):
        below = pieces(keys_of, 0, 400)
        for keys in below:
            assert all(result.ok for result in put(writer, keys, bytes_of))
        eventually(lambda: flushed(writer) and is_in_files(writer, below))
        hot = keys_of(range(1000, 1000 + PIECE))
        put(reader, hot, bytes_of)
        assert all(reader.pin(hot))
        with frozen(disk):
            put(writer, keys_of(range(2000, 2000 + PIECE)), bytes_of)
            slowest = 0.0
            end = time.monotonic() + 30
            while is_healthy(node):
                assert time.monotonic() < end, "the hang was not detected"
            for keys in pieces(keys_of, 3000, 3400):
                began = time.monotonic()
                assert all(result.ok for result in put(writer, keys, bytes_of))
                assert read(writer, keys, bytes_of) == PIECE
                assert read(reader, hot, bytes_of) == PIECE
                # A frozen file system is read as before.
                assert read(reader, below[0], bytes_of) == PIECE
                slowest = max(slowest, time.monotonic() - began)
            print(f"the slowest round of four calls took {slowest:.3f} s of {4 * CALL_S}")
            with pytest.raises(cascadekv.CascadeError):
                writer.flush()
        eventually(lambda: is_healthy(node))
        # The blocks in the file tier are still there.
        assert sum(read(reader, keys, bytes_of) for keys in below) > 350
        eventually(lambda: flushed(writer))
    assert node.stop() == 0, node.log()


def flushed(store):
    try:
        store.flush(timeout=10)
    except cascadekv.CascadeError:
        return False
    return True


def is_in_files(store, pieces):
    return all("files" in tiers for keys in pieces for tiers in store.locate(keys))


def test_a_failing_tier_causes_no_client_errors(node, disk, keys_of, bytes_of, eventually):
    with cascadekv.connect(node.socket, timeout=CALL_S) as store:
        for keys in pieces(keys_of, 0, 400):
            put(store, keys, bytes_of)
        below = pieces(keys_of, 0, 400)
        # On a busy machine a first sync may exceed `probe_timeout`; the tier then recovers, and
        # gets the blocks that it lacks.
        eventually(lambda: flushed(store) and is_in_files(store, below))
        # As ext4 does after a device error: every later write fails.
        run("mount", "-o", "remount,abort", str(disk))
        eventually(lambda: not is_healthy(node))
        for keys in pieces(keys_of, 3000, 3400):
            assert all(result.ok for result in put(store, keys, bytes_of))
            assert read(store, keys, bytes_of) == PIECE
        # Blocks that can be read are still served.
        assert sum(read(store, keys, bytes_of) for keys in below) == 400
        with pytest.raises(cascadekv.TierError, match="files"):
            store.flush()
    node.stop()
    assert "files" in node.log()

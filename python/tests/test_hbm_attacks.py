"""Attacks on a node in the memory of a GPU, over the fake driver.

Full and hanging disks, nodes and clients that are killed at any moment, pressure on the memory,
several GPUs. Every byte that a client gets is compared: a block may be missing, never wrong.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cascadekv
import pytest
from cascadekv import CascadeError, Gpu
from failing_disks import CommandError, ext4, frozen
from failing_disks import run as command
from fake_gpu import FakeGpu, library
from hbm_engine import (
    FIRST_GPU,
    LIMIT_S,
    PAGES,
    Engine,
    block_of,
    keys_of,
    leases_of,
    load,
    mappings,
    run,
    save,
)
from stopping import stop

KILLS = 12
"""Processes that a test kills, each at another moment."""
ENGINES = str(Path(__file__).parents[1] / "tests_engines")


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def serve_hbm(serve, fake):  # noqa: ARG001 # the driver is chosen before a store is opened
    """Start a node with 16 MiB of the memory of the first GPU."""

    def start(*flags, **settings):
        flags = ("--gpu", FIRST_GPU, "--hbm", "16MiB", *flags)
        return serve(*flags, cuda_library=library(), **settings)

    return start


def put_and_get(store, numbers):
    """Put large blocks through the host and compare what is read; returns the number of hits."""
    blocks = {number: random.Random(number).randbytes(1 << 20) for number in numbers}  # known bytes
    store.put(keys_of(numbers), list(blocks.values()), chain=False)
    return get_large(store, blocks)


def get_large(store, blocks):
    buffers = [bytearray(1 << 20) for _ in blocks]
    results = store.get(keys_of(blocks), buffers)
    for number, buffer, result in zip(blocks, buffers, results, strict=True):
        assert not result.ok or buffer == blocks[number], number
    return sum(result.ok for result in results)


def reserved_bytes(node):
    """Return the bytes of the pool that blocks, or clients that write them, occupy."""
    status = json.loads(run("status", "--json", "--socket", str(node.socket)).stdout)
    return sum(tenant["pool"]["reserved_bytes"] for tenant in status["tenants"])


@pytest.fixture
def disk(tmp_path):
    """Mount a new file system that can be frozen; skips the test if that is not possible here."""
    with ext4(tmp_path / "mount") as place:
        yield place


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 8 MiB; skips the test if that is not possible here."""
    place = tmp_path / "small"
    place.mkdir()
    try:
        command("mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(place))
    except CommandError as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    yield place
    command("umount", "-l", str(place))


def test_a_full_disk_costs_only_blocks_that_left_the_gpu(fake, serve_hbm, small_disk):
    flags = ("--files", str(small_disk), "--files-capacity", "256MiB")
    node, engine = serve_hbm(*flags, segment_size="4MiB"), Engine(fake)
    with cascadekv.connect(node.socket, gpu=engine.gpu, timeout=LIMIT_S) as store:
        blocks = {n: random.Random(n).randbytes(1 << 20) for n in range(40)}  # known bytes
        for number, block in blocks.items():
            store.put(keys_of([number]), [block], chain=False)
            # What was just put is there, and so is what an engine saves now.
            assert get_large(store, {number: block}) == 1
            assert save(engine, store, [100 + number], [number % PAGES]) == 1
            assert load(engine, store, [100 + number], [(number + 1) % PAGES]) == 1
        for number, block in blocks.items():
            get_large(store, {number: block})
        with pytest.raises(cascadekv.TierError, match="files"):
            store.flush(timeout=LIMIT_S)
    assert node.stop() == 0, node.log()


def test_a_hanging_disk_stops_no_client(fake, serve_hbm, disk, eventually):
    flags = ("--files", str(disk), "--files-capacity", "64MiB")
    node, engine = serve_hbm(*flags, probe_interval="50ms", probe_timeout="1s"), Engine(fake)
    with cascadekv.connect(node.socket, gpu=engine.gpu, timeout=2.0) as store:
        assert put_and_get(store, range(8)) == 8
        with frozen(disk):
            hits = 0
            for number in range(100, 160):
                # A put may time out until the tier counts as unhealthy; it is never wrong.
                with contextlib.suppress(CascadeError):
                    hits += put_and_get(store, [number])
                if save(engine, store, [1000 + number], [number % PAGES]):
                    assert load(engine, store, [1000 + number], [(number + 1) % PAGES]) <= 1
            assert hits > 30
        assert put_and_get(store, range(200, 204)) == 4
        eventually(lambda: is_flushed(store))
    assert node.stop() == 0, node.log()


def is_flushed(store):
    try:
        store.flush(timeout=10)
    except CascadeError:
        return False
    return True


def test_a_node_killed_at_any_moment_makes_no_block_wrong(fake, serve_hbm, eventually):
    node, engine = serve_hbm(), Engine(fake)
    before = mappings()
    chance = random.Random(1)  # the same moments in each run
    is_over = threading.Event()

    def kill_and_start():
        for at in range(KILLS):
            time.sleep(chance.uniform(0.02, 0.3))
            node.stop() if at % 3 == 2 else node.kill()
            node.start()
        is_over.set()

    killer = threading.Thread(target=kill_and_start)
    saved = hits = rounds = 0
    with cascadekv.connect(node.socket, gpu=engine.gpu, timeout=LIMIT_S) as store:
        killer.start()
        for first in itertools.count(0, 3):
            numbers = [first, first + 1, first + 2]
            # Through the driver's copies and through the host; after the last start, once more.
            is_last = is_over.is_set()
            saved += save(engine, store, numbers, [0, 1, 2])
            hits += load(engine, store, numbers, [5, 6, 7])
            rounds += 1
            if is_last and rounds > KILLS:
                break
        killer.join()
        assert saved >= hits > 0
        eventually(lambda: save(engine, store, [9_000_001], [1]) == 1)
        assert load(engine, store, [9_000_001], [2]) == 1
        assert mappings() == before + 1
    eventually(lambda: mappings() == before)


WORKER = """
    import itertools, sys
    sys.path.append({engines!r})
    import cascadekv
    from fake_gpu import FakeGpu
    from hbm_engine import *
    engine = Engine(FakeGpu())
    store = cascadekv.connect({socket!r}, gpu=engine.gpu)
    views, prepared = [], []
    print("started", flush=True)
    for number in itertools.count({first}):
        engine.compute(1, block_of(number))
        assert engine.save(store, [number], [1])[0].ok
        views.append(store.view(keys_of([number])))
        # Not sealed: some gathered, some not.
        put = store.prepare(keys_of([10**6 + number]), LAYERS * PAGE, namespace=SPACE)
        if number % 2:
            put.start_gather(engine.memory, [1], after=engine.gpu.mark(engine.stream))
        prepared.append(put)
        load = views[-1].start_scatter(engine.memory, [2], after=engine.gpu.mark(engine.stream))
        if number % 8 == 7:
            views, prepared = views[4:], prepared[4:]
"""


def test_clients_killed_at_any_moment_leave_nothing_behind(fake, serve_hbm, eventually):
    node, engine = serve_hbm(), Engine(fake)
    chance = random.Random(2)  # the same moments in each run
    with cascadekv.connect(node.socket, gpu=engine.gpu) as store:
        for first in range(0, KILLS * 10**4, 10**4):
            code = textwrap.dedent(WORKER)
            code = code.format(engines=ENGINES, socket=str(node.socket), first=first)
            with subprocess.Popen(  # noqa: S603 # our own command
                [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
            ) as worker:
                assert worker.stdout.readline() == "started\n"
                time.sleep(chance.uniform(0, 0.1))
                worker.send_signal(signal.SIGKILL)
            # What it sealed is right, what it did not seal is absent.
            numbers = range(first, first + PAGES)
            load(engine, store, numbers, range(PAGES))
            assert store.lookup_prefix(keys_of(range(10**6 + first, 10**6 + first + 1))).blocks == 0
        eventually(lambda: leases_of(node) == 0)
        # Nothing else holds memory.
        store.clear()
        eventually(lambda: reserved_bytes(node) == 0)
        # It can be used again. Small pieces that the pool keeps at hand leave gaps between blocks
        # of 1 MiB, so not all of the 16 MiB.
        assert put_and_get(store, range(5 * 10**6, 5 * 10**6 + 14)) >= 8
    assert node.stop() == 0, node.log()


def test_flapping_pressure_loses_blocks_and_nothing_else(
    fake, serve_hbm, tmp_path, monkeypatch, eventually
):
    taken = tmp_path / "taken"
    taken.write_text("0")
    monkeypatch.setenv("FAKE_CUDA_TAKEN", str(taken))
    node, engine = serve_hbm("--hbm-reserve", "256MiB"), Engine(fake)
    is_over = threading.Event()
    stops = []

    def flap():
        chance = random.Random(3)  # the same moments in each run
        for _ in range(KILLS):
            taken.write_text(str(900 << 20))
            time.sleep(chance.uniform(0.1, 0.9))
            taken.write_text("0")
            with contextlib.suppress(subprocess.TimeoutExpired):
                stops.append(node.process.wait(0.3))
                node.process.stdout.close()
                node.start()
        is_over.set()

    flapping = threading.Thread(target=flap)
    hits = 0
    with cascadekv.connect(node.socket, gpu=engine.gpu, timeout=LIMIT_S) as store:
        flapping.start()
        for number in itertools.count():
            save(engine, store, [number], [number % PAGES])
            hits += load(engine, store, [number], [(number + 1) % PAGES])
            if is_over.is_set():
                break
        flapping.join()
        assert hits > 0
        assert stops
        assert not any(stops), node.log()
        eventually(lambda: save(engine, store, [9_000_001], [1]) == 1)
        assert load(engine, store, [9_000_001], [2]) == 1


def test_a_node_stops_when_its_gpu_is_lost(serve_hbm, monkeypatch):
    # The first answers are those of the start.
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuMemGetInfo_v2=700@4")
    node = serve_hbm()
    assert node.process.wait(LIMIT_S) is not None
    node.process.stdout.close()
    assert "the GPU is lost" in node.log()


class Wire:
    """Connects a client with a node, until it is cut."""

    def __init__(self, place, node):
        self._node, self._ends = node, []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                node = socket.socket(socket.AF_UNIX)
                node.connect(str(self._node))
                self._ends += [client, node]
                for ends in ((client, node), (node, client)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, 1 << 16, 1)
                if not data:
                    return
                if descriptors:
                    socket.send_fds(target, [data], descriptors)
                    os.close(descriptors[0])
                else:
                    target.sendall(data)

    def cut(self):
        """Close all connections; no new ones are accepted."""
        for end in [self._listener, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_blocks_of_a_process_that_lost_its_connection_are_not_overwritten(
    fake, serve_hbm, tmp_path, eventually
):
    node, engine = serve_hbm(), Engine(fake)
    wire = Wire(tmp_path / "wire.sock", node.socket)
    store = cascadekv.connect(tmp_path / "wire.sock", gpu=engine.gpu)
    assert save(engine, store, [0], [1]) == 1
    views = store.view(keys_of([0]))
    # The next call confirms the answer of the last one: otherwise a lease that it granted ends.
    assert store.lookup_prefix(keys_of([0])).blocks == 1
    assert leases_of(node) == 1
    wire.cut()
    eventually(lambda: store.lookup_prefix(keys_of([0])).blocks == 0)
    with cascadekv.connect(node.socket, gpu=engine.gpu) as other:
        other.delete(keys_of([0]))
        # More than fits: every block that may be overwritten is.
        for first in range(100, 140, 4):
            put_and_get(other, range(first, first + 4))
        assert leases_of(node) == 1
    views.start_scatter(engine.memory, [5], after=engine.gpu.mark(engine.stream)).wait(
        timeout=LIMIT_S
    )
    assert engine.page(5) == block_of(0)
    views.release()
    store.close()


PEER = """
    import itertools, sys
    sys.path.append({engines!r})
    import cascadekv
    from fake_gpu import FakeGpu
    from hbm_engine import *
    engine = Engine(FakeGpu({device}), device={device})
    store = cascadekv.connect({socket!r}, gpu=engine.gpu, timeout=60)
    hits = 0
    for round in range(100):
        # Half of the blocks are the other's, which may have saved them or not.
        first = 1000 * {device} + 3 * round
        save(engine, store, range(first, first + 3), [0, 1, 2])
        hits += load(engine, store, range(first, first + 3), [5, 6, 7])
        load(engine, store, range(3 * round, 3 * round + 2), [3, 4])
        load(engine, store, range(1000 + 3 * round, 1000 + 3 * round + 2), [8, 9])
    print("hits", hits)
"""


def test_engines_on_two_gpus_share_blocks(serve_hbm, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv("FAKE_CUDA_PEERS", "1")
    node = serve_hbm()
    code = textwrap.dedent(PEER)
    codes = [code.format(engines=ENGINES, socket=str(node.socket), device=it) for it in range(2)]
    workers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)  # noqa: S603 # our own command
        for code in codes
    ]
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=4 * LIMIT_S)
            assert (worker.returncode, output) == (0, "hits 300\n")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


STUCK = """
    import sys, time
    sys.path.append({engines!r})
    import cascadekv
    from fake_gpu import FakeGpu
    from hbm_engine import *
    engine = Engine(FakeGpu())
    store = cascadekv.connect({socket!r}, gpu=engine.gpu)
    engine.compute(1, block_of(0))
    assert engine.save(store, [0], [1])[0].ok
    print("started", flush=True)
    time.sleep(600)
"""


def test_a_client_that_never_unmaps_is_named_and_delays_nobody(fake, serve_hbm, eventually):
    node, engine = serve_hbm(), Engine(fake)
    before = mappings()
    code = textwrap.dedent(STUCK).format(engines=ENGINES, socket=str(node.socket))
    with (
        subprocess.Popen(  # noqa: S603 # our own command
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as stuck,
        cascadekv.connect(node.socket, gpu=engine.gpu) as store,
    ):
        assert stuck.stdout.readline() == "started\n"
        stop(stuck.pid)
        try:
            released = run("hbm", "release", "--socket", str(node.socket))
            assert released.returncode == 0, released
            assert f"process {stuck.pid}" in released.stdout, released
            assert f"process {os.getpid()}" in released.stdout, released
            eventually(lambda: mappings() == before)
            assert mappings(stuck.pid) == 1
            node.process.wait(LIMIT_S)
            node.process.stdout.close()
            # Another node starts beside the memory that is still mapped.
            node.start()
            eventually(lambda: save(engine, store, [1], [1]) == 1)
            assert load(engine, store, [0, 1], [2, 3]) == 1
            stuck.send_signal(signal.SIGCONT)
            # It goes on with the new node, and maps its memory only.
            eventually(lambda: mappings(stuck.pid) == 1)
        finally:
            stuck.kill()


def test_a_second_connection_of_a_process_maps_the_memory_once_more(fake, serve_hbm, eventually):
    node, engine = serve_hbm(), Engine(fake)
    before = mappings()
    stores = [cascadekv.connect(node.socket, gpu=Gpu(0)) for _ in range(3)]
    assert mappings() == before + 3
    assert save(engine, stores[0], [0, 1], [0, 1]) == 2
    # Each copies by its own mapping.
    assert [load(engine, store, [0, 1], [4, 5]) for store in stores] == [2, 2, 2]
    for store in stores[:2]:
        store.close()
    eventually(lambda: mappings() == before + 1)
    assert load(engine, stores[2], [0, 1], [6, 7]) == 2
    stores[2].close()
    eventually(lambda: mappings() == before)

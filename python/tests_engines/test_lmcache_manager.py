"""LMCache's storage manager, with its store and prefetch controllers, over the L2 adapter.

Objects are written into LMCache's L1; LMCache stores them in Cascade, drops its own copies, and
prefetches them back. Every load's bytes are checked.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lmcache_objects import (
    clear,
    configs,
    create,
    desc,
    keys_of,
    load,
    look_up,
    manager,
    prefetch,
    store,
    write,
)

TESTS = Path(__file__).parent


@pytest.fixture
def manage():
    """Return a function that starts storage managers; closes them later."""
    started = []

    def start(parameters):
        started.append(manager(parameters))
        return started[-1]

    yield start
    for managed in started:
        managed.close()


@pytest.fixture
def stored(eventually):
    """Return a function that waits until LMCache's store controller is idle and L2 has objects."""

    def wait(managed, count):
        adapter = managed.l2_adapters()[0][1]
        size = count * 2 * 4 * 256 * 32 * 2
        eventually(lambda: adapter.get_usage().total_bytes_used == size)

    return wait


def address(node, **more):
    return {"cascade.node": f"unix:{node.socket}", **more}


def files_of(path):
    return {
        "cascade.dram": "16MiB",
        "cascade.files": str(path),
        "cascade.files_capacity": "256MiB",
    }


def test_chunks_come_back_through_lmcaches_controllers(manage, stored, serve):
    for parameters in ({"cascade.dram": "64MiB"}, address(serve("--dram", "64MiB"))):
        managed = manage(parameters)
        keys = keys_of(range(20))
        assert prefetch(managed, keys) == (0, 0)
        write(managed, keys)
        stored(managed, 20)
        assert prefetch(managed, keys) == (20, 0)
        clear(managed)
        assert prefetch(managed, keys) == (0, 20)
        status = managed.l2_adapters()[0][1].report_status()
        assert status["failures"] == {}
        assert status["is_healthy"]


def test_a_prefix_is_loaded_as_far_as_it_is_stored(manage, stored, eventually):
    managed = manage({"cascade.dram": "64MiB"})
    keys = keys_of(range(10))
    write(managed, keys[:6] + keys[7:])
    stored(managed, 9)
    clear(managed)
    assert prefetch(managed, keys) == (0, 6)
    adapter = managed.l2_adapters()[0][1]
    eventually(lambda: adapter.report_status()["locked_key_count"] == 0)


def test_chunks_of_another_dtype_are_misses_in_a_shared_node(manage, stored, serve):
    node = serve("--dram", "64MiB")
    first, second = manage(address(node)), manage(address(node))
    keys = keys_of(range(5))
    write(first, keys)
    stored(first, 5)
    assert prefetch(second, keys, desc(dtype=torch.float16)) == (0, 0)
    assert prefetch(second, keys) == (0, 5)


def test_two_processes_share_a_node(manage, serve):
    node = serve("--dram", "64MiB")
    writer = (
        "import sys; from lmcache_objects import *\n"
        f"adapter = create({address(node)!r})\n"
        "assert store(adapter, keys_of(range(12))).is_successful(); adapter.close()"
    )
    environment = {"PYTHONPATH": ":".join([str(TESTS), *sys.path])}
    subprocess.run([sys.executable, "-c", writer], check=True, timeout=120, env=environment)  # noqa: S603 # fixed
    assert prefetch(manage(address(node)), keys_of(range(12))) == (0, 12)


def test_a_restarted_node_keeps_the_chunks(manage, stored, serve, tmp_path, eventually):
    flags = ["--dram", "64MiB", "--files", str(tmp_path / "files"), "--files-capacity", "256MiB"]
    node = serve(*flags)
    managed = manage(address(node))
    keys = keys_of(range(20))
    write(managed, keys)
    stored(managed, 20)
    assert node.stop() == 0
    clear(managed)
    assert prefetch(managed, keys) == (0, 0), "without a node, everything is a miss"
    node.start()
    eventually(lambda: prefetch(managed, keys)[1] == 20 or clear(managed))


def test_embedded_files_survive_the_process(manage, tmp_path):
    keys = keys_of(range(20))
    adapter = create(files_of(tmp_path / "files"))
    store(adapter, keys)
    adapter.close()
    assert prefetch(manage(files_of(tmp_path / "files")), keys) == (0, 20)


def test_damaged_files_are_misses(manage, tmp_path):
    keys = keys_of(range(30))
    adapter = create(files_of(tmp_path / "files"))
    store(adapter, keys)
    adapter.close()
    segments = [file for file in (tmp_path / "files").rglob("*") if file.stat().st_size > 1 << 20]
    assert segments
    for file in segments:
        data = bytearray(file.read_bytes())
        data[1 << 20] ^= 0xFF
        file.write_bytes(data)
    # An adapter of its own: LMCache's threads take the signals of theirs, so a test may miss them.
    adapter = create(files_of(tmp_path / "files"))
    states = load(adapter, keys)  # checks the bytes of what is reported as loaded
    adapter.close()
    assert False in states
    assert sum(states) >= 28
    hits = prefetch(manage(files_of(tmp_path / "files")), keys)
    assert hits == (0, states.index(False))


def test_a_killed_node_is_misses_and_failed_stores(manage, stored, serve, eventually):
    node = serve("--dram", "64MiB")
    managed = manage(address(node, **{"cascade.timeout": 1}))
    keys = keys_of(range(10))
    write(managed, keys)
    stored(managed, 10)
    node.kill()
    clear(managed)
    assert prefetch(managed, keys) == (0, 0)
    adapter = managed.l2_adapters()[0][1]
    # By LMCache's own thread: it takes the results, so that a test cannot wait for them too.
    write(managed, keys_of(range(50, 55)))
    eventually(lambda: adapter.failures().get("storing", 0) > 0)


def test_a_node_that_does_not_answer_costs_deadlines_only(serve):
    node = serve("--dram", "64MiB")
    adapter = create(address(node, **{"cascade.timeout": 0.3}))
    keys = keys_of(range(10))
    store(adapter, keys)
    node.suspend()
    try:
        started = time.monotonic()
        assert look_up(adapter, keys) == [False] * 10
        assert not store_result_of(adapter, keys_of(range(50, 55)))
        assert load(adapter, keys) in ([False] * 10, [True] * 10)
        adapter.submit_unlock(keys)
        adapter.delete(keys)
        adapter.close()
        # Far more than the deadlines: it only tells a deadline from none.
        assert time.monotonic() - started < 60
    finally:
        node.resume()


def test_a_node_that_starts_later_is_found(serve, eventually, monkeypatch):
    node = serve("--dram", "64MiB")
    assert node.stop() == 0
    adapter = create(address(node, **{"cascade.timeout": 1}))
    monkeypatch.setattr(adapter._link, "_retry_s", 0.1)  # noqa: SLF001 # shorter waits only
    monkeypatch.setattr(adapter._link, "_retry_at", 0)  # noqa: SLF001 # likewise
    keys = keys_of(range(3))
    assert look_up(adapter, keys) == [False] * 3
    assert adapter.report_status()["is_healthy"] is False
    node.start()
    eventually(lambda: store_result_of(adapter, keys))
    assert load(adapter, keys) == [True] * 3
    adapter.close()


def store_result_of(adapter, keys):
    return store(adapter, keys).is_successful()


def test_lmcache_adds_and_removes_the_adapter_at_run_time(manage, stored):
    managed = manage({"cascade.dram": "64MiB"})
    added = managed.add_l2_adapter(configs({"cascade.dram": "32MiB"}).adapters[0])
    write(managed, keys_of(range(4), model="org/late"))
    adapters = {descriptor.index: adapter for descriptor, adapter in managed.l2_adapters()}
    managed.delete_l2_adapter(added)
    assert adapters[added].report_status()["is_healthy"] is False
    stored(managed, 4)
    assert prefetch(managed, keys_of(range(4), model="org/late")) == (4, 0)


def test_the_serializers_of_lmcache_are_misses_and_never_wrong(eventually):
    managed = manager({"cascade.dram": "64MiB"}, serde={"type": "fp8"})
    try:
        keys = keys_of(range(3))
        write(managed, keys)
        adapter = managed.l2_adapters()[0][1]
        eventually(lambda: adapter.get_usage().total_bytes_used > 0)
        clear(managed)
        assert prefetch(managed, keys) == (0, 0)
    finally:
        managed.close()

"""Failures of the store and the connector never change an answer or a stored block."""

from dataclasses import dataclass

import cascadekv
import engine_calls
import numpy as np
import pytest
from cascadekv import BlockKeys, Store
from cascadekv.bench.prompts import prompt, with_prefix
from forked_engines import BLOCK, Engine

pytest_plugins = ["forked_engines"]

KEY = 32
ALWAYS = {
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}


@dataclass
class Watched:
    """An engine, and another client of its node."""

    name: str
    engine: Engine
    store: Store

    def keys(self, request: list[int]) -> bytes:
        """Return the keys of a prompt's blocks."""
        keys = self.engine.call(engine_calls.keys_of_prompt, request)
        assert len(keys) == len(request) // BLOCK * KEY
        return keys

    def contents(self, keys: bytes) -> list[np.ndarray]:
        """Return blocks as arrays of numbers."""
        with self.store.view(BlockKeys(keys), timeout=30) as views:
            assert views.hits == len(keys) // KEY
            return [np.frombuffer(bytes(view), np.float32) for view in views]


@pytest.fixture(scope="module", params=["sync", "async", "layerwise"])
def watched(request, start, serve_module):
    name = request.param
    node = serve_module("--dram", "128MiB")
    ways = {
        "sync": {"cascade.load": "sync"},
        "async": {"cascade.load": "async"},
        "layerwise": {"cascade.load": "sync", "cascade.layerwise": True},
    }
    engine = start({"cascade.node": f"unix:{node.socket}", **ALWAYS, **ways[name]})
    with cascadekv.connect(node.socket, timeout=30) as store:
        yield Watched(name, engine, store)
    engine.close()
    node.stop()


def is_same(blocks: list[np.ndarray], others: list[np.ndarray]) -> bool:
    """Compare KV of two runs, approximately: the order of summation may differ."""
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(blocks, others, strict=True))


def test_a_wrong_block_changes_the_answer(watched, reference):
    request = prompt(4 * BLOCK + 9, "control", watched.name)
    reference.check_one(watched.engine, request)
    keys = watched.keys(request)
    right = watched.contents(keys)
    assert not is_same([right[1]], [right[2]])
    one = BlockKeys(keys[KEY : 2 * KEY])
    assert watched.store.delete(one) == [True]
    assert watched.store.put(one, [right[2].tobytes()])[0].ok
    answer = watched.engine.one(request)
    assert answer.cached == 4 * BLOCK
    assert answer.tokens != reference.answers([request])[0]
    watched.store.delete(BlockKeys(keys))


@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (3, 4), (1, 3), (0, 4)])
def test_blocks_deleted_before_their_load_are_computed(watched, reference, lost):
    request = prompt(4 * BLOCK + 50, "lost", watched.name, lost)
    assert reference.check_one(watched.engine, request) == 0
    keys = watched.keys(request)
    right = watched.contents(keys)
    watched.engine.call(engine_calls.delete_after_next_hit, keys[lost[0] * KEY : lost[1] * KEY])
    reference.check_one(watched.engine, request)
    # Blocks that were computed from missing ones were not saved; recomputed blocks were.
    assert is_same(watched.contents(keys), right)
    assert reference.check_one(watched.engine, request) == 4 * BLOCK


def test_concurrent_requests_whose_shared_blocks_are_deleted_are_correct(watched, reference):
    first = prompt(3 * BLOCK + 20, "lost at once", watched.name)
    reference.check_one(watched.engine, first)
    keys = watched.keys(first)
    right = watched.contents(keys)
    watched.engine.call(engine_calls.delete_after_next_hit, keys[KEY : 2 * KEY])
    requests = [
        first,
        with_prefix(first, 300, "beside", watched.name),
        prompt(200, watched.name),
        first,
    ]
    reference.check(watched.engine, requests)
    assert is_same(watched.contents(keys), right)
    assert reference.check(watched.engine, requests) == [384, 384, 128, 384]


def test_an_exception_in_a_load_changes_no_answer(watched, reference):
    request = prompt(4 * BLOCK + 9, "fault", watched.name)
    reference.check_one(watched.engine, request)
    keys = watched.keys(request)
    right = watched.contents(keys)
    where = ("layers", "_scatter") if watched.name == "layerwise" else ("memory", "load")
    watched.engine.call(engine_calls.break_next, *where)
    reference.check_one(watched.engine, request)
    assert is_same(watched.contents(keys), right)
    assert reference.check_one(watched.engine, request) == 4 * BLOCK


def test_an_exception_in_planning_changes_no_answer(watched, reference):
    request = prompt(4 * BLOCK + 9, "plan", watched.name)
    reference.check_one(watched.engine, request)
    longer = [*request, *prompt(2 * BLOCK, "plan more", watched.name)]
    watched.engine.call(engine_calls.break_next, "scheduler", "_save")
    reference.check_one(watched.engine, longer)
    assert reference.check_one(watched.engine, request) == 4 * BLOCK


def test_an_exception_in_a_save_changes_no_answer(watched, reference):
    request = prompt(4 * BLOCK + 9, "save", watched.name)
    watched.engine.call(engine_calls.break_next, "memory", "save")
    assert reference.check_one(watched.engine, request) == 0
    reference.check_one(watched.engine, request)
    assert reference.check_one(watched.engine, request) == 4 * BLOCK


def test_stored_blocks_are_not_used_after_a_cache_reset(watched, reference):
    request = prompt(3 * BLOCK + 9, "forget", watched.name)
    reference.check_one(watched.engine, request)
    assert reference.check_one(watched.engine, request) == 3 * BLOCK
    before = watched.keys(request)
    assert watched.engine.call(engine_calls.reset_all_caches)
    assert watched.keys(request) != before
    assert reference.check_one(watched.engine, request) == 0
    assert reference.check_one(watched.engine, request) == 3 * BLOCK


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_running_request_does_not_save_blocks_from_before_a_reset(
    watched, reference, is_preempted
):
    request = prompt(3 * BLOCK - 2, "in the middle", watched.name, is_preempted)
    watched.engine.call(engine_calls.reset_during_request, request, 12, is_preempted)
    answer = list(reference.answers([request], 12)[0])
    longer = [*request, *answer, *prompt(9, "more")]
    # A preempted request was computed again; otherwise its first blocks are from before the reset.
    assert reference.check_one(watched.engine, longer) == (3 * BLOCK if is_preempted else 0)
    assert reference.check_one(watched.engine, longer) == 3 * BLOCK


def test_requests_aborted_during_a_load_leak_nothing(watched, reference):
    requests = [prompt(4 * BLOCK, "abort", watched.name, number) for number in range(4)]
    reference.check(watched.engine, requests)
    watched.engine.call(engine_calls.choose_loads, "async")
    free = watched.engine.call(engine_calls.free_blocks)
    assert watched.engine.call(engine_calls.abort_while_loading, requests[:3]) == 3
    assert reference.check(watched.engine, requests) == [4 * BLOCK] * 4
    assert watched.engine.call(engine_calls.free_blocks) == free
    watched.engine.call(engine_calls.choose_loads, "async" if watched.name == "async" else "sync")


FLOATS = 4
"""Bytes of a number in the KV."""


@pytest.fixture(scope="module")
def on_files(start, serve_module, tmp_path_factory):
    """Return an engine and its node, whose blocks are only in files after a restart."""
    files = tmp_path_factory.mktemp("files")
    flags = ("--pipeline", "Dram|Files", "--dram", "64MiB")
    flags += ("--files", str(files), "--files-capacity", "256MiB")
    settings = {"segment_size": "8MiB", "keep_pool": "never"}
    node = serve_module(*flags, **settings)
    engine = start({"cascade.node": f"unix:{node.socket}", **ALWAYS, "cascade.load_timeout": 30})
    yield engine, node, files
    engine.close()


def flip(path):
    """Change a bit in each 16 KiB of a file."""
    data = bytearray(path.read_bytes())
    for at in range(8192, len(data), 16384):
        data[at] ^= 0x40
    path.write_bytes(data)


def cut(path):
    """Truncate a file to half of its size."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut])
def test_damaged_files_cost_only_hits(on_files, reference, eventually, damage):
    engine, node, files = on_files
    requests = [prompt(5 * BLOCK + 3, "files", damage.__name__, number) for number in range(6)]
    reference.check(engine, requests)
    node.stop()
    node.start()
    eventually(lambda: reference.check_one(engine, requests[0]) == 5 * BLOCK)
    node.stop()
    large = [path for path in files.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    assert large
    for path in large:
        damage(path)
    node.start()
    eventually(lambda: is_back(node))
    # Damage is detected by lookups or reads, and the blocks are computed.
    for _ in range(2):
        for each in requests:
            reference.check_one(engine, each)
    with cascadekv.connect(node.socket, timeout=30) as store:
        stats = store.stats()
    assert stats["damaged_blocks"] + stats["lost_blocks"] + stats["stored"] > 0, stats
    assert reference.check(engine, requests) == [5 * BLOCK] * len(requests)


def is_back(node):
    """Whether a node accepts clients."""
    try:
        cascadekv.connect(node.socket, timeout=5).close()
    except cascadekv.CascadeError:
        return False
    return True


def test_a_node_killed_between_lookup_and_load_changes_no_answer(on_files, reference, eventually):
    engine, node, _ = on_files
    requests = [prompt(4 * BLOCK + 3, "dies", number) for number in range(4)]
    reference.check(engine, requests)
    assert reference.check_one(engine, requests[0]) == 4 * BLOCK
    engine.call(engine_calls.kill_after_next_hit, node.process.pid)
    reference.check_one(engine, requests[0])
    assert reference.check_one(engine, requests[1]) == 0
    node.kill()
    node.start()
    fresh = iter(range(1000))

    def hits() -> bool:
        new = prompt(2 * BLOCK + 3, "after", next(fresh))
        reference.check_one(engine, new)
        return reference.check_one(engine, new) == 2 * BLOCK

    eventually(hits, 60)
    reference.check(engine, requests)


def test_preempted_requests_are_answered_correctly(start, reference):
    engine = start(
        {"cascade.dram": "64MiB", **ALWAYS},
        num_gpu_blocks_override=10,
        max_model_len=1024,
        disable_log_stats=False,
    )
    for turn in range(2):
        # Each request starts with two blocks and grows into a third; the engine has nine.
        requests = [prompt(2 * BLOCK - 4, "give way", number) for number in range(6)]
        hits = reference.check(engine, requests, 16)
        assert hits == [BLOCK * turn] * len(requests)
    assert engine.call(engine_calls.count, "vllm:num_preemptions") > 0
    assert engine.call(engine_calls.free_blocks) == 9
    longer = [*requests[0], *reference.answers(requests, 16)[0], *prompt(20, "tail")]
    assert reference.check_one(engine, longer) == 2 * BLOCK
    engine.close()


def test_late_layers_are_not_used(start, reference):
    ways = {"cascade.load": "sync", "cascade.layerwise": True, "cascade.load_timeout": 1}
    engine = start({"cascade.dram": "64MiB", **ALWAYS, **ways})
    first = prompt(3 * BLOCK + 9, "late layers")
    reference.check_one(engine, first)
    engine.call(engine_calls.hold_next_layers, 8.0)
    reference.check_one(engine, first)
    assert reference.check_one(engine, first) == 3 * BLOCK
    engine.close()

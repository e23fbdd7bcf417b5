"""A worker carries out its plans, reports every block that failed, and keeps its deadlines."""

import threading
import time
from dataclasses import dataclass, field

import cascadekv
import numpy as np
import pytest
import torch
from cascadekv.connectors.vllm import layers
from cascadekv.connectors.vllm.layout import Rank
from cascadekv.connectors.vllm.memory import HostMemory, memory_of
from cascadekv.connectors.vllm.metadata import Load, Part, Save, StepPlan
from cascadekv.connectors.vllm.worker import Worker
from vllm_caches import PAGES, SPACE, Model, keys_of
from vllm_caches import Worker as Cache

LIMIT_S = 60
"""Time-out of a test's waits."""


@pytest.fixture
def store():
    with cascadekv.Store(dram="16MiB", huge_pages=False) as opened:
        yield opened


@dataclass
class Engine:
    """One worker with a cache of its own, and the keys of one request."""

    store: object
    shards: int | None = None
    is_filled: bool = True
    groups: int = 1
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        """Allocate, and attach a worker."""
        self.cache = Cache(Model(), Rank(kv_heads=8), shards=self.shards, is_filled=self.is_filled)
        if self.groups > 1:
            (held,) = self.cache.held
            parts = [Part(f"group {at}", at, held.part.block_bytes) for at in range(self.groups)]
            # As in a hybrid model, all groups share the same memory.
            self.cache.held = [type(held)(part, held.regions, is_writer=True) for part in parts]
        self.names = [each.part.name for each in self.cache.held]
        self.keys = keys_of(self.names, PAGES)
        given = {"load_timeout": 5.0, "save_timeout": 5.0} | self.options
        self.worker = Worker(lambda: self.store, lambda _: SPACE, **given)
        memories = [
            (each, memory_of(self.cache.buffer, each.regions, PAGES)) for each in self.cache.held
        ]
        self.worker.attach(memories, list(self.cache.caches))

    def load(self, pages, first=0, *, is_async=False, tables=None, request="request"):
        """Plan a load."""
        last = first + len(pages)
        keys = {name: self.keys.raw(name, first, last) for name in self.names}
        return Load(request, is_async, first, keys, tables or {0: pages}, "dram")

    def save(self, pages, first=0, *, depends_on=None, tables=None):
        """Plan a save."""
        last = first + len(pages)
        keys = {name: self.keys.raw(name, first, last) for name in self.names}
        parents = {name: self.keys.parent(name, first) for name in self.names}
        tables = tables or {0: pages}
        return Save("request", first, keys, parents, tables, depends_on or tables)

    def step(self, plan):
        """Make the calls of a step as the engine does if it waits for loads."""
        self.worker.start_loads(plan)
        for layer in self.cache.caches:
            self.worker.wait_for_layer(layer)
        self.worker.save(plan)

    def stored(self):
        """Return whether the store has each block of the request."""
        return self.store.contains(self.keys.keys(self.names[0], 0, PAGES))

    def assert_loaded(self, pages):
        """Check that page `pages[i]` has saved block i, and that other pages are unchanged."""
        for layer in range(3):
            for page in range(PAGES):
                own = self.cache.page(layer, page)
                if page in pages:
                    wanted = self.cache.share[layer, SAVED[pages.index(page)]]
                    assert np.array_equal(own, wanted), (layer, page)
                else:
                    assert not own.any(), f"page {page} was written"


SAVED = [7, 3, 11, 1, 5, 9]
LOADED = [2, 9, 4, 10, 6, 1]


@pytest.fixture
def saved(store):
    """Return a store with six blocks of the request."""
    engine = Engine(store)
    engine.step(StepPlan(saves=[engine.save(SAVED)]))
    (result,) = engine.worker.take_report().saved
    assert result.stored == [True] * 6
    assert result.bytes == 6 * engine.cache.held[0].part.block_bytes
    engine.worker.close()
    return store


@pytest.mark.parametrize("is_layerwise", [False, True])
def test_blocks_of_one_engine_are_loaded_by_another(saved, is_layerwise):
    engine = Engine(saved, is_filled=False, options={"is_layerwise": is_layerwise})
    engine.step(StepPlan(loads=[engine.load(LOADED)]))
    engine.assert_loaded(LOADED)
    assert engine.worker.take_failed_pages() == set()
    progress = engine.worker.take_report()
    assert (progress.loaded[0].blocks, progress.loaded[0].bad) == (6, [])
    assert engine.worker.take_report() is None
    engine.worker.close()


@pytest.mark.parametrize("is_layerwise", [False, True])
def test_missing_blocks_are_reported_and_others_loaded(saved, is_layerwise):
    engine = Engine(saved, is_filled=False, options={"is_layerwise": is_layerwise})
    saved.delete(engine.keys.keys(engine.names[0], 2, 4))
    engine.step(StepPlan(loads=[engine.load(LOADED)]))
    assert engine.worker.take_failed_pages() == {LOADED[2], LOADED[3]}
    assert engine.worker.take_failed_pages() == set()
    assert engine.worker.take_report().loaded[0].bad == [2, 3]
    engine.worker.close()


def test_a_block_with_a_missing_share_is_reported(store):
    engine = Engine(store, shards=4)
    engine.step(StepPlan(saves=[engine.save(SAVED)]))
    store.delete(engine.keys.keys(engine.names[2], 1, 2))
    engine.step(StepPlan(loads=[engine.load(LOADED)]))
    assert engine.worker.take_failed_pages() == {LOADED[1]}
    engine.worker.close()


def test_failed_blocks_have_indices_from_the_start_of_the_request(saved):
    engine = Engine(saved, is_filled=False)
    saved.delete(engine.keys.keys(engine.names[0], 4, 5))
    engine.step(StepPlan(loads=[engine.load([8, 3, 2], first=3)]))
    assert engine.worker.take_report().loaded[0].bad == [4]
    assert engine.worker.take_failed_pages() == {3}
    engine.worker.close()


def test_blocks_computed_from_failed_loads_are_not_saved(saved):
    engine = Engine(saved)
    saved.delete(engine.keys.keys(engine.names[0], 1, 2))
    save = engine.save([8], first=6, depends_on={0: [*LOADED, 8]})
    engine.step(StepPlan(1, 0, loads=[engine.load(LOADED)], saves=[save]))
    progress = engine.worker.take_report()
    assert progress.saved == []
    assert progress.plan == 1
    # Planned before the scheduler knew about the failure: computed from the same blocks.
    engine.step(StepPlan(2, 0, saves=[save]))
    assert engine.worker.take_report() is None
    assert engine.stored()[6] is False
    # Planned with the knowledge of the failure: the blocks were recomputed.
    engine.step(StepPlan(3, 1, saves=[save]))
    assert engine.stored()[6] is True
    engine.worker.close()


def test_independent_saves_succeed_despite_a_failed_load(saved):
    engine = Engine(saved)
    saved.delete(engine.keys.keys(engine.names[0], 1, 2))
    save = engine.save([8], first=6, depends_on={0: [3, 8]})
    engine.step(StepPlan(1, 0, loads=[engine.load(LOADED)], saves=[save]))
    assert engine.stored()[6] is True
    engine.worker.close()


def arrivals(worker):
    """Poll as steps do, until something arrives."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        arrived, failed = worker.arrivals()
        if arrived:
            return arrived, failed
        time.sleep(0.005)
    raise AssertionError("no load arrived")


def test_asynchronous_loads_arrive_once(saved):
    engine = Engine(saved, is_filled=False)
    saved.delete(engine.keys.keys(engine.names[0], 5, 6))
    loads = [
        engine.load(LOADED[:2], is_async=True, request="good"),
        engine.load(LOADED[4:], first=4, is_async=True, request="bad"),
    ]
    engine.step(StepPlan(loads=loads))
    arrived = set()
    while len(arrived) < 2:
        some, failed = arrivals(engine.worker)
        assert not some & arrived
        assert failed == set()
        arrived |= some
    assert arrived == {"good", "bad"}
    assert engine.worker.take_failed_pages() == {LOADED[5]}
    ended = {each.request: each.bad for each in engine.worker.take_report().loaded}
    assert ended == {"good": [], "bad": [5]}
    assert engine.worker.arrivals() == (set(), set())
    engine.worker.close()


def test_with_several_groups_a_failed_block_fails_the_whole_load(store):
    # The engine accepts failures of single blocks only for models with one group.
    engine = Engine(store, groups=2)
    tables = {0: [7, 3, 11], 1: [0, 0, 5]}
    engine.step(StepPlan(saves=[engine.save([7, 3, 11], tables=tables)]))
    assert engine.worker.take_report().saved[0].stored == [True] * 3
    window = engine.keys.keys(engine.names[1], 0, 3)
    assert store.contains(window) == [False, False, True], "null blocks are not saved"
    targets = {0: [2, 9, 4], 1: [0, 0, 8]}
    engine.step(StepPlan(loads=[engine.load([2, 9, 4], is_async=True, tables=targets)]))
    assert arrivals(engine.worker) == ({"request"}, set())
    store.delete(window)
    engine.step(StepPlan(loads=[engine.load([2, 9, 4], is_async=True, tables=targets)]))
    assert arrivals(engine.worker) == ({"request"}, {"request"})
    assert engine.worker.take_failed_pages() == set()
    engine.worker.close()


def test_with_a_window_a_failed_block_fails_the_whole_load(saved):
    # Regression: the engine went on at the failed block, without pages for the blocks before.
    engine = Engine(saved, is_filled=False)
    saved.delete(engine.keys.keys(engine.names[0], 5, 6))
    loads = [engine.load([0, 0, 0, *LOADED[3:]], is_async=True, request="lost")]
    loads += [engine.load(LOADED[:2], is_async=True, request="unplanned")]
    loads += [engine.load(LOADED[:5], is_async=True, request="good")]
    loads[1].keys = {}
    for load in loads:
        load.has_windows = True
    engine.step(StepPlan(loads=loads))
    ended, failed = set(), set()
    while len(ended) < len(loads):
        some, bad = arrivals(engine.worker)
        ended |= some
        failed |= bad
    assert failed == {"lost", "unplanned"}
    assert engine.worker.take_failed_pages() == set()
    engine.worker.close()


@pytest.mark.parametrize("is_layerwise", [False, True])
def test_null_blocks_are_neither_read_nor_written(saved, is_layerwise):
    engine = Engine(saved, is_filled=False, options={"is_layerwise": is_layerwise})
    pages = [0, 0, 4, 10, 0, 1]
    engine.step(StepPlan(loads=[engine.load(pages)]))
    assert engine.worker.take_failed_pages() == set()
    assert not engine.cache.page(0, 0).any()
    for at in (2, 3, 5):
        assert np.array_equal(engine.cache.page(1, pages[at]), engine.cache.share[1, SAVED[at]])
    engine.worker.close()


def test_a_layer_is_loaded_when_its_wait_returns(saved):
    engine = Engine(saved, is_filled=False, options={"is_layerwise": True})
    plan = StepPlan(loads=[engine.load(LOADED)])
    engine.worker.start_loads(plan)
    for number, layer in enumerate(engine.cache.caches):
        engine.worker.wait_for_layer(layer)
        for source, page in zip(SAVED, LOADED, strict=True):
            own = engine.cache.page(number, page)
            assert np.array_equal(own, engine.cache.share[number, source])
    engine.worker.save(plan)
    engine.worker.close()


class NoRoomViews:
    """Views of blocks for which the pool has no room."""

    def __enter__(self):
        """Return the views."""
        return self

    def __exit__(self, *_):
        """Release nothing."""

    def release(self):
        """Release nothing."""

    def __len__(self):
        """Return the number of blocks."""
        return len(LOADED)

    def error(self, _):
        """Return why a block was not read."""
        return cascadekv.BusyError("no room")


def test_a_layerwise_load_in_batches_keeps_the_deadline_of_its_step(saved):
    # Regression: the batches had another deadline of their own, so a step could take it twice.
    class NoRoomStore:
        def view(self, _keys, timeout):
            assert timeout > 0
            return NoRoomViews()

    options = {"is_layerwise": True, "load_timeout": 30.0}
    engine = Engine(saved, is_filled=False, options=options)
    engine.store = NoRoomStore()
    deadlines, load = [], engine.worker._load  # noqa: SLF001 # what loads in batches

    def recorded(plan, orders, deadline):
        deadlines.append(deadline)
        engine.store = saved
        return load(plan, orders, deadline)

    engine.worker._load = recorded  # noqa: SLF001
    before = time.monotonic()
    plan = StepPlan(loads=[engine.load(LOADED)])
    engine.worker.start_loads(plan)
    after = time.monotonic()
    engine.worker.save(plan)
    engine.assert_loaded(LOADED)
    (deadline,) = deadlines
    assert before <= deadline - 30.0 <= after
    engine.worker.close()


@pytest.mark.parametrize("is_ever_run", [False, True])
def test_a_late_layer_fails_its_blocks(saved, monkeypatch, is_ever_run):
    # Regression: a load waited for busy threads, and the engine computed before its blocks arrived.
    # The late load then succeeded, and the wrong output was used.
    monkeypatch.setattr(layers, "GRACE_S", 0.05)
    options = {"is_layerwise": True, "load_timeout": 0.05}
    engine = Engine(saved, is_filled=False, options=options)
    busy = threading.Event()
    others = [
        engine.worker._loaders.submit(busy.wait, LIMIT_S)  # noqa: SLF001 # to keep them busy
        for _ in range(2)
    ]
    plan = StepPlan(
        1, 0, loads=[engine.load(LOADED)], saves=[engine.save([8], 6, depends_on={0: LOADED})]
    )
    engine.worker.start_loads(plan)
    for layer in engine.cache.caches:
        engine.worker.wait_for_layer(layer)
    if is_ever_run:
        busy.set()
        for other in others:
            other.result(LIMIT_S)
    engine.worker.save(plan)
    assert engine.worker.take_failed_pages() == set(LOADED)
    assert engine.worker.take_report().saved == []
    assert engine.stored()[6] is False
    busy.set()
    engine.worker.close()


class Broken(HostMemory):
    """Memory that raises an unexpected exception."""

    def load(self, views, pages):  # noqa: ARG002 # as its parent
        """Fail."""
        raise RuntimeError("device-side assert")


def test_an_unexpected_exception_fails_the_blocks(saved):
    engine = Engine(saved, is_filled=False)
    (held,) = engine.cache.held
    engine.worker.attach([(held, Broken(engine.cache.buffer, held.regions, PAGES))], [])
    engine.step(StepPlan(loads=[engine.load(LOADED), engine.load(LOADED, is_async=True)]))
    assert engine.worker.take_failed_pages() == set(LOADED)
    assert arrivals(engine.worker) == ({"request"}, set())
    assert engine.worker.take_failed_pages() == set(LOADED)
    engine.worker.close()


@pytest.mark.parametrize("is_layerwise", [False, True])
def test_more_blocks_than_the_pool_holds_are_saved_and_loaded(tmp_path, is_layerwise):
    # Regression: only as many blocks were loaded as fit into the pool at the same time; others were
    # computed although they were in files.
    model = Model()
    model.kv = np.random.default_rng(3).integers(0, 99, (1, 12, 8, 16, 6144), dtype=np.int16)
    rows = model.kv.reshape(12, -1)
    block_bytes = rows[0].nbytes
    files = {"files": tmp_path / "files", "files_capacity": "256MiB", "segment_size": "8MiB"}
    with cascadekv.Store(dram="8MiB", huge_pages=False, **files) as store:
        engine = Engine(
            store,
            options={"is_layerwise": is_layerwise, "save_timeout": 60.0, "load_timeout": 60.0},
        )
        (held,) = engine.cache.held
        assert 12 * block_bytes > 8 << 20
        buffer = rows.copy().view(np.uint8)
        region = type(held.regions[0])(0, block_bytes, block_bytes)
        memory = HostMemory(torch.from_numpy(buffer.reshape(-1)), [region], 12)
        engine.worker.attach([(held, memory)], ["layers.0"])
        pages = list(range(1, 12))
        engine.step(StepPlan(saves=[engine.save(pages)]))
        assert engine.worker.take_report().saved[0].stored == [True] * 11
        store.flush()
        buffer[:] = 0
        engine.step(StepPlan(loads=[engine.load(pages)]))
        assert engine.worker.take_failed_pages() == set()
        assert np.array_equal(buffer[1:], rows.view(np.uint8)[1:])
        engine.worker.close()


def test_nothing_is_saved_or_loaded_without_a_store():
    engine = Engine(None)
    engine.step(StepPlan(loads=[engine.load(LOADED)]))
    assert engine.worker.take_failed_pages() == set(LOADED)
    engine.step(StepPlan(number=2, completed=2, saves=[engine.save(SAVED)]))
    assert engine.worker.take_report().saved[0].stored == [False] * 6
    engine.worker.close()


def test_a_suspended_node_costs_no_more_than_the_deadlines(serve):
    node = serve("--dram", "16MiB")
    with cascadekv.connect(node.socket, timeout=1.0) as store:
        options = {"load_timeout": 0.3, "save_timeout": 0.3}
        engine = Engine(store, options=options)
        engine.step(StepPlan(saves=[engine.save(SAVED)]))
        assert engine.worker.take_report().saved[0].stored == [True] * 6
        node.suspend()
        started = time.monotonic()
        try:
            engine.step(StepPlan(1, 1, loads=[engine.load(LOADED)]))
            assert engine.worker.take_failed_pages() == set(LOADED)
            engine.step(StepPlan(2, 2, saves=[engine.save([8, 10], first=6)]))
            assert engine.worker.take_report().saved[0].stored == [False] * 2
            engine.step(StepPlan(3, 3, loads=[engine.load(LOADED, is_async=True)]))
            assert arrivals(engine.worker)[0] == {"request"}
            assert engine.worker.take_failed_pages() == set(LOADED)
        finally:
            node.resume()
        print(f"three steps with a suspended node: {time.monotonic() - started:.2f} s")
        engine.worker.close()


def test_prefill_is_timed_if_a_step_computes_before_it_loads(saved):
    # A step without synchronous loads computes first and then starts loads.
    engine = Engine(saved)
    plan = StepPlan(tokens=64, requests=1)
    for layer in engine.cache.caches:
        engine.worker.wait_for_layer(layer)
    engine.worker.start_loads(plan)
    engine.worker.save(plan)
    tokens, context, seconds = engine.worker.take_report().prefill
    assert (tokens, context) == (64, 0)
    assert seconds > 0
    engine.worker.close()

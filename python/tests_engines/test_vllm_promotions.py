"""Blocks move up into the memory of a GPU after a load, over the fake driver and a real node."""

import threading

import cascadekv
import pytest
from cascadekv.connectors.vllm import promotions
from cascadekv.connectors.vllm.block_reader import BlockReader
from cascadekv.connectors.vllm.memory import GpuOrder
from cascadekv.connectors.vllm.metadata import StepPlan
from fake_gpu import FakeGpu, library
from test_vllm_gpu import LIMIT_S, SPACE, block_of, keys_of
from test_vllm_gpu_steps import BLOCK_BYTES
from test_vllm_hbm import FIRST_GPU, TieredStep, patient  # noqa: F401 # a fixture of all tests

WAYS = ["together", "layerwise", "async"]


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def node(serve):
    return serve("--gpu", FIRST_GPU, "--hbm", "16MiB", cuda_library=str(library()))


@pytest.fixture
def begin(fake, node):
    """Return a function that starts a worker over both tiers; ends the workers afterwards."""
    started = []

    def start(**options):
        store = cascadekv.Store(dram="16MiB", huge_pages=False)
        started.append(TieredStep(fake, store, node.socket, **options))
        return started[-1]

    yield start
    for step in started:
        fake.release()
        step.worker.close()
        step.store.close()


def put(step, numbers):
    """Store blocks below the tier only."""
    for number in numbers:
        assert step.store.put(keys_of(number), [block_of(number)], namespace=SPACE)[0].ok


def load(step, numbers, *, is_async=False, first_page=1, plan=1):
    """Load the blocks of one request, and compare those that arrived; returns its result."""
    given = step.load_chain(numbers, is_async=is_async, first_page=first_page)
    step.run(StepPlan(number=plan, loads=[given]))
    report = step.settle()
    (loaded,) = report.loaded
    for at, number in enumerate(numbers):
        if at not in loaded.bad:
            assert step.engine.page(first_page + at) == block_of(number), number
    return loaded, report.times


@pytest.mark.parametrize("way", WAYS)
def test_loaded_blocks_move_up_and_are_loaded_from_there(begin, way):
    step = begin(is_layerwise=way == "layerwise")
    numbers, is_async = range(4), way == "async"
    put(step, numbers)
    loaded, times = load(step, numbers, is_async=is_async)
    assert (loaded.bad, loaded.hbm_blocks, loaded.hbm_bytes) == ([], 0, 0)
    assert [(each.tier, each.blocks) for each in times] == [("dram", 4)]
    assert step.is_on_gpu(*numbers)
    # The store cannot serve them any more.
    step.store.clear()
    loaded, times = load(step, numbers, is_async=is_async, first_page=9, plan=2)
    assert (loaded.bad, loaded.hbm_blocks, loaded.hbm_bytes) == ([], 4, 4 * BLOCK_BYTES)
    assert [(each.tier, each.blocks) for each in times] == [("hbm", 4)]
    assert times[0].seconds > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_gpu", [(0, 1, 2), (0,), (1, 3)])
def test_one_load_takes_its_blocks_from_both_tiers(begin, way, on_gpu):
    step = begin(is_layerwise=way == "layerwise")
    numbers, is_async = range(5), way == "async"
    put(step, on_gpu)
    for number in on_gpu:
        load(step, [number], is_async=is_async)
    # Each block is in one tier only.
    step.store.clear()
    put(step, set(numbers) - set(on_gpu))
    loaded, times = load(step, numbers, is_async=is_async, first_page=9, plan=2)
    assert loaded.bad == []
    assert (loaded.hbm_blocks, loaded.hbm_bytes) == (len(on_gpu), len(on_gpu) * BLOCK_BYTES)
    assert loaded.bytes == 5 * BLOCK_BYTES
    own = {each.tier: each.blocks for each in times}
    assert own == {"hbm": len(on_gpu), "dram": 5 - len(on_gpu)}
    assert all(each.seconds > 0 for each in times)
    # Those from the store have moved up.
    assert step.is_on_gpu(*numbers)


@pytest.mark.parametrize("way", WAYS)
def test_missing_blocks_of_a_mixed_load_are_bad_and_do_not_move_up(begin, way):
    step = begin(is_layerwise=way == "layerwise")
    is_async = way == "async"
    put(step, range(2))
    load(step, range(2), is_async=is_async)
    put(step, [3])
    loaded, _ = load(step, range(5), is_async=is_async, first_page=9, plan=2)
    assert (loaded.bad, loaded.hbm_blocks) == ([2, 4], 2)
    assert step.is_on_gpu(0, 1)
    assert not step.is_on_gpu(2)
    assert not step.is_on_gpu(4)
    if is_async:
        assert step.is_on_gpu(3)


def wait_for_copies(step):
    """Return once the asynchronous loads are over; the engine does not know it yet."""
    for _, future in step.worker._async_loads.values():  # noqa: SLF001 # the state under test
        future.result(LIMIT_S)


def start_async_load(step, numbers, plan=1):
    step.run(StepPlan(number=plan, loads=[step.load_chain(numbers, is_async=True)]))


@pytest.mark.parametrize("is_async", [False, True])
def test_the_next_kernel_waits_for_the_copies(begin, fake, is_async):
    # The request is aborted as soon as it has its blocks, and another one computes in its pages.
    step = begin()
    put(step, range(3))
    if is_async:
        fake.finish(step.engine.stream)
        given = step.load_chain(range(3), is_async=True)
        step.worker.start_loads(StepPlan(number=1, loads=[given]))
        wait_for_copies(step)
        fake.hold("cuMemcpyBatchAsync_v2")
        assert step.worker.arrivals() == ({"chain"}, set())
    else:
        fake.hold("cuMemcpyBatchAsync_v2")
        step.run(StepPlan(number=1, loads=[step.load_chain(range(3))]))
    for page in (1, 2, 3):
        step.engine.compute(page, block_of(100 + page))
    fake.release()
    assert step.settle().loaded[0].bad == []
    assert [step.engine.page(page) for page in (1, 2, 3)] == [block_of(n) for n in (101, 102, 103)]
    step.store.clear()
    loaded, _ = load(step, range(3), first_page=9, plan=2)
    assert (loaded.bad, loaded.hbm_blocks) == ([], 3)


def test_the_next_load_of_the_pages_waits_for_the_copies(begin, fake):
    step = begin()
    put(step, range(6))
    start_async_load(step, range(3))
    wait_for_copies(step)
    fake.hold("cuMemcpyBatchAsync_v2")
    step.worker.arrivals()
    # Aborted: its pages are another request's, whose load is planned for the next step.
    start_async_load(step, range(3, 6), plan=2)
    fake.release()
    assert [each.bad for each in step.settle().loaded] == [[], []]
    assert [step.engine.page(page) for page in (1, 2, 3)] == [block_of(n) for n in (3, 4, 5)]
    step.store.clear()
    loaded, _ = load(step, range(6), first_page=9, plan=3)
    assert (loaded.bad, loaded.hbm_blocks) == ([], 6)


def test_a_page_of_two_loads_of_a_step_does_not_move_up(begin):
    step = begin()
    put(step, range(3))
    first = step.load(0, page=1)
    second, third = step.load(1, page=1), step.load(2, page=2)
    step.run(StepPlan(number=1, loads=[first, second, third]))
    assert [each.bad for each in step.settle().loaded] == [[], [], []]
    assert not step.is_on_gpu(0)
    assert not step.is_on_gpu(1)
    assert step.is_on_gpu(2)


def test_a_step_that_was_not_finished_promotes_nothing(begin):
    # Its pages may be others' in the next step.
    step = begin()
    put(step, range(2))
    step.worker.start_loads(StepPlan(number=1, loads=[step.load(0)]))
    step.engine.compute(step.target(0), block_of(100))
    step.run(StepPlan(number=2, loads=[step.load(1)]))
    step.settle()
    assert not step.is_on_gpu(0)
    assert step.is_on_gpu(1)


@pytest.mark.parametrize("is_async", [False, True])
def test_promotions_are_bounded_and_go_on_with_the_next_load(begin, monkeypatch, is_async):
    monkeypatch.setattr(promotions, "PROMOTED_BYTES", 2 * BLOCK_BYTES)
    step = begin()
    put(step, range(5))
    for plan, moved in enumerate([2, 4, 5], 1):
        loaded, _ = load(step, range(5), is_async=is_async, plan=plan)
        assert loaded.bad == []
        assert loaded.hbm_blocks == (plan - 1) * 2
        assert step.is_on_gpu(*range(moved))
        assert moved == 5 or not step.is_on_gpu(moved)


def test_while_copies_are_not_sealed_no_more_are_started(begin, monkeypatch):
    monkeypatch.setattr(promotions, "PROMOTED_BYTES", 2 * BLOCK_BYTES)
    step = begin()
    put(step, range(4))
    sealing = threading.Event()
    step.worker._promotions._sealer.submit(sealing.wait, LIMIT_S)  # noqa: SLF001 # to keep it busy
    for numbers in (range(2), range(2, 4)):
        start_async_load(step, numbers)
        wait_for_copies(step)
        step.worker.arrivals()
    sealing.set()
    step.settle()
    assert step.is_on_gpu(0, 1)
    assert not step.is_on_gpu(2)
    # Later there is room again.
    load(step, range(2, 4), is_async=True, plan=3)
    assert step.is_on_gpu(2, 3)


def test_a_load_that_fails_moves_nothing_up_and_gives_the_memory_back(begin, monkeypatch):
    step = begin()
    put(step, range(2))
    left = step.worker._promotions._left  # noqa: SLF001 # the state under test
    with monkeypatch.context() as patch:
        # After its copies were started, and the memory for the promotion was reserved.
        def fail(_order):
            raise cascadekv.GpuError("raised by the test")

        patch.setattr("cascadekv.connectors.vllm.memory.GpuOrder.wait", fail)
        start_async_load(step, range(2))
        assert step.settle().loaded[0].bad == [0, 1]
    assert not step.is_on_gpu(0)
    assert step.worker._promotions._left == left  # noqa: SLF001 # likewise


@pytest.fixture
def impatient(begin, monkeypatch):
    """Return a worker that waits a second for the seal of a promotion."""
    monkeypatch.setattr(promotions, "SEAL_S", 1.0)
    return begin()


@pytest.mark.parametrize("moment", ["prepared", "copied"])
@pytest.mark.parametrize("end", ["kill", "suspend"])
def test_a_node_that_ends_while_blocks_move_up_costs_only_its_hits(
    impatient, node, fake, moment, end
):
    step = impatient
    put(step, range(3))
    start_async_load(step, range(3))
    wait_for_copies(step)
    if moment == "prepared":
        getattr(node, end)()
    fake.hold("cuMemcpyBatchAsync_v2")
    step.worker.arrivals()
    if moment == "copied":
        getattr(node, end)()
    fake.release()
    assert step.settle().loaded[0].bad == []
    assert [step.engine.page(page) for page in (1, 2, 3)] == [block_of(n) for n in range(3)]
    loaded, _ = load(step, range(3), is_async=True, first_page=9, plan=2)
    assert (loaded.bad, loaded.hbm_blocks) == ([], 0)
    if end == "suspend":
        node.resume()
    else:
        node.start()
    # What the new run of the node has is right, too.
    for plan in range(3, 6):
        assert load(step, range(3), is_async=True, first_page=9, plan=plan)[0].bad == []


def test_promoted_blocks_follow_their_parents(begin):
    step = begin()
    put(step, range(5))
    load(step, [1])
    asked, prepare = [], step.hbm.prepare

    def watched(keys, parent, *others):
        asked.append(([bytes(key) for key in keys], parent))
        return prepare(keys, parent, *others)

    step.hbm.prepare = watched
    given = step.load_chain(range(5))
    before = bytes(keys_of(1000)[0])
    given.parents = {"all": before}
    step.run(StepPlan(number=2, loads=[given]))
    step.settle()
    own = [bytes(key) for key in keys_of(*range(5))]
    assert asked == [(own[:1], before), (own[2:], own[1])]
    assert step.is_on_gpu(*range(5))


def test_a_layer_waits_for_the_copies_from_both_tiers():
    held = []

    class Copies:
        def __init__(self, name):
            self._name = name

        def hold_back(self, stream):
            held.append((self._name, stream))

    order = GpuOrder(None, lambda: 7)
    order.add(Copies("store"), 0)
    order.add(Copies("store"), 1)
    order.add(Copies("gpu"), 1, is_within=True)
    order.hold_back_for(1)
    assert held == [("store", 7), ("gpu", 7)]


def test_a_read_that_fails_in_the_store_holds_nothing_on_the_gpu(begin):
    step = begin()
    put(step, range(2))
    load(step, range(2))
    kept = []
    view = step.hbm.view

    def watched(keys, timeout):
        kept.append(view(keys, timeout))
        return kept[-1]

    class Failing:
        def view(self, _keys, timeout):
            assert timeout > 0
            raise cascadekv.TierError("raised by the test")

    step.hbm.view = watched
    with pytest.raises(cascadekv.TierError):
        BlockReader(Failing(), step.hbm).view(keys_of(0, 1, 2), timeout=LIMIT_S)
    assert [len(views) for views in kept] == [0]
    # All of a call that are there need no store.
    with BlockReader(Failing(), step.hbm).view(keys_of(0, 1), timeout=LIMIT_S) as found:
        assert [each.is_on_gpu for each in found.found] == [True]
    assert [len(views) for views in kept] == [0, 0]

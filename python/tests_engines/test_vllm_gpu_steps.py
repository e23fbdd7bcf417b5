"""A step of vLLM on a GPU, over the fake driver: one submission for all requests, and its times."""

import logging

import cascadekv
import pytest
from cascadekv.connectors.vllm import gpu_loads, gpu_saves
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.metadata import Load, Part, Save, StepPlan
from cascadekv.connectors.vllm.worker import Worker
from fake_gpu import FakeGpu
from test_vllm_gpu import LAYERS, LIMIT_S, PAGE, SPACE, Engine, block_of, in_process, keys_of

REQUESTS = 16
BLOCK_BYTES = LAYERS * PAGE


class Step:
    """A worker over an engine with a page for each request, and its plans."""

    def __init__(self, fake, store, *, is_layerwise=False):
        self.fake = fake
        self.engine = Engine(fake, pages=2 * REQUESTS + 2)
        self.store = store
        part = HeldPart(Part("all", 0, BLOCK_BYTES), (), is_writer=True)
        self.worker = Worker(
            lambda: self.store,
            lambda _: SPACE,
            load_timeout=LIMIT_S,
            save_timeout=LIMIT_S,
            is_layerwise=is_layerwise,
        )
        self.worker.attach([(part, self.engine.memory)], [f"layer {at}" for at in range(LAYERS)])

    def register(self):
        """Register the pool, so that copies start without a wait."""
        with self.store.prepare(keys_of(999), BLOCK_BYTES, namespace=SPACE) as prepared:
            self.engine.memory.save(prepared, [0])
            assert prepared.seal()[0].ok
        while not self.engine.gpu.report()["is_complete"]:
            self.fake.finish(self.engine.stream)

    def save(self, *numbers):
        """Plan a request whose only block is in the page after its number."""
        return [self._save(number) for number in numbers]

    def _save(self, number):
        keys = {"all": bytes(keys_of(number)[0])}
        pages = {0: [number + 1]}
        return Save(f"request {number}", 0, keys, {"all": None}, pages, pages)

    def load(self, number, page=None, *, tier="dram", is_async=False):
        """Plan a load of a request's block to a page."""
        keys = {"all": bytes(keys_of(number)[0])}
        pages = {0: [self.target(number) if page is None else page]}
        return Load(f"request {number}", is_async, 0, keys, pages, tier)

    def target(self, number):
        """Return the page that a request's block is loaded to."""
        return REQUESTS + 1 + number

    def run(self, plan):
        """Make the calls of a step, without waiting for anything."""
        self.worker.begin_step(plan)
        self.worker.start_loads(plan)
        for layer in range(LAYERS):
            self.worker.wait_for_layer(f"layer {layer}")
        self.worker.save(plan)

    def settle(self):
        """Wait for all copies; returns the results of all reports since the last call."""
        while self.worker._async_loads:  # noqa: SLF001 # the state under test
            self.worker.arrivals()
        saves = self.worker._gpu_saves  # noqa: SLF001 # likewise
        saves._finisher.submit(lambda: None).result(LIMIT_S)  # noqa: SLF001 # likewise
        self.fake.finish(self.engine.stream)
        return self.worker.take_report()

    def submissions(self):
        """Return the number of batched copies so far."""
        return self.fake.count("cuMemcpyBatchAsync_v2")


class Watched:
    """A store; `before` is called with the name of each call to prepare or view."""

    def __init__(self, store, before):
        self._store, self._before = store, before

    def prepare(self, keys, *arguments, **named):
        """Prepare a put."""
        self._before("prepare", bytes(keys[0]))
        return self._store.prepare(keys, *arguments, **named)

    def view(self, keys, **named):
        """Read blocks."""
        self._before("view", bytes(keys[0]))
        return self._store.view(keys, **named)


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def store():
    with cascadekv.Store(dram="16MiB", huge_pages=False) as opened:
        yield opened


@pytest.fixture
def step(fake, store):
    step = Step(fake, store)
    step.register()
    yield step
    step.worker.close()


def fill(step, numbers=range(REQUESTS)):
    """Store the blocks of requests."""
    for number in numbers:
        put = step.store.put(keys_of(number), [block_of(number)], namespace=SPACE)
        assert put[0].ok


def assert_stored(step, numbers):
    with step.store.view(keys_of(*numbers)) as views:
        for number, view in zip(numbers, views, strict=True):
            assert bytes(view) == block_of(number), number


def test_the_saves_of_a_step_are_one_submission(step):
    numbers = range(REQUESTS)
    for number in numbers:
        step.engine.compute(number + 1, block_of(number))
    before, waits = step.submissions(), step.fake.count("cuStreamWaitEvent")
    records = step.fake.count("cuEventRecord")
    step.fake.hold("cuMemcpyBatchAsync_v2")
    step.run(StepPlan(number=1, saves=step.save(*numbers)))
    assert step.submissions() == before + 1
    # The copies wait for the kernels and the next kernels for the copies: once each.
    assert step.fake.count("cuStreamWaitEvent") == waits + 2
    assert step.fake.count("cuEventRecord") == records + 2
    # All pages go to other requests at once.
    for number in numbers:
        step.engine.compute(number + 1, block_of(100 + number))
    step.fake.release()
    saved = step.settle().saved
    assert [each.request for each in saved] == [f"request {number}" for number in numbers]
    assert all(each.stored == [True] and each.bytes == BLOCK_BYTES for each in saved)
    assert_stored(step, numbers)


def test_the_loads_of_a_step_are_one_submission(step):
    numbers = range(REQUESTS)
    fill(step)
    before, waits = step.submissions(), step.fake.count("cuStreamWaitEvent")
    step.fake.hold("cuMemcpyBatchAsync_v2")
    step.run(StepPlan(number=1, loads=[step.load(number) for number in numbers]))
    assert step.submissions() == before + 1
    assert step.fake.count("cuStreamWaitEvent") == waits + 2
    loaded = step.worker.take_report().loaded
    assert [each.bad for each in loaded] == [[]] * REQUESTS
    # The blocks are in flight: they stay in the pool.
    step.store.clear()
    step.fake.release()
    for number in numbers:
        assert step.engine.page(step.target(number)) == block_of(number)
    times = step.settle().times
    assert [(each.tier, each.blocks) for each in times] == [("dram", 1)] * REQUESTS
    assert all(each.seconds > 0 for each in times)


def test_a_submission_is_bounded(step, monkeypatch):
    for module in (gpu_saves, gpu_loads):
        monkeypatch.setattr(module, "SUBMISSION_BYTES", 4 * BLOCK_BYTES)
    numbers = range(REQUESTS)
    for number in numbers:
        step.engine.compute(number + 1, block_of(number))
    before = step.submissions()
    step.run(StepPlan(number=1, saves=step.save(*numbers)))
    assert step.submissions() == before + REQUESTS // 4
    assert all(each.stored == [True] for each in step.settle().saved)
    before = step.submissions()
    step.run(StepPlan(number=2, loads=[step.load(number) for number in numbers]))
    assert step.submissions() == before + REQUESTS // 4
    assert not any(each.bad for each in step.settle().loaded)
    assert step.engine.page(step.target(9)) == block_of(9)


def test_a_request_that_cannot_be_prepared_costs_the_others_nothing(step):
    def refuse(call, key):
        if call == "prepare" and key == bytes(keys_of(2)[0]):
            raise cascadekv.TierError("refused by the test")

    for number in range(4):
        step.engine.compute(number + 1, block_of(number))
    own, before = step.store, step.submissions()
    step.store = Watched(own, refuse)
    step.run(StepPlan(number=1, saves=step.save(*range(4))))
    assert step.submissions() == before + 1
    step.store = own
    assert [each.stored for each in step.settle().saved] == [[True], [True], [False], [True]]
    assert_stored(step, [0, 1, 3])
    assert not own.contains(keys_of(2))[0]


def test_a_refused_submission_fails_its_saves_and_says_so(step, monkeypatch, caplog):
    def refuse(_puts):
        raise cascadekv.GpuError("refused by the test")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "vllm.cascade"):
        patch.setattr(step.engine.memory, "start_saves", refuse)
        step.run(StepPlan(number=1, saves=step.save(0, 1, 2)))
    assert "3 saves of one submission: refused by the test" in caplog.text
    assert [each.stored for each in step.settle().saved] == [[False]] * 3
    step.engine.compute(1, block_of(0))
    step.run(StepPlan(number=2, saves=step.save(0)))
    assert step.settle().saved[0].stored == [True]


def test_a_missing_block_costs_its_own_request_only(step):
    fill(step, [0, 2])
    step.run(StepPlan(number=1, loads=[step.load(number) for number in range(3)]))
    assert [each.bad for each in step.settle().loaded] == [[], [0], []]
    assert step.worker.take_failed_pages() == {step.target(1)}
    assert step.engine.page(step.target(2)) == block_of(2)


def test_copies_do_not_wait_for_the_lookup_of_a_slow_tier(step):
    fill(step, range(3))
    seen = []
    own, before = step.store, step.submissions()
    step.store = Watched(own, lambda _call, _key: seen.append(step.submissions() - before))
    loads = [step.load(0), step.load(1), step.load(2, tier="files")]
    step.run(StepPlan(number=1, loads=loads))
    step.store = own
    assert seen == [0, 0, 1]
    assert not any(each.bad for each in step.settle().loaded)


def test_two_loads_to_one_page_are_two_submissions(step):
    fill(step, [0])
    before = step.submissions()
    step.run(StepPlan(number=1, loads=[step.load(0), step.load(0)]))
    assert step.submissions() == before + 2
    assert not any(each.bad for each in step.settle().loaded)
    assert step.engine.page(step.target(0)) == block_of(0)


def test_a_step_is_timed_by_the_gpu_and_reported_when_it_is_over(step):
    step.fake.hold("cuMemcpyHtoDAsync_v2")
    plan = StepPlan(number=1, tokens=32, context_tokens=5, requests=1)
    step.worker.begin_step(plan)
    step.engine.compute(1, block_of(1))
    step.worker.start_loads(plan)
    step.worker.save(plan)
    assert step.worker.take_report() is None
    step.fake.release()
    tokens, context_tokens, seconds = step.settle().prefill
    assert (tokens, context_tokens) == (32, 5)
    assert seconds > 0


# In a process of its own: the driver reads its delays once.
TIMES = """
    import cascadekv
    from fake_gpu import FakeGpu
    from test_vllm_gpu_steps import Step, StepPlan, block_of, fill
    fake = FakeGpu()
    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        for way in ("sync", "async", "layerwise"):
            step = Step(fake, store, is_layerwise=way == "layerwise")
            step.register()
            fill(step, range(2))
            loads = [step.load(number, is_async=way == "async") for number in range(2)]
            step.run(StepPlan(number=1, loads=loads))
            report = step.settle()
            assert not any(each.bad for each in report.loaded)
            print(way, *(each.seconds for each in report.times))
            step.worker.close()
        step = Step(fake, store)
        # Asynchronous loads of other requests are started after the kernels.
        loads = [step.load(0, is_async=True)]
        plan = StepPlan(number=2, tokens=32, requests=1, loads=loads)
        step.worker.begin_step(plan)
        step.engine.compute(1, block_of(1))
        step.worker.start_loads(plan)
        step.worker.save(plan)
        report = step.settle()
        print("prefill", *([report.prefill[2]] if report.prefill else []))
"""
DELAY_S = 0.02


def times_of(printed):
    """Return the printed seconds by their name."""
    lines = [line.split() for line in printed.splitlines()]
    return {name: [float(each) for each in seconds] for name, *seconds in lines}


@pytest.mark.timeout(300)
def test_times_are_those_of_the_copies_and_the_kernels_not_of_their_launches():
    delay = int(DELAY_S * 1e6)
    slow = f"cuMemcpyBatchAsync_v2={delay},cuMemcpyHtoDAsync_v2={delay}"
    times = times_of(in_process(TIMES, FAKE_CUDA_DELAY_US=slow))
    for way in ("sync", "async", "layerwise"):
        assert len(times[way]) == 2
        # A load copies a page of each layer.
        assert min(times[way]) >= LAYERS * DELAY_S, way
    assert times["prefill"][0] >= LAYERS * DELAY_S


@pytest.mark.timeout(300)
def test_without_the_drivers_times_nothing_is_reported():
    times = times_of(in_process(TIMES, FAKE_CUDA_ABSENT="cuEventElapsedTime"))
    assert times == {"sync": [], "async": [], "layerwise": [], "prefill": []}

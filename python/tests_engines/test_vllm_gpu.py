"""The connector's copies on GPUs, over the fake driver: their order, and what a lost GPU costs.

`test_vllm_steps.py` runs vLLM's scheduler over the same memory.
"""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cascadekv
import numpy as np
import pytest
from cascadekv import BlockKeys, Gpu
from cascadekv.connectors.vllm.connector import CascadeConnector
from cascadekv.connectors.vllm.layout import Region
from cascadekv.connectors.vllm.memory import GpuPages
from fake_gpu import LIBRARY_VARIABLE, FakeGpu, library
from vllm_caches import SPACE

LAYERS, PAGES, PAGE = 3, 8, 4096
LIMIT_S = 60


def block_of(number):
    return np.random.default_rng(number).integers(0, 256, LAYERS * PAGE, np.uint8).tobytes()


def keys_of(*numbers):
    return BlockKeys([SPACE.key_of_id(f"block {number}") for number in numbers])


class Engine:
    """An engine's pages on the fake device, layer by layer, and the connector's view of them."""

    def __init__(self, fake, pages=PAGES):
        self.fake, self.stream, self.pages = fake, fake.stream(), pages
        self.array = fake.array(LAYERS * pages * PAGE)
        fake.write(self.array, 0, bytes(self.array.size), self.stream)
        regions = [Region(layer * pages * PAGE, PAGE, PAGE) for layer in range(LAYERS)]
        self.gpu = Gpu(0)
        self.memory = GpuPages(self.gpu, self.array, regions, pages, lambda: self.stream)

    def compute(self, page, block):
        """Write a page in the order of the engine's stream; returns before it is written."""
        for layer in range(LAYERS):
            place = (layer * self.pages + page) * PAGE
            self.fake.write(self.array, place, block[layer * PAGE :][:PAGE], self.stream)

    def page(self, page):
        """Return a page as the engine's next kernel reads it."""
        places = [(layer * self.pages + page) * PAGE for layer in range(LAYERS)]
        return b"".join(self.fake.read(self.array, at, PAGE, self.stream) for at in places)


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def store():
    with cascadekv.Store(dram="16MiB", huge_pages=False) as opened:
        yield opened


@pytest.fixture
def engine(fake, store, eventually):
    """Return an engine; the store's pool is registered, so that copies start without a wait."""
    engine = Engine(fake)
    with store.prepare(keys_of(1000), LAYERS * PAGE, namespace=SPACE) as prepared:
        engine.memory.save(prepared, [0])
        assert prepared.seal()[0].ok
    eventually(lambda: engine.gpu.report()["is_complete"])
    return engine


def test_the_next_kernel_waits_for_a_save_and_the_save_for_the_last_one(store, engine, fake):
    engine.compute(3, block_of(1))
    fake.finish(engine.stream)
    for name in ("cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2", "cuMemcpyDtoHAsync_v2"):
        fake.hold(name)
    engine.compute(3, block_of(2))
    with store.prepare(keys_of(1), LAYERS * PAGE, namespace=SPACE) as prepared:
        engine.memory.save(prepared, [3])
        # The page goes to another request, whose kernel is launched at once.
        engine.compute(3, block_of(3))
        fake.release()
        assert prepared.seal(timeout=LIMIT_S)[0].ok
    with store.view(keys_of(1)) as views:
        assert bytes(views[0]) == block_of(2)
    assert engine.page(3) == block_of(3)


@pytest.mark.parametrize("is_layerwise", [False, True])
def test_the_next_kernel_waits_for_a_load_and_the_load_for_the_last_one(
    store, engine, fake, is_layerwise
):
    store.put(keys_of(2), [block_of(9)], namespace=SPACE)
    for name in ("cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2"):
        fake.hold(name)
    # The last kernel of the page's request before is still to come.
    engine.compute(4, block_of(1))
    order = engine.memory.order()
    with store.view(keys_of(2)) as views:
        if is_layerwise:
            for layer in range(LAYERS):
                assert engine.memory.load_layer(views, [4], layer, order) == [True]
                order.hold_back_for(layer)
        else:
            assert engine.memory.load(views, [4], order) == [True]
            order.hold_back_engine()
    assert order.has_copies
    fake.release()
    assert engine.page(4) == block_of(9)
    order.wait()
    assert not order.has_copies


def test_a_load_without_an_order_is_refused(store, engine):
    store.put(keys_of(2), [block_of(9)], namespace=SPACE)
    with store.view(keys_of(2)) as views, pytest.raises(TypeError, match="needs the order"):
        engine.memory.load(views, [4])


def test_the_registration_is_logged_once(engine, caplog):
    with caplog.at_level(logging.INFO, "vllm.cascade"):
        engine.memory.log_registration()
        engine.memory.log_registration()
    assert caplog.text.count("the driver registered 0.0 GiB of the pool in") == 1


def test_layerwise_loads_need_piecewise_cuda_graphs():
    ask = CascadeConnector.requires_piecewise_for_cudagraph
    assert ask({"cascade.layerwise": True})
    assert not ask({})


def in_process(code, **variables):
    """Run code in a process of its own, because the driver reads its variables once."""
    tests = Path(__file__).parent
    paths = [str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), LIBRARY_VARIABLE: str(library())}
    run = subprocess.run(  # noqa: S603 # our own code
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_refused_registration_is_logged_and_copies_go_on():
    code = """
        import logging
        import sys
        import cascadekv
        from fake_gpu import FakeGpu
        from test_vllm_gpu import SPACE, LAYERS, PAGE, Engine, block_of, keys_of
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
            engine = Engine(FakeGpu())
            engine.compute(1, block_of(1))
            for number in (1, 2):
                with store.prepare(keys_of(number), LAYERS * PAGE, namespace=SPACE) as prepared:
                    engine.memory.save(prepared, [1])
                    assert prepared.seal()[0].ok
            while not engine.gpu.report()["is_complete"]:
                engine.fake.finish(engine.stream)
            engine.memory.log_registration()
            order = engine.memory.order()
            with store.view(keys_of(1)) as views:
                assert engine.memory.load(views, [5], order) == [True]
            order.wait()
            assert engine.page(5) == block_of(1)
    """
    printed = in_process(code, FAKE_CUDA_FAIL="cuMemHostRegister_v2=801")
    assert "registered only 0 of 16777216 bytes of the pool" in printed


def test_a_lost_gpu_never_fails_the_worker():
    # The context dies at each copy in turn, in loads and in saves, also in those of the engine. A
    # fork for each, because the imports take long: no driver runs before it.
    code = """
        import os
        import cascadekv
        from cascadekv.connectors.vllm.layout import HeldPart
        from cascadekv.connectors.vllm.metadata import Load, Part, Save, StepPlan
        from cascadekv.connectors.vllm.worker import Worker
        from fake_gpu import DriverError, FakeGpu
        from test_vllm_gpu import LAYERS, PAGE, SPACE, Engine, block_of, keys_of

        def step(engine, worker, number):
            try:
                engine.compute(number, block_of(number))
            except DriverError:
                pass
            keys = {"all": bytes(keys_of(number)[0])}
            name = f"request {number}"
            save = Save(name, 0, keys, {"all": None}, {0: [number]}, {0: [number]})
            worker.start_loads(StepPlan(number=2 * number))
            worker.save(StepPlan(number=2 * number, saves=[save]))
            worker._gpu_saves._finisher.submit(lambda: None).result()
            load = Load(name, number == 1, 0, keys, {0: [number + 3]}, "dram")
            worker.start_loads(StepPlan(number=2 * number + 1, loads=[load]))
            worker.save(StepPlan(number=2 * number + 1))
            while worker._async_loads:
                worker.arrivals()
            report = worker.take_report()
            return report.saved[0].stored + [not bad for bad in report.loaded[0].bad]

        def run():
            with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
                engine = Engine(FakeGpu())
                part = HeldPart(Part("all", 0, LAYERS * PAGE), (), is_writer=True)
                worker = Worker(lambda: store, lambda _: SPACE, load_timeout=5, save_timeout=5)
                worker.attach([(part, engine.memory)], [])
                results = [step(engine, worker, number) for number in range(3)]
                worker.close()
                for number in range(3):
                    with store.view(keys_of(number)) as views:
                        view = views[0]
                        assert view is None or bytes(view) == block_of(number), number
                return all(map(all, results))

        for copy in range(2, 40):
            os.environ["FAKE_CUDA_DIE_AT_COPY"] = str(copy)
            child = os.fork()
            if child == 0:
                try:
                    os._exit(10 if run() else 11)
                except BaseException as error:
                    print(f"copy {copy}: {error!r}", flush=True)
                    os._exit(1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (10, 11), (copy, status)
            print(copy, "complete" if status == 10 else "lost", flush=True)
            if status == 10:
                break
    """
    outcomes = [line.split()[1] for line in in_process(code).splitlines()]
    assert outcomes.count("lost") >= 9, outcomes
    assert outcomes[-1] == "complete", outcomes

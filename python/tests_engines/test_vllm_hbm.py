"""The tier in the memory of a GPU above vLLM's store, over the fake driver and a real node."""

import cascadekv
import pytest
from cascadekv import Gpu
from cascadekv.connectors.vllm import hbm
from cascadekv.connectors.vllm.hbm import HbmTier, open_hbm
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.memory import HostMemory
from cascadekv.connectors.vllm.metadata import Load, Part, StepPlan
from cascadekv.connectors.vllm.settings import read_connector_settings
from cascadekv.connectors.vllm.worker import Worker
from fake_gpu import FakeGpu, library
from test_vllm_gpu import LAYERS, LIMIT_S, SPACE, Engine, block_of, keys_of
from test_vllm_gpu_steps import BLOCK_BYTES, REQUESTS, Step

FIRST_GPU = "GPU-fafafafa-fafa-fafa-fafa-fafafafafafa"


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def node(serve):
    flags = ["--gpu", FIRST_GPU, "--hbm", "16MiB"]
    return serve(*flags, cuda_library=str(library()))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Give the calls of the node more time: the machine of the tests may be busy."""
    monkeypatch.setattr(hbm, "CALL_S", 3.0)


class TieredStep(Step):
    """A worker over both tiers."""

    def __init__(self, fake, store, socket, *, is_layerwise=False, **options):
        super().__init__(fake, store)
        self.register()
        self.worker.close()
        part = HeldPart(Part("all", 0, BLOCK_BYTES), (), is_writer=True)
        self.hbm = HbmTier(str(socket), None, self.engine.gpu, name="test", **options)
        self.worker = Worker(
            lambda: self.store,
            lambda _: SPACE,
            load_timeout=LIMIT_S,
            save_timeout=LIMIT_S,
            is_layerwise=is_layerwise,
            hbm=self.hbm,
        )
        self.worker.attach([(part, self.engine.memory)], [f"layer {at}" for at in range(LAYERS)])

    def is_on_gpu(self, *numbers):
        """Return whether all of these blocks are in the memory of the GPU."""
        views = self.hbm.view(keys_of(*numbers), LIMIT_S)
        if views is None:
            return False
        with views:
            assert all(view is None or view.tier == "hbm" for view in views)
            return views.hits == len(numbers)

    def load_chain(self, numbers, *, is_async=False, first_page=1):
        """Plan a load of several blocks of one request, to pages in a row."""
        keys = b"".join(bytes(key) for key in keys_of(*numbers))
        pages = {0: list(range(first_page, first_page + len(numbers)))}
        return Load("chain", is_async, 0, {"all": keys}, pages, "dram")

    def settle(self):
        """Wait for all copies and puts; returns the results since the last call."""
        while self.worker._async_loads:  # noqa: SLF001 # the state under test
            self.worker.arrivals()
        promotions = self.worker._promotions  # noqa: SLF001 # likewise
        promotions._sealer.submit(lambda: None).result(LIMIT_S)  # noqa: SLF001 # likewise
        return super().settle()


@pytest.fixture(params=[False, True], ids=["together", "layerwise"])
def step(request, fake, node):
    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        step = TieredStep(fake, store, node.socket, is_layerwise=request.param)
        yield step
        step.worker.close()


def save(step, numbers, plan=1):
    for number in numbers:
        step.engine.compute(number + 1, block_of(number))
    step.run(StepPlan(number=plan, saves=step.save(*numbers)))
    report = step.settle()
    assert [each.stored for each in report.saved] == [[True]] * len(numbers)


def load(step, numbers, plan=2):
    """Load blocks, and return whether each arrived with its bytes."""
    step.run(StepPlan(number=plan, loads=[step.load(number) for number in numbers]))
    report = step.settle()
    arrived = {each.request: not each.bad for each in report.loaded}
    for number in numbers:
        if arrived[f"request {number}"]:
            assert step.engine.page(step.target(number)) == block_of(number)
    return [arrived[f"request {number}"] for number in numbers]


def test_saved_blocks_are_in_both_tiers_and_are_loaded_from_the_gpu(step):
    numbers = range(REQUESTS)
    save(step, numbers)
    assert step.is_on_gpu(*numbers)
    with step.store.view(keys_of(*numbers)) as views:
        assert views.hits == REQUESTS
    # The store cannot have served them.
    step.store.clear()
    assert load(step, numbers) == [True] * REQUESTS


def test_loads_of_both_tiers_in_one_step(step):
    save(step, range(4))
    for number in range(4, 8):
        assert step.store.put(keys_of(number), [block_of(number)], namespace=SPACE)[0].ok
    assert not step.is_on_gpu(4)
    assert load(step, range(8)) == [True] * 8


def test_what_the_store_refused_is_not_kept_on_the_gpu(step):
    step.engine.compute(1, block_of(0))
    plan = step.save(0)
    step.fake.hold("cuMemcpyBatchAsync_v2")
    step.run(StepPlan(number=1, saves=plan))
    # The put in the store is declined when it is sealed: the key is another block's by now.
    held, step.store = step.store, None
    step.fake.release()
    step.settle()
    step.store = held
    assert step.is_on_gpu(0)
    step.store.close()
    step.engine.compute(2, block_of(1))
    step.run(StepPlan(number=2, saves=step.save(1)))
    assert [each.stored for each in step.settle().saved] == [[False]]
    assert not step.is_on_gpu(1)


@pytest.mark.parametrize("end", ["kill", "stop", "suspend"])
def test_a_node_that_ends_costs_only_its_hits(step, node, end):
    save(step, range(4))
    assert step.is_on_gpu(*range(4))
    getattr(node, end)()
    assert load(step, range(4)) == [True] * 4
    save(step, range(4, 8), plan=3)
    assert load(step, range(8), plan=4) == [True] * 8
    assert not step.is_on_gpu(4)
    if end == "suspend":
        node.resume()


def test_a_node_in_dram_is_not_used_and_that_is_said_once(fake, serve, caplog):
    node = serve("--dram", "16MiB")
    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        step = TieredStep(fake, store, node.socket)
        # A node in DRAM is none in the memory of a GPU, and is not used as one.
        save(step, range(2))
        assert load(step, range(2)) == [True] * 2
        assert caplog.text.count("cascade.hbm is not used") == 1
        assert not step.is_on_gpu(0)
        step.worker.close()


def is_connected(tier, eventually):
    """Wait until a tier has a connection."""
    eventually(lambda: tier.is_available)
    return True


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_node_that_starts_after_the_engine_is_used(fake, node, eventually, caplog, is_expected):
    node.stop()
    with (
        cascadekv.Store(dram="16MiB", huge_pages=False) as store,
        caplog.at_level("INFO", "vllm.cascade"),
    ):
        step = TieredStep(fake, store, node.socket, is_expected=is_expected, retry_s=0.05)
        save(step, range(2))
        assert load(step, range(2)) == [True] * 2
        # Only a node that the settings name is missed.
        assert ("is not used until its node can be" in caplog.text) == is_expected
        assert not step.hbm.is_available
        node.start()
        assert is_connected(step.hbm, eventually)
        # Another thread of the worker may be the one that writes it.
        eventually(lambda: caplog.text.count("keeps blocks in the memory of a GPU") == 1)
        # What the engine loads moves up, and what it saves is in both.
        assert load(step, range(2), plan=3) == [True] * 2
        save(step, range(2, 4), plan=4)
        assert step.is_on_gpu(*range(4))
        step.worker.close()


def test_a_node_that_refused_the_engine_is_tried_again(fake, serve, eventually, caplog):
    assert fake.count("cuInit")
    # A node in DRAM is stopped, and one in the memory of a GPU is started at its socket.
    other = serve("--dram", "16MiB")
    tier = HbmTier(str(other.socket), None, Gpu(0), name="test", is_expected=False, retry_s=0.05)
    assert "keeps its blocks in DRAM" in caplog.text
    assert not tier.is_available
    other.stop()
    node = serve("--gpu", FIRST_GPU, "--hbm", "16MiB", cuda_library=str(library()))
    other.socket.symlink_to(node.socket)
    assert is_connected(tier, eventually)
    tier.close()
    assert not tier.is_available


def opened(settings, memories):
    return open_hbm(read_connector_settings(settings), memories)


def test_the_node_beside_the_store_is_found_by_its_socket(fake, node, eventually, tmp_path, caplog):
    engine = Engine(fake)
    store = {"cascade.node": f"unix:{tmp_path}/store.sock"}
    (tmp_path / "store.sock.hbm").symlink_to(node.socket)
    tier = opened(store, [engine.memory])
    assert is_connected(tier, eventually)
    tier.close()
    named = opened({**store, "cascade.hbm": str(node.socket)}, [engine.memory])
    assert is_connected(named, eventually)
    named.close()
    assert opened({**store, "cascade.hbm": False}, [engine.memory]) is None
    # Without a node, in a host's memory, and without KV there is none to ask.
    assert opened({}, [engine.memory]) is None
    host = [object.__new__(HostMemory)]
    assert opened(store, host) is None
    assert opened({**store, "cascade.lite": True}, [engine.memory]) is None
    assert not caplog.text
    assert opened({**store, "cascade.hbm": str(node.socket)}, host) is None
    assert "cascade.hbm is ignored" in caplog.text


def test_without_a_node_beside_the_store_nothing_is_said(fake, tmp_path, caplog):
    tier = opened({"cascade.node": f"unix:{tmp_path}/store.sock"}, [Engine(fake).memory])
    assert not tier.is_available
    assert tier.view(keys_of(1), LIMIT_S) is None
    assert not caplog.text
    tier.close()

"""vLLM's sleep mode on a GPU, over the fake driver: its memory is unmapped and mapped again.

vLLM waits for the whole device, unmaps the KV memory, and later maps other memory at the same
addresses. It tells a connector's scheduler only, by `reset_cache`, and no worker.
"""

import ctypes
import threading

import cascadekv
import pytest
from cascadekv.connectors.vllm.metadata import StepPlan
from fake_gpu import Array, FakeGpu
from gpu_engine import GpuEngine
from scheduled_engine import BLOCK, LIMIT_S
from test_vllm_gpu import block_of, keys_of
from test_vllm_gpu_steps import Step, Watched, fill
from test_vllm_steps import DRAM, model, prompt, start  # noqa: F401 # fixtures

GRANULARITY = 2 << 20


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("kind", ctypes.c_uint), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("handle_types", ctypes.c_uint),
        ("location", Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", ctypes.c_uint))


class SleepingMemory:
    """Memory of the device as vLLM's `CuMemAllocator` has it."""

    def __init__(self, fake, size):
        """Reserve addresses and map memory."""
        self.fake = fake
        self.size = -(-size // GRANULARITY) * GRANULARITY
        self.address, self.handle = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(self.address), self._bytes, 0, 0, 0)
        self.wake()

    @property
    def _bytes(self):
        return ctypes.c_size_t(self.size)

    def _call(self, name, *arguments):
        self.fake.in_context(name, *arguments)

    def wake(self):
        """Map other memory at the same addresses: `create_and_map`."""
        device = Location(1, 0)
        properties, access = Properties(1, 1, device), Access(device, 3)
        create = ctypes.byref(self.handle), self._bytes, ctypes.byref(properties)
        self._call("cuMemCreate", *create, ctypes.c_uint64(0))
        zero = ctypes.c_size_t(0)
        self._call("cuMemMap", self.address, self._bytes, zero, self.handle, ctypes.c_uint64(0))
        one = ctypes.c_size_t(1)
        self._call("cuMemSetAccess", self.address, self._bytes, ctypes.byref(access), one)

    def sleep(self):
        """Wait for the device and unmap: `Worker.sleep` and `unmap_and_release`."""
        self._call("cuCtxSynchronize")
        self._call("cuMemUnmap", self.address, self._bytes)
        self._call("cuMemRelease", self.handle)

    def assert_unharmed(self):
        """Check that no copy used memory that was not mapped."""
        assert (self.fake.count("misused"), self.fake.count("deaths")) == (0, 0)


@pytest.fixture
def memory(monkeypatch):
    """Make memory of the fake device mapped memory; returns the list of all of it."""
    made = []

    def array(fake, size):
        made.append(SleepingMemory(fake, size))
        return Array(made[-1].address.value, size)

    monkeypatch.setattr(FakeGpu, "array", array)
    return made


@pytest.fixture
def step(memory):  # noqa: ARG001 # the step's memory
    with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
        step = Step(FakeGpu(), store)
        step.register()
        yield step
        step.worker.close()


def test_sleep_waits_for_saves_in_flight(step, memory):
    for number in range(4):
        step.engine.compute(number + 1, block_of(number))
    step.fake.hold("cuMemcpyBatchAsync_v2")
    step.run(StepPlan(number=1, saves=step.save(*range(4))))
    sleeper = threading.Thread(target=memory[0].sleep)
    sleeper.start()
    step.fake.release()
    sleeper.join(LIMIT_S)
    saved = [each.stored for each in step.settle().saved]
    assert saved == [[True]] * 4
    with step.store.view(keys_of(*range(4))) as views:
        assert [bytes(view) for view in views] == [block_of(number) for number in range(4)]
    memory[0].assert_unharmed()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_that_starts_in_a_sleeping_engine_fails_and_costs_nothing_else(
    step, memory, is_async
):
    # vLLM pauses its scheduler before it sleeps; `collective_rpc("sleep")` does not.
    fill(step, range(2))
    own = step.store

    def sleep(_call, _key):
        step.store = own
        memory[0].sleep()

    step.store = Watched(own, sleep)
    step.run(StepPlan(number=1, loads=[step.load(0, is_async=is_async)]))
    while step.worker._async_loads:  # noqa: SLF001 # the state under test
        step.worker.arrivals()
    assert [each.bad for each in step.worker.take_report().loaded] == [[0]]
    assert step.worker.take_failed_pages() == {step.target(0)}
    memory[0].wake()
    step.run(StepPlan(number=2, loads=[step.load(1, is_async=is_async)]))
    assert [each.bad for each in step.settle().loaded] == [[]]
    assert step.engine.page(step.target(1)) == block_of(1)
    memory[0].assert_unharmed()


def pause(engine):
    """Reset the caches as vLLM's core does before its workers sleep."""
    return engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def loading(start, **options):  # noqa: F811 # a fixture
    """Start an engine whose second request loads asynchronously, with its copies held."""
    store = {**DRAM, "cascade.load": "async"}
    engine = start(store, memory=None, has_prefix_cache=True, **options)
    first = prompt(5 * BLOCK + 3, "slept")
    engine.ask(first)
    engine.settle()
    engine.reset_prefix_cache()
    engine.hold_saves()
    name = engine.add(first)
    for _ in range(3):
        engine.step()
    assert engine.has_loads_in_flight()
    return engine, first, name


def test_an_engine_sleeps_after_its_loads_and_goes_on_when_it_wakes(start, memory):  # noqa: F811
    engine, first, name = loading(start)
    assert isinstance(engine, GpuEngine)
    engine.abort(name)
    for _ in range(3):
        engine.step()
    # vLLM's pause waits until no request is left, also of those that are aborted.
    assert engine.scheduler.has_requests()
    engine.release_saves()
    engine.run()
    assert pause(engine)
    memory[0].sleep()
    memory[0].wake()
    engine.take_figures()
    engine.ask(first)
    # vLLM's reset of the connector makes all older blocks unused, as after an update of weights.
    assert "loaded_blocks" not in engine.take_figures()["labels"]
    assert all(engine.stored(first))
    engine.reset_prefix_cache()
    engine.ask(first)
    assert engine.take_figures()["labels"]["loaded_blocks"] == {"dram": 5}
    memory[0].assert_unharmed()


def test_an_engine_does_not_sleep_while_a_request_waits_for_its_load(start, memory):  # noqa: F811
    # With the mode "keep", requests are not aborted.
    engine, _, _ = loading(start)
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        pause(engine)
    engine.release_saves()
    engine.run()
    engine.check()
    memory[0].assert_unharmed()

"""What `Gpu.report` counts, over the fake driver: copies, failures, and the loss of the GPU."""

import importlib.util
from pathlib import Path

import cascadekv
import pytest
from cascadekv import Gpu
from fake_gpu import FakeGpu

_FILE = Path(__file__).with_name("test_device_pages.py")
_SPEC = importlib.util.spec_from_file_location("cascade_device_pages", _FILE)
_PAGES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_PAGES)

Engine, LAYERS = _PAGES.Engine, _PAGES.LAYERS
COUNTS = [
    "loaded_copies",
    "loaded_bytes",
    "saved_copies",
    "saved_bytes",
    "within_copies",
    "within_bytes",
    "unregistered_bytes",
    "submissions",
    "failed_submissions",
    "ended_submissions",
]
BLOCK = LAYERS * _PAGES.PAGE


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


def counts():
    report = Gpu(0).report()
    return {name: report[name] for name in COUNTS}


def test_copies_are_counted_once_in_their_direction(fake, store, eventually):
    engine = Engine(fake)
    # The first save starts the registration, and may come before it.
    assert _PAGES.save(store, engine, [1000], [0])[0].ok
    eventually(lambda: engine.gpu.report()["is_complete"])
    before = counts()
    seconds = engine.gpu.report()["in_flight_host_seconds"]
    for number, page in enumerate([7, 3, 11]):
        engine.compute(page, _PAGES.block_of(number))
    assert all(result.ok for result in _PAGES.save(store, engine, range(3), [7, 3, 11]))
    with store.view(_PAGES.keys_of(range(2))) as views:
        load = views.start_scatter(engine.memory, [5, 9], after=engine.mark())
    load.wait()
    after = counts()
    assert {name: after[name] - before[name] for name in COUNTS} == {
        "loaded_copies": 2 * LAYERS,
        "loaded_bytes": 2 * BLOCK,
        "saved_copies": 3 * LAYERS,
        "saved_bytes": 3 * BLOCK,
        "within_copies": 0,
        "within_bytes": 0,
        "unregistered_bytes": 0,
        "submissions": 2,
        "failed_submissions": 0,
        "ended_submissions": 2,
    }
    report = engine.gpu.report()
    assert report["in_flight_host_seconds"] > seconds
    assert report["uuid"].startswith("GPU-")
    assert report["is_fake"]
    assert (report["loss"], report["refused_bytes_total"]) == (None, 0)


def test_counts_outlive_the_pool(fake, store, eventually):
    engine = Engine(fake)
    assert _PAGES.save(store, engine, [2000], [0])[0].ok
    eventually(lambda: engine.gpu.report()["is_complete"])
    before = engine.gpu.report()
    with cascadekv.Store(dram="4MiB", huge_pages=False) as other:
        assert _PAGES.save(other, engine, [2001], [0])[0].ok
        eventually(lambda: engine.gpu.report()["is_complete"])
        after = engine.gpu.report()
    assert after["saved_bytes"] - before["saved_bytes"] == BLOCK
    assert (before["registered_bytes"], after["registered_bytes"]) == (16 << 20, 4 << 20)
    assert after["registered_bytes_total"] - before["registered_bytes_total"] == 4 << 20
    assert after["registration_seconds_total"] > before["registration_seconds_total"]


def test_refused_memory_and_the_bytes_that_it_slows_are_named():
    code = """
        import cascadekv
        from fake_gpu import FakeGpu
        from test_device_pages import Engine, block_of, save
        with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
            engine = Engine(FakeGpu())
            engine.compute(1, block_of(1))
            assert save(store, engine, [1], [1])[0].ok
            while not engine.gpu.report()["is_complete"]:
                engine.fake.finish(engine.stream)
            report = engine.gpu.report()
            print(report["refused_bytes_total"])
            print(report["unregistered_bytes"], report["saved_bytes"])
    """
    printed = _PAGES.in_process(code, FAKE_CUDA_FAIL="cuMemHostRegister_v2=801")
    assert printed.split() == [str(16 << 20), str(BLOCK), str(BLOCK)]


def test_a_lost_gpu_says_why_and_counts_what_it_refuses():
    code = """
        import cascadekv
        from fake_gpu import FakeGpu
        from test_device_pages import Engine, prepare
        with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
            engine = Engine(FakeGpu())
            after = engine.mark()
            report = engine.gpu.report()
            assert (report["failed_submissions"], report["loss"]) == (0, None)
            for number in (1, 2):
                prepared = prepare(store, [number])
                try:
                    prepared.start_gather(engine.memory, [number], after=after)
                except cascadekv.GpuError:
                    pass
                prepared.release()
            report = engine.gpu.report()
            print(report["failed_submissions"], report["submissions"], report["loss"])
    """
    # The first submission waits for an event: that call loses the GPU.
    printed = _PAGES.in_process(code, FAKE_CUDA_FAIL="cuStreamWaitEvent=700@1")
    failed, started, loss = printed.strip().split(" ", 2)
    assert (failed, started) == ("2", "0")
    assert "700" in loss

"""Pages in the memory of a GPU, over the fake driver: copies, their order, and every refusal."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cascadekv
import numpy as np
import pytest
from cascadekv import BlockKeys, Gpu, GpuError, GpuMemory, PutStatus
from fake_gpu import LIBRARY_VARIABLE, Array, FakeGpu, library

LAYERS, PAGES, PAGE = 3, 12, 4096
SPACE = cascadekv.Namespace(cascadekv.Manifest({"weights": "sha256:test"}), b"secret")
LIMIT_S = 60


def block_of(number):
    """Return a block's bytes: a function of its number."""
    return np.random.default_rng(number).integers(0, 256, LAYERS * PAGE, np.uint8).tobytes()


def keys_of(numbers):
    return BlockKeys([SPACE.key_of_id(f"block {number}") for number in numbers])


@pytest.fixture
def registered(fake, store, eventually):
    """Lend a store whose pool is registered: its copies start without a wait."""
    engine = Engine(fake)
    assert save(store, engine, [1000], [0])[0].ok
    eventually(lambda: engine.gpu.report()["is_complete"])
    # The pool stays registered as long as an object of this GPU exists.
    yield store  # noqa: PT022 # the engine exists until here


class Engine:
    """An engine's KV in device memory, block by block or layer by layer, and its stream."""

    def __init__(self, fake, layout="layers", ways="direct"):
        self.fake, self.stream = fake, fake.stream()
        self.array = fake.array(LAYERS * PAGES * PAGE)
        fake.write(self.array, 0, bytes(self.array.size), self.stream)
        page_stride = PAGE if layout == "layers" else LAYERS * PAGE
        layer_stride = PAGES * PAGE if layout == "layers" else PAGE
        self.places = [
            [layer * layer_stride + page * page_stride for layer in range(LAYERS)]
            for page in range(PAGES)
        ]
        regions = [(self.array, layer * layer_stride, page_stride, PAGE) for layer in range(LAYERS)]
        self.gpu = Gpu(0, ways=ways)
        self.memory = GpuMemory(self.gpu, regions, PAGES)

    def compute(self, page, block):
        """Write a page, in the order of the engine's stream."""
        for layer, place in enumerate(self.places[page]):
            self.fake.write(self.array, place, block[layer * PAGE :][:PAGE], self.stream)

    def page(self, page):
        """Return a page as the engine's next kernel reads it."""
        read = [self.fake.read(self.array, at, PAGE, self.stream) for at in self.places[page]]
        return b"".join(read)

    def mark(self):
        """Return an event after the engine's work so far."""
        return self.gpu.mark(self.stream)


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


def stored(store, numbers):
    """Return the bytes of stored blocks."""
    with store.view(keys_of(numbers)) as views:
        return [bytes(view) for view in views]


def prepare(store, numbers):
    return store.prepare(keys_of(numbers), LAYERS * PAGE, namespace=SPACE, timeout=LIMIT_S)


def save(store, engine, numbers, pages):
    with prepare(store, numbers) as prepared:
        prepared.start_gather(engine.memory, pages, after=engine.mark())
        prepared.hold_back(engine.stream)
        return prepared.seal(timeout=LIMIT_S)


@pytest.mark.parametrize("layout", ["layers", "blocks"])
def test_blocks_saved_from_one_gpu_memory_are_loaded_to_another(fake, store, layout):
    source, target = Engine(fake, "layers"), Engine(fake, layout)
    pages, others = [7, 3, 11], [1, 10, 4]
    for number, page in enumerate(pages):
        source.compute(page, block_of(number))
    assert all(result.ok for result in save(store, source, range(3), pages))
    assert stored(store, range(3)) == [block_of(number) for number in range(3)]
    with store.view(keys_of(range(4))) as views:
        load = views.start_scatter(target.memory, [*others, 5], after=target.mark())
    assert load.copied == [True, True, True, False]
    load.hold_back(target.stream)
    assert [target.page(page) for page in others] == [block_of(number) for number in range(3)]
    assert target.page(5) == bytes(LAYERS * PAGE)
    load.wait(timeout=LIMIT_S)
    assert load.is_over()


def test_a_save_has_the_bytes_between_two_kernels(fake, registered):
    engine = Engine(fake)
    engine.compute(2, block_of(1))
    fake.finish(engine.stream)
    # Copies in both directions wait, those of the engine too.
    for name in ("cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2", "cuMemcpyDtoHAsync_v2"):
        fake.hold(name)
    engine.compute(2, block_of(2))
    prepared = prepare(registered, [2])
    prepared.start_gather(engine.memory, [2], after=engine.mark())
    prepared.hold_back(engine.stream)
    engine.compute(2, block_of(3))
    with pytest.raises(cascadekv.DeadlineError):
        prepared.seal(timeout=0.05)
    fake.release()
    (result,) = prepared.seal(timeout=LIMIT_S)
    assert result.ok
    assert stored(registered, [2])[0] == block_of(2)
    assert engine.page(2) == block_of(3)


def test_without_hold_back_the_next_kernel_damages_the_save(fake, registered):
    engine = Engine(fake)
    engine.compute(2, block_of(2))
    fake.finish(engine.stream)
    fake.hold("cuMemcpyBatchAsync_v2")
    prepared = prepare(registered, [2])
    prepared.start_gather(engine.memory, [2], after=engine.mark())
    engine.compute(2, block_of(3))
    fake.finish(engine.stream)
    fake.release()
    assert prepared.seal(timeout=LIMIT_S)[0].ok
    # Wrong KV under a right key: what `hold_back` is for.
    assert stored(registered, [2])[0] == block_of(3)


def test_a_load_is_over_only_when_its_pages_are_written(fake, registered):
    engine = Engine(fake)
    registered.put(keys_of([5]), [block_of(5)], namespace=SPACE)
    fake.hold("cuMemcpyBatchAsync_v2")
    with registered.view(keys_of([5])) as views:
        load = views.start_scatter(engine.memory, [6], after=engine.mark())
    assert not load.is_over()
    with pytest.raises(cascadekv.DeadlineError):
        load.wait(timeout=0.05)
    assert engine.page(6) != block_of(5), "the engine did not wait"
    fake.release()
    load.wait(timeout=LIMIT_S)
    assert engine.page(6) == block_of(5)


def test_blocks_in_flight_stay_in_the_pool(fake, registered):
    engine = Engine(fake)
    registered.put(keys_of([5]), [block_of(5)], namespace=SPACE)
    fake.hold("cuMemcpyBatchAsync_v2")
    with registered.view(keys_of([5])) as views:
        load = views.start_scatter(engine.memory, [6], after=engine.mark())
    prepared = prepare(registered, [8])
    prepared.start_gather(engine.memory, [1], after=engine.mark())
    prepared.release()
    del load
    registered.delete(keys_of([5]))
    # Other blocks take all memory that is free: not that of the two copies.
    others = list(range(100, 100 + (16 << 20) // (LAYERS * PAGE)))
    registered.put(
        keys_of(others), [bytes(LAYERS * PAGE)] * len(others), namespace=SPACE, chain=False
    )
    fake.release()
    fake.finish(engine.stream)
    # A full tier may decline the next block.
    registered.clear()
    assert save(registered, engine, [9], [2])[0].ok
    fresh = Engine(fake)
    registered.put(keys_of([1]), [block_of(1)], namespace=SPACE)
    with registered.view(keys_of([1])) as views:
        fresh_load = views.start_scatter(fresh.memory, [0], after=fresh.mark())
    fresh_load.wait()
    assert engine.page(6) == block_of(5)


def test_a_put_that_was_present_needs_no_copies(fake, store):
    engine = Engine(fake)
    engine.compute(0, block_of(0))
    assert save(store, engine, [0], [0])[0].status is PutStatus.STORED
    before = fake.count("cuMemcpyBatchAsync_v2")
    with prepare(store, [0]) as prepared:
        assert prepared.needed == []
        prepared.start_gather(engine.memory, [0], after=engine.mark())
        prepared.hold_back(engine.stream)
        assert prepared.seal()[0].ok
    assert fake.count("cuMemcpyBatchAsync_v2") == before


def submissions(fake):
    return fake.count("cuMemcpyBatchAsync_v2")


def test_several_puts_are_copied_in_one_submission_and_sealed_one_by_one(fake, registered):
    engine = Engine(fake)
    for number in range(4):
        engine.compute(number, block_of(number))
    assert save(registered, engine, [3], [3])[0].ok
    puts = [prepare(registered, numbers) for numbers in ([0], [1, 2], [3], [7])]
    before = submissions(fake)
    fake.hold("cuMemcpyBatchAsync_v2")
    pages = [[0], [1, 2], [3], [9]]
    copies = engine.memory.start_gather(zip(puts, pages, strict=True), after=engine.mark())
    copies.hold_back(engine.stream)
    assert submissions(fake) == before + 1
    # The pages go to other requests at once.
    for page in range(3):
        engine.compute(page, block_of(100 + page))
    assert not copies.is_over()
    # A put that is released while its copies run costs the others nothing.
    puts[3].release()
    with pytest.raises(cascadekv.DeadlineError):
        puts[1].seal(timeout=0.05)
    # One that was present needs no copy, so it waits for none.
    assert puts[2].seal(timeout=LIMIT_S)[0].ok
    fake.release()
    results = [put.seal(timeout=LIMIT_S) for put in (puts[1], puts[0])]
    assert all(result.ok for each in results for result in each)
    assert copies.is_over()
    assert stored(registered, range(4)) == [block_of(number) for number in range(4)]
    assert not registered.contains(keys_of([7]))[0]
    assert engine.page(1) == block_of(101)


def test_slabs_of_a_released_put_come_back_after_the_copies(fake, registered):
    engine = Engine(fake)
    numbers = range(200, 200 + (8 << 20) // (LAYERS * PAGE))
    fake.hold("cuMemcpyBatchAsync_v2")
    big, small = prepare(registered, numbers), prepare(registered, [1])
    pages = [0] * len(numbers)
    copies = engine.memory.start_gather([(big, pages), (small, [1])], after=engine.mark())
    big.release()
    others = range(2000, 2000 + (9 << 20) // (LAYERS * PAGE))
    # The first half of the pool is in flight, so these do not fit.
    with prepare_now(registered, others) as too_many:
        assert len(too_many.needed) < len(others)
    fake.release()
    assert small.seal(timeout=LIMIT_S)[0].ok
    # `copies` lives, and has none of them.
    with prepare(registered, others) as enough:
        assert len(enough.needed) == len(others)
    assert copies.is_over()


def prepare_now(store, numbers):
    return store.prepare(keys_of(numbers), LAYERS * PAGE, namespace=SPACE, timeout=0.1)


def test_several_views_are_copied_in_one_submission(fake, registered):
    engine = Engine(fake)
    registered.put(keys_of([0, 1, 2]), [block_of(at) for at in range(3)], namespace=SPACE)
    before = submissions(fake)
    with registered.view(keys_of([0, 5])) as first, registered.view(keys_of([1, 2])) as second:
        both = [(first, [4, 5]), (second, [6, 7])]
        load = engine.memory.start_scatter(both, after=engine.mark())
        with pytest.raises(ValueError, match="7 occurs twice"):
            engine.memory.start_scatter([(first, [7, 5]), (second, [6, 7])], after=engine.mark())
    assert submissions(fake) == before + 1
    assert load.copied == [True, False, True, True]
    load.hold_back(engine.stream)
    assert [engine.page(page) for page in (4, 6, 7)] == [block_of(at) for at in range(3)]
    load.wait(timeout=LIMIT_S)


def test_wrong_puts_of_a_submission_change_nothing(fake, store):
    engine = Engine(fake)
    good, used = prepare(store, [1]), prepare(store, [2])
    used.release()
    wrong = {
        "sealed or released": [(good, [0]), (used, [1])],
        "one occurs twice": [(good, [0]), (good, [1])],
        "pages are from 0": [(good, [PAGES])],
        "1 blocks but 0 pages": [(good, [])],
    }
    for message, puts in wrong.items():
        with pytest.raises(ValueError, match=message):
            engine.memory.start_gather(puts, after=engine.mark())
    for puts in (good, [good], [(object(), [0])]):
        with pytest.raises(TypeError, match="puts"):
            engine.memory.start_gather(puts, after=engine.mark())
    with pytest.raises(TypeError, match="views"):
        engine.memory.start_scatter([(object(), [0])], after=engine.mark())
    engine.memory.start_gather([], after=engine.mark()).hold_back(engine.stream)
    engine.memory.start_gather([(good, [3])], after=engine.mark())
    assert good.seal(timeout=LIMIT_S)[0].ok


def test_the_gpu_times_the_copies_of_a_load():
    # Each copy takes 20 ms: the call that starts them has no part in it.
    code = """
        import cascadekv
        from fake_gpu import FakeGpu
        from test_device_pages import SPACE, Engine, block_of, keys_of, save
        with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
            engine = Engine(FakeGpu())
            assert save(store, engine, [1], [1])[0].ok
            while not engine.gpu.report()["is_complete"]:
                engine.fake.finish(engine.stream)
            engine.fake.hold("cuMemcpyBatchAsync_v2")
            before = engine.gpu.mark(engine.stream, timed=True)
            with store.view(keys_of([1])) as views:
                load = views.start_scatter(engine.memory, [2], after=before)
            assert load.seconds is None
            engine.fake.release()
            load.hold_back(engine.stream)
            after = engine.gpu.mark(engine.stream, timed=True)
            load.wait()
            engine.fake.finish(engine.stream)
            print(load.seconds, after.seconds_since(before))
            assert after.seconds_since(engine.mark()) is None
            empty = engine.memory.start_scatter([], after=after)
            assert empty.is_over() and empty.seconds is None
    """
    printed = in_process(code, FAKE_CUDA_DELAY_US="cuMemcpyBatchAsync_v2=20000")
    copies, between = map(float, printed.split())
    assert copies >= LAYERS * 0.02
    assert between >= copies
    # A driver without the function has no times, and copies as before.
    printed = in_process(code, FAKE_CUDA_ABSENT="cuEventElapsedTime")
    assert printed.split() == ["None", "None"]


def test_the_pool_is_registered_once_and_again_for_another_store(fake, store, eventually):
    engine = Engine(fake)
    for number in range(3):
        engine.compute(number, block_of(number))
    assert all(result.ok for result in save(store, engine, range(3), range(3)))
    eventually(lambda: engine.gpu.report()["is_complete"])
    report = engine.gpu.report()
    assert report["is_fake"]
    assert "fake" in report["device"]
    assert report["refusal"] is None
    assert (report["registered_bytes"], report["staged_bytes"]) == (16 << 20, 0)
    with cascadekv.Store(dram="4MiB", huge_pages=False) as other:
        assert save(other, Engine(fake), [7], [0])[0].ok
        eventually(lambda: engine.gpu.report()["is_complete"])
        assert engine.gpu.report()["registered_bytes"] == 4 << 20
    engine.compute(5, block_of(5))
    assert save(store, engine, [5], [5])[0].ok
    assert stored(store, [5])[0] == block_of(5)


WRONG_ARRAYS = {
    "no interface": (lambda _: object(), TypeError, "__cuda_array_interface__"),
    "read-only": (lambda a: Array(a.address, a.size, data=(a.address, True)), ValueError, "read-o"),
    "strided": (lambda a: Array(a.address, a.size, strides=(2,)), ValueError, "C-contiguous"),
    "no type": (lambda a: Array(a.address, a.size, typestr="u"), TypeError, "__cuda_array"),
    "negative": (lambda a: Array(a.address, a.size, shape=(-1,)), TypeError, "__cuda_array"),
    "huge": (lambda a: Array(a.address, a.size, shape=(1 << 62, 8)), TypeError, "__cuda_array"),
    "short": (lambda a: Array(a.address, PAGE), ValueError, "does not fit its buffer"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_wrong_arrays_are_refused(fake, name):
    change, error, message = WRONG_ARRAYS[name]
    array = fake.array(PAGES * PAGE)
    with pytest.raises(error, match=message):
        GpuMemory(Gpu(0), [(change(array), 0, PAGE, PAGE)], PAGES)


def test_wrong_arguments_are_refused(fake, store):
    engine = Engine(fake)
    host = bytearray(PAGES * PAGE * LAYERS)
    paged = cascadekv.PagedMemory([(host, 0, LAYERS * PAGE, LAYERS * PAGE)], PAGES)
    store.put(keys_of([0, 1]), [block_of(0), block_of(1)], namespace=SPACE)
    with store.view(keys_of([0, 1])) as views:
        with pytest.raises(ValueError, match="occurs twice"):
            views.start_scatter(engine.memory, [3, 3], after=engine.mark())
        with pytest.raises(ValueError, match="pages are from 0"):
            views.start_scatter(engine.memory, [3, PAGES], after=engine.mark())
        with pytest.raises(TypeError, match="GpuMemory"):
            views.start_scatter(paged, [3, 4], after=engine.mark())
        with pytest.raises(TypeError):
            views.start_scatter(engine.memory, [3, 4])
    with pytest.raises(TypeError, match="PagedMemory"), prepare(store, [7]) as prepared:
        prepared.gather(engine.memory, [0])
    with store.prepare(keys_of([8]), PAGE, namespace=SPACE) as short:
        with pytest.raises(ValueError, match="its blocks have"):
            short.start_gather(engine.memory, [0], after=engine.mark())
        # Nothing was released: the host's pages still fit.
        assert short.needed == [0]
    with prepare(store, [9]) as twice:
        twice.start_gather(engine.memory, [0], after=engine.mark())
        with pytest.raises(ValueError, match="copying these blocks already"):
            twice.start_gather(engine.memory, [1], after=engine.mark())
        assert twice.seal(timeout=LIMIT_S)[0].ok
    with pytest.raises(GpuError, match="INVALID_DEVICE"):
        Gpu(7)


def environment(**variables):
    """Return the environment of a process that uses the fake driver and these modules."""
    tests = Path(__file__).parent
    paths = [str(tests), str(tests.with_name("tests_engines"))]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    path = {"PYTHONPATH": os.pathsep.join(paths)}
    return os.environ | path | {LIBRARY_VARIABLE: str(library())} | variables


def in_process(code, **variables):
    """Run code in a process of its own, because the driver reads its variables once."""
    run = subprocess.run(  # noqa: S603 # our own code
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_without_a_driver_the_error_says_what_to_do():
    code = """
        import cascadekv
        try:
            cascadekv.Gpu(0)
        except cascadekv.GpuError as error:
            print(error)
    """
    printed = in_process(code, CASCADE_CUDA_LIBRARY="/nonexistent/libcuda.so.1")
    assert "/nonexistent/libcuda.so.1" in printed
    assert "install the NVIDIA driver" in printed


def test_a_forked_child_is_refused():
    code = """
        import os
        import cascadekv
        gpu = cascadekv.Gpu(0)
        child = os.fork()
        if child == 0:
            try:
                gpu.mark(0)
            except cascadekv.GpuError as error:
                os._exit(0 if "spawn" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    """
    in_process(code)


def test_a_worker_killed_with_copies_in_flight_leaves_nothing(fake, serve):
    node = serve("--dram", "16MiB")
    code = """
        import sys
        import cascadekv
        from fake_gpu import FakeGpu
        from test_device_pages import Engine, block_of, keys_of, prepare, save
        store = cascadekv.connect(sys.argv[1])
        engine = Engine(FakeGpu())
        engine.compute(1, block_of(1))
        assert save(store, engine, [1], [1])[0].ok
        engine.fake.hold("cuMemcpyBatchAsync_v2")
        with store.view(keys_of([1])) as views:
            load = views.start_scatter(engine.memory, [2], after=engine.mark())
        prepared = prepare(store, [2, 3])
        prepared.start_gather(engine.memory, [1, 1], after=engine.mark())
        print("in flight", flush=True)
        sys.stdin.read()
    """
    # Without the registration, a copy would be over before the call returns.
    warm = (
        "        while not engine.gpu.report()['is_complete']: engine.fake.finish(engine.stream)\n"
    )
    code = code.replace("        engine.fake.hold", warm + "        engine.fake.hold")
    worker = subprocess.Popen(  # noqa: S603 # our own code
        [sys.executable, "-c", textwrap.dedent(code), str(node.socket)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout.readline() == "in flight\n"
        worker.kill()
    with cascadekv.connect(node.socket) as store:
        assert stored(store, [1]) == [block_of(1)]
        # Blocks in flight are neither stored nor reserved, and their memory is free again.
        assert store.contains(keys_of([2, 3])) == [False, False]
        engine = Engine(fake)
        engine.compute(5, block_of(2))
        assert save(store, engine, [2], [5])[0].ok
        assert stored(store, [2]) == [block_of(2)]
        store.clear()
        fill = range(100, 100 + ((16 << 20) - (1 << 20)) // (LAYERS * PAGE))
        blocks = [bytes(LAYERS * PAGE)] * len(fill)
        results = store.put(keys_of(fill), blocks, namespace=SPACE, chain=False)
        assert all(result.ok for result in results)


@pytest.mark.parametrize("copy", range(2, 9))
def test_a_lost_gpu_costs_blocks_and_nothing_else(copy):
    # The context dies at each copy in turn: saves and loads fail, and the store goes on.
    code = """
        import cascadekv
        from fake_gpu import DriverError, FakeGpu
        from test_device_pages import Engine, SPACE, block_of, keys_of, prepare, stored
        with cascadekv.Store(dram="16MiB", huge_pages=False) as store:
            try:
                engine = Engine(FakeGpu())
                store.put(keys_of([5]), [block_of(5)], namespace=SPACE)
                with store.view(keys_of([5])) as views:
                    load = views.start_scatter(engine.memory, [6], after=engine.mark())
                load.hold_back(engine.stream)
                prepared = prepare(store, [8])
                prepared.start_gather(engine.memory, [6], after=engine.mark())
                prepared.hold_back(engine.stream)
                load.wait(timeout=20)
                (result,) = prepared.seal(timeout=20)
                assert result.ok
                assert stored(store, [8])[0] == block_of(5)
                print("complete")
            except (DriverError, cascadekv.GpuError) as error:
                assert not store.contains(keys_of([8]))[0]
                print("lost:", error)
            assert stored(store, [5])[0] == block_of(5)
            assert store.put(keys_of([10]), [block_of(10)], namespace=SPACE)[0].ok
    """
    printed = in_process(code, FAKE_CUDA_DIE_AT_COPY=str(copy))
    assert "lost" in printed or "complete" in printed
    # One copy is the engine's, and two transfers follow.
    assert copy > 3 or "lost" in printed


@pytest.mark.parametrize(
    ("ways", "has_kernel"),
    # A stand-in is never measured, so "measured" is direct there.
    [("direct", False), ("staged", True), ("mapped", True), ("measured", False)],
)
def test_pages_take_the_given_way(fake, registered, ways, has_kernel):
    engine = Engine(fake, ways=ways)
    engine.compute(3, block_of(1))
    engine.compute(0, block_of(2))
    before = fake.count("cuLaunchKernel")
    assert all(result.ok for result in save(registered, engine, [1, 2], [3, 0]))
    assert (fake.count("cuLaunchKernel") > before) == has_kernel
    assert stored(registered, [1, 2]) == [block_of(1), block_of(2)]
    before = fake.count("cuLaunchKernel")
    with registered.view(keys_of([1, 2])) as views:
        load = views.start_scatter(engine.memory, [7, 5], after=engine.mark())
    load.wait(timeout=LIMIT_S)
    assert (fake.count("cuLaunchKernel") > before) == has_kernel
    assert [engine.page(page) for page in (7, 5)] == [block_of(1), block_of(2)]


@pytest.mark.usefixtures("fake")
def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="ways must be one of direct, measured, staged, mapped"):
        Gpu(0, ways="fast")

"""A node whose blocks are in the memory of a GPU, over the fake driver: real processes map it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import cascadekv
import pytest
from cascadekv import ConfigError, Gpu, RefusedError
from fake_gpu import FakeGpu, library
from hbm_engine import (
    FIRST_GPU,
    LAYERS,
    LIMIT_S,
    PAGE,
    SPACE,
    Engine,
    block_of,
    keys_of,
    leases_of,
    mappings,
    run,
)


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def serve_hbm(serve, fake):  # noqa: ARG001 # the driver is chosen before a store is opened
    """Start a node with 16 MiB of the memory of the first GPU, or of another one."""

    def start(*flags, gpu=FIRST_GPU, **settings):
        return serve("--gpu", gpu, "--hbm", "16MiB", *flags, cuda_library=library(), **settings)

    return start


def test_blocks_of_a_gpu_are_put_and_read_by_copies(serve_hbm):
    with cascadekv.connect(serve_hbm().socket, gpu=Gpu(0)) as store:
        keys = keys_of(range(3))
        results = store.put(keys, [block_of(number) for number in range(3)], namespace=SPACE)
        assert all(result.ok for result in results), results
        assert store.lookup_prefix(keys_of(range(4))).blocks == 3
        buffers = [bytearray(LAYERS * PAGE) for _ in range(4)]
        found = store.get(keys_of(range(4)), buffers)
        assert [result.ok for result in found] == [True, True, True, False]
        assert [bytes(it) for it in buffers[:3]] == [block_of(number) for number in range(3)]


def test_pages_are_saved_and_loaded_within_the_gpu(fake, serve_hbm):
    engine = Engine(fake)
    with cascadekv.connect(serve_hbm().socket, gpu=engine.gpu) as store:
        before = engine.gpu.report()
        for number, page in enumerate([7, 3, 11]):
            engine.compute(page, block_of(number))
        assert all(result.ok for result in engine.save(store, range(3), [7, 3, 11]))
        load = engine.load(store, range(4), [1, 10, 4, 5])
        assert load.copied == [True, True, True, False]
        assert [engine.page(page) for page in (1, 10, 4)] == [block_of(n) for n in range(3)]
        load.wait(timeout=LIMIT_S)
        assert engine.page(5) == bytes(LAYERS * PAGE)
        with store.view(keys_of(range(1))) as views, pytest.raises(BufferError, match="device"):
            memoryview(views[0])
        # The pool in host memory was never used, so nothing was registered.
        report = engine.gpu.report()
        assert report["registered_bytes"] == 0
        assert report["within_copies"] - before["within_copies"] == 6 * LAYERS
        assert report["within_bytes"] - before["within_bytes"] == 6 * LAYERS * PAGE


def test_clients_that_cannot_map_the_memory_are_refused(serve_hbm, serve):
    with pytest.raises(ConfigError, match="keeps its blocks in DRAM; leave gpu out"):
        cascadekv.connect(serve("--dram", "16MiB").socket, gpu=Gpu(0))
    socket = serve_hbm().socket
    with pytest.raises(RefusedError, match="in the memory of a GPU; connect with a GPU"):
        cascadekv.connect(socket)
    with pytest.raises(RefusedError, match='connect with the access "write"'):
        cascadekv.connect(socket, gpu=Gpu(0), access="read")


def test_released_memory_is_unmapped_by_idle_processes(fake, serve_hbm, eventually):
    node, engine = serve_hbm(), Engine(fake)
    before = mappings()
    store = cascadekv.connect(node.socket, gpu=engine.gpu)
    assert mappings() == before + 1
    engine.compute(1, block_of(0))
    assert engine.save(store, [0], [1])[0].ok
    status = run("hbm", "status", "--socket", str(node.socket))
    assert "FAKE" in status.stdout, status
    assert "16.0 MiB taken" in status.stdout, status
    released = run("hbm", "release", "--socket", str(node.socket))
    assert released.returncode == 0, released
    assert f"process {os.getpid()}" in released.stdout, released
    # Without a call of the store: a thread of the client sees the closed connection.
    eventually(lambda: mappings() == before)
    with store.view(keys_of([0])) as views:
        assert views.hits == 0
    assert not engine.save(store, [0], [1])[0].ok
    store.close()
    node.process.stdout.close()


def test_a_block_in_use_keeps_its_memory_after_the_release(fake, serve_hbm, eventually):
    node, engine = serve_hbm(), Engine(fake)
    before = mappings()
    with cascadekv.connect(node.socket, gpu=engine.gpu) as store:
        engine.compute(1, block_of(0))
        assert engine.save(store, [0], [1])[0].ok
        views = store.view(keys_of([0]))
        assert run("hbm", "release", "--socket", str(node.socket)).returncode == 0
        eventually(lambda: store.lookup_prefix(keys_of([0])).blocks == 0)
        load = views.start_scatter(engine.memory, [5], after=engine.gpu.mark(engine.stream))
        load.wait(timeout=LIMIT_S)
        assert engine.page(5) == block_of(0)
        assert mappings() == before + 1
        del load
        views.release()
        eventually(lambda: mappings() == before)
    node.process.stdout.close()


def test_a_killed_node_loses_its_blocks_and_nothing_else(fake, serve_hbm, eventually):
    node, engine = serve_hbm(), Engine(fake)
    before = mappings()
    with cascadekv.connect(node.socket, gpu=engine.gpu) as store:
        engine.compute(1, block_of(0))
        assert engine.save(store, [0], [1])[0].ok
        node.kill()
        eventually(lambda: mappings() == before)
        assert store.lookup_prefix(keys_of([0])).blocks == 0
        node.start()
        eventually(lambda: store.lookup_prefix(keys_of([0])).blocks == 0 and mappings() > before)
        engine.compute(2, block_of(1))
        eventually(lambda: engine.save(store, [1], [2])[0].ok)
        engine.load(store, [1], [3]).wait(timeout=LIMIT_S)
        assert engine.page(3) == block_of(1)


def test_a_worker_killed_with_leases_gives_them_back(serve_hbm, eventually):
    node = serve_hbm()
    code = f"""
        import sys, time, cascadekv
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(library()).parent)]!r}
        sys.path.append({str(Path(__file__).parents[1] / "tests_engines")!r})
        from fake_gpu import FakeGpu
        from hbm_engine import Engine, block_of, keys_of
        engine = Engine(FakeGpu())
        store = cascadekv.connect({str(node.socket)!r}, gpu=engine.gpu)
        engine.compute(1, block_of(0))
        assert engine.save(store, [0], [1])[0].ok
        views = store.view(keys_of([0]))
        print("held", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(  # noqa: S603 # our own command
        command, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout.readline() == "held\n"
        assert leases_of(node) == 1
        worker.send_signal(signal.SIGKILL)
    eventually(lambda: leases_of(node) == 0)


def test_a_node_stops_when_others_need_the_memory(serve_hbm, tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.write_text("0")
    monkeypatch.setenv("FAKE_CUDA_TAKEN", str(taken))
    node = serve_hbm("--hbm-reserve", "256MiB")
    with cascadekv.connect(node.socket, gpu=Gpu(0)) as store:
        assert store.put(keys_of([0]), [block_of(0)], namespace=SPACE)[0].ok
        taken.write_text(str(900 << 20))
        assert node.process.wait(LIMIT_S) == 0, node.log()
        node.process.stdout.close()
        assert "the memory of the GPU is needed" in node.log()
        with store.view(keys_of([0])) as views:
            assert views.hits == 0
    with pytest.raises(AssertionError, match="less than hbm_reserve"):
        serve_hbm("--hbm-reserve", "256MiB")


def test_wrong_settings_are_refused(serve_hbm, serve):
    with pytest.raises(AssertionError, match=f"no GPU .*set gpu to one of: {FIRST_GPU}"):
        serve_hbm(gpu="GPU-0")
    with pytest.raises(AssertionError, match="set hbm, such as"):
        serve("--gpu", FIRST_GPU)
    with pytest.raises(AssertionError, match="no GPU is named for it"):
        serve("--hbm", "1GiB")
    with pytest.raises(AssertionError, match="this host has no GPU"):
        serve("--gpu", FIRST_GPU, "--hbm", "16MiB", cuda_library="/nonexistent.so")


PEER = """
    import sys
    sys.path[:0] = {paths!r}
    import cascadekv
    from fake_gpu import FakeGpu
    from hbm_engine import *
    fake = FakeGpu()
    engine = Engine(fake, device=0)
    try:
        store = cascadekv.connect({socket!r}, gpu=engine.gpu)
    except cascadekv.CascadeError as error:
        print("refused:", error)
    else:
        engine.compute(1, block_of(0))
        assert engine.save(store, [0], [1])[0].ok
        engine.load(store, [0], [2]).wait(timeout=60)
        assert engine.page(2) == block_of(0)
        print("right")
"""


@pytest.mark.parametrize("has_peers", [True, False])
def test_a_gpu_uses_memory_of_another_one_only_if_it_can_access_it(
    serve_hbm, monkeypatch, has_peers
):
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv("FAKE_CUDA_PEERS", str(int(has_peers)))
    node = serve_hbm(gpu=FIRST_GPU[:-1] + "b")
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "tests_engines")]
    code = textwrap.dedent(PEER).format(paths=paths, socket=str(node.socket))
    done = subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    if has_peers:
        assert done.stdout == "right\n"
    else:
        assert "refused" in done.stdout
        assert "cannot access" in done.stdout

"""A node in DRAM that starts a node in the memory of a GPU, over the fake driver."""

import importlib.util
import json
import os
import signal
from pathlib import Path

import cascadekv
import pytest
from cascadekv import Gpu
from fake_gpu import FakeGpu, library

_FILE = Path(__file__).with_name("test_hbm.py")
_SPEC = importlib.util.spec_from_file_location("cascade_hbm", _FILE)
_HBM = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_HBM)

FIRST_GPU, SPACE, Engine = _HBM.FIRST_GPU, _HBM.SPACE, _HBM.Engine
block_of, keys_of, mappings, run = _HBM.block_of, _HBM.keys_of, _HBM.mappings, _HBM.run
FLAGS = ("--dram", "16MiB", "--gpu", FIRST_GPU, "--hbm", "16MiB")


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture
def serve_both(serve, fake):  # noqa: ARG001 # the driver is chosen before a store is opened
    """Start a node with DRAM and with memory of a GPU."""

    def start(*flags, **settings):
        return serve(*FLAGS, *flags, **({"cuda_library": library()} | settings))

    return start


def notes(node):
    status = run("status", "--json", "--socket", str(node.socket))
    return json.loads(status.stdout)["notes"]


def gpu_node(node):
    """Return what the node in DRAM says of the node of the GPU."""
    status = run("status", "--json", "--socket", str(node.socket))
    return json.loads(status.stdout)["node"]["gpu_node"]


def hbm_state(node):
    """Return the state of the node of the GPU, as `cascade hbm status` prints it."""
    status = run("hbm", "status", "--json", "--socket", str(node.socket))
    return json.loads(status.stdout)["gpu_node"]["state"]


def wait_for(eventually, node, state):
    """Wait for a state and return the status that has it: a failed node starts again."""
    seen = []

    def is_there():
        seen[:] = [gpu_node(node)]
        return seen[0]["state"] == state

    eventually(is_there)
    return seen[0]


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def test_one_command_serves_dram_and_the_memory_of_a_gpu(fake, serve_both, eventually):
    node, engine = serve_both(), Engine(fake)
    assert "pipeline Hbm|Dram" in node.ready_line
    found = wait_for(eventually, node, "serving")
    assert (found["uuid"], found["socket"]) == (FIRST_GPU, f"{node.socket}.hbm")
    with (
        cascadekv.connect(node.socket) as dram,
        cascadekv.connect(found["socket"], gpu=engine.gpu) as hbm,
    ):
        engine.compute(1, block_of(0))
        for store in (dram, hbm):
            assert engine.save(store, [0], [1])[0].ok
        engine.load(hbm, [0], [2]).wait(timeout=60)
        assert engine.page(2) == block_of(0)
        status = run("hbm", "status", "--socket", str(node.socket))
        assert "16.0 MiB taken" in status.stdout, status
        # The blocks in DRAM do not depend on the GPU.
        os.kill(found["pid"], signal.SIGKILL)
        assert dram.lookup_prefix(keys_of([0])).blocks == 1
        eventually(lambda: gpu_node(node)["pid"] not in (None, found["pid"]))


def test_a_killed_node_of_a_gpu_starts_again(serve_both, eventually):
    node = serve_both()
    first = wait_for(eventually, node, "serving")
    os.kill(first["pid"], signal.SIGKILL)
    # Not its state: it has failed for a second only, which a busy machine may not see.
    eventually(lambda: "signal: 9" in node.log())
    eventually(
        lambda: (again := gpu_node(node))["state"] == "serving" and again["pid"] != first["pid"]
    )


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_node_of_a_gpu_ends_with_the_node_that_started_it(serve_both, eventually, how):
    node = serve_both()
    found = wait_for(eventually, node, "serving")
    node.process.send_signal(how)
    node.process.wait(60)
    node.process.stdout.close()
    eventually(lambda: has_ended(found["pid"]))
    if how != signal.SIGKILL:
        # It was not killed, so it removed its socket.
        assert not Path(found["socket"]).exists()
        assert "is killed" not in node.log()
    # The next node gets the socket, also if the last node of the GPU ends a little later.
    node.start()
    assert wait_for(eventually, node, "serving")["pid"] != found["pid"]


def test_released_memory_is_taken_again_on_order_only(serve_both, eventually):
    node = serve_both()
    before = mappings()
    found = wait_for(eventually, node, "serving")
    with cascadekv.connect(found["socket"], gpu=Gpu(0)) as store:
        assert store.put(keys_of([0]), [block_of(0)], namespace=SPACE)[0].ok
        released = run("hbm", "release", "--socket", str(node.socket))
        assert released.returncode == 0, released
        eventually(lambda: mappings() == before)
        assert wait_for(eventually, node, "released")["pid"] is None
        for verb in ("status", "release"):
            again = run("hbm", verb, "--socket", str(node.socket))
            assert again.returncode == 0, again
            assert "gave the memory back" in again.stdout
        started = run("hbm", "start", "--socket", str(node.socket))
        assert started.returncode == 0, started
        assert f"serves at {found['socket']}" in started.stdout
        eventually(lambda: store.put(keys_of([1]), [block_of(1)], namespace=SPACE)[0].ok)
        assert store.lookup_prefix(keys_of([0])).blocks == 0
    # A node that serves is left alone.
    pid = gpu_node(node)["pid"]
    assert run("hbm", "start", "--socket", str(node.socket)).returncode == 0
    assert gpu_node(node)["pid"] == pid


def test_needed_memory_is_given_back_and_dram_goes_on(
    serve_both, eventually, tmp_path, monkeypatch
):
    taken = tmp_path / "taken"
    taken.write_text("0")
    monkeypatch.setenv("FAKE_CUDA_TAKEN", str(taken))
    node = serve_both("--hbm-reserve", "256MiB")
    wait_for(eventually, node, "serving")
    taken.write_text(str(900 << 20))
    wait_for(eventually, node, "released")
    assert any("was given back; `cascade hbm start`" in note for note in notes(node))
    # Others still have the memory.
    refused = run("hbm", "start", "--socket", str(node.socket))
    assert refused.returncode == 1, refused
    assert "does not run" in refused.stdout
    assert "less than hbm_reserve" in node.log()
    taken.write_text("0")
    assert run("hbm", "start", "--socket", str(node.socket)).returncode == 0
    with cascadekv.connect(node.socket) as dram:
        assert dram.put(keys_of([0]), [block_of(0)], namespace=SPACE)[0].ok


def test_a_lost_gpu_is_a_failure(serve_both, eventually, monkeypatch):
    # 700: an instruction that followed a wrong address. The first call is that of the start.
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuMemGetInfo_v2=700@3")
    node = serve_both()
    assert "exit status: 1" in wait_for(eventually, node, "failed")["reason"]
    assert f"GPU {FIRST_GPU} is lost, with all blocks of this node" in node.log()


def test_a_host_without_a_gpu_serves_dram(serve_both, eventually):
    node = serve_both(cuda_library="/nonexistent.so")
    failed = wait_for(eventually, node, "failed")
    assert "exit status: 1" in failed["reason"]
    assert "this host has no GPU" in node.log()
    eventually(lambda: any("exit status: 1" in note for note in notes(node)))
    # It starts again after each failure, and fails again.
    eventually(lambda: hbm_state(node) == "failed")
    with cascadekv.connect(node.socket) as dram:
        assert dram.put(keys_of([0]), [block_of(0)], namespace=SPACE)[0].ok


def test_settings_that_belong_to_dram_do_not_reach_the_node_of_the_gpu(
    serve_both, eventually, tmp_path
):
    files = tmp_path / "files"
    node = serve_both("--files", str(files), "--files-capacity", "64MiB", "--listen", "127.0.0.1:0")
    assert "pipeline Hbm|Dram|Files" in node.ready_line
    found = wait_for(eventually, node, "serving")
    shown = run("config", "get", "--json", "--socket", found["socket"])
    values = {it["key"]: it["value"] for it in json.loads(shown.stdout)}
    assert values["pipeline"] == "Hbm"
    assert values["hbm"] == "16MiB"
    assert [values[key] for key in ("files", "listen")] == [None, None]


def test_wrong_settings_of_both_are_refused(serve_both, serve):
    with pytest.raises(AssertionError, match="has no stage Dram behind Hbm"):
        serve_both("--pipeline", "Hbm")
    with pytest.raises(AssertionError, match="set hbm, such as"):
        serve("--dram", "16MiB", "--gpu", FIRST_GPU)
    plain = serve("--dram", "16MiB")
    for verb in ("status", "release"):
        refused = run("hbm", verb, "--socket", str(plain.socket))
        assert "uses no GPU" in refused.stderr, refused
    assert "has no GPU" in run("hbm", "start", "--socket", str(plain.socket)).stderr

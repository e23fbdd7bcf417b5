"""Waits for transfers: deadlines, signals, cancellations, and endpoints that are closed."""

import contextlib
import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from cascadekv.errors import (
    AwayError,
    CascadeError,
    DeadlineError,
)
from cascadekv.transfer import Blocks
from stopping import stop
from transfer_endpoints import ONE, START_S, S, engine, serve


def test_a_closed_endpoint_frees_its_pages():
    layers, endpoint = engine(1)
    pages = weakref.ref(layers[0].keys)
    endpoint.listen("127.0.0.1:0")
    endpoint.close()
    del layers, endpoint
    gc.collect()
    assert pages() is None


def start_process():
    """Start a process with an endpoint; return it, its pipe, which keeps it, and its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, "127.0.0.1:0", None), daemon=True)
    process.start()
    return process, ours, ours.recv()


def silent_peer(local):
    """Connect to another process's endpoint that answers nothing from then on."""
    process, pipe, address = start_process()
    peer = local.connect(address, timeout=START_S)
    stop(process.pid)
    return process, pipe, peer


@pytest.fixture
def silent():
    """Make a local endpoint and a peer that answers nothing."""
    _, local = engine(1)
    process, pipe, peer = silent_peer(local)
    yield local, peer
    process.kill()
    process.join()
    pipe.close()


def test_a_wait_and_a_cancel_keep_their_deadlines_while_another_thread_waits(silent):
    _, peer = silent
    moved = peer.read("r", ONE, layers=[0], timeout=S)
    ended = threading.Event()

    def wait():
        with pytest.raises(CascadeError):
            moved.wait(timeout=1000)
        ended.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    with pytest.raises(DeadlineError):
        moved.wait(timeout=0.3)
    assert not ended.is_set()
    moved.cancel(timeout=0.3)
    assert ended.wait(S)


def test_a_time_out_is_that_of_all_layers(silent):
    _, peer = silent
    moved = peer.read("r", ONE, timeout=S)
    waits = []
    tickets = moved._tickets  # noqa: SLF001 # what each layer is given

    class Ticket:
        def wait(self, *, timeout):
            waits.append(timeout)
            time.sleep(0.01)

    moved._tickets = {layer: Ticket() for layer in tickets}  # noqa: SLF001
    moved.wait(timeout=1.0)
    assert waits[0] == 1.0
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] <= 1.0 - 0.01 * (len(waits) - 1)


def test_a_lost_transfer_is_lost_for_each_that_waits(silent):
    _, peer = silent
    moved = peer.read("r", ONE, layers=[0], timeout=S)
    peer.close()
    for _ in range(3):
        with pytest.raises(AwayError):
            moved.wait(timeout=S)


def test_threads_that_reconnect_at_once_make_one_connection():
    _, local = engine(1)
    _, remote = engine(2)
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        peer.close()
        opened = []
        open_one = local.open
        local.open = lambda *args, **more: opened.append(1) or open_one(*args, **more)
        threads = [threading.Thread(target=peer.reconnect, kwargs={"timeout": S}) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(opened) == 1
        peer.write("r", ONE, timeout=S).wait(timeout=S)


DROPPED_WHILE_A_PEER_IS_CHECKED = """
import faulthandler, socket, sys, threading, time
from cascadekv import CascadeError
from cascadekv._native import TransportEndpoint
faulthandler.dump_traceback_later(60, exit=True)
checks = threading.Event()
def accepts(geometry):
    checks.set()
    time.sleep(0.5)
    return None
server = TransportEndpoint(name="x", geometry=b"{}", accepts=accepts)
client = TransportEndpoint(name="y", geometry=b"{}")
address = server.listen("127.0.0.1:0")
def connect():
    try:
        client.connect(address, timeout=5)
    except CascadeError as error:
        print(error, file=sys.stderr)
thread = threading.Thread(target=connect)
thread.start()
checks.wait()
del server
thread.join()
print("ended")
"""


def test_an_endpoint_can_be_dropped_while_a_peer_is_checked():
    done = subprocess.run(  # noqa: S603 # our own program
        [sys.executable, "-c", DROPPED_WHILE_A_PEER_IS_CHECKED],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "ended\n", done.stderr


def test_a_cancelled_write_leaves_its_connection_open(silent):
    """A thread that waits for it gives way; the peer need not answer, for nothing is read."""
    _, peer = silent
    moved = peer.write("r", ONE, layers=[0], timeout=S)
    ended = threading.Event()

    def wait():
        with pytest.raises(CascadeError, match="cancelled"):
            moved.wait(timeout=1000)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    with pytest.raises(DeadlineError):
        moved.wait(timeout=0.3)
    moved.cancel(timeout=0)
    assert ended.wait(S)
    assert peer.is_connected


@pytest.mark.parametrize("streams", [1, 4])
def test_a_transfer_that_nobody_waits_for_leaves_its_connection(streams):
    blocks = 128  # 4 MiB a layer: enough for several streams
    options = {"blocks": blocks, "head_bytes": 512, "streams": streams}
    _, local = engine(1, **options)
    _, remote = engine(2, **options)
    every = Blocks(range(blocks), range(blocks))
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        peer.write("r", every, timeout=S)
        peer.read("r", every, timeout=S)
        gc.collect()
        assert peer.is_connected
        peer.read("r", every, timeout=S).wait(timeout=S)


def test_arrivals_end_when_the_endpoint_is_closed():
    _, local = engine(1)
    _, remote = engine(2)
    with local:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        peer.write("r", ONE, layers=[1], timeout=S).wait(timeout=S)
    closing = threading.Timer(0.2, remote.close)
    closing.start()
    assert remote.next_arrival(timeout=S).layer == 1
    with pytest.raises(AwayError, match="closed"):
        remote.next_arrival(timeout=1000)
    closing.join()


INTERRUPTED = """
import signal, sys, threading
import numpy
from stopping import stop
from transfer_endpoints import ONE, engine
call, address = sys.argv[1:]
# A shell ignores it in what it starts in the background, and a program inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
_, here = engine(1)
if call == "wait":
    moving = here.connect(address, timeout=100).read
    print("connected", flush=True)
    sys.stdin.readline()  # the peer does not answer from here on
    moved = moving("r", ONE, timeout=100)
threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
try:
    if call == "next_arrival":
        here.next_arrival(timeout=1000)
    if call == "connect":
        here.connect(address, timeout=1000)
    if call == "wait":
        moved.wait(timeout=1000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("call", ["next_arrival", "connect", "wait"])
def test_ctrl_c_ends_a_wait(call):
    process = pipe = None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if call == "wait":
            process, pipe, address = start_process()
        interrupted = subprocess.Popen(  # noqa: S603 # our own program
            [sys.executable, "-c", INTERRUPTED, call, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            },
        )
        with interrupted:
            watchdog = threading.Timer(100, interrupted.kill)
            watchdog.start()
            if process is not None:
                assert interrupted.stdout.readline() == "connected\n"
                stop(process.pid)
                interrupted.stdin.write("\n")
                interrupted.stdin.flush()
            assert interrupted.stdout.readline() == "interrupted\n"
            watchdog.cancel()
            interrupted.kill()
    if process is not None:
        process.kill()
        process.join()
        pipe.close()


ENDED = """
import sys, time
from transfer_endpoints import engine
_, here = engine(1)
print(here.listen("127.0.0.1:0"), flush=True)
input()
# From here on, other threads do not get the interpreter.
sys.setswitchinterval(1000)
print("ending", flush=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
"""


def test_a_process_ends_while_peers_connect():
    """It hung: its end waited for a handshake, and that for the interpreter, which had ended."""
    _, local = engine(2)
    ending = subprocess.Popen(  # noqa: S603 # our own program
        [sys.executable, "-c", ENDED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    with ending:
        watchdog = threading.Timer(60, ending.kill)
        watchdog.start()
        address = ending.stdout.readline().strip()
        ending.stdin.write("\n")
        ending.stdin.flush()
        assert ending.stdout.readline().strip() == "ending"
        with contextlib.suppress(CascadeError):
            local.connect(address, timeout=5)
        assert ending.wait() == 0
        watchdog.cancel()

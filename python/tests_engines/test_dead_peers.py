"""Nothing is kept for an engine that was killed.

Two threads stayed for each prefill or decode engine that had been there, up to 64 of them.
"""

import multiprocessing
import os
import signal
import threading
import time

import pytest
from cascadekv.connectors.vllm import peer_workers
from cascadekv.connectors.vllm.metadata import Load
from cascadekv.connectors.vllm.offers import (
    Computed,
    Offer,
    Opened,
    PullPlan,
    PushPlan,
    PushSource,
    TransferPlan,
)
from cascadekv.connectors.vllm.running_load import RunningLoad
from scheduled_engine import LIMIT_S
from transfer_pages import Pages

OPENED = TransferPlan(opened=[Opened("r", 0, 9, "x", "of the prompt", 8)])


def serve(pipe, source):
    """Be another engine: push to it from `source`, an address, or offer a request to be read."""
    with Pages(1, 64, 2, 12).open() as transfers:
        if source is None:
            transfers.apply(OPENED)
            transfers.apply(TransferPlan(ended=[("r", 100.0)]))
        else:
            plan = PushPlan(PushSource([(source, "")], "x"), "of the prompt", 8, 1, LIMIT_S)
            load = load_of([2, 3])
            load.push = plan
            result = transfers.expect(RunningLoad(load)).result(LIMIT_S)
            assert result.bad == []
        pipe.send((transfers.address, transfers.id))
        pipe.recv()


@pytest.fixture
def peer(monkeypatch):
    """Return a function that starts another engine; it returns its process and its address."""
    monkeypatch.setattr(peer_workers, "LOST_S", 0.2)
    context, running = multiprocessing.get_context("spawn"), []

    def start(source=None):
        own, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, source), daemon=True)
        process.start()
        running.append((process, own))
        assert own.poll(LIMIT_S)
        return process, own.recv()

    yield start
    for process, _ in running:
        process.kill()
        process.join()


def load_of(pages, pull=None):
    return Load("r", is_async=True, first=0, keys={}, blocks={0: pages}, tier="peers", pull=pull)


def threads(name):
    return [it for it in threading.enumerate() if it.name.startswith(f"cascade-{name}")]


def test_threads_for_a_killed_prefill_engine_end(peer, eventually):
    process, address = peer()
    offer = Offer("e", "r", [address], [[4, 5]], 8, 0, 9, 30.0, "")
    with Pages(1, 64, 2, 12).open() as target:

        def pull():
            running = RunningLoad(load_of([2, 3], PullPlan(offer, 1)))
            return target.pull(running, time.monotonic() + LIMIT_S).result(LIMIT_S)

        assert pull().bad == []
        assert threads("pull")
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: not threads("pull"))
        # Another request of it is computed at once, and its thread ends, too.
        assert pull().bad == [0, 1]
        eventually(lambda: not threads("pull"))


def test_threads_for_a_killed_decode_engine_end(peer, eventually):
    with Pages(1, 64, 2, 12).open() as source:
        source.apply(OPENED)
        source.apply(TransferPlan(computed=[Computed("r", 0, 8, {0: [4, 5]})]))
        source.end_step(["r"], [])
        process, _ = peer(source.address)
        assert threads("push")
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: not threads("push"))


@pytest.mark.parametrize("end", ["close", "abort"])
def test_threads_that_are_found_lost_while_they_are_closed(end):
    """Regression: an engine that ended after ten idle seconds could log an exception."""
    threads = peer_workers.PeerThreads([], 1, "test")
    assert threads.submit(lambda: 7).result(LIMIT_S) == 7
    getattr(threads, end)()
    threads.close_later()

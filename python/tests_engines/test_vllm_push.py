"""A prefill engine writes into the pages of a decode engine: right answers, whatever happens.

Both engines are vLLM's own scheduler with both sides of the connector, in one process. Requests
have the `kv_transfer_params` of llm-d's router, which sends them to both engines at once.
"""

import json
import random
import threading
import time

import pytest
import torch
from cascadekv.connectors.vllm.announcements import Announcement, Written, message
from cascadekv.connectors.vllm.decode_worker import DecodeWorker
from cascadekv.connectors.vllm.offers import OfferError, PushSource
from network import Network, eventually
from push_engines import (
    both,
    expected,
    finish,
    pages_of,
    push,
    reach_through,
    run_until,
    transfers,
    waiting,
)
from scheduled_engine import BLOCK, LAYERS, LIMIT_S, answer_of
from transfer_engines import (
    end_leases,
    leases_of,
    prefill,
    prompt,
    pulled,
    reuse_pages,
    step_until,
    step_until_idle,
)

pytest_plugins = ["transfer_engines"]


@pytest.fixture
def start(start_scheduled):
    """Return a function that starts engines."""
    return start_scheduled


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "tokens", [BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 9 * BLOCK + 5]
)
def test_a_prompt_is_written_by_the_prefill_engine(start, tokens, cached, decode_first):
    source, target = start(has_prefix_cache=cached), start(has_prefix_cache=cached)
    asked = prompt(tokens, "pushed")
    name = push(source, target, asked, decode_first=decode_first)
    assert target.facts.answers[name] == answer_of(asked, 6)
    assert pulled(target) == -(-tokens // BLOCK)
    assert target.facts.loads_failed == 0
    assert transfers(source).pushes == (1, 0)
    assert transfers(target).pushes == (0, 1)


def test_each_layer_arrives_before_the_next_one_is_computed(start):
    source, target = start(step_tokens=48), start()
    asked = prompt(9 * BLOCK + 5, "layers")
    to_prefill, to_decode = both(source)
    target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    (awaited,) = expected(target).values()
    total = -(-len(asked) // BLOCK)
    steps = []
    computed = source.worker.save_kv_layer

    def wait_for_arrival(layer, *arguments):
        computed(layer, *arguments)
        number = LAYERS.index(layer)
        if number == 0:
            steps.append(0)
        done = min(len(asked), 48 * len(steps))
        units = total if done == len(asked) else done // BLOCK

        def has_arrived():
            left = [awaited.left.get(key) for key in sorted(awaited.left)]
            arrived = [total] * (len(LAYERS) - len(left)) + [first for first, _ in left]
            return arrived[number] == units if len(left) == len(LAYERS) else number < 4

        end = time.monotonic() + LIMIT_S
        while awaited.left and not has_arrived():
            assert time.monotonic() < end, (layer, steps, awaited.left)
            time.sleep(0.001)

    source.worker.save_kv_layer = wait_for_arrival
    name = source.add(asked, new=1, hints=to_prefill)
    step_until(source, lambda: name in source.facts.finished)
    assert len(steps) == 4
    target.run()
    finish(source, target)
    assert pulled(target) == 10


def test_many_pushes_at_once(start):
    source, target = start(pages=256), start(pages=256)
    chance = random.Random(5)
    asked = [prompt(3 * BLOCK + at, "many", at) for at in range(16)]
    for number, each in enumerate(asked):
        to_prefill, to_decode = both(source, number)
        adds = [
            lambda each=each, params=to_decode: target.add(each, new=4, hints=params),
            lambda each=each, params=to_prefill: source.add(each, new=1, hints=params),
        ]
        chance.shuffle(adds)
        for add in adds:
            add()
            (target if chance.random() < 0.5 else source).step()
    finish(source, target)
    assert pulled(target) == sum(-(-len(each) // BLOCK) for each in asked)


def test_a_push_after_a_hit_in_the_decode_engines_cache(start):
    """Only the blocks that the decode engine lacks are written."""
    source, target = start(has_prefix_cache=True), start(has_prefix_cache=True)
    shared = prompt(4 * BLOCK, "shared")
    target.ask([*shared, 1, 2, 3])
    asked = [*shared, *prompt(3 * BLOCK + 3, "own")]
    push(source, target, asked)
    assert pulled(target) == 4


def test_vllms_proxy_for_push(start):
    """It waits for the prefill, and leaves out the pages and the connector's own part."""
    source, target = start(), start()
    asked = prompt(5 * BLOCK + 1, "toy push proxy")
    answer = prefill(source, asked)
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
    params = {name: answer[name] for name in names}
    target.add(asked, hints={"do_remote_prefill": True, "do_remote_decode": False, **params})
    finish(source, target)
    assert pulled(target) == 6


# What ends a push early.


def test_a_decode_that_is_aborted_while_it_waits(start):
    """An aborted push left its pages taken until the engine had none left (vLLM 46283).

    They come back as soon as nothing can be written into them, without a prefill engine.
    """
    source, target = start({"cascade.transfer_lease": 3600}), start()
    asked = prompt(6 * BLOCK, "aborted")
    to_prefill, to_decode = both(source)
    name = target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    target.abort(name)
    finish(target)
    step_until(source, lambda: next(iter(waiting(source).values())).is_stopped)
    # The decode engine does not wait any more: the prefill engine frees the pages at once.
    source.add(asked, new=1, hints=to_prefill)
    finish(source, target)
    assert transfers(source).pushes == (0, 0)


def test_pages_of_an_aborted_decode_are_not_written_any_more(start, monkeypatch):
    """A write that begins after the abort is refused, whatever the prefill engine knows."""
    source, target = start(), start()
    asked = prompt(6 * BLOCK, "late")
    to_prefill, to_decode = both(source)
    begins, goes_on = threading.Event(), threading.Event()
    write = DecodeWorker.write

    def write_late(worker, *arguments):
        begins.set()
        assert goes_on.wait(LIMIT_S)
        write(worker, *arguments)

    monkeypatch.setattr(DecodeWorker, "write", write_late)
    monkeypatch.setattr(
        type(transfers(source)._pushes),  # noqa: SLF001
        "withdraw",
        lambda _pushes, _number: None,
    )
    name = target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    source.add(asked, new=1, hints=to_prefill)
    step_until(source, begins.is_set)
    target.abort(name)
    finish(target)
    others = [prompt(6 * BLOCK, "other", at) for at in range(8)]
    names = [target.add(each, new=4) for each in others]
    target.step()
    # Nobody told the prefill engine. Its writes go into pages that are others' now.
    goes_on.set()
    run_until((source, target), lambda: all(each in target.facts.finished for each in names))
    end_leases(source)
    finish(source, target)
    assert transfers(target).pushes == (0, 0)


def test_an_aborted_decode_waits_for_a_write_that_has_begun(start, monkeypatch, transfer_token):
    """Half of a frame has arrived: its pages are free when the rest can not come any more."""
    _, token = transfer_token
    source, target = start(token), start(token)
    asked = prompt(6 * BLOCK, "begun")
    to_prefill, to_decode = both(source)
    write = DecodeWorker.write
    pool = target.scheduler.kv_cache_manager.block_pool
    with Network(transfers(target).address) as network:
        reach_through(target, network)

        def write_half(*arguments):
            if not network.is_frozen:
                network.freeze(after=5000)
            write(*arguments)

        monkeypatch.setattr(DecodeWorker, "write", write_half)
        pages = pages_of(target)
        before = pages.clone()
        name = target.add(asked, hints=to_decode)
        step_until(target, lambda: bool(waiting(source)))
        source.add(asked, new=1, hints=to_prefill)
        step_until(source, lambda: network.is_frozen)
        # The network has let it pass. The target's thread may not have received it yet.
        eventually(lambda: not torch.equal(pages, before))
        target.abort(name)
        for _ in range(200):
            target.step()
        assert pool.get_num_free_blocks() < pool.num_gpu_blocks - 1
        network.cut()
        finish(target)
    end_leases(source)
    finish(source)


def test_a_prefill_that_is_aborted(start):
    source, target = start(step_tokens=32), start()
    asked = prompt(6 * BLOCK, "aborted prefill")
    to_prefill, to_decode = both(source)
    decode = target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    name = source.add(asked, new=1, hints=to_prefill)
    source.step()
    source.step()
    source.abort(name)
    run_until((source, target), lambda: decode in target.facts.finished)
    finish(source, target)
    assert target.facts.loads_failed == 6


def test_pages_of_an_aborted_prefill_are_not_read_any_more(start, monkeypatch):
    """The engine uses them in the next step: what is then written would be another prompt's."""
    source, target = start(step_tokens=32), start()
    asked = prompt(6 * BLOCK, "read late")
    to_prefill, to_decode = both(source)
    write, reads = DecodeWorker.write, []

    def write_slowly(*arguments):
        time.sleep(0.02)
        reads.append(arguments)
        write(*arguments)

    monkeypatch.setattr(DecodeWorker, "write", write_slowly)
    decode = target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    name = source.add(asked, new=1, hints=to_prefill)
    # Two of its six blocks.
    source.step()
    eventually(lambda: bool(reads))
    source.abort(name)
    source.step()
    before = len(reads)
    reuse_pages(source)
    assert len(reads) == before
    run_until((source, target), lambda: decode in target.facts.finished)
    finish(source, target)


def test_a_prefill_that_loses_its_pages_to_another_request(start):
    """A preempted prefill is computed again in other pages; the decode engine computes too."""
    source, target = start(pages=12, step_tokens=64), start()
    first = source.add(prompt(4 * BLOCK, "first"), new=5 * BLOCK)
    asked = prompt(6 * BLOCK, "preempted")
    to_prefill, to_decode = both(source)
    target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    source.step()
    # Long enough to be preempted.
    source.add(asked, new=2 * BLOCK, hints=to_prefill)
    step_until(source, lambda: source.facts.preemptions > 0 or first in source.facts.finished)
    end = time.monotonic() + LIMIT_S
    while source.scheduler.has_requests() or target.scheduler.has_requests():
        assert time.monotonic() < end
        source.step()
        target.step()
        for lease in leases_of(source)._by_request.values():  # noqa: SLF001
            if lease.expires is not None:
                lease.expires = 0.0
    assert source.facts.preemptions
    finish(source, target)


def test_a_lease_that_ends_ends_its_push(start, monkeypatch):
    """Pages are not read after their lease: the write in flight is waited for or cut."""
    source, target = start(), start()
    asked = prompt(6 * BLOCK, "lease ends")
    to_prefill, to_decode = both(source)
    begins, goes_on = threading.Event(), threading.Event()
    write = DecodeWorker.write

    def write_late(worker, *arguments):
        begins.set()
        assert goes_on.wait(LIMIT_S)
        write(worker, *arguments)

    monkeypatch.setattr(DecodeWorker, "write", write_late)
    decode = target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    name = source.add(asked, new=1, hints=to_prefill)
    step_until(source, lambda: begins.is_set() and name in source.facts.finished)
    source.step()
    for lease in leases_of(source)._by_request.values():  # noqa: SLF001
        lease.expires = 0.0
    threading.Timer(0.5, goes_on.set).start()
    # Returns only when the write is over.
    source.step()
    assert goes_on.is_set()
    run_until((source, target), lambda: decode in target.facts.finished)
    finish(source, target)
    assert target.facts.loads_failed == 6


def test_a_prefill_that_never_comes(start):
    """A request whose prefill never came was pending for ever (vLLM 49829)."""
    source, target = start(), start({"cascade.transfer_lease": 4})
    _, to_decode = both(source)
    asked = prompt(4 * BLOCK, "never")
    target.add(asked, hints=to_decode)
    finish(target)
    assert target.facts.loads_failed == 4
    step_until(source, lambda: not waiting(source) or not source.scheduler.has_requests())


def test_a_prefill_engine_that_is_gone(start):
    source, target = start(), start()
    asked = [prompt(4 * BLOCK, "gone", at) for at in range(2)]
    _, to_decode = both(source)
    target.add(asked[0], hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    transfers(source).close()
    # At once, not at the deadline of 30 s.
    began = time.monotonic()
    finish(target)
    target.add(asked[1], hints=to_decode)
    finish(target)
    assert time.monotonic() - began < 25
    assert target.facts.loads_failed == 8


def test_a_decode_engine_that_is_gone(start):
    """The prefill engine is not held up, and its pages come back with the lease."""
    source, target = start(step_tokens=32), start()
    asked = prompt(6 * BLOCK, "decode gone")
    to_prefill, to_decode = both(source)
    target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    name = source.add(asked, new=1, hints=to_prefill)
    source.step()
    target.worker.shutdown()
    step_until(source, lambda: name in source.facts.finished)
    step_until_idle(source)


REFUSED = {
    "another prompt": lambda asked: [*asked[:-1], asked[-1] + 1],
    "too short": lambda asked: asked[: BLOCK - 1],
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("decode_first", [True, False])
def test_a_push_that_is_refused_is_computed_at_once(start, kind, decode_first):
    source, target = start(), start()
    asked = prompt(4 * BLOCK, "refused")
    to_prefill, to_decode = both(source)
    began = time.monotonic()
    if decode_first:
        target.add(asked, hints=to_decode)
        step_until(target, lambda: bool(waiting(source)))
    name = source.add(REFUSED[kind](asked), new=1, hints=to_prefill)
    step_until(source, lambda: name in source.facts.finished)
    if not decode_first:
        target.add(asked, hints=to_decode)
    run_until((source, target), lambda: not target.scheduler.has_requests())
    assert time.monotonic() - began < 25
    end_leases(source)
    finish(source, target)
    assert target.facts.loads_failed == 4


def test_what_does_not_name_a_prefill_engine_is_no_push():
    good = {"transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": 7400, "tp_size": 2}
    source = PushSource.parse(good)
    assert source == PushSource([("127.0.0.1:7400", ""), ("127.0.0.1:7401", "")], "x")
    assert PushSource.parse({**good, "remote_host": "::1"}).workers[0][0] == "[::1]:7400"
    ports = [address for address, _ in PushSource.parse({**good, "pp_size": 2.0}).workers]
    assert ports == [f"127.0.0.1:{port}" for port in range(7400, 7404)]
    for no_push in (
        {"transfer_mode": "pull"},
        {"cascade": {}},
        {"remote_block_ids": [[1]]},
        {"transfer_id": None},
        {"transfer_id": 7},
        {"remote_host": None},
        {"remote_host": ""},
        {"remote_port": None},
    ):
        assert PushSource.parse({**good, **no_push}) is None, no_push
    for wrong in (
        {"remote_port": "many"},
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_port": float("inf")},
        {"tp_size": 2000},
        {"tp_size": -1},
        {"pp_size": "many"},
        {"pp_size": -1},
        {"pp_size": 600},
        {"transfer_id": "x" * 1000},
    ):
        with pytest.raises(OfferError):
            PushSource.parse({**good, **wrong})


def test_messages_that_make_no_sense_change_nothing(start):
    engine = start()
    own = transfers(engine)
    good = json.loads(
        Announcement(1, "x", "p", 4, "127.0.0.1:1", "00", 0, 1, 9, 8, 10, 5.0).to_message()
    )
    for notice in (
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'["announce"]',
        b'["announce", 1, []]',
        b'["announce", 2, {}]',
        b'["layer", 1, [1]]',
        b'["layer", 2, [1, "p", 0, 0, 1]]',
        b'["refuse", 1, []]',
        b'["withdraw", 1, ["x"]]',
        b'["withdraw", 1, [1e999]]',
        b"[" * 4000,
        json.dumps(["announce", 1, {**good[2], "rank": 1}]).encode(),
        json.dumps(["announce", 1, {**good[2], "list_bytes": 1 << 40}]).encode(),
        json.dumps(["announce", 1, {**good[2], "seconds": "x"}]).encode(),
        Written(7, "part", 0, 0, 1).to_message(),
        message("refuse", 7),
        message("withdraw", 7),
    ):
        own._apply_message(notice)  # noqa: SLF001
    assert waiting(engine) == {}
    engine.ask(prompt(3 * BLOCK, "still works"))

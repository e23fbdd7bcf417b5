"""What went wrong in other connectors that move KV between engines, each as a test here.

Every test says what happened, what it cost, and what stops it here. An aborted push, a prefill
that never comes and a preempted one are in `test_vllm_push.py`.
"""

import contextlib
import random
import threading
import time

import numpy as np
import pytest
from cascadekv.connectors.vllm.leases import RENEW, LeaseTable, lease_notice
from cascadekv.connectors.vllm.metadata import Load
from cascadekv.connectors.vllm.offers import Offer, Opened, PullPlan, TransferPlan
from cascadekv.connectors.vllm.prefill_engine import PrefillEngine
from cascadekv.connectors.vllm.running_load import RunningLoad
from network import Network
from push_engines import both, finish, run_until, transfers, waiting
from scheduled_engine import BLOCK, LIMIT_S, content, states
from sealed_offers import with_own
from transfer_engines import (
    decode,
    end_leases,
    leases_of,
    prefill,
    prompt,
    pulled,
    reuse_pages,
    step_until,
    step_until_idle,
)
from transfer_pages import transfers_of
from vllm_caches import BLOCK_TOKENS, Model, workers_of

pytest_plugins = ["transfer_engines"]


@pytest.fixture
def start(start_scheduled):
    """Return a function that starts engines."""
    return start_scheduled


def test_a_heartbeat_renews_the_lease(start):
    """NIXL's heartbeats renewed nothing (vLLM 53095): pages of waiting requests were freed.

    Requests that waited longer than the lease failed. Here the lease of a request that waits is
    about to end, and is seen to last again.
    """
    source, target = start({"cascade.transfer_lease": 4}), start(pages=16)
    asked = prompt(6 * BLOCK, "renewed")
    params = prefill(source, asked)
    (lease,) = leases_of(source)._by_request.values()  # noqa: SLF001
    blocker = target.add(prompt(10 * BLOCK, "blocks"), new=4 * BLOCK)
    target.step()
    target.add(asked, hints=params)
    for _ in range(2):
        soon = lease.expires = time.monotonic() + 2
        while lease.expires == soon:
            assert blocker not in target.facts.finished
            # The steps of an engine with a model take time.
            time.sleep(0.04)
            target.step()
        assert lease.expires > soon + 1
    target.run()
    target.check()
    assert pulled(target) == 6
    step_until_idle(source)


def test_a_renewed_lease_does_not_keep_others_open():
    """A reaper looked at the oldest lease only (vLLM 58222).

    While that one was renewed, the pages of all others stayed taken. Here leases end in any order.
    """
    table = LeaseTable()
    names = [f"r{number}" for number in range(20)]
    opened = [Opened(name, slot, 100 + slot) for slot, name in enumerate(names)]
    table.apply(TransferPlan(opened=opened, ended=[(name, 1000.0) for name in names]))
    chance = random.Random(8)
    chance.shuffle(names)
    for name in names[:-1]:
        table.receive(lease_notice(RENEW, 100 + int(names[-1][1:])))
        table._by_request[name].expires = 0.0  # noqa: SLF001 # as if the time had passed
        assert table.take_ended() == {name}
    assert set(table.open_leases()) == {names[-1]}


def test_freed_pages_are_not_read_with_success(start, monkeypatch):
    """Pages were read after they were freed, with status 200 (aws-do-eks 84): 8 of 42 requests.

    Their answers were those of other prompts. Here leases end and pages are used again at random
    moments of 42 reads.
    """
    source, target = start(), start()
    chance = random.Random(42)
    read = PrefillEngine._read_pages  # noqa: SLF001 # the moment between pages and lease

    def read_then_maybe_reuse(engine, *arguments):
        moment = chance.choice(["before", "after", "never"])
        if moment == "before":
            end_leases(source)
            reuse_pages(source, number)
        sources = read(engine, *arguments)
        if moment == "after":
            end_leases(source)
            reuse_pages(source, number)
        moments.append(moment)
        return sources

    monkeypatch.setattr(PrefillEngine, "_read_pages", read_then_maybe_reuse)
    moments = []
    for number in range(42):
        asked = prompt(chance.randrange(2 * BLOCK, 6 * BLOCK), "freed", number)
        # Raises if an answer is wrong.
        decode(target, asked, prefill(source, asked))
        step_until_idle(source)
    assert set(moments) == {"before", "after", "never"}


@pytest.mark.parametrize("way", ["pull", "push"])
def test_several_outputs_of_a_request(start, way):
    """Requests with n > 1 leaked their pages in the prefill engine (vLLM, PR 43509).

    The engine makes a request of each output, all with the same parameters. All answers are right,
    and all pages come back.
    """
    source, target = start({"cascade.transfer_lease": 3600}, pages=128), start(pages=128)
    asked = prompt(4 * BLOCK + 3, "several", way)
    if way == "pull":
        params = prefill(source, asked)
        for _ in range(3):
            target.add(asked, hints=params)
    else:
        to_prefill, to_decode = both(source)
        for _ in range(3):
            target.add(asked, hints=to_decode)
        step_until(target, lambda: len(waiting(source)) == 3)
        for _ in range(3):
            source.add(asked, new=1, hints=to_prefill)
    run_until((source, target), lambda: not target.scheduler.has_requests())
    finish(source, target)
    assert pulled(target) >= 5


def test_notices_come_after_the_bytes(start, monkeypatch):
    """A notice overtook its data (vLLM, PR 43509): the decode used pages that had not arrived.

    Here the bytes are compared in the moment of each notice.
    """
    source, target = start(step_tokens=32), start()
    asked = prompt(7 * BLOCK + 5, "notice")
    right = content(states(asked))
    arrivals = transfers(target)._arrivals  # noqa: SLF001
    receive, compared = arrivals.receive, []

    def compare(written):
        (load,) = [each.running.load for each in arrivals._expected.values()]  # noqa: SLF001
        own = target._kv[written.layer]  # noqa: SLF001
        for unit in range(written.first, written.end):
            at = unit * BLOCK
            want = right[written.layer][:, at : at + BLOCK]
            page = load.blocks[0][unit]
            assert np.array_equal(own[page][:, : want.shape[1]], want), written
            compared.append((written.layer, unit))
        receive(written)

    monkeypatch.setattr(arrivals, "receive", compare)
    to_prefill, to_decode = both(source)
    target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    source.add(asked, new=1, hints=to_prefill)
    finish(source, target)
    assert sorted(compared) == [(layer, unit) for layer in range(4) for unit in range(8)]


@pytest.mark.parametrize("stage", ["connect", "pages"])
def test_a_read_that_neither_ends_nor_fails(start, stage, transfer_token):
    """A fetch from a prefill engine that stopped answering hung for 30 s (vLLM 49820).

    Here the network drops everything before or during the read; `cascade.load_timeout` ends it.
    """
    key, token = transfer_token
    source, target = start(token), start({**token, "cascade.load_timeout": 2})
    asked = prompt(6 * BLOCK, "hangs", stage)
    params = prefill(source, asked)
    _, identity = params["cascade"]["workers"][0]
    with Network(transfers(source).address) as network:
        through = with_own(params, key=key, workers=[[network.address, identity]])
        if stage == "connect":
            network.freeze()
        else:
            warm = prompt(3 * BLOCK, "warm")
            own = prefill(source, warm)
            own = with_own(own, key=key, workers=[[network.address, identity]])
            decode(target, warm, own)
            network.freeze()
        loads = pulled(target)
        decode(target, asked, through)
        assert target.facts.loads_failed == 6
        assert loads == (0 if stage == "connect" else 3)
    end_leases(source)


@pytest.mark.parametrize("taken", [2, 4])
def test_a_dead_peer_is_noticed_by_every_rank(taken, transfer_token):
    """Only one rank knew that the peer was dead (vLLM 56828); the others waited 36 to 43 s.

    The engine waits for the slowest rank. Here each rank has connections of its own.
    """
    model, token = Model(), transfer_token[0]
    with contextlib.ExitStack() as stack:
        (worker,) = workers_of(model, 1, shards=taken)
        source = stack.enter_context(contextlib.closing(transfers_of(worker, 1, token)))
        source.apply(TransferPlan(opened=[Opened("r", 0, 9)], ended=[("r", 100.0)]))
        with Network(source.address) as network:
            offer = Offer(
                "e", "r", [(network.address, source.id)], [[4]], BLOCK_TOKENS, 0, 9, 30.0, ""
            )
            ranks = [
                stack.enter_context(contextlib.closing(transfers_of(each, taken, token)))
                for each in workers_of(model, taken, shards=taken, is_filled=False)
            ]
            loads = [
                Load("r", is_async=True, first=0, keys={}, blocks={0: [2]}, tier="peers")
                for _ in ranks
            ]
            for load in loads:
                load.pull = PullPlan(offer, taken)

            def pull_all():
                deadline = time.monotonic() + LIMIT_S
                results = [
                    rank.pull(RunningLoad(load), deadline)
                    for rank, load in zip(ranks, loads, strict=True)
                ]
                return [bool(each.result(LIMIT_S).bad) for each in results]

            assert pull_all() == [False] * taken
            source.apply(TransferPlan(opened=[Opened("s", 1, 9)], ended=[("s", 100.0)]))
            network.cut()
            began = time.monotonic()
            assert pull_all() == [True] * taken
            assert time.monotonic() - began < 30


def test_a_process_that_does_not_answer_delays_no_step(start):
    """Heartbeats and lookups were answered between steps (vLLM PR 57165): 2.5 s for 0.1 s of data.

    Here threads of their own answer. The engine takes no step while another one reads.
    """
    source, target = start(), start()
    asked = prompt(6 * BLOCK, "no steps")
    params = prefill(source, asked)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (decode(target, asked, params), done.set()))
    thread.start()
    thread.join(LIMIT_S)
    assert done.is_set()
    assert pulled(target) == 6
    step_until_idle(source)

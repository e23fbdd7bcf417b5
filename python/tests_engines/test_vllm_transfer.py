"""Prefill in one engine and decode in another: right answers, whatever happens to the pages.

Both engines are vLLM's own scheduler with both sides of the connector, in one process. Requests
have the `kv_transfer_params` of vLLM's example proxy, which passes a prefill's to the decode
engine unchanged.
"""

import contextlib
import json
import random
import socket
import threading
import time

import numpy as np
import pytest
from cascadekv.connectors.vllm.leases import LeaseTable, lease_notice
from cascadekv.connectors.vllm.metadata import Load
from cascadekv.connectors.vllm.offers import Offer, Opened, PullPlan, TransferPlan
from cascadekv.connectors.vllm.prefill_engine import PrefillEngine
from cascadekv.connectors.vllm.running_load import RunningLoad
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError, PartPages
from scheduled_engine import BLOCK, LIMIT_S, answer_of
from sealed_offers import sealed, with_own
from transfer_engines import (
    TO_PREFILL,
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
from transfer_pages import Pages, transfers_of
from vllm_caches import BLOCK_TOKENS, Model, workers_of

pytest_plugins = ["transfer_engines"]


@pytest.fixture
def start(start_scheduled):
    """Return a function that starts engines."""
    return start_scheduled


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "tokens", [BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 9 * BLOCK + 5]
)
def test_a_prompt_is_computed_once(start, tokens, cached):
    source, target = start(has_prefix_cache=cached), start(has_prefix_cache=cached)
    asked = prompt(tokens, "once")
    params = prefill(source, asked)
    assert params["do_remote_prefill"] is True
    assert params["remote_num_tokens"] == tokens
    name = decode(target, asked, params)
    assert target.facts.answers[name] == answer_of(asked, 6)
    assert pulled(target) == -(-tokens // BLOCK)
    assert target.facts.loads_failed == 0
    # Only the prompt's last token is computed again.
    assert target.facts.finished
    step_until_idle(source)


def test_a_proxy_that_makes_all_numbers_floating_point(start):
    """As llm-d's sidecar, which is written in Go."""
    source, target = start(), start()
    asked = prompt(3 * BLOCK + 1, "floats")
    params = json.loads(json.dumps(prefill(source, asked)), parse_int=float)
    decode(target, asked, params)
    assert pulled(target) == 4
    step_until_idle(source)


def test_a_prompt_shorter_than_a_block_is_computed_again(start):
    source, target = start(), start()
    asked = prompt(BLOCK - 1, "short")
    params = prefill(source, asked)
    assert params["do_remote_prefill"] is False
    assert params["remote_block_ids"] == []
    step_until_idle(source)
    decode(target, asked, params)
    assert pulled(target) == 0


def test_an_engine_without_transfers_answers_too(start):
    """Some routers refuse a response without parameters."""
    source, target = start({"cascade.transfer": "off"}), start()
    asked = prompt(3 * BLOCK, "off")
    params = prefill(source, asked)
    step_until_idle(source)
    decode(target, asked, params)
    assert pulled(target) == 0


def test_many_requests_at_once(start):
    source, target = start(pages=256), start(pages=256)
    asked = [prompt(3 * BLOCK + at, "many", at) for at in range(24)]
    offers = [prefill(source, each) for each in asked]
    names = [
        target.add(each, new=4, hints=offer) for each, offer in zip(asked, offers, strict=True)
    ]
    target.run()
    target.check()
    assert len(names) == len(asked)
    assert pulled(target) == sum(-(-len(each) // BLOCK) for each in asked)
    step_until_idle(source)


def test_pages_whose_lease_has_ended_are_not_used(start):
    source, target = start(), start()
    asked = prompt(5 * BLOCK + 2, "ended")
    params = prefill(source, asked)
    end_leases(source)
    reuse_pages(source)
    decode(target, asked, params)
    assert target.facts.loads_failed == 6


def test_pages_that_are_reused_during_the_read_are_not_used(start, monkeypatch):
    source, target = start(), start()
    asked = prompt(5 * BLOCK + 2, "during")
    params = prefill(source, asked)
    read = PrefillEngine._read_pages  # noqa: SLF001 # the moment between pages and lease

    def read_then_reuse(engine, *arguments):
        end_leases(source)
        reuse_pages(source)
        return read(engine, *arguments)

    monkeypatch.setattr(PrefillEngine, "_read_pages", read_then_reuse)
    decode(target, asked, params)
    assert target.facts.loads_failed == 6


def test_a_prefill_engine_that_is_gone(start):
    source, target = start(), start()
    asked = [prompt(4 * BLOCK, "gone", at) for at in range(3)]
    offers = [prefill(source, each) for each in asked]
    decode(target, asked[0], offers[0])
    source.worker.shutdown()
    decode(target, asked[1], offers[1])
    decode(target, asked[2], offers[2])
    assert target.facts.loads_failed == 8


def test_a_prefill_engine_that_is_silent_delays_no_other(start):
    source, target = start(), start()
    asked = [prompt(4 * BLOCK, "silent", at) for at in range(2)]
    silent, good = [prefill(source, each) for each in asked]
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, identity = silent["cascade"]["workers"][0]
        address = f"127.0.0.1:{server.getsockname()[1]}"
        names = [
            target.add(asked[0], hints=with_own(silent, workers=[[address, identity]])),
            target.add(asked[1], hints=good),
        ]
        step_until(target, lambda: names[1] in target.facts.finished)
        assert names[0] not in target.facts.finished
        target.run()
    target.check()
    assert target.facts.loads_failed == 4


def test_another_engine_at_the_address_is_not_read(start):
    source, other, target = start(), start(), start()
    asked = prompt(4 * BLOCK, "another")
    params = prefill(source, asked)
    address = other.worker._worker._transfers.address  # noqa: SLF001
    _, identity = params["cascade"]["workers"][0]
    decode(target, asked, with_own(params, workers=[[address, identity]]))
    assert target.facts.loads_failed == 4


@pytest.mark.parametrize("more", [0, 1, -1])
def test_an_offer_for_another_prompt_is_given_back(start, more):
    """Pages for a prompt of another length stayed taken for the whole lease."""
    source, target = start(), start()
    params = prefill(source, prompt(4 * BLOCK, "one"))
    decode(target, prompt(4 * BLOCK + more, "two"), params)
    assert pulled(target) == 0
    step_until_idle(source)


WRONG = [
    lambda params: {**params, "remote_block_ids": [[99999] * 5]},
    lambda params: {**params, "remote_block_ids": [[-1] * 5]},
    lambda params: {**params, "remote_block_ids": [[1, 2]]},
    lambda params: {**params, "remote_block_ids": []},
    lambda params: {**params, "remote_block_ids": None},
    lambda params: {**params, "remote_num_tokens": "many"},
    lambda params: {**params, "cascade": None},
    lambda params: {key: value for key, value in params.items() if key != "cascade"},
    lambda params: with_own(params, version=2),
    lambda params: with_own(params, workers=[]),
    lambda params: with_own(params, workers=[["127.0.0.1:1", "00"]] * 2000),
    lambda params: {**params, "remote_block_ids": [[1] * 100]},
    lambda params: {**params, "remote_num_tokens": 7},
    lambda params: with_own(params, workers=[["nowhere", "00"]]),
    lambda params: with_own(params, slot=4096),
    lambda params: with_own(params, slot=-1),
    lambda params: with_own(params, slot=float("inf")),
    lambda params: with_own(params, lease="no number"),
    lambda params: with_own(params, lease=None),
    lambda params: with_own(params, lease="0"),
    lambda params: with_own(params, lease="7"),
]
"""Changes of an offer, none of which may be used."""


def test_an_offer_that_is_wrong_is_not_used(start):
    source, target = start(), start()
    for number, change in enumerate(WRONG):
        asked = prompt(5 * BLOCK - 3, "wrong", number)
        params = sealed(change(prefill(source, asked)))
        decode(target, asked, params)
        assert pulled(target) == 0, params
        end_leases(source)


def refuse_changed_pages(source, target, asked):
    """Change an offer to the pages of another request, which is refused; returns the right one."""
    victim = prefill(source, prompt(3 * BLOCK, "victim"))
    params = prefill(source, asked)
    decode(target, asked, {**params, "remote_block_ids": victim["remote_block_ids"]})
    assert pulled(target) == 0
    return params


def test_an_offer_must_have_the_seal_of_the_token(start, tmp_path):
    secret, others = tmp_path / "secret", tmp_path / "others"
    secret.write_text("0123456789abcdef\n")
    others.write_text("fedcba9876543210\n")
    own = {"cascade.transfer_token_file": str(secret), "cascade.transfer_lease": 60}
    source, target = start(own), start(own)
    stranger = start({"cascade.transfer_token_file": str(others)})
    asked = prompt(3 * BLOCK, "sealed")
    params = refuse_changed_pages(source, target, asked)
    decode(stranger, asked, params)
    assert pulled(stranger) == 0
    decode(target, asked, params)
    assert pulled(target) == 3
    end_leases(source)


def test_without_a_token_offers_have_the_seal_of_the_user(start):
    source, target = start(), start()
    asked = prompt(3 * BLOCK, "sealed by default")
    decode(target, asked, refuse_changed_pages(source, target, asked))
    assert pulled(target) == 3
    end_leases(source)


def test_pages_move_between_engines_with_certificates_of_one_authority(start, authority):
    def settings(name):
        directory = authority(name)
        files = ("certificate", "key", "authority")
        return {f"cascade.transfer_tls_{file}": str(directory / f"{file}.pem") for file in files}

    own = settings("ours")
    source, target = start(own), start(own)
    stranger, plain = start(settings("theirs")), start()
    asked = prompt(3 * BLOCK, "certified")
    params = prefill(source, asked)
    for refused in (stranger, plain):
        decode(refused, asked, params)
        assert pulled(refused) == 0
    decode(target, asked, params)
    assert pulled(target) == 3
    end_leases(source)


def test_without_a_token_other_hosts_are_not_read(start):
    source, target = start(), start()
    asked = prompt(3 * BLOCK, "hosts")
    params = prefill(source, asked)
    _, identity = params["cascade"]["workers"][0]
    decode(target, asked, with_own(params, workers=[["192.0.2.1:7", identity]]))
    assert target.facts.loads_failed == 3
    (reason,) = [
        worker._reason  # noqa: SLF001
        for engine in target.worker._worker._transfers._engines.values()  # noqa: SLF001
        for worker in engine._workers  # noqa: SLF001
    ]
    assert "cascade.transfer_token_file" in str(reason)
    end_leases(source)


def test_an_aborted_decode_gives_the_pages_back(start):
    source, target = start(), start(pages=16)
    asked = prompt(6 * BLOCK, "waits")
    params = prefill(source, asked)
    # It has to wait: the other request holds the pages.
    target.add(prompt(12 * BLOCK, "first"), new=8)
    target.step()
    waiting = target.add(asked, hints=params)
    target.step()
    target.abort(waiting)
    target.run()
    target.check()
    assert pulled(target) == 0
    step_until_idle(source)


def test_a_decode_that_is_aborted_while_it_reads(start, monkeypatch):
    source, target = start(), start()
    asked = prompt(6 * BLOCK, "reads")
    params = prefill(source, asked)
    reads, goes_on = threading.Event(), threading.Event()
    read = PrefillEngine.read

    def read_slowly(engine, *arguments):
        reads.set()
        assert goes_on.wait(LIMIT_S)
        read(engine, *arguments)

    monkeypatch.setattr(PrefillEngine, "read", read_slowly)
    name = target.add(asked, hints=params)
    step_until(target, reads.is_set)
    target.abort(name)
    target.step()
    # The pages stay the request's until nothing writes to them.
    assert target.has_loads_in_flight()
    goes_on.set()
    target.run()
    target.check()
    step_until_idle(source)


def test_a_decode_that_may_not_read_gives_the_pages_back_at_once(start):
    source, target = start(), start()
    asked = prompt(4 * BLOCK, "logprobs")
    name = target.add(asked, new=60, hints=prefill(source, asked))
    # As vLLM does for a request that wants the log probabilities of its prompt.
    target.scheduler.requests[name].skip_reading_prefix_cache = True
    target.step()
    target.step()
    step_until_idle(source)
    assert name not in target.facts.finished
    target.run()
    target.check()
    assert pulled(target) == 0


def test_an_aborted_prefill_offers_nothing(start):
    source = start(step_tokens=32)
    name = source.add(prompt(6 * BLOCK, "aborted"), new=1, hints=TO_PREFILL)
    source.step()
    source.abort(name)
    source.run()
    assert leases_of(source).open_leases() == {}
    assert not (source.facts.params.get(name) or {}).get("remote_block_ids")
    source.check()


def test_two_decodes_of_one_prefill(start):
    source, target = start(), start()
    asked = prompt(4 * BLOCK + 1, "twice")
    params = prefill(source, asked)
    target.add(asked, hints=params)
    target.add(asked, hints=params)
    target.run()
    target.check()
    step_until_idle(source)


def test_a_preempted_decode_does_not_read_again(start):
    source, target = start(), start(pages=12)
    asked = [prompt(4 * BLOCK, "preempted", at) for at in range(2)]
    for each in asked:
        target.add(each, new=4 * BLOCK, hints=prefill(source, each))
    target.run()
    target.check()
    assert target.facts.preemptions
    assert pulled(target) == 8
    step_until_idle(source)


def test_a_waiting_request_renews_its_lease(start):
    source, target = start({"cascade.transfer_lease": 4}), start(pages=16)
    asked = prompt(6 * BLOCK, "renewed")
    params = prefill(source, asked)
    (before,) = leases_of(source)._by_request.values()  # noqa: SLF001
    expires = before.expires
    blocker = target.add(prompt(10 * BLOCK, "blocks"), new=4 * BLOCK)
    target.step()
    target.add(asked, hints=params)
    step_until(target, lambda: before.expires != expires)
    assert blocker not in target.facts.finished
    target.run()
    target.check()
    assert pulled(target) == 6
    step_until_idle(source)


def test_leases_are_limited(start):
    source = start()
    free = source.connector._transfers._free  # noqa: SLF001
    del free[1:]
    one, two = prompt(2 * BLOCK, "one"), prompt(2 * BLOCK, "two")
    assert prefill(source, one) is not None
    assert prefill(source, two)["remote_block_ids"] == []
    end_leases(source)
    assert prefill(source, two) is not None
    end_leases(source)
    assert len(free) == 1


def test_the_way_over_a_node(start, serve):
    node = serve("--dram", "64MiB")
    way = {"cascade.transfer": "node", "cascade.node": f"unix:{node.socket}"}
    settings = {**way, "cascade.dram": None}
    source, target = start(settings), start(settings)
    asked = prompt(5 * BLOCK + 3, "node")
    params = prefill(source, asked)
    # Without delay: the blocks are in the node before the prefill answers.
    step_until_idle(source)
    assert params["do_remote_prefill"] is True
    decode(target, asked, params)
    assert target.take_figures()["labels"]["loaded_blocks"] == {"dram": 5}


def test_lease_messages():
    table = LeaseTable()
    table.apply(TransferPlan(opened=[Opened("request", 3, 77)]))
    assert table.memory[3] == 77
    table.receive(lease_notice("done", 77, rank=0, workers=2))
    table.apply(TransferPlan(ended=[("request", 1000.0)]))
    assert table.take_ended() == set()
    # The same worker twice, other leases, and what is no message change nothing.
    table.receive(lease_notice("done", 77, rank=0, workers=2))
    table.receive(lease_notice("done", 78, rank=1, workers=2))
    for message in (b"", b"[]", b"null", b"\xff", b'["done", 77, 2, 2]', b'["other", 77, 1, 2]'):
        table.receive(message)
    for message in (b'["done", 1e999, 0, 1]', b'["renew", 77, 0, 1e999]', b"[" * 4000):
        table.receive(message)
    assert table.take_ended() == set()
    assert table.memory[3] == 77
    table.receive(lease_notice("done", 77, rank=1, workers=2))
    assert table.take_ended() == {"request"}
    assert table.memory[3] == 0
    assert table.open_leases() == {}


def test_units_of_blocks_of_different_sizes():
    """Each unit here is read from the unit of the same tokens there."""
    chance = random.Random(7)
    for _ in range(300):
        own, other = chance.choice([1, 2, 3, 4]), chance.choice([1, 2, 3, 4])
        tokens = chance.randrange(1, 200)
        units = -(-tokens // 4)
        here = chance.sample(range(1, 300), -(-units // own))
        there = chance.sample(range(1, 300), -(-units // other))
        geometry, part = _geometry(own)
        offer = Offer("e", "r", [("a:1", "")], [there], tokens, 0, 1, 30.0, "")
        first = chance.randrange(len(here))
        load = Load(
            "r", is_async=True, first=first, keys={}, blocks={0: here[first:]}, tier="peers"
        )
        local, remote = geometry.page_lists(part, _geometry(other)[1], load, offer)
        wanted = range(first * own, units)
        assert local == [here[unit // own] * own + unit % own for unit in wanted]
        assert remote == [there[unit // other] * other + unit % other for unit in wanted]


def _geometry(pieces):
    part = PartPages("part", 0, ((0, 64, 64),), pieces, "all", ("layers.0",))
    return Geometry({}, 0, 1, 4 * pieces, 4, (part,)), part


@pytest.mark.parametrize("pieces", [2, 4])
def test_block_sizes_differ_in_bytes(pieces):
    """The bytes of a prompt arrive in the right units of an engine with larger blocks."""
    unit, layers, pages = 64, 2, 12
    small, large = Pages(1, unit, layers, pages * pieces), Pages(pieces, unit, layers, pages)
    small.memory.random_(0, 255)
    tokens = 4 * (2 * pieces + 1)
    here, there = [3, 1, 5], list(range(2, 2 + 2 * pieces + 1))
    with small.open() as source, large.open() as target:
        source.apply(TransferPlan(opened=[Opened("r", 0, 9)], ended=[("r", 100.0)]))
        workers = [(source.address, source.id)]
        offer = Offer("e", "r", workers, [there], tokens, 0, 9, 30.0, "")
        load = _load({0: here}, PullPlan(offer, 1))
        result = target.pull(RunningLoad(load), time.monotonic() + LIMIT_S).result(LIMIT_S)
        assert result.bad == []
        for layer in range(layers):
            for number, page in enumerate(there):
                at = here[number // pieces] * pieces + number % pieces
                assert large.unit(layer, at).equal(small.unit(layer, page))
        assert large.unit(0, here[-1] * pieces + 1).count_nonzero() == 0


def _load(blocks, pull):
    return Load("r", is_async=True, first=0, keys={}, blocks=blocks, tier="peers", pull=pull)


@pytest.mark.parametrize(("given", "taken"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (8, 1)])
@pytest.mark.parametrize("is_mla", [False, True])
def test_ranks_of_other_sizes(given, taken, is_mla):
    model = Model(is_mla=is_mla)
    shards = None if is_mla else max(given, taken)
    pages, there = [7, 2, 9], [4, 1, 11]
    with contextlib.ExitStack() as stack:
        sources = [
            stack.enter_context(contextlib.closing(transfers_of(each, given)))
            for each in workers_of(model, given, shards=shards)
        ]
        for each in sources:
            each.apply(TransferPlan(opened=[Opened("r", 0, 9)], ended=[("r", 100.0)]))
        addresses = [(each.address, each.id) for each in sources]
        offer = Offer("e", "r", addresses, [there], 3 * BLOCK_TOKENS, 0, 9, 30.0, "")
        load = _load({0: pages}, PullPlan(offer, taken))
        for number, each in enumerate(workers_of(model, taken, shards=shards, is_filled=False)):
            assert all(source.take_ended() == set() for source in sources), number
            target = stack.enter_context(contextlib.closing(transfers_of(each, taken)))
            result = target.pull(RunningLoad(load), time.monotonic() + LIMIT_S).result(LIMIT_S)
            assert result.bad == []
            for layer in range(len(model.layers)):
                for own, theirs in zip(pages, there, strict=True):
                    assert np.array_equal(each.page(layer, own), each.share[layer, theirs])
        # All ranks are done.
        for source in sources:
            _eventually(lambda source=source: source.take_ended() == {"r"})


def _eventually(is_so):
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.01)


def test_engines_that_do_not_fit_refuse_each_other():
    model = Model()
    (one,), (two,) = workers_of(model, 1), workers_of(model, 1)
    own = Geometry.of(
        one.held, {"weights": "a"}, rank=0, workers=1, block_tokens=BLOCK_TOKENS, pieces=1
    )
    other = Geometry.of(
        two.held, {"weights": "b"}, rank=0, workers=1, block_tokens=BLOCK_TOKENS, pieces=1
    )
    with pytest.raises(GeometryError, match="weights: the peer has 'b', this engine 'a'"):
        own.check(Geometry.parse(other.to_json()))
    for wrong in (b"", b"{}", b"[]", b'{"version": 2}', b'{"version": 9, "facts": {}}'):
        with pytest.raises(GeometryError):
            Geometry.parse(wrong)

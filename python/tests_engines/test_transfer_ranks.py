"""Bytes that move between engines with other numbers of tensor and pipeline parallel ranks."""

import random
import time

import numpy as np
import pytest
from cascadekv.connectors.vllm.announcements import page_list
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
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError, holders
from network import eventually, ports_in_sequence
from scheduled_engine import LIMIT_S
from transfer_pages import DIGEST, compute, engine_of, expect, expect_from, geometry_of, opened
from vllm_caches import BLOCK_TOKENS, PAGES, Model, workers_of

LAYERS = tuple(f"model.layers.{number}.self_attn.attn" for number in range(7))
THERE, HERE = [4, 1, 11], [7, 2, 9]
"""Pages of a prompt in the prefill engine and in the decode engine."""
TOKENS = 3 * BLOCK_TOKENS
SIZES = [
    ((1, 2), (1, 2)),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((1, 3), (1, 2)),
    ((2, 2), (2, 2)),
    ((2, 2), (4, 1)),
    ((2, 1), (1, 3)),
    ((1, 7), (2, 2)),
]
"""Tensor parallel ranks and stages of a prefill and of a decode engine."""


def ranks_of(model, sizes, *, shards, **options):
    """Return the workers of an engine."""
    tensor, stages = sizes
    return workers_of(model, tensor, stages=stages, shards=shards, **options)


def check_pages(workers):
    """Compare all pages of a decode engine: those of the prompt, and the others, which are zero."""
    for number, worker in enumerate(workers):
        for layer in range(len(worker.share)):
            for own, theirs in zip(HERE, THERE, strict=True):
                page = worker.page(layer, own)
                assert np.array_equal(page, worker.share[layer, theirs]), (number, layer, own)
            for other in set(range(PAGES)) - set(HERE):
                assert not worker.page(layer, other).any(), (number, layer, other)


def offer_of(sources):
    """Open a lease in all workers of a prefill engine, and offer their pages."""
    for each in sources:
        each.apply(TransferPlan(opened=[Opened("r", 0, 9)], ended=[("r", 100.0)]))
    addresses = [(each.address, each.id) for each in sources]
    return Offer("e", "r", addresses, [THERE], TOKENS, 0, 9, 30.0, "")


def pull(target, offer, workers):
    """Read the pages of an offer; returns the blocks that are missing."""
    plan = PullPlan(offer, workers)
    load = Load("r", is_async=True, first=0, keys={}, blocks={0: HERE}, tier="peers", pull=plan)
    result = target.pull(RunningLoad(load), time.monotonic() + LIMIT_S)
    return result.result(LIMIT_S).bad


@pytest.mark.parametrize(("given", "taken"), SIZES)
@pytest.mark.parametrize("is_mla", [False, True])
def test_a_decode_engine_reads_all_stages(given, taken, is_mla):
    model, shards = Model(is_mla=is_mla, layers=LAYERS), None if is_mla else 8
    prefill = ranks_of(model, given, shards=shards)
    decode = ranks_of(model, taken, shards=shards, is_filled=False)
    with engine_of(prefill, given[1]) as sources, engine_of(decode, taken[1]) as targets:
        offer = offer_of(sources)
        for number, target in enumerate(targets):
            assert all(source.take_ended() == set() for source in sources), number
            assert pull(target, offer, len(targets)) == []
        check_pages(decode)
        # Every worker of the decode engine has told every worker of the prefill engine.
        for source in sources:
            eventually(lambda source=source: source.take_ended() == {"r"})


@pytest.mark.parametrize(("given", "taken"), SIZES)
@pytest.mark.parametrize("is_mla", [False, True])
def test_all_stages_write_to_a_decode_engine(given, taken, is_mla):
    model, shards = Model(is_mla=is_mla, layers=LAYERS), None if is_mla else 8
    chance = random.Random(repr((given, taken)))
    prefill = ranks_of(model, given, shards=shards)
    decode = ranks_of(model, taken, shards=shards, is_filled=False)
    with engine_of(prefill, given[1]) as sources, engine_of(decode, taken[1]) as targets:
        for each in sources:
            each.apply(opened(TOKENS))
        results = [
            expect(each, sources, {0: HERE}, TOKENS, workers=len(targets)) for each in targets
        ]
        compute(sources, {0: THERE}, TOKENS, chance)
        assert [each.result(LIMIT_S).bad for each in results] == [[]] * len(targets)
        check_pages(decode)
        for source in sources:
            source.apply(TransferPlan(ended=[("r", 100.0)]))
            eventually(lambda source=source: source.take_ended() == {"r"})


def test_a_push_waits_for_the_layers_of_every_stage():
    model = Model(layers=LAYERS)
    prefill, decode = workers_of(model, 1, stages=2), workers_of(model, 1, is_filled=False)
    with engine_of(prefill, 2) as sources, engine_of(decode) as (target,):
        for each in sources:
            each.apply(opened(TOKENS))
        result = expect(target, sources, {0: HERE}, TOKENS)
        compute(sources[:1], {0: THERE}, TOKENS, random.Random(1))
        waits = target._arrivals._expected  # noqa: SLF001 # what has not arrived
        eventually(lambda: any(len(each.left) == 4 for each in waits.values()))
        (waiting,) = waits.values()
        assert sorted(layer for _, layer in waiting.left) == [3, 4, 5, 6]
        assert not result.done()
        # It ends without the second stage's layers: nothing of the prompt counts as arrived.
        target.apply(TransferPlan(withdrawn=["d"]))
        assert result.result(LIMIT_S).bad == [0, 1, 2]


def test_layers_are_written_before_later_stages_are_computed():
    model = Model(layers=LAYERS)
    prefill = workers_of(model, 1, stages=2)
    decode = workers_of(model, 1, stages=3, is_filled=False)
    with engine_of(prefill, 2) as sources, engine_of(decode, 3) as targets:
        for each in sources:
            each.apply(opened(TOKENS))
        results = [expect(each, sources, {0: HERE}, TOKENS, workers=3) for each in targets]
        waits = [each._arrivals._expected for each in targets]  # noqa: SLF001
        eventually(lambda: all(waits))
        for source, names in zip(sources, (LAYERS[:3], LAYERS[3:]), strict=True):
            step = [Computed("r", 0, TOKENS, {0: THERE})]
            source.apply(TransferPlan(computed=step))
            for name in names:
                source.layer_computed(name, ["r"])
                # The stages of the decode engine have two, two and three layers.
                done = LAYERS.index(name) + 1
                counts = [max(0, 2 - done), max(0, min(2, 4 - done)), min(3, 7 - done)]
                eventually(lambda counts=counts: [_left(each) for each in waits] == counts)
        assert [each.result(LIMIT_S).bad for each in results] == [[], [], []]
        check_pages(decode)


def _left(waits):
    return sum(len(each.left) for each in list(waits.values()))


def test_a_stage_whose_lease_has_ended_makes_the_read_fail():
    model = Model(layers=LAYERS)
    prefill, decode = workers_of(model, 1, stages=2), workers_of(model, 1, is_filled=False)
    with engine_of(prefill, 2) as sources, engine_of(decode) as (target,):
        offer = offer_of(sources)
        sources[1].revoke("r")
        assert pull(target, offer, 1) == [0, 1, 2]


def test_a_stage_that_is_gone_makes_the_read_fail():
    model = Model(layers=LAYERS)
    prefill, decode = workers_of(model, 1, stages=2), workers_of(model, 1, is_filled=False)
    with engine_of(prefill, 2) as sources, engine_of(decode) as (target,):
        offer = offer_of(sources)
        sources[1].close()
        assert pull(target, offer, 1) == [0, 1, 2]


def test_an_offer_without_one_of_the_stages_is_not_read():
    model = Model(layers=LAYERS)
    prefill, decode = workers_of(model, 1, stages=2), workers_of(model, 1, is_filled=False)
    with engine_of(prefill, 2) as sources, engine_of(decode) as (target,):
        offer = offer_of(sources)
        for order in ([0], [1, 0], [0, 0]):
            offer.workers[:] = [(sources[at].address, sources[at].id) for at in order]
            assert pull(target, offer, 1) == [0, 1, 2]
            assert not decode[0].page(0, HERE[0]).any()


def test_sizes_that_do_not_fit_are_named():
    """Without shards, heads of other tensor parallel sizes are not contiguous in the same way."""
    model = Model(layers=LAYERS)
    own = [
        geometry_of(each, number, 4, stages=2)
        for number, each in enumerate(workers_of(model, 2, stages=2))
    ]
    peers = [
        Geometry.parse(geometry_of(each, number, 4).to_json())
        for number, each in enumerate(workers_of(model, 4))
    ]
    reason = (
        r"heads 0-3 of 8 of model\.layers\.0\.self_attn\.attn: it has 4 tensor and 1 pipeline "
        r"parallel ranks, this engine has 2 tensor and 2 pipeline parallel ranks; .*cascade\.shards"
    )
    with pytest.raises(GeometryError, match=reason):
        holders(own[0], peers)


@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_decode_engine_without_a_holder_of_its_heads_computes(way):
    model = Model(layers=LAYERS)
    prefill = workers_of(model, 4)
    decode = workers_of(model, 2, stages=2, is_filled=False)
    with engine_of(prefill) as sources, engine_of(decode, 2) as targets:
        if way == "pull":
            offer = offer_of(sources)
            missing = [pull(each, offer, len(targets)) for each in targets]
        else:
            for each in sources:
                each.apply(opened(TOKENS))
                each.apply(TransferPlan(ended=[("r", 100.0)]))
            results = [
                expect(each, sources, {0: HERE}, TOKENS, workers=len(targets)) for each in targets
            ]
            missing = [each.result(LIMIT_S).bad for each in results]
        assert missing == [[0, 1, 2]] * 4
        assert not any(each.buffer.any() for each in decode)
        # The prefill engine does not keep the pages for engines that do not read them.
        for source in sources:
            eventually(lambda source=source: source.take_ended() == {"r"})


def test_the_geometry_of_a_large_engine_fits():
    """The transport takes 64 KiB. These are 126 layers of eight shares, as of the largest Llama."""
    layers = tuple(f"model.layers.{number}.self_attn.attn" for number in range(126))
    (worker,) = workers_of(Model(layers=layers), 1, shards=8)
    geometry = geometry_of(worker, 0, 1)
    sent = geometry.to_json()
    assert len(sent) < 64 << 10
    assert Geometry.parse(sent) == geometry


def test_a_list_that_wants_layers_of_another_worker_is_refused():
    """A decode engine must not wait for what no one will write."""
    model = Model(layers=LAYERS)
    prefill, decode = workers_of(model, 1, stages=2), workers_of(model, 1, is_filled=False)
    with engine_of(prefill, 2) as sources, engine_of(decode) as (target,):
        own = target._arrivals._targets  # noqa: SLF001

        def all_from_the_first(*arguments):
            targets, _ = own(*arguments)
            for each in targets.values():
                each.sources[:] = [0] * len(each.sources)
            return targets, page_list(targets)

        target._arrivals._targets = all_from_the_first  # noqa: SLF001
        for each in sources:
            each.apply(opened(TOKENS))
        result = expect(target, sources, {0: HERE}, TOKENS)
        compute(sources, {0: THERE}, TOKENS, random.Random(1))
        assert result.result(LIMIT_S).bad == [0, 1, 2]


@pytest.mark.parametrize(
    "sizes", [{}, {"tp_size": 2}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 8}]
)
def test_a_router_need_not_know_the_number_of_workers(sizes):
    """The first worker says it: some routers pass on `tp_size` but not `pp_size`."""
    model = Model(layers=LAYERS)
    prefill = workers_of(model, 2, stages=2, shards=8)
    decode = workers_of(model, 1, shards=8, is_filled=False)
    port = ports_in_sequence(4)
    named = {"transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": port, **sizes}
    with engine_of(prefill, 2, port) as sources, engine_of(decode) as (target,):
        for each in sources:
            each.apply(opened(TOKENS))
        result = expect_from(target, PushSource.parse(named), {0: HERE}, TOKENS)
        compute(sources, {0: THERE}, TOKENS, random.Random(1))
        assert result.result(LIMIT_S).bad == []
        check_pages(decode)


def test_a_declined_push_reaches_workers_that_the_router_did_not_name():
    model = Model(layers=LAYERS)
    prefill, decode = workers_of(model, 1, stages=2), workers_of(model, 1, is_filled=False)
    port = ports_in_sequence(2)
    named = {"transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": port}
    with engine_of(prefill, 2, port) as sources, engine_of(decode) as (target,):
        for each in sources:
            each.apply(opened(TOKENS))
            each.apply(TransferPlan(ended=[("r", 100.0)]))
        plan = PushPlan(PushSource.parse(named), DIGEST, TOKENS, 1, LIMIT_S)
        target.apply(TransferPlan(declined=[plan]))
        for source in sources:
            eventually(lambda source=source: source.take_ended() == {"r"})


def test_a_port_that_is_not_the_first_workers_is_refused():
    model = Model(layers=LAYERS)
    prefill, decode = workers_of(model, 1, stages=2), workers_of(model, 1, is_filled=False)
    port = ports_in_sequence(2)
    named = {"transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": port + 1}
    with engine_of(prefill, 2, port) as sources, engine_of(decode) as (target,):
        for each in sources:
            each.apply(opened(TOKENS))
        result = expect_from(target, PushSource.parse(named), {0: HERE}, TOKENS)
        assert result.result(LIMIT_S).bad == [0, 1, 2]

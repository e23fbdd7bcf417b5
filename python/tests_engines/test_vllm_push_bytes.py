"""Bytes that prefill workers write into pages of decode workers: block sizes, ranks, steps."""

import contextlib
import random
import time

import numpy as np
import pytest
from cascadekv.connectors.vllm.offers import TransferPlan
from scheduled_engine import LIMIT_S
from transfer_pages import Pages, compute, expect, opened, transfers_of
from vllm_caches import BLOCK_TOKENS, Model, workers_of


@pytest.mark.parametrize("pieces", [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 3)])
def test_blocks_of_other_sizes(pieces):
    """The bytes of a prompt arrive in the right units; nothing else changes."""
    chance = random.Random(repr(pieces))
    unit, layers, pages = 64, 3, 24
    own, other = pieces
    for _ in range(6):
        sender, receiver = Pages(own, unit, layers, pages), Pages(other, unit, layers, pages)
        sender.memory.random_(1, 255)
        tokens = chance.randrange(1, 40)
        units = -(-tokens // 4)
        there = chance.sample(range(1, pages), -(-units // own))
        here = chance.sample(range(1, pages), -(-units // other))
        first = chance.randrange(len(here))
        with sender.open() as source, receiver.open() as target:
            order = chance.choice(["before", "after"])
            if order == "after":
                source.apply(opened(tokens))
                compute([source], {0: there}, tokens, chance)
            result = expect(target, [source], {0: here[first:]}, tokens, first=first)
            if order == "before":
                source.apply(opened(tokens))
                compute([source], {0: there}, tokens, chance)
            assert result.result(LIMIT_S).bad == []
        written = set()
        for layer in range(layers):
            for number in range(first * other, units):
                to = here[number // other] * other + number % other
                come = there[number // own] * own + number % own
                assert receiver.unit(layer, to).equal(sender.unit(layer, come))
                written.add(to)
            for number in set(range(receiver.count)) - written:
                assert receiver.unit(layer, number).count_nonzero() == 0


def test_pages_before_a_window_are_not_written():
    """Regression: another request could have them already; that of a peer got its bytes."""
    chance = random.Random(3)
    sender, receiver = Pages(1, 64, 2, 24, window=6), Pages(2, 64, 2, 24)
    sender.memory.random_(1, 255)
    there = chance.sample(range(1, 24), 6)
    # Token 22 of 23 sees token 17 and later ones, from unit 4 on: the engine has freed the others.
    for here, is_whole in (([0, 0, 7], True), ([0, 5, 7], False)):
        with sender.open() as source, receiver.open() as target:
            source.apply(opened(23))
            compute([source], {0: there}, 23, chance)
            result = expect(target, [source], {0: here}, 23).result(LIMIT_S)
        assert result.bad == ([] if is_whole else [1, 2])
        for layer in range(2):
            units = [receiver.unit(layer, number) for number in range(2 * 24)]
            assert not any(unit.count_nonzero() for unit in units[10:12])
            for number in range(2) if is_whole else ():
                assert units[14 + number].equal(sender.unit(layer, there[4 + number]))


@pytest.mark.parametrize(("given", "taken"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (8, 1)])
@pytest.mark.parametrize("is_mla", [False, True])
def test_ranks_of_other_sizes(given, taken, is_mla):
    model, chance = Model(is_mla=is_mla), random.Random(repr((given, taken)))
    shards = None if is_mla else max(given, taken)
    pages, there = [7, 2, 9], [4, 1, 11]
    tokens = 3 * BLOCK_TOKENS
    with contextlib.ExitStack() as stack:
        sources = [
            stack.enter_context(contextlib.closing(transfers_of(each, given)))
            for each in workers_of(model, given, shards=shards)
        ]
        for each in sources:
            each.apply(opened(tokens))
        ranks = workers_of(model, taken, shards=shards, is_filled=False)
        targets = [
            stack.enter_context(contextlib.closing(transfers_of(each, taken))) for each in ranks
        ]
        results = [expect(each, sources, {0: pages}, tokens, workers=taken) for each in targets]
        compute(sources, {0: there}, tokens, chance)
        for result, rank in zip(results, ranks, strict=True):
            assert result.result(LIMIT_S).bad == []
            for layer in range(len(model.layers)):
                for own, theirs in zip(pages, there, strict=True):
                    assert np.array_equal(rank.page(layer, own), rank.share[layer, theirs])
        # The lease ends once every rank of the decode engine has all.
        for each in sources:
            each.apply(TransferPlan(ended=[("r", 100.0)]))
            end = time.monotonic() + LIMIT_S
            while each.take_ended() != {"r"}:
                assert time.monotonic() < end, "it did not become so"
                time.sleep(0.01)

"""Bytes that move between engines whose context parallel ranks share the tokens of each block."""

import contextlib
import random
import time
from types import SimpleNamespace

import pytest
import torch
from cascadekv.connectors.vllm.identity import _context_parallel
from cascadekv.connectors.vllm.layout import Rank, describe
from cascadekv.connectors.vllm.metadata import Load
from cascadekv.connectors.vllm.offers import Offer, Opened, PullPlan, TransferPlan
from cascadekv.connectors.vllm.running_load import RunningLoad
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError, Ranks
from cascadekv.connectors.vllm.transfers import Transfers
from scheduled_engine import LIMIT_S
from transfer_pages import compute, expect, opened
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm_caches import config_of

LAYERS = ("layers.0", "layers.1", "layers.2")
PAGES = 12
PIECE = 4
"""Tokens of a block of the attention backend, on each rank."""


class ContextRank:
    """One worker: a word for each layer and token that it holds."""

    def __init__(self, rank, block, interleave, context):
        """`block` counts the tokens of a page, `context` the ranks that share those of a block."""
        self.rank, self.block, self.interleave, self.context = rank, block, interleave, context
        common = {"block_size": block, "num_kv_heads": 1, "dtype": torch.float16}
        is_mla = rank.kv_heads == 1
        kind = MLAAttentionSpec if is_mla else FullAttentionSpec
        spec = kind(head_size=4 if is_mla else 2, **common)
        self.pieces = block // PIECE
        held = describe(config_of(LAYERS, spec, "LBHNC", PAGES), rank, pieces=self.pieces)
        self.memory = torch.zeros(len(LAYERS) * PAGES * block * 8, dtype=torch.uint8)
        self.words = self.memory.view(torch.int64).view(len(LAYERS), PAGES, block)
        parallel = SimpleNamespace(
            decode_context_parallel_size=context, cp_kv_cache_interleave_size=interleave
        )
        self.geometry = Geometry.of(
            held,
            {"context_parallel": _context_parallel(parallel)},
            rank=rank.tensor,
            workers=rank.tensor_size,
            block_tokens=block * context,
            pieces=self.pieces,
            interleave=interleave,
            ranks=Ranks(rank.tensor_size, 1, context),
        )

    def right(self, table, tokens):
        """Return the right word of each place that holds one of a prompt's tokens."""
        head = self.rank.tensor * self.rank.kv_heads // self.rank.tensor_size
        right = {}
        for number, page in enumerate(table):
            for slot in range(self.block):
                turn, place = divmod(slot, self.interleave)
                inside = (turn * self.context + self.rank.context) * self.interleave + place
                token = number * self.block * self.context + inside
                for layer in range(len(LAYERS)):
                    if token < tokens:
                        right[layer, page, slot] = 1 + head + 10 * layer + 100 * token
        return right

    def fill(self, table, tokens):
        """Compute a prompt in these pages."""
        for place, word in self.right(table, tokens).items():
            self.words[place] = word

    def open(self):
        """Let peers read and write the pages; a context manager."""
        transfers = Transfers(self.memory, self.geometry, listen="127.0.0.1:0", token=None)
        return contextlib.closing(transfers)


def engine(block, interleave, context, *, tensor=None, kv_heads=1):
    """Return the workers of an engine."""
    tensor = tensor or context
    return [
        ContextRank(
            Rank(number, tensor, number % context, context, kv_heads), block, interleave, context
        )
        for number in range(tensor)
    ]


def move(way, engines, tables, tokens):
    """Move a prompt between two engines; returns the blocks that each decode worker lacks."""
    (prefill, decode), (there, here) = engines, tables
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(each.open()) for each in prefill]
        targets = [stack.enter_context(each.open()) for each in decode]
        if way == "push":
            for each in sources:
                each.apply(opened(tokens))
            results = [
                expect(each, sources, {0: here}, tokens, workers=len(targets)) for each in targets
            ]
            compute(sources, {0: there}, tokens, random.Random(tokens))
        else:
            for each in sources:
                each.apply(TransferPlan(opened=[Opened("r", 0, 9)], ended=[("r", 100.0)]))
            addresses = [(each.address, each.id) for each in sources]
            offer = Offer("e", "r", addresses, [there], tokens, 0, 9, 30.0, "")
            plan = PullPlan(offer, len(targets))
            load = Load("r", is_async=True, first=0, keys={}, blocks={0: here}, tier="peers")
            load.pull = plan
            end = time.monotonic() + LIMIT_S
            results = [each.pull(RunningLoad(load), end) for each in targets]
        return [result.result(LIMIT_S).bad for result in results]


SAME = [
    # Tokens of a page at the prefill and at the decode engine, and tokens in turn.
    (4, 4, 1),
    (4, 4, 4),
    (8, 8, 2),
    (8, 8, 8),
    (8, 16, 1),
    (16, 8, 4),
    (16, 16, 8),
]


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize(("given", "taken", "interleave"), SAME)
@pytest.mark.parametrize("context", [2, 4])
def test_each_rank_gets_its_tokens(way, given, taken, interleave, context):
    chance = random.Random(repr((given, taken, interleave, context)))
    some = chance.randrange(2, 4 * given * context)
    for tokens in (1, interleave + 1, interleave * context + PIECE + 1, some):
        prefill = engine(given, interleave, context)
        decode = engine(taken, interleave, context)
        there = chance.sample(range(1, PAGES), -(-tokens // (given * context)))
        here = chance.sample(range(1, PAGES), -(-tokens // (taken * context)))
        for each in prefill:
            each.fill(there, tokens)
        assert move(way, (prefill, decode), (there, here), tokens) == [[]] * context
        for number, each in enumerate(decode):
            for place, word in each.right(here, tokens).items():
                assert each.words[place] == word, (tokens, number, place)
            others = sorted(set(range(PAGES)) - set(here))
            assert not each.words[:, others].any()


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize(("given", "taken"), [(4, 4), (4, 8), (8, 4)])
def test_heads_that_several_ranks_have(way, given, taken):
    """Each of two heads is at several tensor parallel ranks, and two of these share its tokens."""
    tokens, there, here = 27, [3, 1], [5, 9]
    prefill = engine(8, 2, 2, tensor=given, kv_heads=2)
    decode = engine(8, 2, 2, tensor=taken, kv_heads=2)
    for each in prefill:
        each.fill(there, tokens)
    missing = move(way, (prefill, decode), (there, here), tokens)
    assert missing == [[]] * taken
    for number, each in enumerate(decode):
        for place, word in each.right(here, tokens).items():
            assert each.words[place] == word, (number, place)


DIFFERENT = {
    "sizes": ((8, 1, 2), (8, 1, 4), "'2, 1 tokens in turn', this engine '4, 1 tokens in turn'"),
    "one": ((8, 1, 2), (8, 1, 1), "'2, 1 tokens in turn', this engine '1'"),
    "turns": ((8, 1, 2), (8, 4, 2), "'2, 1 tokens in turn', this engine '2, 4 tokens in turn'"),
}


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_sizes_are_refused_and_named(way, kind):
    given, taken, reason = DIFFERENT[kind]
    prefill, decode = engine(*given), engine(*taken)
    with pytest.raises(GeometryError, match=f"context_parallel: the peer has {reason}"):
        decode[0].geometry.check(Geometry.parse(prefill[0].geometry.to_json()))
    for each in prefill:
        each.fill([3, 1], 20)
    missing = move(way, (prefill, decode), ([3, 1], [5, 9]), 20)
    assert missing == [[0, 1]] * len(decode)
    assert not any(each.words.any() for each in decode)


def test_blocks_of_other_sizes_need_units_of_tokens_in_sequence():
    """With as many tokens in turn as a block has, half of a block has tokens from all over it."""
    one, other = engine(8, 8, 2)[0].geometry, engine(16, 8, 2)[0].geometry
    with pytest.raises(GeometryError, match="in units of 32 tokens, this engine in units of 16"):
        one.check(Geometry.parse(other.to_json()))

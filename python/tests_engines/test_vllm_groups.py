"""A prefix is usable if every KV cache group has the blocks that it needs."""

import random

import cascadekv
import pytest
import torch
from cascadekv import Hints, Manifest, Namespace
from cascadekv.connectors.vllm.groups import CacheGroup, groups_of, usable_prefix
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.layout import LayoutError
from cascadekv.connectors.vllm.metadata import Part
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

BLOCK_TOKENS = 16
BLOCKS = 9
SPACE = Namespace(Manifest({"weights": "sha256:test"}), b"secret")
KINDS = {
    "full": [None],
    "window": [3 * BLOCK_TOKENS],
    "two windows": [1 + BLOCK_TOKENS, 4 * BLOCK_TOKENS],
    "mixed": [None, 1 + 2 * BLOCK_TOKENS],
    "all": [None, 2, None, 5 * BLOCK_TOKENS],
    "a window of one token": [None, 1],
}
COMMON = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """DRAM for two of five blocks, and files for all of them."""
    files = tmp_path_factory.mktemp("groups") / "files"
    settings = {"files_capacity": "256MiB", "segment_size": "8MiB"}
    with cascadekv.Store(dram="8MiB", huge_pages=False, files=files, **settings) as opened:
        yield opened


def naive(groups, parts, there, tokens):
    """Return the ends of usable prefixes: the next token sees all tokens, or those of a window."""
    windows = {group.number: group.window for group in groups}

    def needed(part, end):
        following = min(end * BLOCK_TOKENS, tokens - 1)
        window = windows[part.group] or following + 1
        seen = range(max(0, following - window + 1), following + 1)
        return {at // BLOCK_TOKENS for at in seen} & set(range(end))

    return [
        end
        for end in range(1, BLOCKS + 1)
        if all(there[part.name][at] for part in parts for at in needed(part, end))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_usable_prefix_matches_its_definition(store, kind):
    chance = random.Random(kind)
    groups = [CacheGroup(number, window) for number, window in enumerate(KINDS[kind])]
    parts = [
        Part(f"group {group.number} heads {heads}", group.number, 1)
        for group in groups
        for heads in range(2)
    ]
    reached = set()
    for case in range(150):
        keys = RequestKeys(SPACE, [part.name for part in parts], BLOCK_TOKENS, {"salt": f"{case}"})
        # A third of the requests ends with its last block.
        tokens = BLOCKS * BLOCK_TOKENS + chance.choice([0, 1, 3])
        keys.extend([chance.randrange(1000) for _ in range(tokens)])
        share = chance.choice([0.5, 0.8, 0.95, 1.0])
        there = {}
        for part in parts:
            there[part.name] = [chance.random() < share for _ in range(BLOCKS)]
            whole = keys.keys(part.name, 0, BLOCKS)
            present = [
                key for key, is_there in zip(whole, there[part.name], strict=True) if is_there
            ]
            if present:
                # Not a chain: blocks between these are missing.
                put = store.put(present, [bytes(key) for key in present], chain=False)
                assert all(result.ok for result in put)
        sizes = {"tokens": tokens, "block_tokens": BLOCK_TOKENS}
        found = usable_prefix(store, groups, parts, keys, Hints(), **sizes)
        ends = naive(groups, parts, there, tokens)
        assert len(found.tiers) == max(ends, default=0)
        for most in range(BLOCKS + 2):
            assert found.longest(most) == max((end for end in ends if end <= most), default=0)
        reached.add(len(found.tiers))
        store.clear()
    assert len(reached) > 3, "the random cases have too little variety"


def test_the_tier_of_a_block_is_that_of_its_slowest_part(store):
    parts = [Part("fast", 0, 1), Part("slow", 0, 1)]
    keys = RequestKeys(SPACE, ["fast", "slow"], BLOCK_TOKENS, {"salt": "tiers"})
    keys.extend(range(4 * BLOCK_TOKENS))
    slow = keys.keys("slow", 0, 4)
    store.put(slow, [bytes(1 << 20)] * 4)
    # Later blocks evict these from DRAM.
    others = RequestKeys(SPACE, ["other"], BLOCK_TOKENS, {})
    others.extend(range(16 * BLOCK_TOKENS))
    for at in range(0, 16, 4):
        store.put(others.keys("other", at, at + 4), [bytes([at + 1]) * (1 << 20)] * 4, chain=False)
    store.flush()
    store.put(keys.keys("fast", 0, 4), [bytes(key) for key in keys.keys("fast", 0, 4)])
    fastest = [tiers[0] for tiers in store.locate(slow)]
    assert "files" in fastest
    sizes = {"tokens": 4 * BLOCK_TOKENS, "block_tokens": BLOCK_TOKENS}
    found = usable_prefix(store, [CacheGroup(0)], parts, keys, Hints(), **sizes)
    assert list(found.tiers) == fastest
    store.clear()


def test_groups_are_read_from_the_engines_specification():
    full = FullAttentionSpec(block_size=BLOCK_TOKENS, **COMMON)
    latent = MLAAttentionSpec(block_size=BLOCK_TOKENS, **COMMON)
    specs = [full, latent]
    specs += [
        SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=n, **COMMON)
        for n in (1, 2, 17, 18, 33)
    ]
    specs.append(UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"layer 7": full}))
    config = config_of(specs)
    windows = [group.window for group in groups_of(config, BLOCK_TOKENS)]
    assert windows == [None, None, 1, 2, 17, 18, 33, None]


def test_the_first_stage_may_lack_the_layers_of_a_group():
    window = SlidingWindowSpec(block_size=BLOCK_TOKENS, sliding_window=17, **COMMON)
    config = config_of([FullAttentionSpec(block_size=BLOCK_TOKENS, **COMMON)])
    config.kv_cache_groups.append(KVCacheGroupSpec([], window))
    assert groups_of(config, BLOCK_TOKENS) == [CacheGroup(0), CacheGroup(1, 17)]


def test_the_engine_keeps_pages_that_only_a_draft_model_needs():
    if not hasattr(SlidingWindowSpec, "extra_retained_tokens"):
        pytest.skip("this vLLM keeps the pages of the window only")
    spec = SlidingWindowSpec(
        block_size=BLOCK_TOKENS, sliding_window=20, extra_retained_tokens=3, **COMMON
    )
    assert groups_of(config_of([spec]), BLOCK_TOKENS) == [CacheGroup(0, 23)]


@pytest.mark.parametrize(
    "spec",
    [
        ChunkedLocalAttentionSpec(block_size=BLOCK_TOKENS, attention_chunk_size=64, **COMMON),
        FullAttentionSpec(block_size=2 * BLOCK_TOKENS, **COMMON),
    ],
    ids=["chunked", "other block size"],
)
def test_unsupported_groups_are_refused(spec):
    with pytest.raises(LayoutError):
        groups_of(
            config_of([FullAttentionSpec(block_size=BLOCK_TOKENS, **COMMON), spec]), BLOCK_TOKENS
        )


def test_a_block_has_the_tokens_of_all_context_parallel_ranks():
    config = config_of([FullAttentionSpec(block_size=BLOCK_TOKENS, **COMMON)])
    with pytest.raises(LayoutError, match="blocks of 64 and 16"):
        groups_of(config, BLOCK_TOKENS, 4)
    assert groups_of(config, 4 * BLOCK_TOKENS, 4) == [CacheGroup(0)]


def config_of(specs):
    groups = [KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(8, [], groups)

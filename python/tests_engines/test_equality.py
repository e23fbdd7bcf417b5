"""An engine's answers are equal with and without the cache, and it hits as expected."""

import random
from dataclasses import dataclass

import engine_calls
import pytest
from cascadekv.bench.prompts import prompt, with_prefix
from forked_engines import BLOCK, Engine

pytest_plugins = ["forked_engines"]

EMBEDDED = {"cascade.pipeline": "Dram|Files", "cascade.dram": "128MiB"}
ALWAYS = {
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}
"""Time-outs that do not expire on a loaded machine."""


@dataclass
class CachedEngine:
    """An engine with the connector, and its configuration."""

    name: str
    engine: Engine
    is_async: bool
    """Whether all blocks of a prompt of full blocks are loaded."""
    has_own_cache: bool

    def due(self, tokens: int, shared: int | None = None) -> int:
        """Return how many tokens of a prompt hit if its first `shared` tokens are stored."""
        stored = tokens if shared is None else min(shared, tokens)
        most = tokens if self.is_async else tokens - 1
        return min(stored, most) // BLOCK * BLOCK

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own cache, so that blocks are loaded from the store."""
        if self.has_own_cache:
            assert self.engine.call(engine_calls.reset_prefix_cache)


WAYS = {
    "embedded": {},
    "embedded-layerwise": {"cascade.layerwise": True, "cascade.load": "sync"},
    "served-sync": {"cascade.load": "sync"},
    "served-async": {"cascade.load": "async"},
}
OWN_CACHE = ("embedded", "served-async")


@pytest.fixture(scope="module", params=WAYS)
def cached(request, start, serve_module, tmp_path_factory):
    name = request.param
    if name.startswith("embedded"):
        files = tmp_path_factory.mktemp(name)
        place = {**EMBEDDED, "cascade.files": str(files), "cascade.files_capacity": "256MiB"}
    else:
        place = {"cascade.node": f"unix:{serve_module('--dram', '128MiB').socket}"}
    has_own_cache = name in OWN_CACHE
    engine = start({**place, **ALWAYS, **WAYS[name]}, enable_prefix_caching=has_own_cache)
    is_async = WAYS[name].get("cascade.load") != "sync"
    yield CachedEngine(name, engine, is_async, has_own_cache)
    engine.close()


@pytest.mark.parametrize("blocks", range(1, 5))
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_of_any_length_have_the_same_answer_from_the_cache(cached, reference, blocks, more):
    tokens = blocks * BLOCK + more
    request = prompt(tokens, "lengths", cached.name, tokens)
    assert reference.check_one(cached.engine, request) == 0
    cached.reset_prefix_cache()
    assert reference.check_one(cached.engine, request) == cached.due(tokens)
    # From the engine's own cache if it has one, otherwise from the store again.
    assert reference.check_one(cached.engine, request) == cached.due(tokens)


def test_prefixes_of_any_length_hit_all_full_blocks(cached, reference):
    first = prompt(4 * BLOCK + 60, "prefixes", cached.name)
    reference.check_one(cached.engine, first)
    edges = {at * BLOCK + more for at in range(5) for more in (-1, 0, 1)}
    chance = random.Random(cached.name)
    for shared in sorted({at for at in edges if at > 0} | {0, *chance.sample(range(600), 4)}):
        request = with_prefix(first, min(shared, len(first)), "tail", cached.name, shared)
        cached.reset_prefix_cache()
        assert reference.check_one(cached.engine, request) == cached.due(len(request), shared), (
            shared
        )


def test_concurrent_requests_share_stored_blocks(cached, reference):
    first = prompt(3 * BLOCK + 5, "at once", cached.name)
    requests = [
        with_prefix(first, shared, "at once", cached.name, shared) for shared in (0, 130, 256, 300)
    ]
    requests += [first, prompt(700, "long", cached.name), first, prompt(90, "short", cached.name)]
    reference.check(cached.engine, requests)
    cached.reset_prefix_cache()
    assert reference.check(cached.engine, requests) == [cached.due(len(each)) for each in requests]
    # Without room for all requests, some wait and are looked up again.
    cached.reset_prefix_cache()
    many = [with_prefix(first, 256, "many", cached.name, number) for number in range(12)]
    hits = reference.check(cached.engine, many)
    assert hits == [256] * len(many)


def test_an_answer_is_part_of_the_next_turns_prefix(cached, reference):
    said = prompt(2 * BLOCK - 6, "turns", cached.name)
    answer = list(reference.answers([said], 16)[0])
    assert reference.check_one(cached.engine, said, 16) == 0
    for turn in range(3):
        cached.reset_prefix_cache()
        computed = len(said) + len(answer) - 1
        said = [*said, *answer, *prompt(50, "turn", cached.name, turn)]
        hit = reference.check_one(cached.engine, said, 16)
        assert hit == cached.due(len(said), computed)
        answer = list(reference.answers([said], 16)[0])


def test_blocks_in_the_engines_cache_are_not_loaded(cached, reference):
    whole = prompt(4 * BLOCK + 20, "own", cached.name)
    reference.check_one(cached.engine, whole)
    cached.reset_prefix_cache()
    half = with_prefix(whole, 2 * BLOCK, "own half", cached.name)[: 2 * BLOCK + 30]
    assert reference.check_one(cached.engine, half) == 2 * BLOCK
    before = cached.engine.call(engine_calls.loaded_blocks)
    assert reference.check_one(cached.engine, whole) == 4 * BLOCK
    after = cached.engine.call(engine_calls.loaded_blocks)
    assert after - before == (2 if cached.has_own_cache else 4)


def test_a_cache_salt_separates_blocks(cached, reference):
    request = prompt(2 * BLOCK + 9, "salt", cached.name)
    right = reference.answers([request])[0]
    for salt, hit in (("a", 0), ("b", 0), (None, 0), ("a", 256), ("b", 256), (None, 256)):
        cached.reset_prefix_cache()
        answer = cached.engine.one(request, salt=salt)
        assert (answer.tokens, answer.cached) == (right, hit), salt


def test_blocks_in_files_are_hit_after_a_restart(start, reference, tmp_path):
    place = {**ALWAYS, "cascade.files": str(tmp_path), "cascade.files_capacity": "256MiB"}
    requests = [prompt(n, "restart", n) for n in (128, 129, 383, 511, 512, 700)]
    first = start({**place, **EMBEDDED})
    reference.check(first, requests)
    first.close()
    # DRAM is empty now, and too small for all blocks.
    second = start({**place, **EMBEDDED, "cascade.dram": "8MiB"})
    for each in (*requests, *reversed(requests)):
        assert reference.check_one(second, each) == len(each) // BLOCK * BLOCK
    second.close()

"""The scheduler's side: what it says is here, when it asks, and which blocks it plans."""

import dataclasses
import time

import cascadekv
import pytest
from cascadekv import Hints
from cascadekv.connectors.vllm import scheduler as module
from cascadekv.connectors.vllm.groups import Group
from cascadekv.connectors.vllm.keys import RequestKeys, Unkeyed
from cascadekv.connectors.vllm.metadata import Loaded, Part, Progress, Saved
from cascadekv.connectors.vllm.scheduler import Policy, Scheduler
from older_vllm import block_state
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm_caches import SPACE

TOKENS = 16
"""Tokens of a block."""
PARTS = [Part("heads 0-3", 0, 64), Part("heads 4-7", 0, 64)]
WHOLE = (Group(0),)
TABLE = list(range(100, 400))


@pytest.fixture
def store():
    with cascadekv.Store(dram="16MiB", huge_pages=False) as opened:
        yield opened


def prompt(tokens, **changes):
    params = SamplingParams(max_tokens=64, prompt_logprobs=changes.pop("prompt_logprobs", None))
    name = changes.pop("name", "request")
    return Request(name, [7919 * at % 50_000 for at in range(tokens)], params, None, **changes)


def keys_of(request):
    origin = {"salt": request.cache_salt} if request.cache_salt else {}
    return RequestKeys(SPACE, [part.name for part in PARTS], TOKENS, origin)


def scheduler_of(store, *, groups=WHOLE, choose=None, keys=keys_of, **policy):
    return Scheduler(
        lambda: store,
        PARTS,
        groups,
        keys,
        Policy(**policy),
        block_tokens=TOKENS,
        choose=choose or (lambda tiers, _: len(tiers)),
        hints_of=lambda _: Hints(),
    )


def keep(store, blocks, of=None, parts=PARTS):
    """Have the store keep the leading blocks of a long prompt."""
    keys = keys_of(of or prompt(8))
    keys.extend(prompt(blocks * TOKENS).all_token_ids)
    for part in parts:
        own = keys.keys(part.name, 0, blocks)
        assert all(result.ok for result in store.put(own, [bytes(key) for key in own]))


def output(tables=(TABLE,), **tokens):
    """Give what the engine plans for a step: tokens of each request, and their block tables."""
    state = block_state(set(tokens), lambda _: tuple(map(list, tables)))
    return dataclasses.replace(
        SchedulerOutput.make_empty(),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        kv_connector_block_state=state,
    )


def lookups(scheduler):
    return scheduler.stats.data["sums"].get("lookups", 0)


def failed(request, first, bad):
    return Progress(loaded=[Loaded(request.request_id, first, "dram", 9, bad, 0, 0.1, 0.0)])


@pytest.mark.parametrize(
    ("tokens", "load", "matched"),
    [
        # The engine has to compute a token in the step that loads.
        (64, "sync", (48, False)),
        (65, "sync", (64, False)),
        (63, "sync", (48, False)),
        # Loaded beside others, all may come: the engine computes the last token again.
        (64, "async", (64, True)),
        (65, "async", (64, True)),
        # What is in memory is waited for, unless nothing is left to compute.
        (64, "auto", (64, True)),
        (65, "auto", (64, False)),
        (15, "auto", (0, False)),
        (16, "sync", (0, False)),
        (16, "auto", (16, True)),
    ],
)
def test_the_last_token(store, tokens, load, matched):
    keep(store, 4)
    scheduler = scheduler_of(store, load=load)
    assert scheduler.matched(prompt(tokens), 0) == matched


def test_local_blocks_are_not_loaded_again(store):
    keep(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched(request, 32) == (32, False)
    assert scheduler.matched(request, 64) == (0, False)
    assert scheduler.matched(request, 80) == (0, False)
    assert scheduler.matched(request, 0) == (64, False)


def test_a_block_counts_when_all_its_parts_are_here(store):
    keep(store, 4, parts=PARTS[:1])
    keep(store, 2, parts=PARTS[1:])
    assert scheduler_of(store).matched(prompt(100), 0) == (32, False)


@pytest.mark.parametrize(
    ("ratio", "tokens"), [(0.0, 0), (0.25, 32), (0.5, 64), (0.99, 112), (1, 128)]
)
def test_hit_ratio_bounds_what_is_loaded(store, ratio, tokens):
    keep(store, 8)
    scheduler = scheduler_of(store, hit_ratio=ratio)
    assert scheduler.matched(prompt(8 * TOKENS + 1), 0) == (tokens, False)


def test_short_prompts_are_neither_looked_up_nor_saved(store):
    keep(store, 4)
    scheduler = scheduler_of(store, min_tokens=64)
    short, long = prompt(63, name="short"), prompt(64, name="long")
    assert scheduler.matched(short, 0) == (0, False)
    assert lookups(scheduler) == 0
    assert scheduler.matched(long, 0) == (64, True)
    scheduler.matched(prompt(63, name="other", cache_salt="a"), 0)
    scheduler.matched(prompt(64, name="kept", cache_salt="b"), 0)
    plan = scheduler.plan(output(other=63, kept=64), "")
    assert [save.request for save in plan.saves] == ["kept"]


def test_what_is_faster_to_compute_is_not_loaded(store):
    keep(store, 8)
    asked = []

    def choose(tiers, tokens):
        asked.append((list(tiers), tokens))
        return 3

    scheduler = scheduler_of(store, choose=choose)
    assert scheduler.matched(prompt(200), 32) == (48, False)
    assert asked == [(["dram"] * 6, 200)]


def test_lite_says_what_would_have_been_hits_and_loads_nothing(store, caplog):
    scheduler = scheduler_of(store, is_lite=True)
    first = prompt(100, name="first")
    assert scheduler.matched(first, 0) == (0, False)
    assert scheduler.plan(output(first=100), "").saves == []
    assert store.contains(keys_of_blocks(6)) == [True] * 6
    again = prompt(100, name="again")
    with caplog.at_level("INFO", "vllm.cascade"):
        assert scheduler.matched(again, 16) == (0, False)
    assert "total_blocks_num: 6, hit hbm: 1, hit external: 5" in caplog.text
    scheduler.allocated(again, [TABLE], 80)
    assert scheduler.plan(output(again=84), "").loads == []
    assert scheduler.stats.data["sums"]["would_hit_blocks"] == 5


@pytest.mark.parametrize("is_lite", [True, False])
def test_a_request_that_waits_is_counted_once(store, is_lite):
    # Each step that asked about a request that had no room counted its blocks again.
    keep(store, 6)
    scheduler = scheduler_of(store, is_lite=is_lite, choose=lambda tiers, _: len(tiers) - 2)
    request = prompt(100)
    for _ in range(5):
        scheduler.matched(request, 0)
    sums = scheduler.stats.data["sums"]
    assert sums == {
        "lookups": 1,
        "looked_up_blocks": 6,
        "hit_blocks": 6,
        **({"would_hit_blocks": 6} if is_lite else {"declined_blocks": 2}),
    }


def keys_of_blocks(blocks, part=PARTS[0]):
    keys = keys_of(prompt(8))
    keys.extend(prompt(blocks * TOKENS).all_token_ids)
    return keys.keys(part.name, 0, blocks)


def test_ucms_line_is_told_once(store, caplog):
    keep(store, 125)
    scheduler = scheduler_of(store)
    request = prompt(125 * TOKENS)
    with caplog.at_level("INFO", "vllm.cascade"):
        for _ in range(3):
            scheduler.matched(request, 0)
    lines = [each.message for each in caplog.records if "total_blocks_num" in each.message]
    assert lines == ["request_id: request, total_blocks_num: 125, hit hbm: 0, hit external: 125"]


def test_a_request_that_is_asked_about_again_asks_the_store_once(store, monkeypatch):
    keep(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    monkeypatch.setattr(module, "ANSWER_S", 3600)
    for _ in range(50):
        assert scheduler.matched(request, 0) == (64, False)
    assert lookups(scheduler) == 1


def test_an_old_answer_is_asked_for_again(store, monkeypatch):
    keep(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched(request, 0) == (64, False)
    store.clear()
    monkeypatch.setattr(module, "ANSWER_S", 0)
    assert scheduler.matched(request, 0) == (0, False)
    # A request that goes on waiting is one request of the hit rate.
    assert lookups(scheduler) == 1


def test_after_a_preemption_the_store_is_asked_anew_with_the_answer_so_far(store, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 3600)
    keep(store, 2)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched(request, 0) == (32, False)
    request.append_output_token_ids(list(range(40)))
    keep(store, 2)
    keys = keys_of(request)
    keys.extend(request.all_token_ids)
    for part in PARTS:
        store.put(keys.keys(part.name, 2, 8), [b"kv"] * 6, parent=keys.parent(part.name, 2))
    request.num_preemptions += 1
    assert scheduler.matched(request, 0) == (128, False)
    assert lookups(scheduler) == 2


def test_a_load_that_failed_is_not_offered_again(store):
    keep(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched(request, 0) == (96, False)
    scheduler.allocated(request, [TABLE], 96)
    assert len(scheduler.plan(output(request=4), "").loads) == 1
    scheduler.learn(failed(request, 0, [2, 3]))
    request.num_preemptions += 1
    assert scheduler.matched(request, 0) == (0, False)
    # What was not there is computed, and saved.
    plan = scheduler.plan(output(request=100), "")
    assert [(save.first, save.blocks) for save in plan.saves] == [(2, {0: TABLE[2:6]})]


def test_another_request_may_load_after_one_that_failed(store):
    keep(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.matched(request, 0)
    scheduler.learn(failed(request, 0, [2]))
    assert scheduler.matched(prompt(100, name="other"), 0) == (96, False)


@pytest.mark.parametrize(
    ("given", "blocks"), [(96, 6), (48, 3), (16, 1), (33, 3), (0, 0), (500, 6)]
)
def test_a_load_is_as_long_as_the_engine_says(store, given, blocks):
    keep(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(120)
    assert scheduler.matched(request, 0) == (96, False)
    scheduler.allocated(request, [TABLE], given)
    loads = scheduler.plan(output(), "").loads
    assert sum(len(load.blocks[0]) for load in loads) == blocks
    for load in loads:
        assert load.blocks == {0: TABLE[:blocks]}
        assert {len(keys) for keys in load.keys.values()} == {32 * blocks}
    assert scheduler.plan(output(), "").loads == []


def test_a_load_begins_behind_local_blocks_and_is_told_of_by_tier(store):
    keep(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(120)
    assert scheduler.matched(request, 32) == (64, False)
    scheduler.allocated(request, [TABLE], 64)
    assert scheduler.sources(request, 64) == {"dram": 64}
    (load,) = scheduler.plan(output(), "").loads
    assert (load.first, load.blocks, load.tier) == (2, {0: TABLE[2:6]}, "dram")
    keys = keys_of(request)
    keys.extend(request.all_token_ids)
    assert load.keys == {part.name: keys.raw(part.name, 2, 6) for part in PARTS}


def test_a_second_call_after_an_asynchronous_load_plans_nothing(store):
    keep(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(64)
    assert scheduler.matched(request, 0) == (64, True)
    scheduler.allocated(request, [TABLE], 64)
    scheduler.allocated(request, [TABLE], 0)
    (load,) = scheduler.plan(output(), "").loads
    assert load.is_async


def test_several_groups_are_always_loaded_beside_others(store):
    # The engine cannot be told of single bad blocks of several groups in a step.
    keep(store, 4)
    groups = [Group(0), Group(1, 2)]
    assert scheduler_of(store, groups=groups, load="sync").matched(prompt(100), 0) == (64, True)


def test_a_request_that_must_compute_its_prompt_loads_nothing(store):
    keep(store, 4)
    scheduler = scheduler_of(store)
    assert scheduler.matched(prompt(100, prompt_logprobs=1), 0) == (0, False)


def test_full_blocks_are_saved_once_each_as_they_are_computed(store):
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.matched(request, 0)
    saved = []
    for computed, tokens in [(0, 40), (40, 40), (80, 20), (100, 1)]:
        request.num_computed_tokens = computed
        plan = scheduler.plan(output(request=tokens), "")
        saved += [(save.first, save.blocks[0], save.stands_on[0]) for save in plan.saves]
        for save in plan.saves:
            assert all(len(keys) == 32 * len(save.blocks[0]) for keys in save.keys.values())
            assert all((key is None) == (save.first == 0) for key in save.parents.values())
    assert saved == [
        (0, TABLE[:2], TABLE[:2]),
        (2, TABLE[2:5], TABLE[:5]),
        (5, TABLE[5:6], TABLE[:6]),
    ]


def test_tokens_that_may_be_taken_back_are_not_saved(store):
    # A guess is in the step, and not yet among the request's tokens.
    scheduler = scheduler_of(store)
    request = prompt(30)
    scheduler.matched(request, 0)
    assert [save.blocks[0] for save in scheduler.plan(output(request=34), "").saves] == [TABLE[:1]]


def test_what_the_store_did_not_take_is_offered_again_after_a_while(store, monkeypatch):
    scheduler = scheduler_of(store)
    request = prompt(64)
    scheduler.matched(request, 0)
    assert len(scheduler.plan(output(request=64), "").saves) == 1
    scheduler.learn(Progress(saved=[Saved("request", 0, [False] * 4, 0, 0.1, 0.0)]))
    request.num_computed_tokens = 64
    assert scheduler.plan(output(request=1), "").saves == []
    monkeypatch.setattr(module, "RETRY_S", 0)
    scheduler.learn(Progress(saved=[Saved("request", 0, [False] * 4, 0, 0.1, 0.0)]))
    assert [save.first for save in scheduler.plan(output(request=1), "").saves] == [0]


def test_loads_are_planned_though_saves_cannot_be(store):
    # The engine takes the tokens for loaded: a plan without the load is a wrong answer.
    keep(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.matched(request, 0)
    scheduler.allocated(request, [TABLE], 64)
    assert len(scheduler.plan(output(tables=(), request=36), "").loads) == 1


def test_after_the_engine_forgot_its_cache_nothing_old_is_loaded(store):
    keep(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched(request, 0) == (64, False)
    scheduler.forget()
    scheduler.allocated(request, [TABLE], 64)
    assert scheduler.plan(output(), "").loads == []
    assert scheduler.matched(request, 0) == (0, False)


def test_a_request_without_names_is_computed_and_not_saved(store):
    def unkeyed(_):
        raise Unkeyed("it is embeddings")

    scheduler = scheduler_of(store, keys=unkeyed)
    request = prompt(100)
    scheduler.arrive(request)
    assert scheduler.matched(request, 0) == (0, False)
    assert scheduler.plan(output(request=100), "").saves == []
    assert scheduler.finish(request, lambda hints: hints) is None


def test_plans_say_which_outcome_they_know_of(store):
    scheduler = scheduler_of(store)
    plans = [scheduler.plan(output(), "")]
    plans.append(scheduler.plan(output(), ""))
    scheduler.learn(Progress(plan=1))
    plans.append(scheduler.plan(output(), ""))
    assert [(plan.number, plan.learned) for plan in plans] == [(1, 0), (2, 0), (3, 1)]


def test_a_finished_request_is_forgotten(store):
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.arrive(request)
    assert scheduler.finish(request, lambda hints: hints).blocks == 6
    assert scheduler.finish(request, lambda hints: hints) is None
    assert scheduler.plan(output(request=1), "").saves == []


def test_without_a_store_everything_is_a_miss():
    scheduler = scheduler_of(None)
    request = prompt(100)
    scheduler.arrive(request)
    assert scheduler.matched(request, 0) == (0, False)


@pytest.mark.parametrize(("seconds", "stays"), [(0.0, False), (0.001, False), (60.0, True)])
def test_blocks_of_a_request_that_waits_stay_for_a_bounded_time(store, seconds, stays):
    block = bytes(1 << 20)
    scheduler = scheduler_of(store, lookahead_s=seconds)
    for part in PARTS:
        assert all(result.ok for result in store.put(keys_of_blocks(3, part), [block] * 3))
    scheduler.arrive(prompt(100))
    time.sleep(0.01)
    for number in range(16):
        # Of other requests: nothing goes for the end of its own chain.
        flood = keys_of(prompt(8, cache_salt=f"other {number}"))
        flood.extend(prompt(4 * TOKENS).all_token_ids)
        store.put(flood.keys(PARTS[0].name, 0, 4), [block] * 4)
    assert (scheduler.matched(prompt(100), 0) == (48, False)) == stays


def test_a_node_that_stands_still_is_a_miss_within_its_budget(serve, eventually):
    node = serve("--dram", "16MiB")
    budget = 0.2
    with cascadekv.connect(node.socket, timeout=budget) as store:
        keep(store, 4)
        scheduler = scheduler_of(store)
        assert scheduler.matched(prompt(100, name="before"), 0) == (64, False)
        node.suspend()
        try:
            for name in ("first", "second"):
                request = prompt(100, name=name)
                started = time.monotonic()
                scheduler.arrive(request)
                assert scheduler.matched(request, 0) == (0, False)
                print(f"a miss after {time.monotonic() - started:.3f} s of {2 * budget}")
        finally:
            node.resume()
        names = iter(range(1000))
        eventually(lambda: scheduler.matched(prompt(100, name=f"{next(names)}"), 0) == (64, False))

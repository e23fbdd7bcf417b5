"""The scheduler's side: lookups, and the loads and saves that it plans."""

import dataclasses
import time

import cascadekv
import pytest
from cascadekv import Hints
from cascadekv.connectors.vllm import scheduler as module
from cascadekv.connectors.vllm import tracked
from cascadekv.connectors.vllm.groups import CacheGroup
from cascadekv.connectors.vllm.keys import RequestKeys, UnkeyableRequest
from cascadekv.connectors.vllm.metadata import LoadResult, Part, SaveResult, WorkerReport
from cascadekv.connectors.vllm.scheduler import Scheduler, SchedulerSettings
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm_caches import SPACE
from vllm_compat import block_state

TOKENS = 16
"""Tokens of a block."""
PARTS = [Part("heads 0-3", 0, 64), Part("heads 4-7", 0, 64)]
WHOLE = (CacheGroup(0),)
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


def scheduler_of(store, *, groups=WHOLE, choose=None, keys=keys_of, on_saved=None, **policy):
    return Scheduler(
        lambda: store,
        PARTS,
        groups,
        keys,
        SchedulerSettings(**policy),
        block_tokens=TOKENS,
        choose=choose or (lambda tiers, _: len(tiers)),
        hints_of=lambda _: Hints(),
        on_saved=on_saved,
    )


def put_blocks(store, blocks, of=None, parts=PARTS):
    """Store the leading blocks of a long prompt."""
    keys = keys_of(of or prompt(8))
    keys.extend(prompt(blocks * TOKENS).all_token_ids)
    for part in parts:
        own = keys.keys(part.name, 0, blocks)
        assert all(result.ok for result in store.put(own, [bytes(key) for key in own]))


def output(tables=(TABLE,), **tokens):
    """Return the engine's output for a step: tokens of each request, and their block tables."""
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
    return WorkerReport(loaded=[LoadResult(request.request_id, first, "dram", 9, bad, 0, 0.1, 0.0)])


@pytest.mark.parametrize(
    ("tokens", "load", "matched"),
    [
        # A step that loads synchronously must compute a token.
        (64, "sync", (48, False)),
        (65, "sync", (64, False)),
        (63, "sync", (48, False)),
        # An asynchronous load may have all blocks: the engine computes the last token again.
        (64, "async", (64, True)),
        (65, "async", (64, True)),
        # Blocks in DRAM are loaded synchronously, unless no token is left to compute.
        (64, "auto", (64, True)),
        (65, "auto", (64, False)),
        (15, "auto", (0, False)),
        (16, "sync", (0, False)),
        (16, "auto", (16, True)),
    ],
)
def test_the_last_token_is_computed_unless_a_load_is_asynchronous(store, tokens, load, matched):
    put_blocks(store, 4)
    scheduler = scheduler_of(store, load=load)
    assert scheduler.matched_tokens(prompt(tokens), 0) == matched


def test_local_blocks_are_not_loaded_again(store):
    put_blocks(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched_tokens(request, 32) == (32, False)
    assert scheduler.matched_tokens(request, 64) == (0, False)
    assert scheduler.matched_tokens(request, 80) == (0, False)
    assert scheduler.matched_tokens(request, 0) == (64, False)


def test_a_block_is_a_hit_if_all_its_parts_are_present(store):
    put_blocks(store, 4, parts=PARTS[:1])
    put_blocks(store, 2, parts=PARTS[1:])
    assert scheduler_of(store).matched_tokens(prompt(100), 0) == (32, False)


@pytest.mark.parametrize(
    ("ratio", "tokens"), [(0.0, 0), (0.25, 32), (0.5, 64), (0.99, 112), (1, 128)]
)
def test_hit_ratio_limits_the_loaded_blocks(store, ratio, tokens):
    put_blocks(store, 8)
    scheduler = scheduler_of(store, hit_ratio=ratio)
    assert scheduler.matched_tokens(prompt(8 * TOKENS + 1), 0) == (tokens, False)


def test_short_prompts_are_neither_looked_up_nor_saved(store):
    put_blocks(store, 4)
    scheduler = scheduler_of(store, min_tokens=64)
    short, long = prompt(63, name="short"), prompt(64, name="long")
    assert scheduler.matched_tokens(short, 0) == (0, False)
    assert lookups(scheduler) == 0
    assert scheduler.matched_tokens(long, 0) == (64, True)
    scheduler.matched_tokens(prompt(63, name="other", cache_salt="a"), 0)
    scheduler.matched_tokens(prompt(64, name="kept", cache_salt="b"), 0)
    plan = scheduler.plan_step(output(other=63, kept=64), "")
    assert [save.request for save in plan.saves] == ["kept"]


def test_blocks_that_are_faster_to_compute_are_not_loaded(store):
    put_blocks(store, 8)
    calls = []

    def choose(tiers, tokens):
        calls.append((list(tiers), tokens))
        return 3

    scheduler = scheduler_of(store, choose=choose)
    assert scheduler.matched_tokens(prompt(200), 32) == (48, False)
    assert calls == [(["dram"] * 6, 200)]


def test_lite_mode_counts_hits_and_loads_nothing(store, caplog):
    scheduler = scheduler_of(store, is_lite=True)
    first = prompt(100, name="first")
    assert scheduler.matched_tokens(first, 0) == (0, False)
    assert scheduler.plan_step(output(first=100), "").saves == []
    assert store.contains(keys_of_blocks(6)) == [True] * 6
    again = prompt(100, name="again")
    with caplog.at_level("INFO", "vllm.cascade"):
        assert scheduler.matched_tokens(again, 16) == (0, False)
    assert "total_blocks_num: 6, hit hbm: 1, hit external: 5" in caplog.text
    scheduler.plan_load(again, [TABLE], 80)
    assert scheduler.plan_step(output(again=84), "").loads == []
    assert scheduler.stats.data["sums"]["would_hit_blocks"] == 5


@pytest.mark.parametrize("is_lite", [True, False])
def test_a_waiting_request_is_counted_once(store, is_lite):
    # Regression: every step counted the blocks of a waiting request again.
    put_blocks(store, 6)
    scheduler = scheduler_of(store, is_lite=is_lite, choose=lambda tiers, _: len(tiers) - 2)
    request = prompt(100)
    for _ in range(5):
        scheduler.matched_tokens(request, 0)
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


def test_ucms_log_line_is_written_once(store, caplog):
    put_blocks(store, 125)
    scheduler = scheduler_of(store)
    request = prompt(125 * TOKENS)
    with caplog.at_level("INFO", "vllm.cascade"):
        for _ in range(3):
            scheduler.matched_tokens(request, 0)
    lines = [each.message for each in caplog.records if "total_blocks_num" in each.message]
    assert lines == ["request_id: request, total_blocks_num: 125, hit hbm: 0, hit external: 125"]


def test_a_lookup_result_is_reused_while_a_request_waits(store, monkeypatch):
    put_blocks(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    monkeypatch.setattr(tracked, "RESULT_MAX_AGE_S", 3600)
    for _ in range(50):
        assert scheduler.matched_tokens(request, 0) == (64, False)
    assert lookups(scheduler) == 1


def test_a_stale_lookup_result_is_renewed(store, monkeypatch):
    put_blocks(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched_tokens(request, 0) == (64, False)
    store.clear()
    monkeypatch.setattr(tracked, "RESULT_MAX_AGE_S", 0)
    assert scheduler.matched_tokens(request, 0) == (0, False)
    # A waiting request counts once in the hit rate.
    assert lookups(scheduler) == 1


def test_a_preempted_request_is_looked_up_again_with_its_output(store, monkeypatch):
    monkeypatch.setattr(tracked, "RESULT_MAX_AGE_S", 3600)
    put_blocks(store, 2)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched_tokens(request, 0) == (32, False)
    request.append_output_token_ids(list(range(40)))
    put_blocks(store, 2)
    keys = keys_of(request)
    keys.extend(request.all_token_ids)
    for part in PARTS:
        store.put(keys.keys(part.name, 2, 8), [b"kv"] * 6, parent=keys.parent(part.name, 2))
    request.num_preemptions += 1
    assert scheduler.matched_tokens(request, 0) == (128, False)
    assert lookups(scheduler) == 2


def test_a_failed_load_is_not_repeated(store):
    put_blocks(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched_tokens(request, 0) == (96, False)
    scheduler.plan_load(request, [TABLE], 96)
    assert len(scheduler.plan_step(output(request=4), "").loads) == 1
    scheduler.apply_report(failed(request, 0, [2, 3]))
    request.num_preemptions += 1
    assert scheduler.matched_tokens(request, 0) == (0, False)
    # The failed blocks are computed and saved.
    plan = scheduler.plan_step(output(request=100), "")
    assert [(save.first, save.blocks) for save in plan.saves] == [(2, {0: TABLE[2:6]})]


def test_other_requests_still_load_after_a_failed_load(store):
    put_blocks(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.matched_tokens(request, 0)
    scheduler.apply_report(failed(request, 0, [2]))
    assert scheduler.matched_tokens(prompt(100, name="other"), 0) == (96, False)


@pytest.mark.parametrize(
    ("given", "blocks"), [(96, 6), (48, 3), (16, 1), (33, 3), (0, 0), (500, 6)]
)
def test_a_load_has_the_length_that_the_engine_allocates(store, given, blocks):
    put_blocks(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(120)
    assert scheduler.matched_tokens(request, 0) == (96, False)
    scheduler.plan_load(request, [TABLE], given)
    loads = scheduler.plan_step(output(), "").loads
    assert sum(len(load.blocks[0]) for load in loads) == blocks
    for load in loads:
        assert load.blocks == {0: TABLE[:blocks]}
        assert {len(keys) for keys in load.keys.values()} == {32 * blocks}
    assert scheduler.plan_step(output(), "").loads == []


def test_a_load_starts_after_local_blocks_and_is_reported_by_tier(store):
    put_blocks(store, 6)
    scheduler = scheduler_of(store)
    request = prompt(120)
    assert scheduler.matched_tokens(request, 32) == (64, False)
    scheduler.plan_load(request, [TABLE], 64)
    assert scheduler.tokens_by_tier(request, 64) == {"dram": 64}
    (load,) = scheduler.plan_step(output(), "").loads
    assert (load.first, load.blocks, load.tier) == (2, {0: TABLE[2:6]}, "dram")
    keys = keys_of(request)
    keys.extend(request.all_token_ids)
    assert load.keys == {part.name: keys.raw(part.name, 2, 6) for part in PARTS}


def test_a_second_call_after_an_asynchronous_load_plans_nothing(store):
    put_blocks(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(64)
    assert scheduler.matched_tokens(request, 0) == (64, True)
    scheduler.plan_load(request, [TABLE], 64)
    scheduler.plan_load(request, [TABLE], 0)
    (load,) = scheduler.plan_step(output(), "").loads
    assert load.is_async


def test_several_groups_are_always_loaded_asynchronously(store):
    # With several groups, a synchronous load cannot report single failed blocks.
    put_blocks(store, 4)
    groups = [CacheGroup(0), CacheGroup(1, 20)]
    assert scheduler_of(store, groups=groups, load="sync").matched_tokens(prompt(100), 0) == (
        64,
        True,
    )


@pytest.mark.parametrize("load", ["sync", "auto", "async"])
def test_with_a_window_the_last_token_does_not_count_as_loaded(store, load):
    # The engine computes it again. It keeps the pages of its window only if one token less is
    # reported.
    put_blocks(store, 4)
    for groups in ([CacheGroup(0, 20)], [CacheGroup(0), CacheGroup(1, 20)]):
        scheduler = scheduler_of(store, groups=groups, load=load)
        assert scheduler.matched_tokens(prompt(64), 0) == (63, True)
        assert scheduler.matched_tokens(prompt(64, name="own"), 48) == (15, True)
        assert scheduler.matched_tokens(prompt(65, name="more"), 0) == (64, True)
        request = prompt(64)
        scheduler.matched_tokens(request, 0)
        scheduler.plan_load(request, [TABLE] * len(groups), 63)
        (load_,) = scheduler.plan_step(output(), "").loads
        assert load_.blocks == {group.number: TABLE[:4] for group in groups}
        assert load_.has_windows


def test_a_shorter_prefix_is_loaded_only_if_its_window_is_there(store):
    put_blocks(store, 8)
    keys = keys_of(prompt(8))
    keys.extend(prompt(8 * TOKENS).all_token_ids)
    for part in PARTS:
        # A prefix of 4 or 5 blocks needs this one, a longer one does not.
        assert all(store.delete(keys.keys(part.name, 3, 4)))
    groups = [CacheGroup(0, 2 * TOKENS + 1)]
    for ratio, blocks in [(1.0, 8), (0.75, 6), (0.7, 3), (0.5, 3), (0.4, 3), (0.3, 2)]:
        scheduler = scheduler_of(store, groups=groups, hit_ratio=ratio)
        assert scheduler.matched_tokens(prompt(8 * TOKENS + 1), 0)[0] == blocks * TOKENS, ratio


def test_a_load_without_a_page_for_a_needed_block_fails(store):
    put_blocks(store, 4)
    scheduler = scheduler_of(store, groups=[CacheGroup(0, 2 * TOKENS + 1)])
    tables = dict.fromkeys(("whole", "before", "lacking"), TABLE[:4])
    tables["before"] = [0, *TABLE[1:4]]
    tables["lacking"] = [0, 0, *TABLE[2:4]]
    for name, table in tables.items():
        request = prompt(64, name=name)
        assert scheduler.matched_tokens(request, 0) == (63, True)
        scheduler.plan_load(request, [table], 63)
    loads = {load.request: load for load in scheduler.plan_step(output(), "").loads}
    assert {name for name, load in loads.items() if load.keys} == {"whole", "before"}
    # The workers report all of its blocks as failed.
    assert loads["lacking"].is_async


def test_a_request_for_prompt_logprobs_loads_nothing(store):
    put_blocks(store, 4)
    scheduler = scheduler_of(store)
    assert scheduler.matched_tokens(prompt(100, prompt_logprobs=1), 0) == (0, False)


def test_full_blocks_are_saved_once_each_as_they_are_computed(store):
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.matched_tokens(request, 0)
    saved = []
    for computed, tokens in [(0, 40), (40, 40), (80, 20), (100, 1)]:
        request.num_computed_tokens = computed
        plan = scheduler.plan_step(output(request=tokens), "")
        saved += [(save.first, save.blocks[0], save.depends_on[0]) for save in plan.saves]
        for save in plan.saves:
            assert all(len(keys) == 32 * len(save.blocks[0]) for keys in save.keys.values())
            assert all((key is None) == (save.first == 0) for key in save.parents.values())
    assert saved == [
        (0, TABLE[:2], TABLE[:2]),
        (2, TABLE[2:5], TABLE[:5]),
        (5, TABLE[5:6], TABLE[:6]),
    ]


def test_speculative_tokens_are_not_saved(store):
    # Speculative tokens are scheduled, but not among the request's tokens yet.
    scheduler = scheduler_of(store)
    request = prompt(30)
    scheduler.matched_tokens(request, 0)
    assert [save.blocks[0] for save in scheduler.plan_step(output(request=34), "").saves] == [
        TABLE[:1]
    ]


def test_a_failed_save_is_retried_after_a_delay(store, monkeypatch):
    scheduler = scheduler_of(store)
    request = prompt(64)
    scheduler.matched_tokens(request, 0)
    assert len(scheduler.plan_step(output(request=64), "").saves) == 1
    scheduler.apply_report(WorkerReport(saved=[SaveResult("request", 0, [False] * 4, 0, 0.1, 0.0)]))
    request.num_computed_tokens = 64
    assert scheduler.plan_step(output(request=1), "").saves == []
    monkeypatch.setattr(module, "SAVE_RETRY_S", 0)
    scheduler.apply_report(WorkerReport(saved=[SaveResult("request", 0, [False] * 4, 0, 0.1, 0.0)]))
    assert [save.first for save in scheduler.plan_step(output(request=1), "").saves] == [0]


def test_loads_are_planned_although_planning_saves_fails(store):
    # The engine counts the tokens as loaded: a plan without the load gives a wrong answer.
    put_blocks(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.matched_tokens(request, 0)
    scheduler.plan_load(request, [TABLE], 64)
    assert len(scheduler.plan_step(output(tables=(), request=36), "").loads) == 1


def test_nothing_old_is_loaded_after_a_cache_reset(store):
    put_blocks(store, 4)
    scheduler = scheduler_of(store)
    request = prompt(100)
    assert scheduler.matched_tokens(request, 0) == (64, False)
    scheduler.reset_keys()
    scheduler.plan_load(request, [TABLE], 64)
    assert scheduler.plan_step(output(), "").loads == []
    assert scheduler.matched_tokens(request, 0) == (0, False)


def test_a_reset_changes_the_keys_of_all_requests_although_one_has_none_now(store):
    # The files of an adapter are gone: the requests behind it kept their old keys.
    def keys(request):
        if request.request_id in gone:
            raise UnkeyableRequest("adapter a cannot be read")
        return keys_of(request)

    gone = set()
    put_blocks(store, 4)
    scheduler = scheduler_of(store, keys=keys)
    first, second = prompt(100, name="first"), prompt(100, name="second")
    for request in (first, second):
        scheduler.add_request(request)
        assert scheduler.matched_tokens(request, 0) == (64, False)
    gone.add("first")
    scheduler.reset_keys()
    assert scheduler.matched_tokens(first, 0) == (0, False)
    assert scheduler.matched_tokens(second, 0) == (0, False)
    assert [each.request for each in scheduler.plan_step(output(second=100), "").saves] == [
        "second"
    ]


def test_a_save_that_ends_after_a_cache_reset_is_not_announced_under_the_new_keys(store):
    announced = []
    scheduler = scheduler_of(store, on_saved=lambda *saved: announced.append(saved))
    request = prompt(100)
    scheduler.add_request(request)
    (save,) = scheduler.plan_step(output(request=100), "").saves
    saved = SaveResult("request", 0, [True] * 6, 0, 0.1, 0.0, save.plan)
    scheduler.reset_keys()
    scheduler.apply_report(WorkerReport(saved=[saved]))
    assert announced == []
    (save,) = scheduler.plan_step(output(request=100), "").saves
    saved = dataclasses.replace(saved, plan=save.plan)
    scheduler.apply_report(WorkerReport(saved=[saved]))
    assert len(announced) == 1


def test_a_request_without_keys_is_computed_and_not_saved(store):
    def unkeyed(_):
        raise UnkeyableRequest("its prompt consists of embeddings")

    scheduler = scheduler_of(store, keys=unkeyed)
    request = prompt(100)
    scheduler.add_request(request)
    assert scheduler.matched_tokens(request, 0) == (0, False)
    assert scheduler.plan_step(output(request=100), "").saves == []
    assert scheduler.finish(request, lambda hints: hints) is None


def test_plans_have_the_number_of_the_last_completed_plan(store):
    scheduler = scheduler_of(store)
    plans = [scheduler.plan_step(output(), "")]
    plans.append(scheduler.plan_step(output(), ""))
    scheduler.apply_report(WorkerReport(plan=1))
    plans.append(scheduler.plan_step(output(), ""))
    assert [(plan.number, plan.completed) for plan in plans] == [(1, 0), (2, 0), (3, 1)]


def test_a_finished_request_is_removed(store):
    scheduler = scheduler_of(store)
    request = prompt(100)
    scheduler.add_request(request)
    assert scheduler.finish(request, lambda hints: hints).blocks == 6
    assert scheduler.finish(request, lambda hints: hints) is None
    assert scheduler.plan_step(output(request=1), "").saves == []


def test_without_a_store_everything_is_a_miss():
    scheduler = scheduler_of(None)
    request = prompt(100)
    scheduler.add_request(request)
    assert scheduler.matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(("seconds", "stays"), [(0.0, False), (0.001, False), (60.0, True)])
def test_blocks_of_a_waiting_request_stay_for_a_bounded_time(store, seconds, stays):
    block = bytes(1 << 20)
    scheduler = scheduler_of(store, lookahead_s=seconds)
    for part in PARTS:
        assert all(result.ok for result in store.put(keys_of_blocks(3, part), [block] * 3))
    scheduler.add_request(prompt(100))
    time.sleep(0.01)
    for number in range(16):
        # Chains of other requests: a chain does not evict its own blocks.
        flood = keys_of(prompt(8, cache_salt=f"other {number}"))
        flood.extend(prompt(4 * TOKENS).all_token_ids)
        store.put(flood.keys(PARTS[0].name, 0, 4), [block] * 4)
    assert (scheduler.matched_tokens(prompt(100), 0) == (48, False)) == stays


def test_a_suspended_node_is_a_miss_within_the_deadline(serve, eventually):
    node = serve("--dram", "16MiB")
    budget = 0.2
    with cascadekv.connect(node.socket, timeout=budget) as store:
        put_blocks(store, 4)
        scheduler = scheduler_of(store)
        assert scheduler.matched_tokens(prompt(100, name="before"), 0) == (64, False)
        node.suspend()
        try:
            for name in ("first", "second"):
                request = prompt(100, name=name)
                started = time.monotonic()
                scheduler.add_request(request)
                assert scheduler.matched_tokens(request, 0) == (0, False)
                print(f"a miss after {time.monotonic() - started:.3f} s of {2 * budget}")
        finally:
            node.resume()
        names = iter(range(1000))
        eventually(
            lambda: scheduler.matched_tokens(prompt(100, name=f"{next(names)}"), 0) == (64, False)
        )

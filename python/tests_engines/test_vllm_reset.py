"""Weights change in memory, and vLLM resets its caches: no KV of other weights is used or stored.

The engines are vLLM's own scheduler with both sides of the connector. All KV is a function of the
weights, so an answer or a stored block from other weights is wrong.
"""

import threading

import pytest
from cascadekv.connectors.vllm.prefill_engine import PrefillEngine
from cascadekv.connectors.vllm.worker import Worker
from push_engines import both, expected, finish, run_until, transfers, waiting
from scheduled_engine import BLOCK, LIMIT_S
from transfer_engines import (
    TO_PREFILL,
    decode,
    leases_of,
    prefill,
    prompt,
    pulled,
    step_until,
    step_until_idle,
)

pytest_plugins = ["transfer_engines"]


@pytest.fixture
def start(start_scheduled):
    """Return a function that starts engines."""
    return start_scheduled


def update(*engines, is_preempted=False):
    """Change the weights and reset all caches; returns whether vLLM's own caches were reset."""
    results = []
    for engine in engines:
        engine.weights += 1
        reset = engine.scheduler.reset_prefix_cache
        results.append(reset(reset_running_requests=is_preempted, reset_connector=True))
    return all(results)


def ignore_own_pages(engine):
    """Let an engine go on with pages of the old weights, as vLLM does for running requests."""
    engine.compare_running = lambda: None


@pytest.mark.parametrize("updated", ["both", "prefill", "decode"])
def test_an_offer_from_before_a_reset_is_not_read(start, updated):
    """The decode engine read pages of the old weights, and stored them under its new keys."""
    source, target = start(), start()
    asked = prompt(5 * BLOCK + 2, "before", updated)
    params = prefill(source, asked)
    update(*{"both": [source, target], "prefill": [source], "decode": [target]}[updated])
    # The workers of the prefill engine learn of the reset in its next step.
    step_until_idle(source)
    decode(target, asked, params)
    assert pulled(target) == 0
    assert target.stored(asked) == [True] * 5


@pytest.mark.parametrize("updated", ["prefill", "decode"])
def test_engines_read_nothing_of_each_other_after_one_was_reset(start, updated):
    """In a rolling update, the decode engine read pages of other weights."""
    source, target = start(), start()
    warm = prompt(3 * BLOCK, "warm", updated)
    decode(target, warm, prefill(source, warm))
    assert pulled(target) == 3
    step_until_idle(source)
    update(source if updated == "prefill" else target)
    for number in range(2):
        asked = prompt(5 * BLOCK + 2, "rolling", updated, number)
        decode(target, asked, prefill(source, asked))
        assert pulled(target) == 0
        assert target.stored(asked) == [True] * 5
        step_until_idle(source)


def test_leases_end_at_a_reset(start):
    """Open leases kept vLLM from a reset of its own cache, for which all pages must be free."""
    source = start(has_prefix_cache=True)
    asked = prompt(5 * BLOCK + 2, "lease")
    prefill(source, asked)
    assert leases_of(source).open_leases()
    # As documented: the first call ends the leases, and vLLM's answer is that pages are in use.
    assert not update(source)
    source.step()
    assert leases_of(source).open_leases() == {}
    assert source.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    source.ask(asked)
    source.check()


def test_the_pages_of_a_request_that_has_just_finished_come_back_after_a_reset(start):
    """The workers learn in one plan of the end of the request and of the reset."""
    source = start()
    asked = prompt(5 * BLOCK + 2, "just finished")
    name = source.add(asked, new=1, hints=TO_PREFILL)
    step_until(source, lambda: name in source.facts.finished)
    assert not update(source)
    source.step()
    assert leases_of(source).open_leases() == {}
    source.check()


@pytest.mark.parametrize("state", ["waits", "is preempted"])
def test_a_request_that_starts_again_after_a_reset_is_offered(start, state):
    source, target = start(step_tokens=48), start()
    asked = prompt(9 * BLOCK + 5, "again", state)
    name = source.add(asked, new=1, hints=TO_PREFILL)
    if state == "is preempted":
        source.step()
        source.step()
    update(source, is_preempted=True)
    step_until(source, lambda: name in source.facts.finished)
    source.step()
    assert len(leases_of(source).open_leases()) == 1
    params = source.facts.params[name]
    assert params["do_remote_prefill"]
    decode(target, asked, params)
    assert pulled(target) == 0
    step_until_idle(source)


def test_a_request_with_kv_from_before_a_reset_is_not_offered(start):
    source, target = start(step_tokens=48), start()
    asked = prompt(9 * BLOCK + 5, "mixed")
    name = source.add(asked, new=1, hints=TO_PREFILL)
    source.step()
    source.step()
    update(source)
    ignore_own_pages(source)
    step_until(source, lambda: name in source.facts.finished)
    assert not source.facts.params[name]["do_remote_prefill"]
    source.abort(name)
    step_until_idle(source)
    decode(target, asked, source.facts.params[name])


@pytest.mark.parametrize("kind", ["pull", "load"])
def test_a_load_in_flight_at_a_reset_fails(start, monkeypatch, kind):
    """Its pages are of the old weights. They were used, and stored under the new keys."""
    source, target = start(), start({"cascade.load": "async"})
    asked = prompt(6 * BLOCK + 2, "in flight", kind)
    params = None
    if kind == "pull":
        params = prefill(source, asked)
    else:
        target.ask(asked)
    has_read, goes_on = threading.Event(), threading.Event()
    place = (PrefillEngine, "read") if kind == "pull" else (Worker, "_load")
    read = getattr(*place)

    def read_and_wait(*arguments):
        result = read(*arguments)
        has_read.set()
        assert goes_on.wait(LIMIT_S)
        return result

    monkeypatch.setattr(*place, read_and_wait)
    target.add(asked, hints=params)
    step_until(target, has_read.is_set)
    assert not update(target)
    goes_on.set()
    target.run()
    target.check()
    assert target.facts.loads_failed == (7 if kind == "pull" else 6)
    # What is stored under the new keys is right, if it is there at all.
    target.stored(asked)
    target.ask(asked)
    assert target.stored(asked) == [True] * 6
    step_until_idle(source)


@pytest.mark.parametrize("updated", ["both", "prefill", "decode"])
@pytest.mark.parametrize("moment", ["announced", "written in part"])
def test_a_push_in_flight_at_a_reset_fails(start, updated, moment):
    source, target = start(step_tokens=48), start()
    asked = prompt(9 * BLOCK + 5, "push", updated, moment)
    to_prefill, to_decode = both(source)
    target.add(asked, hints=to_decode)
    step_until(target, lambda: bool(waiting(source)))
    if moment == "written in part":
        name = source.add(asked, new=1, hints=to_prefill)
        source.step()
        (push,) = expected(target).values()
        step_until(target, lambda: any(first for first, _ in push.left.values()))
    update(*{"both": [source, target], "prefill": [source], "decode": [target]}[updated])
    if moment == "announced":
        name = source.add(asked, new=1, hints=to_prefill)
    else:
        ignore_own_pages(source)
    run_until((source, target), lambda: not target.scheduler.has_requests())
    step_until(source, lambda: name in source.facts.finished)
    source.abort(name)
    target.check()
    assert transfers(target).pushes == (0, 0)
    target.stored(asked)
    finish(source, target)
    target.ask(asked)
    assert target.stored(asked) == [True] * 9

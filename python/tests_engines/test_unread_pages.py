"""Pages of a prefill engine come back at once if a decode engine will not read them.

They stayed for the whole lease, 30 s by default, in which a busy prefill engine runs out of pages.
The leases of these tests last for an hour.
"""

import pytest
from push_engines import both, finish, run_until, waiting
from scheduled_engine import BLOCK
from transfer_engines import (
    decode,
    end_leases,
    leases_of,
    prefill,
    prompt,
    pulled,
    step_until,
    step_until_idle,
)

pytest_plugins = ["transfer_engines"]

LEASE = {"cascade.transfer_lease": 3600}
MISFITS = {
    "model": ({"cascade.weights": "of another model"}, {}),
    "block": ({}, {"block": 2 * BLOCK}),
    "layout": ({"cascade.shards": 2}, {}),
}
"""Settings and options of decode engines whose pages are not those of the prefill engine."""


@pytest.fixture
def start(start_scheduled):
    """Return a function that starts engines."""
    return start_scheduled


@pytest.mark.parametrize("kind", MISFITS)
def test_of_an_engine_that_does_not_fit(start, kind):
    settings, options = MISFITS[kind]
    source, target = start(LEASE), start({**LEASE, **settings}, **options)
    for number in range(2):
        asked = prompt(4 * BLOCK, "misfit", number)
        decode(target, asked, prefill(source, asked))
        step_until_idle(source)
    assert pulled(target) == 0


@pytest.mark.parametrize("decode_first", [True, False])
def test_of_a_push_to_an_engine_that_does_not_fit(start, decode_first):
    source = start(LEASE)
    target = start({**LEASE, "cascade.weights": "of another model"})
    asked = prompt(4 * BLOCK, "misfit", decode_first)
    to_prefill, to_decode = both(source)
    if decode_first:
        target.add(asked, hints=to_decode)
        step_until(target, lambda: bool(waiting(source)))
    source.add(asked, new=1, hints=to_prefill)
    if not decode_first:
        source.step()
        target.add(asked, hints=to_decode)
    finish(source, target)
    assert pulled(target) == 0


def test_of_a_push_to_a_request_that_may_not_use_it(start):
    source, target = start(LEASE), start(LEASE)
    asked = prompt(4 * BLOCK, "logprobs")
    to_prefill, to_decode = both(source)
    name = target.add(asked, hints=to_decode)
    # As vLLM does for a request that wants the log probabilities of its prompt.
    target.scheduler.requests[name].skip_reading_prefix_cache = True
    source.add(asked, new=1, hints=to_prefill)
    finish(source, target)
    assert pulled(target) == 0


@pytest.mark.parametrize("way", ["pull", "push"])
def test_of_several_outputs_of_a_request(start, way):
    """With n > 1 the engine makes a request of each output, and the response has one offer."""
    source, target = start(LEASE, pages=128), start(LEASE, pages=128)
    asked = prompt(4 * BLOCK + 3, "several", way)
    to_prefill, to_decode = both(source)
    if way == "push":
        for _ in range(3):
            target.add(asked, hints=to_decode)
        step_until(target, lambda: len(waiting(source)) == 3)
    else:
        del to_prefill["transfer_id"]
    names = [f"{at}_cmpl-1" for at in range(3)]
    for name in names:
        source.add(asked, new=1, hints=to_prefill, name=name)
    step_until(source, lambda: set(names) <= set(source.facts.finished))
    source.step()
    offers = [source.facts.params[name] for name in names]
    assert len(leases_of(source).open_leases()) <= 1
    if way == "pull":
        # Whichever of them the response has.
        assert offers[0]["remote_block_ids"]
        assert offers[0] == offers[1] == offers[2]
        target.add(asked, hints=offers[1])
    run_until((source, target), lambda: not target.scheduler.has_requests())
    assert pulled(target) == (5 if way == "pull" else 15)
    finish(source, target)


def test_of_a_request_whose_first_output_is_aborted(start):
    source, target = start(LEASE, step_tokens=32), start(LEASE)
    asked = prompt(6 * BLOCK, "first aborted")
    to_prefill = both(source)[0]
    del to_prefill["transfer_id"]
    first, second = [
        source.add(asked, new=1, hints=to_prefill, name=f"{at}_cmpl-1") for at in range(2)
    ]
    source.step()
    source.abort(first)
    step_until(source, lambda: second in source.facts.finished)
    decode(target, asked, source.facts.params[second])
    step_until_idle(source)
    assert leases_of(source).open_leases() == {}


def test_counts_of_leases_reach_the_metrics(start):
    source, target = start(LEASE), start(LEASE)
    misfit = start({**LEASE, "cascade.weights": "of another model"})
    asked = [prompt(4 * BLOCK, "counted", number) for number in range(5)]
    offers = [prefill(source, each) for each in asked[:4]]
    decode(target, asked[0], offers[0])
    decode(target, asked[1], offers[1])
    decode(misfit, asked[2], offers[2])
    step_until(source, lambda: len(leases_of(source).open_leases()) == 1)
    end_leases(source)
    to_prefill, to_decode = both(source)
    source.add(asked[4], new=1, hints=to_prefill)
    target.add(asked[4], hints=to_decode)
    finish(source, target)
    prefill(source, asked[0])
    source.connector.reset_cache()
    step_until_idle(source)
    figures = source.take_figures()
    assert figures["sums"]["offered_leases"] == 6
    ended = {"read": 3, "given_back": 1, "expired": 1, "reset": 1}
    assert figures["labels"]["ended_leases"] == ended

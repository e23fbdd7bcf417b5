"""Pages of an adapter move between engines only if both have loaded the same weights."""

import engine_calls
import pytest
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK
from test_adapters import LORA, STORE, write_adapter
from transfer_engines import TO_PREFILL

pytest_plugins = ["forked_engines"]

DIRECT = {**STORE, "cascade.transfer": "direct"}
NAME, NUMBER = "x", 1


@pytest.fixture(scope="module")
def right(start, tmp_path_factory):
    """Return a function that answers prompts with an adapter of a seed, without a connector."""
    engine, place = start(**LORA), tmp_path_factory.mktemp("right")

    def answer(request, seed):
        adapter = (f"seed {seed}", seed, write_adapter(place / str(seed), seed))
        return engine.run([request], 8, adapter=adapter)[0].tokens

    return answer


def test_pages_of_other_weights_are_not_read(start, right, tmp_path):
    """The digest of a prompt had the fingerprint of the adapter's files, not of what was loaded.

    A decode engine that had loaded the new files read pages of the old weights.
    """
    places = [tmp_path / "prefill", tmp_path / "decode"]
    first, second = ((NAME, NUMBER, write_adapter(place, 1)) for place in places)
    prefill, decode = start(DIRECT, **LORA), start(DIRECT, **LORA)

    def moved(name, seed, *, begin=None):
        """Compute on one engine and answer on the other; returns whether pages were read."""
        request = prompt(5 * BLOCK + 3, name)
        begin = begin or (lambda: prefill.call(*_prefill(request, first))[1])
        before = decode.call(engine_calls.reads_from_prefill_engines)
        answer, _ = decode.call(engine_calls.answer_with, request, 8, begin(), second)
        assert answer.tokens == right(request, seed), name
        return decode.call(engine_calls.reads_from_prefill_engines) > before

    for engine, adapter in ((prefill, first), (decode, second)):
        engine.call(engine_calls.load_adapter, adapter)
    assert moved("equal", 1), "equal weights are not read"
    # The new files are not loaded: the engines still have the same weights.
    write_adapter(places[0], 2)
    assert moved("equal yet", 1)
    prefill.call(engine_calls.load_adapter, first)
    assert not moved("new ones at the prefill", 1)
    write_adapter(places[1], 2)
    decode.call(engine_calls.load_adapter, second)
    assert moved("new ones at both", 2)
    write_adapter(places[0], 1)
    mixed = prompt(5 * BLOCK + 3, "in the middle")
    middle = (engine_calls.reload_while_computing, mixed, first, TO_PREFILL)
    assert not moved("in the middle", 2, begin=lambda: prefill.call(*middle))


def _prefill(request, adapter):
    return engine_calls.answer_with, request, 1, TO_PREFILL, adapter

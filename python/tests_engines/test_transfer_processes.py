"""Two vLLM engines in processes of their own: one computes prompts, the other one decodes."""

import os
import signal

import engine_calls
import pytest
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK

pytest_plugins = ["forked_engines"]

DIRECT = {
    "cascade.dram": "64MiB",
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
    "cascade.transfer": "direct",
}
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's example proxy sends to the prefill engine."""
TOKENS = 8
"""Tokens of an answer."""


def prefill(engine, asked):
    """Return the offer of a prefill engine."""
    _, params = engine.call(engine_calls.answer_with, asked, 1, TO_PREFILL)
    assert params["remote_num_tokens"] == len(asked)
    return params


def decode(engine, asked, params):
    """Return the answer of a decode engine."""
    answer, _ = engine.call(engine_calls.answer_with, asked, TOKENS, params)
    return answer


def decoded(engine):
    """Return how many prompts a decode engine has read from prefill engines."""
    return engine.call(engine_calls.reads_from_prefill_engines)


def test_the_same_tokens_as_one_engine(start, reference):
    source, target = start(DIRECT), start(DIRECT)
    lengths = [BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 5 * BLOCK + 7, 9 * BLOCK - 1]
    for number, length in enumerate(lengths, 1):
        asked = prompt(length, "two engines")
        answer = decode(target, asked, prefill(source, asked))
        (right,) = reference.answers([asked], TOKENS)
        assert answer.tokens == right, length
        assert decoded(target) == number


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_prefill_engine_that_stops(start, reference, name):
    source, target = start(DIRECT), start({**DIRECT, "cascade.load_timeout": 3})
    asked = [prompt(3 * BLOCK + at, name, at) for at in range(3)]
    offers = [prefill(source, each) for each in asked]
    right = reference.answers(asked, TOKENS)
    assert decode(target, asked[0], offers[0]).tokens == right[0]
    os.kill(source.process.pid, getattr(signal, name))
    for at in (1, 2):
        assert decode(target, asked[at], offers[at]).tokens == right[at]
    assert decoded(target) == 1
    if name == "SIGSTOP":
        os.kill(source.process.pid, signal.SIGCONT)
        again = prompt(4 * BLOCK, "goes on")
        offer = prefill(source, again)
        assert decode(target, again, offer).tokens == reference.answers([again], TOKENS)[0]
        # Computed: a worker that did not answer is not tried again at once.
        assert decoded(target) in (1, 2)
        source.close()
    else:
        source.kill()

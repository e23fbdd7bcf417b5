"""Two vLLM engines in processes of their own: one computes prompts, the other one decodes."""

import os
import signal
import threading
import time

import engine_calls
import pytest
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK, OPTIONS, engines
from network import Network, ports_in_sequence
from sealed_offers import with_own
from stopping import stop

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


@pytest.fixture
def start(tiny_model):
    """Start engines for one test."""
    with engines(tiny_model) as starter:
        yield starter


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


def stages(count):
    """Return options of an engine with that many stages, each in a process of its own."""
    if count == 1:
        return {}
    return {
        "pipeline_parallel_size": count,
        "distributed_executor_backend": "mp",
        "environment": {"VLLM_WORKER_MULTIPROC_METHOD": "fork"},
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("given", "taken"), [(2, 1), (1, 2)])
def test_engines_with_other_numbers_of_stages(start, reference, given, taken):
    listen = {"cascade.transfer_listen": f"127.0.0.1:{ports_in_sequence(given)}"}
    source, target = start(DIRECT | listen, **stages(given)), start(DIRECT, **stages(taken))
    lengths = [BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 7]
    for length in lengths:
        asked = prompt(length, "stages", given)
        params = prefill(source, asked)
        assert (params["tp_size"], params["pp_size"], params["dcp_size"]) == (1, given, 1)
        (right,) = reference.answers([asked], TOKENS)
        assert decode(target, asked, params).tokens == right, length
    pulled = len(lengths)
    assert target.call(engine_calls.moved) == [(pulled, 0, 0)] * taken
    # The router names the tensor parallel size only.
    router = Router(source)
    for length in lengths:
        asked = prompt(length, "pushed stages", given)
        (right,) = reference.answers([asked], TOKENS)
        assert router.ask(source, target, asked).tokens == right, length
    assert target.call(engine_calls.moved) == [(pulled, 0, len(lengths))] * taken
    for engine in source, target:
        assert engine.call(engine_calls.taken_blocks, BLOCKS) == 0


def together(*calls):
    """Make calls to several engines at once; returns what they return."""
    results = [None] * len(calls)

    def make(number, call):
        results[number] = call()

    threads = [
        threading.Thread(target=make, args=(number, call)) for number, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Router:
    """What llm-d's router does in push mode: it sends each request to both engines at once."""

    def __init__(self, source):
        """Learn the prefill engine's address, as the router does from its first answer."""
        host, _, port = source.call(engine_calls.transfer_address).rpartition(":")
        self._known = {
            "remote_engine_id": "prefill",
            "remote_host": host,
            "remote_port": float(port),
            "tp_size": 1.0,
            "transfer_mode": "push",
        }
        self._serial = 0

    def params(self):
        """Return what the next request to the prefill and to the decode engine has."""
        self._serial += 1
        name = {"transfer_id": f"xfer-{self._serial}"}
        decode = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "r"}
        return {**TO_PREFILL, **name}, {**self._known, **decode, **name}

    def ask(self, source, target, asked):
        """Return the answer to a prompt."""
        to_prefill, to_decode = self.params()
        _, answer = together(
            lambda: source.call(engine_calls.answer_with, asked, 1, to_prefill),
            lambda: decode(target, asked, to_decode),
        )
        return answer


def test_weights_that_change_in_memory(start):
    """Offers outlived a change of weights, and the decode engine stored what it had read."""
    source, target, alone = start(DIRECT), start(DIRECT), start()
    before, after = prompt(5 * BLOCK + 7, "before"), prompt(5 * BLOCK + 7, "after")
    offer = prefill(source, before)
    # The lease is open: the first call ends it.
    assert [each.call(engine_calls.update_weights, 2.0) for each in (source, target, alone)] == [
        2,
        1,
        1,
    ]
    assert decode(target, before, offer).tokens == alone.one(before, TOKENS).tokens
    # A rolling update: the prefill engine has the next weights already.
    source.call(engine_calls.update_weights, 2.0)
    offer = prefill(source, after)
    assert decode(target, after, offer).tokens == alone.one(after, TOKENS).tokens
    assert decoded(target) == 0
    for asked in before, after:
        found = target.one(asked, TOKENS)
        assert found.cached == 5 * BLOCK
        assert found.tokens == alone.one(asked, TOKENS).tokens
    check_nothing_held(source, target)


BLOCKS = OPTIONS["num_gpu_blocks_override"] - 1
"""Usable KV blocks of an engine."""


def check_nothing_held(*engines):
    """Compare what engines hold after all requests with nothing."""
    for engine in engines:
        assert engine.call(engine_calls.held, BLOCKS) == (0, 0, 0, 0)


def test_pushes_give_the_same_tokens_as_one_engine(start, reference):
    source, target = start(DIRECT), start(DIRECT)
    router = Router(source)
    lengths = [BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 5 * BLOCK + 7, 9 * BLOCK - 1]
    for number, length in enumerate(lengths, 1):
        asked = prompt(length, "pushed")
        (right,) = reference.answers([asked], TOKENS)
        assert router.ask(source, target, asked).tokens == right, length
        assert source.call(engine_calls.pushes) == (number, 0)
        assert target.call(engine_calls.pushes) == (0, number)
    check_nothing_held(source, target)


@pytest.mark.parametrize("kind", ["cut", "frozen"])
def test_the_network_fails_during_a_push(start, reference, kind, transfer_token):
    """The decode computes, the prefill is not held up, and a later push works again."""
    direct = DIRECT | transfer_token[1]
    source, target = start(direct), start({**direct, "cascade.transfer_lease": 8})
    router = Router(source)
    with Network(target.call(engine_calls.transfer_address)) as network:
        target.call(engine_calls.reach_through, network.address)
        asked = [prompt(4 * BLOCK + at, kind, at) for at in range(3)]
        right = reference.answers(asked, TOKENS)
        assert router.ask(source, target, asked[0]).tokens == right[0]
        network.freeze(after=network.passed[True] // 2)
        source.call(engine_calls.slow_layers, 0.2)
        if kind == "cut":
            threading.Thread(
                target=lambda: (_until(lambda: network.is_frozen), network.cut()), daemon=True
            ).start()
        assert router.ask(source, target, asked[1]).tokens == right[1]
        assert target.call(engine_calls.pushes) == (0, 1)
        source.call(engine_calls.slow_layers, 0)
        network.restore()
        source.call(engine_calls.end_leases)
        check_nothing_held(source, target)
        # An engine that was not reached is not tried again for 5 s.
        time.sleep(5.5)
        assert router.ask(source, target, asked[2]).tokens == right[2]
        assert target.call(engine_calls.pushes) == (0, 2)
        check_nothing_held(source, target)


@pytest.mark.parametrize("kind", ["cut", "frozen"])
@pytest.mark.parametrize("stage", ["before", "during"])
def test_the_network_fails_during_a_pull(start, reference, kind, stage, transfer_token):
    """The decode computes, the pages come back by the lease, and a later pull works again."""
    key, token = transfer_token
    source = start(DIRECT | token)
    target = start({**DIRECT, **token, "cascade.load_timeout": 3})
    with Network(source.call(engine_calls.transfer_address)) as network:

        def ask(prompt):
            params = prefill(source, prompt)
            _, identity = params["cascade"]["workers"][0]
            through = with_own(params, key=key, workers=[[network.address, identity]])
            return decode(target, prompt, through)

        asked = [prompt(4 * BLOCK + at, "pull", kind, stage, at) for at in range(3)]
        right = reference.answers(asked, TOKENS)
        assert ask(asked[0]).tokens == right[0]
        assert decoded(target) == 1
        if stage == "before":
            network.freeze()
        else:
            network.freeze(after=network.passed[False] // 2, is_forward=False)
        if kind == "cut":
            threading.Thread(
                target=lambda: (_until(lambda: network.is_frozen), network.cut()), daemon=True
            ).start()
        assert ask(asked[1]).tokens == right[1]
        assert decoded(target) == 1
        network.restore()
        source.call(engine_calls.end_leases)
        check_nothing_held(source, target)
        # An engine that was not reached is not tried again for 5 s.
        time.sleep(5.5)
        assert ask(asked[2]).tokens == right[2]
        assert decoded(target) == 2
        check_nothing_held(source, target)


def _until(is_so):
    end = time.monotonic() + 120
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stage", ["before", "during"])
def test_a_side_of_a_push_is_killed(start, reference, side, stage):
    """Whoever is left answers right and holds nothing."""
    settings = {**DIRECT, "cascade.transfer_lease": 8}
    source, target = start(settings), start(settings)
    router = Router(source)
    asked = prompt(5 * BLOCK, side, stage)
    (right,) = reference.answers([asked], TOKENS)
    to_prefill, to_decode = router.params()
    killed, left = (source, target) if side == "prefill" else (target, source)
    if stage == "before":
        if side == "prefill":
            killed.kill()
            assert decode(target, asked, to_decode).tokens == right
        else:
            target.call(engine_calls.abort_while_waiting, asked, to_decode)
            killed.kill()
            source.call(engine_calls.answer_with, asked, 1, to_prefill)
            source.call(engine_calls.end_leases)
        check_nothing_held(left)
        return
    source.call(engine_calls.slow_layers, 0.3)

    def kill_later():
        time.sleep(0.5)
        os.kill(killed.process.pid, signal.SIGKILL)

    def ask_left():
        if side == "prefill":
            return decode(target, asked, to_decode).tokens
        source.call(engine_calls.answer_with, asked, 1, to_prefill)
        return right

    def ask_killed():
        arguments = (asked, 1, to_prefill) if side == "prefill" else (asked, TOKENS, to_decode)
        # Its pipe ends with it.
        with pytest.raises(BaseException, match="ended with exit code"):
            killed.call(engine_calls.answer_with, *arguments)

    answer, _, _ = together(ask_left, ask_killed, kill_later)
    assert answer == right
    killed.kill()
    if side == "decode":
        source.call(engine_calls.end_leases)
    check_nothing_held(left)


def test_a_frozen_prefill_engine_of_a_push(start, reference):
    """The decode engine does not wait longer than its deadline."""
    source, target = start(DIRECT), start({**DIRECT, "cascade.transfer_lease": 4})
    router = Router(source)
    asked = [prompt(5 * BLOCK, "frozen", at) for at in range(2)]
    right = reference.answers(asked, TOKENS)
    assert router.ask(source, target, asked[0]).tokens == right[0]
    stop(source.process.pid)
    try:
        assert decode(target, asked[1], router.params()[1]).tokens == right[1]
        check_nothing_held(target)
    finally:
        os.kill(source.process.pid, signal.SIGCONT)
    assert target.call(engine_calls.pushes) == (0, 1)
    check_nothing_held(source)


def test_aborted_decodes_of_pushes(start, reference):
    source, target = start(DIRECT), start(DIRECT)
    router = Router(source)
    for at in range(3):
        asked = prompt(5 * BLOCK, "aborted", at)
        to_prefill, to_decode = router.params()
        target.call(engine_calls.abort_while_waiting, asked, to_decode)
        check_nothing_held(target)
        source.call(engine_calls.answer_with, asked, 1, to_prefill)
    source.call(engine_calls.end_leases)
    check_nothing_held(source, target)
    again = prompt(5 * BLOCK, "again")
    (right,) = reference.answers([again], TOKENS)
    assert router.ask(source, target, again).tokens == right


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_prefill_engine_that_stops(start, reference, name):
    source, target = start(DIRECT), start({**DIRECT, "cascade.load_timeout": 3})
    asked = [prompt(3 * BLOCK + at, name, at) for at in range(3)]
    offers = [prefill(source, each) for each in asked]
    right = reference.answers(asked, TOKENS)
    assert decode(target, asked[0], offers[0]).tokens == right[0]
    if name == "SIGSTOP":
        stop(source.process.pid)
    else:
        source.kill()
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

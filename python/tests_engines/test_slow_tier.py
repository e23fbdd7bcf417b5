"""A tier that becomes slow is avoided until it recovers, in a real engine.

The slowness is simulated: the worker sleeps before it reads. Everything else is real.
"""

import time

import engine_calls
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK

pytest_plugins = ["forked_engines"]

BLOCKS = 15
"""Blocks of a prompt: enough that computing takes longer than reading."""
PROBE = 4
STORE = {
    "cascade.pipeline": "Dram|Files",
    "cascade.files_capacity": "512MiB",
    # Reads from the page cache are much faster than computing.
    "cascade.direct_io": False,
    "cascade.io_engine": "psync",
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
    "cascade.load_timeout": 60,
    # Without lookahead, blocks are in files when they are requested.
    "cascade.lookahead": 0,
}
SLOW_BLOCK_S = 0.2
TRIES = 8


def test_loads_stop_while_a_tier_is_slow_and_resume(start, reference, tmp_path):
    store = {**STORE, "cascade.files": str(tmp_path)}
    stored = [prompt(BLOCKS * BLOCK + 20, "ill", number) for number in range(3 * TRIES)]
    writing = start({**store, "cascade.dram": "256MiB"})
    for request in stored:
        reference.check_one(writing, request)
    writing.close()

    engine = start({**store, "cascade.dram": "16MiB"})
    left = iter(stored)
    for number in range(3):
        # Prompts without hits measure the cost of computing.
        assert reference.check_one(engine, prompt(BLOCKS * BLOCK, "new", number)) == 0
    hits = [reference.check_one(engine, next(left)) for _ in range(3)]
    assert hits[-1] == BLOCKS * BLOCK, hits

    engine.call(engine_calls.slow_loads, SLOW_BLOCK_S)
    hits = [reference.check_one(engine, next(left)) for _ in range(TRIES)]
    assert hits[-1] <= PROBE * BLOCK, hits
    assert sum(hits) <= 3 * BLOCKS * BLOCK, hits

    engine.call(engine_calls.slow_loads, 0.0)
    hits = []
    while len(hits) < TRIES and (not hits or hits[-1] < BLOCKS * BLOCK):
        # A slow tier is probed once in five seconds.
        time.sleep(5.5)
        hits.append(reference.check_one(engine, next(left)))
    assert hits[-1] == BLOCKS * BLOCK, hits
    engine.close()

"""A tier that falls ill is left alone, and used again when it is well: in a real engine.

The illness is made up: the worker sleeps before it reads. Everything else is real.
"""

import time

import engine_calls
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK

pytest_plugins = ["forked_engines"]

BLOCKS = 15
"""Blocks of a prompt: enough that computing them takes longer than reading them."""
PROBE = 4
STORE = {
    "cascade.pipeline": "Dram|Files",
    "cascade.files_capacity": "512MiB",
    # What was read a second ago comes from memory of the system's: much faster than computing.
    "cascade.direct_io": False,
    "cascade.io_engine": "psync",
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
    "cascade.load_timeout": 60,
    # Blocks are to be in files when they are asked for.
    "cascade.lookahead": 0,
}
ILL_BLOCK_S = 0.2
TRIES = 8


def test_loads_stop_while_a_tier_is_slow_and_resume(start, reference, tmp_path):
    store = {**STORE, "cascade.files": str(tmp_path)}
    kept = [prompt(BLOCKS * BLOCK + 20, "ill", number) for number in range(3 * TRIES)]
    writing = start({**store, "cascade.dram": "256MiB"})
    for asked in kept:
        reference.check_one(writing, asked)
    writing.close()

    engine = start({**store, "cascade.dram": "16MiB"})
    left = iter(kept)
    for number in range(3):
        # What computing takes is learnt from prompts that nobody has seen.
        assert reference.check_one(engine, prompt(BLOCKS * BLOCK, "new", number)) == 0
    hits = [reference.check_one(engine, next(left)) for _ in range(3)]
    assert hits[-1] == BLOCKS * BLOCK, hits

    engine.call(engine_calls.slow_loads, ILL_BLOCK_S)
    hits = [reference.check_one(engine, next(left)) for _ in range(TRIES)]
    assert hits[-1] <= PROBE * BLOCK, hits
    assert sum(hits) <= 3 * BLOCKS * BLOCK, hits

    engine.call(engine_calls.slow_loads, 0.0)
    hits = []
    while len(hits) < TRIES and (not hits or hits[-1] < BLOCKS * BLOCK):
        # A tier that lost is tried once in five seconds.
        time.sleep(5.5)
        hits.append(reference.check_one(engine, next(left)))
    assert hits[-1] == BLOCKS * BLOCK, hits
    engine.close()

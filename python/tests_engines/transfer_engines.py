"""Two engines of `scheduled_engine.py` between which KV moves: settings, fixtures and calls."""

import json
import random
import time

import pytest
from cascadekv.bench.models import make_model
from conftest import MODELS
from scheduled_engine import BLOCK, LIMIT_S, ScheduledEngine
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)

DIRECT = {
    "cascade.dram": "16MiB",
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


@pytest.fixture(scope="module")
def scheduled_model(tmp_path_factory):
    """Return a model's directory, and initialize a group of one rank while tests run."""
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    directory = make_model(MODELS, "tiny", "bfloat16")
    init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        ensure_model_parallel_initialized(1, 1)
    yield directory
    cleanup_dist_env_and_memory()


@pytest.fixture
def start_scheduled(scheduled_model):
    """Return a function that starts engines; stops them after the test."""
    running = []

    def begin(settings=None, **options):
        given = {**DIRECT, **(settings or {})}
        given = {key: value for key, value in given.items() if value is not None}
        engine = ScheduledEngine(scheduled_model, given, **options)
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.stop()


def prompt(tokens, *parts):
    """Return tokens that are a function of `parts`."""
    chance = random.Random(repr((tokens, parts)))
    return [chance.randrange(1000) for _ in range(tokens)]


def prefill(engine, tokens, **options):
    """Compute a prompt as the example proxy asks for it; returns the params of the response."""
    name = engine.add(tokens, new=1, hints={**TO_PREFILL, **options})
    step_until(engine, lambda: name in engine.facts.finished)
    # The workers learn of the end in the next step.
    engine.step()
    # As they travel through a proxy.
    return json.loads(json.dumps(engine.facts.params[name]))


def step_until(engine, is_over, seconds=LIMIT_S):
    """Step an engine until something is the case."""
    end = time.monotonic() + seconds
    while not is_over():
        assert time.monotonic() < end, "it did not become so"
        engine.step()


def step_until_idle(engine):
    """Step until nothing is left to do: all leases have ended and all pages are free."""
    step_until(engine, lambda: not engine.scheduler.has_requests())
    engine.check()


def pulled(engine):
    """Return how many blocks the engine has read from prefill engines."""
    return engine.take_figures().get("labels", {}).get("loaded_blocks", {}).get("peers", 0)


def decode(engine, tokens, params, new=6):
    """Ask as the example proxy does; raises if the answer or a page is wrong. Returns the name."""
    name = engine.add(tokens, new=new, hints=params)
    engine.run()
    engine.check()
    return name


def leases_of(engine):
    """Return the table of leases of an engine's worker."""
    return engine.worker._worker._transfers._leases  # noqa: SLF001 # the parts under test


def end_leases(engine):
    """Let all leases expire now, and step until the engine has freed their pages."""
    for lease in leases_of(engine)._by_request.values():  # noqa: SLF001
        lease.expires = 0.0
    step_until_idle(engine)


def reuse_pages(engine, *parts):
    """Compute prompts that need all pages of an engine."""
    pages = engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    each = min(pages, 16)
    for at in range(-(-pages // each)):
        engine.ask(prompt(each * BLOCK - 4, "reuse", at, *parts), new=2)

"""vLLM's own scheduler and both sides of the connector, step by step; every page is compared."""

import random

import pytest
from cascadekv.bench.models import make_model
from cascadekv.connectors.vllm.memory import DeviceMemory, HostMemory
from conftest import MODELS
from scheduled_engine import BLOCK, ScheduledEngine, answer_of
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

DRAM = {"cascade.dram": "64MiB", "cascade.lookup_timeout": 10, "cascade.save_timeout": 30}
WAYS = {
    "sync": {"cascade.load": "sync"},
    "async": {"cascade.load": "async"},
    "layerwise": {"cascade.load": "sync", "cascade.layerwise": True},
    "auto": {},
}
MEMORIES = {"host": HostMemory, "device": DeviceMemory}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Give a model's configuration; a group of one rank is there while tests run."""
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    directory = make_model(MODELS, "tiny", "bfloat16")
    init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        ensure_model_parallel_initialized(1, 1)
    yield directory
    cleanup_dist_env_and_memory()


@pytest.fixture
def start(model):
    """Start engines; what a test leaves running ends after it."""
    running = []

    def begin(store, **options):
        running.append(ScheduledEngine(model, store, **options))
        return running[-1]

    yield begin
    for engine in running:
        engine.stop()


def prompt(tokens, *parts):
    """Make tokens that follow from `parts`."""
    chance = random.Random(repr((tokens, parts)))
    return [chance.randrange(1000) for _ in range(tokens)]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_is_what_was_computed(start, way, memory):
    engine = start({**DRAM, **WAYS[way]}, memory=MEMORIES[memory])
    first = prompt(5 * BLOCK + 3, "first")
    engine.ask(first)
    assert all(engine.stored(first))
    engine.ask(first, [*first[: 3 * BLOCK], *prompt(30, "tail")], first)
    assert engine.facts.compared_pages


SCHEDULERS = {
    "plain": {},
    "prefix-cache": {"has_prefix_cache": True},
    "async-scheduling": {"is_async_scheduling": True},
    "both": {"has_prefix_cache": True, "is_async_scheduling": True},
}
everywhere = pytest.mark.parametrize(
    ("way", "memory", "scheduler"),
    [(way, memory, scheduler) for way in WAYS for memory in MEMORIES for scheduler in SCHEDULERS],
)


def begin(start, way, memory, scheduler, **options):
    """Start an engine of one kind, and see that it is of that kind."""
    kind = SCHEDULERS[scheduler]
    engine = start({**DRAM, **WAYS[way]}, memory=MEMORIES[memory], **kind, **options)
    is_async = kind.get("is_async_scheduling", False)
    assert isinstance(engine.scheduler, AsyncScheduler) == is_async
    assert engine.depth == (2 if is_async else 1)
    return engine


def lose(engine, blocks):
    """Delete blocks of a prompt between the next plan that loads and its execution."""

    def act():
        if engine.is_loading:
            engine.between = lambda: None
            engine.store().delete(blocks)

    engine.between = act


@everywhere
def test_blocks_that_go_between_lookup_and_load_are_computed(start, way, memory, scheduler):
    engine = begin(start, way, memory, scheduler)
    for turn, lost in enumerate([(0, 1), (3, 4), (0, 6), (5, 6)]):
        first = prompt(6 * BLOCK + 5, "lost", turn)
        engine.ask(first)
        engine.forget_locally()
        lose(engine, engine.keys(first)[lost[0] : lost[1]])
        engine.ask(first, [*first[: 4 * BLOCK], *prompt(40, "beside", turn)], first)
        # What was computed then is right, and kept.
        assert all(engine.stored(first))
        engine.forget_locally()
        engine.ask(first)
    assert engine.facts.loads_failed

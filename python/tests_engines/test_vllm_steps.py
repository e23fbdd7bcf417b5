"""vLLM's own scheduler with both sides of the connector, step by step; every page is compared."""

import dataclasses
import os
import random
import threading

import pytest
from cascadekv import Gpu
from cascadekv.bench.models import make_model
from cascadekv.connectors.vllm import events as events_module
from cascadekv.connectors.vllm import scheduler as scheduler_module
from cascadekv.connectors.vllm.memory import DeviceMemory, HostMemory
from conftest import MODELS
from gpu_engine import GpuEngine
from scheduled_engine import BLOCK, LIMIT_S, ScheduledEngine
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

STEPS = int(os.environ.get("CASCADE_CHAOS_STEPS", "200"))
"""Steps of a random run."""
DRAM = {"cascade.dram": "64MiB", "cascade.lookup_timeout": 10, "cascade.save_timeout": 30}
WAYS = {
    "sync": {"cascade.load": "sync"},
    "async": {"cascade.load": "async"},
    "layerwise": {"cascade.load": "sync", "cascade.layerwise": True},
    "auto": {},
}
MEMORIES = {"host": HostMemory, "device": DeviceMemory, "gpu": None}
"""Classes of memory; a GPU's has an engine of its own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model's directory, and initialize a group of one rank while tests run."""
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    directory = make_model(MODELS, "tiny", "bfloat16")
    init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        ensure_model_parallel_initialized(1, 1)
    yield directory
    cleanup_dist_env_and_memory()


@pytest.fixture
def start(model):
    """Return a function that starts engines; stops them after the test."""
    running = []

    def begin(store, *, memory=HostMemory, **options):
        if memory is None:
            engine = GpuEngine(model, store, **options)
        else:
            engine = ScheduledEngine(model, store, memory=memory, **options)
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.stop()


def prompt(tokens, *parts):
    """Return tokens that are a function of `parts`."""
    chance = random.Random(repr((tokens, parts)))
    return [chance.randrange(1000) for _ in range(tokens)]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("way", WAYS)
def test_loaded_blocks_equal_computed_blocks(start, way, memory):
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
    [
        (way, memory, scheduler)
        for way in WAYS
        for memory in MEMORIES
        # Slow, since each access to a page of the fake GPU is a call of its driver.
        for scheduler in (("both",) if memory == "gpu" else SCHEDULERS)
    ],
)


def begin(start, way, memory, scheduler, **options):
    """Start an engine with these options, and check its scheduler."""
    kind = SCHEDULERS[scheduler]
    engine = start({**DRAM, **WAYS[way]}, memory=MEMORIES[memory], **kind, **options)
    is_async = kind.get("is_async_scheduling", False)
    assert isinstance(engine.scheduler, AsyncScheduler) == is_async
    assert engine.depth == (2 if is_async else 1)
    return engine


def delete_before_load(engine, blocks):
    """Delete blocks of a prompt between the next plan that loads and its execution."""

    def act():
        if engine.is_loading:
            engine.between = lambda: None
            engine.store().delete(blocks)

    engine.between = act


@everywhere
def test_blocks_deleted_between_lookup_and_load_are_computed(start, way, memory, scheduler):
    engine = begin(start, way, memory, scheduler)
    for turn, lost in enumerate([(0, 1), (3, 4), (0, 6), (5, 6)]):
        first = prompt(6 * BLOCK + 5, "lost", turn)
        engine.ask(first)
        engine.reset_prefix_cache()
        delete_before_load(engine, engine.keys(first)[lost[0] : lost[1]])
        engine.ask(first, [*first[: 4 * BLOCK], *prompt(40, "beside", turn)], first)
        # The recomputed blocks are right, and saved.
        assert all(engine.stored(first))
        engine.reset_prefix_cache()
        engine.ask(first)
    assert engine.facts.loads_failed


@everywhere
def test_preempted_and_aborted_requests_leak_nothing(start, way, memory, scheduler):
    engine = begin(start, way, memory, scheduler, pages=13)
    common = prompt(3 * BLOCK, "common")
    for turn in range(3):
        requests = [[*common, *prompt(BLOCK + 5, "own", number)] for number in range(5)]
        names = [engine.add(each, 2 * BLOCK) for each in requests]
        for _ in range(turn + 2):
            engine.step()
        engine.abort(names[turn])
        engine.run()
        engine.check()
        engine.reset_prefix_cache()
        for each in requests[3:]:
            assert all(engine.stored(each))
    assert engine.facts.preemptions, engine.facts


@everywhere
def test_a_node_killed_before_a_load_changes_no_answer(start, serve, way, memory, scheduler):
    node = serve("--dram", "32MiB")
    store = {"cascade.node": f"unix:{node.socket}", "cascade.load_timeout": 5, **WAYS[way]}
    engine = start(store, memory=MEMORIES[memory], **SCHEDULERS[scheduler])
    requests = [prompt(4 * BLOCK + 3, "away", number) for number in range(3)]
    engine.ask(*requests)
    engine.reset_prefix_cache()

    def kill():
        if engine.is_loading:
            engine.between = lambda: None
            node.kill()

    engine.between = kill
    engine.ask(*requests)
    assert engine.between() is None, "nothing was loaded"
    engine.reset_prefix_cache()
    engine.ask(*requests, new=BLOCK)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_random_steps_keep_every_page_right(start, memory, scheduler):
    seed = random.SystemRandom().randrange(1 << 32)
    seed = int(os.environ.get("CASCADE_CHAOS_SEED", seed))
    print(f"CASCADE_CHAOS_SEED={seed}")
    chance = random.Random(seed)
    way = chance.choice(list(WAYS))
    engine = begin(start, way, memory, scheduler, pages=24)
    bases = [prompt(7 * BLOCK, "base", number) for number in range(3)]

    def new():
        base = chance.choice(bases)
        shared = chance.randrange(len(base) + 1)
        return [*base[:shared], *prompt(chance.randrange(1, 40), "tail", chance.random())]

    def delete_some():
        if chance.random() < 0.3:
            keys = engine.keys(chance.choice(bases))
            first = chance.randrange(len(keys))
            engine.store().delete(keys[first : first + chance.randrange(1, 4)])

    engine.between = delete_some
    waiting = []
    steps = STEPS // 4 if memory == "gpu" else STEPS
    for _ in range(steps):
        if chance.random() < 0.4 and engine.scheduler.get_num_unfinished_requests() < 12:
            waiting.append(engine.add(new(), chance.randrange(1, 20)))
        if waiting and chance.random() < 0.05:
            engine.abort(waiting.pop(chance.randrange(len(waiting))))
        if chance.random() < 0.02:
            # vLLM cannot preempt running requests while others load.
            is_all = chance.random() < 0.5 and not engine.has_loads_in_flight()
            engine.scheduler.reset_prefix_cache(reset_running_requests=is_all)
        engine.step()
    engine.between = lambda: None
    engine.run()
    engine.check()
    for base in bases:
        engine.stored(base)
    print(f"{way}: {engine.facts.compared_pages} pages, {engine.facts.loads_failed} not loaded")
    assert engine.facts.compared_pages > steps


def test_the_failure_policy_fail_is_respected(start, caplog):
    # Regression: the connector overrode the setting.
    with caplog.at_level("WARNING", "vllm.cascade"):
        engine = start({**DRAM, **WAYS["sync"]}, policy="fail")
    assert "kv_load_failure_policy is fail" in caplog.text
    assert engine.config.kv_transfer_config.kv_load_failure_policy == "fail"
    first = prompt(6 * BLOCK + 5, "fail")
    engine.ask(first)
    delete_before_load(engine, engine.keys(first)[3:4])
    name = engine.add(first)
    engine.run()
    assert engine.facts.answers[name] == []
    assert engine.facts.finished[name].name == "ERROR"
    assert engine.stored(first) == [True] * 3 + [False] + [True] * 2


def test_device_memory_disables_measured_choice_and_layerwise_loads(start, caplog):
    # Launches on a device return before the work is done, so that their times are wrong.
    store = {**DRAM, **WAYS["layerwise"], "cascade.load_or_compute": True}
    with caplog.at_level("WARNING", "vllm.cascade"):
        engine = start(store, memory=DeviceMemory)
        assert "cascade.layerwise is ignored: the KV is in device memory" in caplog.text
        caplog.clear()
        other = start(store, memory=HostMemory)
        assert "layerwise" not in caplog.text
    first = prompt(6 * BLOCK + 5, "measured")
    for each in (engine, other):
        each.ask(first)
        each.ask(first)
    assert engine.connector._load_or_compute is None  # noqa: SLF001 # the choice under test
    assert other.connector._load_or_compute is not None  # noqa: SLF001 # likewise


def test_hits_and_loaded_blocks_are_counted_separately(start):
    # vLLM's own metrics count blocks that were found, even if their load failed.
    engine = start({**DRAM, **WAYS["sync"]})
    first = prompt(6 * BLOCK + 5, "counted")
    engine.ask(first)
    engine.take_figures()
    delete_before_load(engine, engine.keys(first)[2:3])
    engine.ask(first)
    figures = engine.take_figures()
    assert figures["sums"]["looked_up_blocks"] == 6
    assert figures["sums"]["hit_blocks"] == 6
    assert figures["labels"]["loaded_blocks"] == {"dram": 5}
    assert figures["sums"]["failed_blocks"] == 1


def set_lookup_timeout(engine, seconds):
    """Change the time-out of lookups."""
    scheduler = engine.connector._scheduler  # noqa: SLF001 # the choice under test
    scheduler._settings = dataclasses.replace(scheduler._settings, lookup_s=seconds)  # noqa: SLF001


def test_a_slow_node_does_not_block_steps(start, serve, monkeypatch):
    # Regression: each lookup blocked the scheduler's thread until the client's time-out, 0.1 s.
    node = serve("--dram", "32MiB")
    engine = start({"cascade.node": f"unix:{node.socket}", **WAYS["sync"]})
    first = prompt(4 * BLOCK + 3, "still")
    engine.ask(first)
    engine.take_figures()
    held = threading.Event()
    ask = scheduler_module.usable_prefix

    def late(*arguments, **sizes):
        assert threading.current_thread().name.startswith("cascade-lookup")
        assert held.wait(LIMIT_S)
        return ask(*arguments, **sizes)

    monkeypatch.setattr(scheduler_module, "usable_prefix", late)
    set_lookup_timeout(engine, LIMIT_S)
    engine.add(first)
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.running, "the lookup returned before the node answered"
    held.set()
    engine.run()
    engine.check()
    assert engine.take_figures()["sums"]["hit_blocks"] == 4
    held.clear()
    set_lookup_timeout(engine, 0.01)
    engine.ask(first)
    held.set()
    figures = engine.take_figures()
    assert figures["sums"]["lookup_timeouts"] == 1
    assert "hit_blocks" not in figures["sums"]


def test_a_slow_node_does_not_delay_events(start, serve, monkeypatch):
    # Regression: the scheduler's thread called the node for events in every step.
    node = serve("--dram", "32MiB")
    held, callers = threading.Event(), []
    changes = events_module.DeferredStore.changes

    def late(*arguments, **named):
        callers.append(threading.current_thread())
        assert held.wait(LIMIT_S)
        return changes(*arguments, **named)

    monkeypatch.setattr(events_module.DeferredStore, "changes", late)
    engine = start({"cascade.node": f"unix:{node.socket}", **WAYS["sync"]}, has_events=True)
    engine.ask(prompt(4 * BLOCK + 3, "events"))
    held.set()
    assert [thread.name for thread in callers] == ["cascade-events_0"]


def test_blocks_that_a_gpu_copies_after_their_request_are_announced(start, eventually, monkeypatch):
    engine = start({**DRAM, **WAYS["sync"]}, memory=None, has_events=True)
    engine.ask(prompt(2 * BLOCK, "registers the pool"))
    # Before that, a copy is over when its call returns.
    eventually(lambda: Gpu(0).report()["is_complete"])
    taken, take = [], engine.connector.take_events

    def recorded():
        events = list(take())
        taken.extend(events)
        return events

    recorded()
    taken.clear()
    monkeypatch.setattr(engine.connector, "take_events", recorded)
    # One step: the engine's next kernel would wait for the copies.
    first = prompt(3 * BLOCK + 3, "late")
    engine.hold_saves()
    engine.add(first, 1)
    while engine.scheduler.has_requests():
        engine.step()
    assert not any(engine.store().contains(engine.keys(first)))
    assert not taken
    engine.release_saves()
    engine.settle()
    # The report of the saves comes with the next step.
    engine.ask(prompt(BLOCK, "next"))
    recorded()
    stored = [event for event in taken if isinstance(event, BlockStored)]
    announced = [token for event in stored for token in event.token_ids]
    assert announced[: 3 * BLOCK] == first[: 3 * BLOCK]


def test_hints_and_dropped_trace_lines_are_counted(start, tmp_path, caplog):
    # Regression: the two metrics were exported and documented, and always 0.
    engine = start({**DRAM, "cascade.record": str(tmp_path)})
    given = {"cascade.priority": "high", "cascade.ends_session": True, "cascade.workload": 999}
    engine.add(prompt(3 * BLOCK, "hints"), hints=given)
    engine.run()
    assert engine.take_figures()["labels"]["hints"] == {"priority": 1, "ends_session": 1}
    assert "cascade.workload: 999 is not a whole number" in caplog.text
    engine.connector._recorder._count_dropped(3, "a test")  # noqa: SLF001 # as for a full queue
    engine.ask(prompt(3 * BLOCK, "dropped"))
    assert engine.take_figures()["sums"]["trace_drops"] == 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_copies_of_a_gpu_are_in_the_engines_figures(start, way):
    engine = start({**DRAM, **WAYS[way]}, memory=None)
    engine.worker._counts._gpu._interval_s = 0  # noqa: SLF001 # each step reports
    first = prompt(5 * BLOCK + 3, "figures")
    engine.ask(first)
    engine.reset_prefix_cache()
    engine.ask(first)
    # The counts of a step come with the next one.
    engine.ask(prompt(BLOCK - 1, "next"))
    figures, device = engine.take_figures()["labels"], f"FAKE {Gpu(0).report()['uuid']}"
    for name in ("saved_bytes", "loaded_bytes"):
        assert figures[f"gpu_{name}"] == {device: figures[name]["dram"]}
    assert figures["gpu_submissions"] == figures["gpu_ended_submissions"]
    assert figures["gpu_in_flight_host_seconds"][device] > 0
    assert figures["gpu_registered_bytes"] == {device: 64 << 20}
    assert "gpu_failed_submissions" not in figures
    assert "gpu_losses" not in figures

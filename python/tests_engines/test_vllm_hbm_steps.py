"""vLLM's own scheduler over a store and a node in the memory of a (fake) GPU; all is compared."""

import os
import random

import pytest
from cascadekv import Gpu, GpuEvent, GpuMemory, connect
from fake_gpu import FakeGpu, library
from gpu_engine import PAGE_BYTES
from scheduled_engine import BLOCK, LAYERS, LIMIT_S, content, states
from test_vllm_hbm import FIRST_GPU, patient  # noqa: F401 # a fixture of all tests
from test_vllm_steps import DRAM, SCHEDULERS, STEPS, WAYS, model, prompt, start  # noqa: F401


@pytest.fixture
def node(serve):
    FakeGpu()
    return serve("--gpu", FIRST_GPU, "--hbm", "32MiB", cuda_library=str(library()))


@pytest.fixture
def begin(start, node):  # noqa: F811 # a fixture
    """Return a function that starts an engine over both tiers."""

    def over_both(way, scheduler="both", **options):
        store = {**DRAM, **WAYS[way], "cascade.hbm": str(node.socket)}
        return start(store, memory=None, **SCHEDULERS[scheduler], **options)

    return over_both


def settle(engine):
    """Wait until the blocks of all steps so far are sealed in both tiers."""
    engine.settle()
    promotions = engine.worker._worker._promotions  # noqa: SLF001 # the queue under test
    promotions._sealer.submit(lambda: None).result(LIMIT_S)  # noqa: SLF001 # likewise


def on_gpu(engine, node, tokens):
    """Return whether each block of a prompt is in the memory of the GPU; raises if one is wrong.

    They are copied to pages of an array of the test's own.
    """
    settle(engine)
    keys, fake = engine.keys(tokens), FakeGpu()
    stream, size = fake.stream(), len(LAYERS) * PAGE_BYTES
    array = fake.array(len(keys) * size)
    gpu = Gpu(0)
    memory = GpuMemory(gpu, [(array, 0, size, size)], len(keys))
    with connect(str(node.socket), gpu=gpu) as client, client.view(keys) as views:
        event: GpuEvent = gpu.mark(stream)
        load = views.start_scatter(memory, range(len(keys)), after=event)
        load.wait(timeout=LIMIT_S)
    right = content(states(tokens))
    for at, is_copied in enumerate(load.copied):
        if is_copied:
            want = right[:, :, at * BLOCK : (at + 1) * BLOCK].tobytes()
            assert fake.read(array, at * size, size, stream) == want, f"block {at} is wrong"
    return load.copied


def tiers_of(engine):
    """Return the blocks that were loaded since the last call, by tier."""
    return dict(engine.take_figures().get("labels", {}).get("loaded_blocks", {}))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheduler", ["plain", "both"])
def test_blocks_move_up_and_are_loaded_from_the_gpu(begin, node, way, scheduler):
    engine = begin(way, scheduler)
    first = prompt(5 * BLOCK + 3, "first")
    engine.ask(first)
    assert on_gpu(engine, node, first) == [True] * 5
    # As after a restart of the node: the store has the blocks, and the GPU has not.
    with connect(str(node.socket), gpu=Gpu(0)) as client:
        client.clear()
    if scheduler == "both":
        engine.reset_prefix_cache()
    tiers_of(engine)
    engine.ask(first)
    assert tiers_of(engine) == {"dram": 5}
    assert on_gpu(engine, node, first) == [True] * 5
    if scheduler == "both":
        engine.reset_prefix_cache()
    longer = [*first, *prompt(2 * BLOCK, "more")]
    engine.ask(longer)
    assert tiers_of(engine) == {"hbm": 5}
    assert all(on_gpu(engine, node, longer))


@pytest.mark.parametrize("way", WAYS)
def test_a_leading_part_is_loaded_from_the_gpu(begin, node, way):
    engine = begin(way)
    first = prompt(6 * BLOCK + 3, "leading")
    engine.ask(first)
    settle(engine)
    with connect(str(node.socket), gpu=Gpu(0)) as client:
        client.delete(engine.keys(first)[2:])
    engine.reset_prefix_cache()
    tiers_of(engine)
    engine.ask(first)
    assert tiers_of(engine) == {"hbm": 2, "dram": 4}
    assert on_gpu(engine, node, first) == [True] * 6


def test_aborts_and_preemptions_after_a_load_leave_right_blocks(begin, node):
    # Few pages: what was just loaded is another request's soon.
    engine = begin("async", pages=13)
    requests = [prompt(3 * BLOCK + 5, "own", number) for number in range(6)]
    engine.ask(*requests[:3])
    engine.ask(*requests[3:])
    for turn in range(2):
        engine.reset_prefix_cache()
        settle(engine)
        with connect(str(node.socket), gpu=Gpu(0)) as client:
            client.clear()
        names = [engine.add(each, 2 * BLOCK) for each in requests]
        while not engine.has_loads_in_flight():
            engine.step()
        for _ in range(turn + 1):
            engine.step()
        for name in names[: turn + 1]:
            engine.abort(name)
        engine.run()
        engine.check()
        for each in requests:
            on_gpu(engine, node, each)
    assert any(on_gpu(engine, node, each)[0] for each in requests)
    assert engine.facts.preemptions, engine.facts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["async", "layerwise"])
def test_random_steps_with_a_node_that_dies_keep_every_page_right(begin, node, way):
    seed = random.SystemRandom().randrange(1 << 32)
    seed = int(os.environ.get("CASCADE_CHAOS_SEED", seed))
    print(f"CASCADE_CHAOS_SEED={seed}")
    chance = random.Random(seed)
    engine = begin(way, chance.choice(["plain", "both"]), pages=24)
    bases = [prompt(7 * BLOCK, "base", number) for number in range(3)]
    waiting, loaded = [], {}

    def lose_some():
        keys = engine.keys(chance.choice(bases))
        first = chance.randrange(len(keys))
        if chance.random() < 0.2:
            engine.store().delete(keys[first : first + chance.randrange(1, 4)])

    engine.between = lose_some
    for step in range(STEPS // 4):
        if chance.random() < 0.4 and engine.scheduler.get_num_unfinished_requests() < 8:
            base = chance.choice(bases)
            tail = prompt(chance.randrange(1, 40), "tail", chance.random())
            tokens = [*base[: chance.randrange(len(base) + 1)], *tail]
            waiting.append(engine.add(tokens, chance.randrange(1, 20)))
        if waiting and chance.random() < 0.08:
            engine.abort(waiting.pop(chance.randrange(len(waiting))))
        if chance.random() < 0.05 and not engine.has_loads_in_flight():
            engine.scheduler.reset_prefix_cache(reset_running_requests=False)
        if step % 15 == 14:
            node.kill()
            node.start()
        engine.step()
        for tier, count in tiers_of(engine).items():
            loaded[tier] = loaded.get(tier, 0) + count
    engine.between = lambda: None
    engine.run()
    engine.check()
    for base in bases:
        engine.stored(base)
        on_gpu(engine, node, base)
    print(f"{way}: {engine.facts.compared_pages} pages, loaded {loaded}")
    assert engine.facts.compared_pages > STEPS // 4

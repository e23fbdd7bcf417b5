"""Blocks are loaded if that is faster than computing them, by measured costs."""

import random

import pytest
from cascadekv.connectors.load_or_compute import PROBE_BLOCKS, LoadOrCompute

BLOCK_TOKENS = 128
BLOCK_BYTES = 1 << 20


class Clock:
    """A clock that only moves when a test sets it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):  # noqa: D102
        return self.now


class Engine:
    """An engine and tiers with known costs, and the decision that has to estimate them."""

    def __init__(self, *, token_s=1e-4, growth_s=1e-8, **tiers):
        self.clock = Clock()
        self.decision = LoadOrCompute(
            block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, clock=self.clock
        )
        self.token_s, self.growth_s, self.tiers = token_s, growth_s, tiers
        self.chance = random.Random(7)

    def load_s(self, tier, blocks):  # noqa: D102
        latency_s, block_s = self.tiers[tier]
        return latency_s + blocks * block_s

    def compute_s(self, first, end):  # noqa: D102
        count = end - first
        return count * (self.token_s + self.growth_s * (first + count / 2))

    def learn(self, samples=20, noise=0.0):  # noqa: D102
        for _ in range(samples):
            factor = 1 + self.chance.uniform(-noise, noise)
            context, tokens = self.chance.randrange(0, 8192, 128), self.chance.randrange(128, 4096)
            step = self.compute_s(context, context + tokens) * factor
            self.decision.observe_prefill(tokens, context, step)
            for tier in self.tiers:
                blocks = self.chance.randint(1, 64)
                self.decision.observe_load(tier, blocks, self.load_s(tier, blocks) * factor)

    def request(self, tiers, total_tokens, queued_blocks=0):
        """Serve a request: the chosen blocks are loaded, and the loads are observed."""
        count = self.decision.choose(tiers, total_tokens=total_tokens, queued_blocks=queued_blocks)
        loaded = tiers[:count]
        for tier in dict.fromkeys(loaded):
            blocks = loaded.count(tier)
            self.decision.observe_load(tier, blocks, self.load_s(tier, blocks))
        return count

    def best(self, tiers, total_tokens):
        """Return the fastest number of blocks to load, by brute force."""

        def total_s(count):
            loaded = tiers[:count]
            loads = sum(self.load_s(tier, loaded.count(tier)) for tier in dict.fromkeys(loaded))
            return loads + self.compute_s(count * BLOCK_TOKENS, total_tokens)

        return min(range(len(tiers) + 1), key=lambda count: (total_s(count), -count))


def test_everything_is_loaded_before_the_first_measurement():
    engine = Engine(dram=(0, 1e-5))
    assert engine.decision.choose(["dram"] * 30, total_tokens=3841) == 30
    assert engine.decision.choose([], total_tokens=3841) == 0
    engine.decision.observe_load("dram", 4, 100.0)
    assert engine.decision.choose(["dram"] * 30, total_tokens=3841) == 30


def test_dram_is_loaded_and_a_slow_file_tier_behind_it_is_not():
    engine = Engine(dram=(1e-4, 1e-4), files=(5e-3, 1.0))
    engine.learn()
    assert engine.request(["dram"] * 10 + ["files"] * 22, 32 * 128 + 1) == 10


def test_the_choice_is_the_fastest_under_the_cost_model():
    for seed in range(200):
        chance = random.Random(seed)
        engine = Engine(
            token_s=10 ** chance.uniform(-5, -3),
            growth_s=10 ** chance.uniform(-10, -7),
            dram=(10 ** chance.uniform(-5, -3), 10 ** chance.uniform(-5, -3)),
            files=(10 ** chance.uniform(-4, -1), 10 ** chance.uniform(-4, -1)),
        )
        engine.chance = chance
        engine.learn()
        tiers = ["dram"] * chance.randint(0, 20) + ["files"] * chance.randint(0, 40)
        if seed % 2:
            # Blocks that were evicted from DRAM are between resident ones.
            tiers = [tier for tier in tiers for _ in range(chance.choice([1, 1, 2]))]
            for _ in range(chance.randint(0, 6)):
                chance.shuffle(tiers) if chance.random() < 0.3 else tiers.reverse()
        total = len(tiers) * BLOCK_TOKENS + chance.randrange(1, 1000)
        chosen, best = engine.decision.choose(tiers, total_tokens=total), engine.best(tiers, total)

        def total_s(count, engine=engine, tiers=tiers, total=total):
            loaded = tiers[:count]
            loads = sum(engine.load_s(tier, loaded.count(tier)) for tier in dict.fromkeys(loaded))
            return loads + engine.compute_s(count * BLOCK_TOKENS, total)

        assert total_s(chosen) <= total_s(best) * 1.25, seed


def test_the_choice_never_exceeds_the_found_blocks():
    for seed in range(300):
        chance = random.Random(seed)
        clock = Clock()
        decision = LoadOrCompute(block_tokens=16, block_bytes=1, probe_interval_s=1.0, clock=clock)
        for _ in range(40):
            clock.now += chance.choice([0, 0.1, 5])
            seconds = 10 ** chance.uniform(-9, 4) * chance.choice([1, 1, 1, 0, -1])
            if chance.random() < 0.5:
                decision.observe_prefill(chance.randrange(9999), chance.randrange(99999), seconds)
            else:
                decision.observe_load(chance.choice("abc"), chance.randrange(-1, 99), seconds)
            tiers = [chance.choice("abcd") for _ in range(chance.randrange(30))]
            total = chance.randrange(len(tiers) * 16, len(tiers) * 16 + 99)
            count = decision.choose(tiers, total_tokens=total, queued_blocks=chance.randrange(99))
            assert 0 <= count <= len(tiers)
            assert all(value >= 0 for value in decision.estimates().values())


def test_more_bandwidth_never_loads_less():
    counts = []
    for exponent in range(60):
        engine = Engine(growth_s=1e-7, files=(0, 10 ** (1 - exponent / 12)))
        engine.learn()
        counts.append(engine.decision.choose(["files"] * 64, total_tokens=64 * 128 + 1))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 64)


def test_queued_blocks_delay_a_load():
    engine = Engine(files=(0, 5e-3))
    engine.learn()
    tiers = ["files"] * 20
    assert engine.decision.choose(tiers, total_tokens=2561) == 20
    assert engine.decision.choose(tiers, total_tokens=2561, queued_blocks=10_000) == 0


def test_noise_does_not_change_a_clear_choice():
    engine = Engine(dram=(1e-4, 1e-4), files=(1e-2, 1e-1))
    engine.learn(samples=200, noise=0.5)
    assert engine.request(["dram"] * 20, 2561) == 20
    assert engine.request(["files"] * 20, 2561) == 0


def test_a_single_outlier_does_not_stop_loads():
    engine = Engine(files=(1e-4, 1e-3))
    engine.learn()
    engine.decision.observe_load("files", 20, 60.0)
    engine.decision.observe_prefill(512, 0, 1e-7)
    assert engine.decision.choose(["files"] * 20, total_tokens=2561) == 20


@pytest.mark.parametrize("times", [10, 100, 10_000])
def test_a_slow_tier_is_avoided_until_it_recovers(times):
    engine = Engine(files=(1e-3, 1e-3))
    engine.learn()
    tiers, total = ["files"] * 30, 30 * 128 + 1
    assert engine.request(tiers, total) == 30
    fast = engine.tiers["files"]
    engine.tiers["files"] = (fast[0] * times, fast[1] * times * 5)
    slow_loads = 0
    while engine.request(tiers, total) > PROBE_BLOCKS:
        slow_loads += 1
        assert slow_loads <= 4
    for _ in range(100):
        engine.clock.now += 1
        assert engine.request(tiers, total) <= PROBE_BLOCKS
    probes = engine.decision.estimates()["probes"]
    assert 15 <= probes <= 21

    engine.tiers["files"] = fast
    for _ in range(100):
        engine.clock.now += 1
        if engine.request(tiers, total) == 30:
            break
    else:
        pytest.fail("the recovered tier was never used again")
    assert engine.decision.estimates()["probes"] - probes <= 4


def test_a_tier_is_probed_at_most_once_per_interval():
    engine = Engine(files=(1, 1))
    engine.learn()
    counts = [engine.request(["files"] * 30, 3841) for _ in range(50)]
    assert counts == [0] * 50
    engine.clock.now += 5
    counts = [engine.request(["files"] * 30, 3841) for _ in range(50)]
    assert counts == [PROBE_BLOCKS] + [0] * 49
    figures = engine.decision.estimates()
    assert figures["declined_blocks"] == 100 * 30 - PROBE_BLOCKS


def test_estimates_match_the_observed_costs():
    engine = Engine(token_s=2e-4, growth_s=3e-8, dram=(1e-3, 5e-4))
    engine.learn(samples=50)
    figures = engine.decision.estimates()
    assert figures["prefill_token_seconds"] == pytest.approx(2e-4, rel=0.05)
    assert figures["prefill_token_seconds_per_context_token"] == pytest.approx(3e-8, rel=0.05)
    assert figures["dram_latency_seconds"] == pytest.approx(1e-3, rel=0.05)
    assert figures["dram_bytes_per_second"] == pytest.approx(BLOCK_BYTES / 5e-4, rel=0.05)


def test_steps_of_less_than_a_block_are_ignored():
    engine = Engine()
    engine.decision.observe_prefill(127, 0, 1.0)
    assert "prefill_token_seconds" not in engine.decision.estimates()


def test_invalid_sizes_are_refused():
    for bad in ({"block_tokens": 0}, {"block_bytes": 0}, {"probe_interval_s": -1.0}):
        with pytest.raises(ValueError, match=r"at least 1|negative"):
            LoadOrCompute(**{"block_tokens": 1, "block_bytes": 1, **bad})

"""vLLM's own classes export the connector's metrics, under released names."""

import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from cascadekv.connectors.vllm.memory import GpuPages
from cascadekv.connectors.vllm.metadata import LoadResult
from cascadekv.connectors.vllm.metrics import (
    LABELLED,
    PREFIX,
    CascadePromMetrics,
    CascadeStats,
    GpuCounts,
)
from cascadekv.connectors.vllm.worker_counts import WorkerCounts
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm_compat import child_payload_of, payload_of

GOLDEN = Path(__file__).parents[2] / "testdata" / "vllm-metrics.txt"
PAGE = GOLDEN.parents[1] / "docs" / "connectors.md"
LABELS = ["model_name", "engine"]
ENGINES = {0: ["m", 0], 1: ["m", 1]}


@pytest.fixture
def metrics():
    unregister_vllm_metrics()
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    yield CascadePromMetrics(config, types, LABELS, ENGINES)
    unregister_vllm_metrics()


def value(name, engine=0, **labels):
    labels = {"model_name": "m", "engine": str(engine), **labels}
    return REGISTRY.get_sample_value(PREFIX + name, labels)


def some(chance):
    stats = CascadeStats()
    for _ in range(chance.randrange(20)):
        stats.lookup(
            blocks=chance.randrange(300),
            hit_blocks=chance.randrange(10),
            seconds=10 ** chance.uniform(-6, 1),
        )
        tier = chance.choice(["dram", "files"])
        stats.load(tier, blocks=3, bytes_moved=3 << 20, seconds=10 ** chance.uniform(-4, 1))
        stats.save("dram", blocks=1, bytes_moved=1 << 20, seconds=10 ** chance.uniform(-4, 1))
        stats.count("failed_blocks", chance.randrange(2))
        stats.hint(chance.choice(["priority", "stop"]))
    return stats


def sent(stats):
    """Return the data that arrives in the front end: vLLM sends it as msgpack."""
    return received(payload_of(stats))


def received(payload):
    """Return what arrives of a payload."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(payload))


def test_metrics_are_those_that_were_released(metrics):
    assert metrics
    lines = []
    for family in sorted(REGISTRY.collect(), key=lambda family: family.name):
        if family.name.startswith(PREFIX):
            metric = REGISTRY._names_to_collectors[family.name]  # noqa: SLF001
            labels = ",".join(metric._labelnames)  # noqa: SLF001
            end = "_total" if family.type == "counter" else ""
            lines.append(f"{family.name}{end} {family.type} [{labels}] {family.documentation}")
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()
    page = PAGE.read_text()
    assert not [line for line in lines if f"| `{line.split()[0]}` |" not in page]


def test_every_count_reaches_the_endpoint(metrics):
    stats = CascadeStats()
    stats.lookup(blocks=125, hit_blocks=120, seconds=1.5e-4)
    stats.load("files", blocks=100, bytes_moved=1000, seconds=0.25)
    stats.load("dram", blocks=20, bytes_moved=200, seconds=0.01)
    stats.save("dram", blocks=5, bytes_moved=50, seconds=0.002)
    for name in ("failed_blocks", "declined_blocks", "would_hit_blocks", "trace_drops"):
        stats.count(name, 7)
    stats.hint("ends_session")
    metrics.observe(sent(stats), 1)
    assert value("lookups_total") == 0
    assert value("lookups_total", 1) == 1
    assert value("looked_up_blocks_total", 1) == 125
    assert value("hit_blocks_total", 1) == 120
    assert value("loaded_bytes_total", 1, tier="files") == 1000
    assert value("load_seconds_total", 1, tier="dram") == 0.01
    assert value("saved_blocks_total", 1, tier="dram") == 5
    assert value("declined_blocks_total", 1) == value("trace_drops_total", 1) == 7
    assert value("hints_total", 1, hint="ends_session") == 1
    assert value("lookup_duration_seconds_count", 1) == 1
    assert value("lookup_duration_seconds_bucket", 1, le="0.0002") == 1
    assert value("lookup_duration_seconds_bucket", 1, le="0.0001") == 0


def test_what_came_from_a_gpu_is_a_load_of_its_own():
    stats = CascadeStats()
    # Ten requested, one missing, four of the others from the memory of a GPU.
    mixed = LoadResult("request", 0, "dram", 10, [9], 900, 0.5, 0.9, 4, 400, 0.1)
    stats.load_result(mixed)
    assert stats.data["labels"] == {
        "loaded_blocks": {"hbm": 4, "dram": 5},
        "loaded_bytes": {"hbm": 400, "dram": 500},
        "load_seconds": {"hbm": 0.1, "dram": 0.4},
        "load_cpu_seconds": {"hbm": pytest.approx(0.4), "dram": pytest.approx(0.5)},
    }
    for given in (
        LoadResult("request", 0, "dram", 4, [], 400, 0.5, 0.0, 4, 400, 0.5),
        LoadResult("request", 0, "files", 4, [0, 1, 2, 3], 0, 0.5, 0.0),
    ):
        stats = CascadeStats()
        stats.load_result(given)
        tier = "hbm" if given.hbm_blocks else "files"
        assert stats.data["labels"]["load_seconds"] == {tier: 0.5}


def test_statistics_of_workers_and_steps_add_up(metrics):
    chance = random.Random(1)
    parts = [some(chance) for _ in range(30)]
    one = CascadeStats()
    for part in parts:
        before = msgspec.msgpack.encode(payload_of(part))
        one = one.aggregate(CascadeStats(sent(part)))
        assert msgspec.msgpack.encode(payload_of(part)) == before
        metrics.observe(sent(part), 0)
    metrics.observe(sent(one), 1)
    for line in generate_latest().decode().splitlines():
        if line.startswith(PREFIX) and 'engine="0"' in line and "_created" not in line:
            name, first = line.rsplit(" ", 1)
            other = name.replace('engine="0"', 'engine="1"')
            (second,) = [
                found.rsplit(" ", 1)[1]
                for found in generate_latest().decode().splitlines()
                if found.rsplit(" ", 1)[0] == other
            ]
            assert float(first) == pytest.approx(float(second)), name


def test_an_interval_is_bounded_and_returned_once():
    stats = CascadeStats()
    assert stats.is_empty()
    for number in range(100_000):
        stats.lookup(blocks=1, hit_blocks=1, seconds=number * 1e-6)
    assert len(msgspec.msgpack.encode(payload_of(stats))) < 1000
    whole = stats.clone_and_reset()
    assert stats.is_empty()
    assert not whole.is_empty()
    assert whole.reduce()["Hit blocks"] == 100_000
    stats.count("lookups", 0)
    assert stats.is_empty()


def test_the_log_line_has_rates_and_never_divides_by_zero():
    assert set(CascadeStats().reduce().values()) == {0}
    stats = CascadeStats()
    stats.lookup(blocks=10, hit_blocks=8, seconds=1e-4)
    stats.load("dram", blocks=8, bytes_moved=80_000_000, seconds=0.5)
    assert stats.reduce()["Hit rate (%)"] == 80.0
    assert stats.reduce()["Load MB/s"] == 160.0


def test_metrics_of_another_version_are_ignored(metrics):
    metrics.observe({"sums": {"of_tomorrow": 1}, "labels": {"x": {"y": 1}}, "more": {}})
    metrics.observe({})
    with pytest.raises(KeyError):
        CascadeStats().count("of_tomorrow")


def test_an_engine_that_starts_again_in_one_process_registers_again(metrics):
    assert metrics
    unregister_vllm_metrics()
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    CascadePromMetrics(config, types, LABELS, ENGINES)
    assert value("lookups_total") == 0


TOTALS = ["registered_bytes", "refused_bytes", "registration_seconds"]
GPU_NAMES = {
    name: name.removeprefix("gpu_") for name, (label, _) in LABELLED.items() if label == "device"
} | {f"gpu_{name}": f"{name}_total" for name in TOTALS}
"""By counter: its name in a report."""


class CountedGpu(GpuPages):
    """A GPU whose report the test sets. It is no driver, and copies nothing."""

    def __init__(self, **values):
        of_device = {"uuid": "GPU-01", "device": "a name", "is_fake": False, "loss": None}
        self.values = dict.fromkeys(GPU_NAMES.values(), 0) | of_device | values

    def report(self):
        """Return the test's report."""
        return dict(self.values)


def counts_of(gpu):
    counts = GpuCounts(interval_s=0)
    counts.attach([object(), gpu])
    return counts


def test_counts_of_a_gpu_reach_the_endpoint_with_its_uuid(metrics):
    gpu = CountedGpu(saved_bytes=5)
    counts = counts_of(gpu)
    assert counts.take() is None, "what was copied before this engine is not its own"
    for number, name in enumerate(GPU_NAMES.values(), 10):
        gpu.values[name] = number
    gpu.values["loss"] = "an error"
    metrics.observe(sent(counts.take()), 1)
    for number, name in enumerate(GPU_NAMES, 10):
        expected = {"gpu_losses": 1, "gpu_saved_bytes": number - 5}.get(name, number)
        assert value(f"{name}_total", 1, device="GPU-01") == expected, name
    assert counts.take() is None
    gpu.values["loaded_bytes"] += 7
    (changed,) = counts.take().data["labels"].items()
    assert changed == ("gpu_loaded_bytes", {"GPU-01": 7})


def test_counts_of_workers_keep_their_devices(metrics):
    whole = CascadeStats()
    for number in range(3):
        gpu = CountedGpu(uuid=f"GPU-0{number}")
        counts = counts_of(gpu)
        gpu.values["submissions"] = 10 + number
        whole = whole.aggregate(counts.take())
    metrics.observe(sent(whole), 0)
    found = [value("gpu_submissions_total", device=f"GPU-0{number}") for number in range(3)]
    assert found == [10, 11, 12]


@pytest.mark.parametrize(
    ("facts", "label"),
    [
        ({}, "GPU-01"),
        ({"uuid": ""}, "a name"),
        ({"is_fake": True}, "FAKE GPU-01"),
    ],
)
def test_the_label_of_a_device_is_its_uuid_and_says_fake(facts, label):
    gpu = CountedGpu(**facts)
    counts = counts_of(gpu)
    gpu.values["submissions"] = 1
    assert counts.take().data["labels"]["gpu_submissions"] == {label: 1}


@pytest.mark.parametrize("is_labelled", [True, False])
def test_children_of_a_multi_connector_are_told_apart_by_their_names(is_labelled):
    """VLLM adds up what connectors of one class count, and registers metrics by the first one."""
    unregister_vllm_metrics()
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    module = {"kv_connector_module_path": "cascadekv.connectors.vllm", "kv_role": "kv_both"}
    children = [
        {
            "kv_connector": "CascadeConnector",
            **module,
            "kv_connector_extra_config": {"cascade.name": name} if name else {},
        }
        for name in ("fast" if is_labelled else None, "large")
    ]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    config = VllmConfig(kv_transfer_config=transfer)
    exported = MultiConnector.build_prom_metrics(config, types, LABELS, ENGINES)
    fast, large = CascadeStats(), CascadeStats()
    fast.count("lookups", 2)
    large.count("lookups", 3)
    large.load("files", blocks=1, bytes_moved=10, seconds=0.25)
    named = [fast.named("fast" if is_labelled else None), large.named("large")]
    whole = CascadeStats()
    for each in named:
        whole = whole.aggregate(each)
    assert whole.reduce()["Lookups"] == 5
    whole = CascadeStats()
    for each in named:
        whole = whole.aggregate(CascadeStats(sent(each)))
    exported.observe({"CascadeConnector": received(child_payload_of(whole))}, 1)
    if is_labelled:
        assert value("lookups_total", 1, connector="fast") == 2
        assert value("lookups_total", 1, connector="large") == 3
        assert value("loaded_bytes_total", 1, connector="large", tier="files") == 10
        assert value("load_duration_seconds_count", 1, connector="large") == 1
    else:
        # Without a name, the metrics are those of a connector that is alone.
        assert value("lookups_total", 1) == 5
    unregister_vllm_metrics()


def test_restarts_of_a_private_node_and_leases_are_counted_once(metrics):
    node = SimpleNamespace(restarts=0)
    leases = [(2, {"read": 1}), (0, {})]
    transfers = SimpleNamespace(take_lease_counts=lambda: leases.pop(0))
    first, second = WorkerCounts(0), WorkerCounts(1)
    first.attach([], transfers, node)
    second.attach([], transfers, None)
    node.restarts = 3
    metrics.observe(sent(first.take()), 1)
    assert first.take() is None
    assert second.take() is None
    assert value("node_restarts_total", 1) == 3
    assert value("offered_leases_total", 1) == 2
    assert value("ended_leases_total", 1, end="read") == 1


def test_a_gpu_is_asked_once_an_interval():
    gpu = CountedGpu()
    counts = GpuCounts(interval_s=3600)
    counts.attach([gpu])
    gpu.values["submissions"] = 1
    assert counts.take() is not None
    gpu.values["submissions"] = 2
    assert counts.take() is None
    assert GpuCounts().take() is None, "an engine without a GPU"

"""The connector's metrics in vLLM's log line and Prometheus endpoint."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cascadekv.connectors.vllm.memory import GpuPages, GpuReport, Memory
from cascadekv.connectors.vllm.metadata import LoadResult
from cascadekv.connectors.vllm.running_load import HBM

__all__ = [
    "COUNTERS",
    "HISTOGRAMS",
    "LABELLED",
    "PREFIX",
    "CascadePromMetrics",
    "CascadeStats",
    "GpuCounts",
]

PREFIX = "vllm:cascade_connector_"
"""vLLM unregisters metrics that begin with `vllm:` before it starts another engine in one process;
metrics with other names would be registered twice."""

COUNTERS = {
    "lookups": "Requests that were looked up",
    "lookup_timeouts": "Lookups that exceeded their time-out; they count as misses",
    "looked_up_blocks": "Full blocks of looked-up requests; each request counts once",
    "hit_blocks": "Looked-up blocks that were found; the hit rate is hit_blocks / looked_up_blocks",
    "failed_blocks": "Blocks that were found but could not be loaded",
    "failed_save_blocks": "Blocks that could not be saved",
    "declined_blocks": "Found blocks that were computed: faster, or too many loads in flight",
    "would_hit_blocks": "Blocks that were found in lite mode, which loads nothing",
    "trace_drops": "Finished requests that are missing from the trace",
    "offered_leases": "Finished prefills whose pages were kept for a decode engine, by a lease",
    "node_restarts": "Restarts of the engine's private node",
}
"""Counters without further labels: name and meaning."""

LABELLED = {
    "loaded_blocks": ("tier", "Blocks loaded, by tier"),
    "loaded_bytes": ("tier", "Bytes loaded, by tier"),
    "load_seconds": ("tier", "Time of loads, by tier"),
    "load_cpu_seconds": ("tier", "CPU time of loads, by tier"),
    "saved_blocks": ("tier", "Blocks saved, by tier"),
    "saved_bytes": ("tier", "Bytes saved, by tier"),
    "save_seconds": ("tier", "Time of saves, by tier"),
    "save_cpu_seconds": ("tier", "CPU time of saves, by tier"),
    "hints": ("hint", "Hints of requests, by parameter"),
    "ended_leases": ("end", "Leases that ended: read, given_back, expired or reset"),
    "gpu_loaded_copies": ("device", "Copies to the GPU"),
    "gpu_loaded_bytes": ("device", "Bytes copied to the GPU"),
    "gpu_saved_copies": ("device", "Copies from the GPU"),
    "gpu_saved_bytes": ("device", "Bytes copied from the GPU"),
    "gpu_within_copies": ("device", "Copies from and to the memory of a GPU (cascade.hbm)"),
    "gpu_within_bytes": ("device", "Bytes copied from and to the memory of a GPU (cascade.hbm)"),
    "gpu_unregistered_bytes": (
        "device",
        "Bytes copied through small buffers, because the pool was not registered",
    ),
    "gpu_submissions": ("device", "Submissions of copies that were started"),
    "gpu_failed_submissions": ("device", "Submissions that the driver refused, or to a lost GPU"),
    "gpu_ended_submissions": ("device", "Started submissions that were seen to be over"),
    "gpu_in_flight_host_seconds": (
        "device",
        "Time on the host from submissions until they were seen to be over",
    ),
    "gpu_registered_bytes": ("device", "Bytes of the pool that the driver registered"),
    "gpu_refused_bytes": ("device", "Bytes of the pool that the driver refused to register"),
    "gpu_registration_seconds": ("device", "Time of registrations"),
    "gpu_losses": ("device", "1 once the GPU is lost to this process, whose copies then fail"),
}
"""Counters with one more label: name, label and meaning."""

HISTOGRAMS = {
    "lookup_duration_seconds": (
        "Duration of a lookup",
        (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0),
    ),
    "load_duration_seconds": (
        "Duration of a load",
        (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0),
    ),
    "save_duration_seconds": (
        "Duration of a save, within the engine's step",
        (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0),
    ),
}
"""Histograms: name, meaning and buckets."""

NAME_KEY = "cascade.name"
_NAME_LABEL = "connector"
"""The label with the name of a connector, if the first one of a `MultiConnector` has a name."""
_SUMS, _LABELS, _BUCKETS, _NAMED = "sums", "labels", "buckets", "named"
_GPU_COUNTS = {
    name: name.removeprefix("gpu_") for name, (label, _) in LABELLED.items() if label == "device"
} | {
    "gpu_registered_bytes": "registered_bytes_total",
    "gpu_refused_bytes": "refused_bytes_total",
    "gpu_registration_seconds": "registration_seconds_total",
    "gpu_losses": "loss",
}
"""By counter: its name in a GPU's report. An error, which is the report of a loss, counts as 1."""


@dataclass
class CascadeStats(KVConnectorStats):
    """Statistics of one interval: plain values of bounded size that vLLM sends and adds up."""

    def __post_init__(self) -> None:
        """Start an interval unless `data` has one."""
        if not self.data:
            self.reset()

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return `data` by its name.

        An engine of vLLM 0.29 that runs in its front end's process reads a child of a
        `MultiConnector` like the dictionary that another process would get.
        """
        if name != "data":
            raise KeyError(name)
        return self.data

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {_SUMS: {}, _LABELS: {}, _BUCKETS: {}}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> "CascadeStats":
        """Add the statistics of another worker or interval to these."""
        _add(self.data, other.data)
        return self

    def clone_and_reset(self) -> "CascadeStats":
        """Return this interval's statistics and start a new interval."""
        interval = CascadeStats(self.data)
        self.reset()
        return interval

    def named(self, name: str | None) -> "CascadeStats":
        """Return this interval under the name of its connector, if it has one.

        vLLM adds up the statistics of all connectors of a class in a `MultiConnector`.
        """
        return self if name is None else CascadeStats({_NAMED: {name: self.data}})

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of `COUNTERS`."""
        if name not in COUNTERS:
            raise KeyError(name)
        if amount:
            _add(self.data[_SUMS], {name: amount})

    def lookup(self, *, blocks: int, hit_blocks: int, seconds: float) -> None:
        """Record a request's lookup; `hit_blocks` of its `blocks` were found."""
        self.count("lookups")
        self.count("looked_up_blocks", blocks)
        self.count("hit_blocks", hit_blocks)
        self._observe("lookup_duration_seconds", seconds)

    def load(
        self, tier: str, *, blocks: int, bytes_moved: int, seconds: float, cpu_seconds: float = 0.0
    ) -> None:
        """Record a load from one tier."""
        self._label("load_cpu_seconds", tier, cpu_seconds)
        self._label("loaded_blocks", tier, blocks)
        self._label("loaded_bytes", tier, bytes_moved)
        self._label("load_seconds", tier, seconds)
        self._observe("load_duration_seconds", seconds)

    def load_result(self, loaded: LoadResult) -> None:
        """Record a load: what came from the memory of a GPU as a load from there."""
        blocks = loaded.blocks - len(loaded.bad)
        on_gpu = loaded.hbm_blocks
        cpu_seconds = loaded.cpu_seconds * on_gpu / max(1, blocks)
        if on_gpu:
            self.load(
                HBM,
                blocks=on_gpu,
                bytes_moved=loaded.hbm_bytes,
                seconds=loaded.hbm_seconds,
                cpu_seconds=cpu_seconds,
            )
        if not on_gpu or on_gpu < loaded.blocks:
            self.load(
                loaded.tier,
                blocks=blocks - on_gpu,
                bytes_moved=loaded.bytes - (loaded.hbm_bytes if on_gpu else 0),
                seconds=loaded.seconds - (loaded.hbm_seconds if on_gpu else 0.0),
                cpu_seconds=loaded.cpu_seconds - cpu_seconds,
            )

    def save(
        self, tier: str, *, blocks: int, bytes_moved: int, seconds: float, cpu_seconds: float = 0.0
    ) -> None:
        """Record a save into one tier."""
        self._label("save_cpu_seconds", tier, cpu_seconds)
        self._label("saved_blocks", tier, blocks)
        self._label("saved_bytes", tier, bytes_moved)
        self._label("save_seconds", tier, seconds)
        self._observe("save_duration_seconds", seconds)

    def hint(self, name: str) -> None:
        """Record a hint of a request, by its parameter without `cascade.`."""
        self._label("hints", name, 1)

    def leases(self, offered: int, ended: Mapping[str, int]) -> None:
        """Record leases of pages, and how others ended."""
        self.count("offered_leases", offered)
        for end, amount in ended.items():
            self._label("ended_leases", end, amount)

    def gpu(self, device: str, counts: Mapping[str, float]) -> None:
        """Record what a GPU copied, by the names in `LABELLED`."""
        for name, amount in counts.items():
            self._label(name, device, amount)

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's periodic log line."""
        named: dict[str, dict[str, Any]] = self.data.get(_NAMED, {})
        if named:
            whole = CascadeStats()
            _add(whole.data, {name: own for name, own in self.data.items() if name != _NAMED})
            for data in named.values():
                _add(whole.data, data)
            return whole.reduce()
        sums = self.data[_SUMS]
        loaded, load_s = self._total("loaded_bytes"), self._total("load_seconds")
        saved, save_s = self._total("saved_bytes"), self._total("save_seconds")
        looked_up, hit = sums.get("looked_up_blocks", 0), sums.get("hit_blocks", 0)
        return {
            "Lookups": sums.get("lookups", 0),
            "Hit blocks": hit,
            "Hit rate (%)": round(100 * hit / looked_up, 1) if looked_up else 0.0,
            "Loaded MB": round(loaded / 1e6, 3),
            "Load MB/s": round(loaded / 1e6 / load_s, 1) if load_s else 0.0,
            "Saved MB": round(saved / 1e6, 3),
            "Save MB/s": round(saved / 1e6 / save_s, 1) if save_s else 0.0,
            "Failed blocks": sums.get("failed_blocks", 0),
            "Declined blocks": sums.get("declined_blocks", 0),
        }

    def _label(self, name: str, label: str, amount: float) -> None:
        if amount:
            _add(self.data[_LABELS], {name: {label: amount}})

    def _observe(self, name: str, value: float) -> None:
        """Count a value in its bucket; the size of the interval stays bounded."""
        buckets = HISTOGRAMS[name][1]
        bucket = next((n for n, most in enumerate(buckets) if value <= most), len(buckets))
        _add(self.data[_BUCKETS], {name: {str(bucket): {"count": 1, "sum": value}}})

    def _total(self, name: str) -> float:
        return sum(self.data[_LABELS].get(name, {}).values())


class GpuCounts:
    """What a worker's GPU copied since the last interval."""

    def __init__(self, interval_s: float = 1.0) -> None:
        """Begin without a GPU; `interval_s` is the least time between two intervals."""
        self._interval_s = interval_s
        self._next_s = 0.0
        self._gpu: GpuPages | None = None
        self._last: dict[str, float] = {}

    def attach(self, memories: Iterable[Memory]) -> None:
        """Set the engine's memory, of which all is on one device, and count from now on."""
        self._gpu = next((memory for memory in memories if isinstance(memory, GpuPages)), None)
        if self._gpu is not None:
            self._last = _gpu_counts(self._gpu.report())

    def take(self) -> CascadeStats | None:
        """Return the counts of the last interval; `None` while it lasts, or if nothing changed."""
        now = time.monotonic()
        if self._gpu is None or now < self._next_s:
            return None
        self._next_s = now + self._interval_s
        report = self._gpu.report()
        last, self._last = self._last, _gpu_counts(report)
        stats = CascadeStats()
        grown = {name: count - last[name] for name, count in self._last.items()}
        stats.gpu(_device_label(report), grown)
        return None if stats.is_empty() else stats


class CascadePromMetrics(KVConnectorPromMetrics):
    """The statistics as Prometheus metrics; `testdata/vllm-metrics.txt` fixes their names."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the metrics; counters without a further label start at 0."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        transfer = self._kv_transfer_config
        name = transfer.kv_connector_extra_config.get(NAME_KEY) if transfer else None
        self._is_named = name is not None
        names = [*labelnames, _NAME_LABEL] if self._is_named else list(labelnames)
        self._sums: dict[str, Any] = {
            name: self._counter_cls(name=PREFIX + name, documentation=meaning, labelnames=names)
            for name, meaning in COUNTERS.items()
        }
        self._labelled: dict[str, Any] = {
            name: self._counter_cls(
                name=PREFIX + name, documentation=meaning, labelnames=[*names, label]
            )
            for name, (label, meaning) in LABELLED.items()
        }
        # The base class declares a type for histograms that takes no buckets.
        histogram: Any = self._histogram_cls
        self._buckets: dict[str, Any] = {
            name: histogram(
                name=PREFIX + name, documentation=meaning, labelnames=names, buckets=list(buckets)
            )
            for name, (meaning, buckets) in HISTOGRAMS.items()
        }
        for engine in per_engine_labelvalues:
            for metric in (*self._sums.values(), *self._buckets.values()):
                metric.labels(*self._values(engine, name))

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add an interval of one engine. Unknown names, of another version, are ignored."""
        self._observe(transfer_stats_data, self._values(engine_idx, None))
        for name, data in transfer_stats_data.get(_NAMED, {}).items():
            self._observe(data, self._values(engine_idx, name))

    def _values(self, engine: int, name: str | None) -> list[str]:
        """Return the values of the labels of an engine, and of a connector if it has a label."""
        values = [str(value) for value in self.per_engine_labelvalues[engine]]
        return [*values, name or ""] if self._is_named else values

    def _observe(self, data: Mapping[str, Any], values: Sequence[str]) -> None:
        for name, amount in data.get(_SUMS, {}).items():
            if name in self._sums:
                self._sums[name].labels(*values).inc(amount)
        for name, amounts in data.get(_LABELS, {}).items():
            if name in self._labelled:
                for label, amount in amounts.items():
                    self._labelled[name].labels(*values, label).inc(amount)
        for name, buckets in data.get(_BUCKETS, {}).items():
            if name in self._buckets:
                bounds = (*HISTOGRAMS[name][1], float("inf"))
                for index, bucket in buckets.items():
                    if int(index) < len(bounds):
                        histogram = self._buckets[name].labels(*values)
                        _observe(histogram, bounds[int(index)], bucket)


def _gpu_counts(report: GpuReport) -> dict[str, float]:
    """Return the counts in a GPU's report, which only grow."""
    found = {name: report[of_report] or 0 for name, of_report in _GPU_COUNTS.items()}
    return {name: 1 if isinstance(count, str) else count for name, count in found.items()}


def _device_label(report: GpuReport) -> str:
    """Return the device's UUID, as `nvidia-smi -L` prints it; that of a fake device says so."""
    device = str(report["uuid"] or report["device"])
    return f"FAKE {device}" if report["is_fake"] else device


def _observe(histogram: Any, bound: float, bucket: Mapping[str, float]) -> None:
    """Add the values of a bucket to a histogram, each as their mean, which is in that bucket."""
    count = int(bucket["count"])
    for _ in range(count):
        histogram.observe(min(bucket["sum"] / count, bound))


def _add(target: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add numbers to those of the same name, recursively in nested mappings."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            _add(target.setdefault(name, {}), cast("Mapping[str, Any]", value))
        else:
            target[name] = target.get(name, 0) + value

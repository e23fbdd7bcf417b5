"""The rounds: every competitor in turn, in another order each time; a failure ends one of them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import cold
from disk_limit import DiskLimit, LimitError
from worker import WorkerError

GIB = float(1 << 30)
FIO = "fio"
WRITE, COLD_GET, DURABLE_PUT = "write", "cold-get", "durable-put"
KINDS = (WRITE, COLD_GET, DURABLE_PUT)


class CompetitorProcess(Protocol):
    """What the rounds need of a competitor's process."""

    def versions(self) -> dict[str, str]:
        """Wait until it has started."""
        ...

    def call(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command."""
        ...

    def end(self) -> None:
        """End it."""
        ...


@dataclass
class Samples:
    """What was measured of one competitor with blocks of one size, in GiB/s."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    problem: str | None = None
    """Why there are no figures, or no more of them."""
    cached_bytes_max: int = 0
    """Most bytes of its files in the page cache before a cold read."""
    disk_bytes_min: int | None = None
    """Least bytes that a cold read fetched from the disk; none if the kernel does not say."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    sizes: tuple[int, ...]
    rounds: int
    size: int
    """Bytes of a round."""
    directory: Path
    """An empty directory on the disk to measure."""


class Rounds:
    """Measures competitors side by side. `start` starts a process; `tell` gets the progress."""

    def __init__(
        self,
        plan: Plan,
        names: list[str],
        start: Callable[[str], CompetitorProcess],
        tell: Callable[[str], None],
    ) -> None:
        self._plan, self._names, self._start, self._tell = plan, names, start, tell
        self._processes: dict[str, CompetitorProcess] = {}
        self.versions: dict[str, str] = {}

    def start(self) -> dict[str, str]:
        """Start all processes. Returns the failures by name."""
        failures: dict[str, str] = {}
        self._processes = {name: self._start(name) for name in self._names}
        for name in self._names:
            self._tell(f"starting {name}")
            try:
                self.versions |= self._processes[name].versions()
            except WorkerError as error:
                failures[name] = f"failed: {error}"
        return failures

    def end(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.end()

    def measure(
        self, block_bytes: int, limit: DiskLimit | None, failed: dict[str, str]
    ) -> dict[str, Samples]:
        """Measure blocks of one size. `failed` names the competitors that did not start."""
        samples = {name: Samples(problem=failed.get(name)) for name in self._names}
        if limit is not None:
            samples[FIO] = Samples()
        order = list(samples)
        for number in range(self._plan.rounds):
            # Rotated, because the first system of a round finds the disk still busy.
            for name in order[number % len(order) :] + order[: number % len(order)]:
                if samples[name].problem is None:
                    self._tell(f"round {number + 1} of {self._plan.rounds}, {name}")
                    self._turn(name, number, block_bytes, limit, samples[name])
        if limit is not None and samples[FIO].problem is None:
            samples[FIO].rates[WRITE] = limit.best("write")[1]
            samples[FIO].rates[COLD_GET] = limit.best("read")[1]
        return samples

    def _turn(
        self, name: str, number: int, block_bytes: int, limit: DiskLimit | None, samples: Samples
    ) -> None:
        try:
            if name == FIO and limit is not None:
                limit.measure("write")
                limit.measure("read")
            else:
                self._measure_one(name, number, block_bytes, samples)
        except (LimitError, WorkerError) as error:
            samples.problem = f"failed in round {number + 1}: {error}"
            if name in self._processes:  # It may be dead, or still be writing.
                self._processes[name].end()
                self._remove(self._plan.directory / name)
                self._processes[name] = self._start(name)

    def _measure_one(self, name: str, number: int, block_bytes: int, samples: Samples) -> None:
        process, directory = self._processes[name], self._plan.directory / name
        size = self._plan.size // block_bytes * block_bytes
        command = {"round": number, "bytes": size, "block_bytes": block_bytes, "durable": False}
        command["directory"] = str(directory)
        put = process.call({**command, "do": "put"})
        samples.rates[WRITE].append(size / put["seconds"] / GIB)
        cold.settle(self._plan.directory)
        get = process.call({**command, "do": "get"})
        samples.rates[COLD_GET].append(size / get["seconds"] / GIB)
        samples.cached_bytes_max = max(samples.cached_bytes_max, get["cached_bytes"])
        if get["disk_bytes"] is not None:
            least = samples.disk_bytes_min
            samples.disk_bytes_min = min(get["disk_bytes"], least or get["disk_bytes"])
        process.call({"do": "close"})
        self._remove(directory)
        durable = process.call({**command, "do": "put", "durable": True})
        samples.rates[DURABLE_PUT].append(size / durable["seconds"] / GIB)
        process.call({"do": "close"})
        self._remove(directory)

    def _remove(self, directory: Path) -> None:
        """Remove a competitor's files, and wait until the file system has freed their space."""
        if directory.exists():
            shutil.rmtree(directory)
        cold.settle(self._plan.directory)

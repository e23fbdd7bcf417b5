"""Measures one cell: a peer with one size of blocks and number of threads."""

import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cascadekv.bench.transport_peers.blocks import Shape
from cascadekv.bench.transport_peers.movers import PEERS
from cascadekv.bench.transport_peers.options import BEST, FIRST, Options
from cascadekv.bench.transport_peers.pair import Pair, PairError
from cascadekv.bench.transport_peers.system_calls import count_calls

__all__ = ["Cell", "Sample", "rate"]

START_S = 60.0
"""How long both processes may take to start, to write their regions and to connect."""
TRIAL_ROUNDS = 2
"""Rounds in which a setting is tried."""

Sample = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A peer with one size of blocks and number of threads."""

    options: Options
    peer: str
    shape: Shape

    def samples(self) -> Iterator[Sample]:
        """Measure it. Ends with a sample that has an `error` if the peer failed."""
        if missing := missing_packages(self.peer):
            yield self.failed("", missing)
            return
        setting, tried = self._best_setting()
        for sample in self._measure(setting, self.options.rounds):
            yield sample | ({"tried_gb_per_s": tried} if tried else {})

    def _best_setting(self) -> tuple[str, dict[str, float | str]]:
        settings = list(PEERS[self.peer].settings)
        if len(settings) == 1 or self.options.setting == FIRST:
            return settings[0], {}
        if self.options.setting != BEST:
            return self.options.setting, {}
        rates: dict[str, float] = {}
        errors: dict[str, str] = {}
        for setting in settings:
            samples = list(self._measure(setting, TRIAL_ROUNDS, is_trial=True))
            rates[setting] = max((rate(s) for s in samples if s["error"] is None), default=0.0)
            if samples[-1]["error"] is not None:
                errors[setting] = samples[-1]["error"]
        best = max(settings, key=lambda setting: rates[setting])
        return best, {name: errors.get(name, round(rates[name], 4)) for name in settings}

    def _measure(self, setting: str, rounds: int, *, is_trial: bool = False) -> Iterator[Sample]:
        options = {
            "peer": self.peer,
            "setting": setting,
            "shape": asdict(self.shape),
            "fault": self.options.fault,
        }
        environment = dict(PEERS[self.peer].settings[setting].environment)
        try:
            with Pair(options, environment, time.monotonic() + START_S) as pair:
                run = Run(self, pair, setting, time.monotonic() + self.options.cell_s)
                yield from run.samples(rounds, counts_calls=not is_trial)
        except PairError as error:
            yield self.failed(setting, str(error))

    def facts(self, setting: str) -> Sample:
        """Return the fields of every sample."""
        peer, transport = self.peer.split("/")
        packages = PEERS[self.peer].packages
        return {
            "peer": peer,
            "transport": transport,
            "version": version(packages[0]) if packages and setting else "",
            "setting": setting,
            "block_bytes": self.shape.block_bytes,
            "batch": self.shape.batch,
            "batch_wanted": self.options.batch,
            "threads": self.shape.threads,
            "region_bytes": self.shape.region_bytes,
        }

    def failed(self, setting: str, error: str) -> Sample:
        """Return a sample without times."""
        return self.facts(setting) | {
            "blocks": 0,
            "bytes": 0,
            "seconds": None,
            "verified": False,
            "error": error,
        }


@dataclass(frozen=True)
class Run:
    """Rounds of a connected pair."""

    cell: Cell
    pair: Pair
    setting: str
    deadline: float

    def samples(self, rounds: int, *, counts_calls: bool) -> Iterator[Sample]:
        """Measure rounds. Ends with a sample that has an `error` if the peer failed."""
        options = self.cell.options
        number = 0
        try:
            if options.warm_up:
                number += 1
                first = self._round(number, options.warm_up)
                # A warm-up that returns wrong bytes is a sample, so that it is seen.
                if not first["verified"]:
                    yield first | {"is_warm_up": True}
            for _ in range(rounds):
                number += 1
                yield self._round(number, options.iterations)
            if options.count_system_calls and counts_calls:
                number += 1
                yield self._count(number)
        except PairError as error:
            shape = self.cell.shape
            blocks = int(self.pair.counters[: shape.threads].sum()) * shape.batch
            yield self.cell.failed(self.setting, str(error)) | {
                "round": number,
                "blocks": blocks,
                "bytes": blocks * shape.block_bytes,
            }

    def _round(self, number: int, iterations: int) -> Sample:
        batches = self._prepare(number, iterations)
        before = self._target_cpu_s()
        if self.cell.options.fault == "hang":
            self.pair.target.signal(signal.SIGSTOP)
        ran = self._move()
        times = {
            "seconds": ran["seconds"],
            "source_cpu_s": ran["cpu_s"],
            "target_cpu_s": self._target_cpu_s() - before,
        }
        return self._verified(number, batches, ran["counts"]) | times

    def _count(self, number: int) -> Sample:
        """Count system calls in one more round, whose time means nothing."""
        batches = self._prepare(number, 1)
        counts: list[int] = []
        processes = (self.pair.source.pid, self.pair.target.pid)
        calls, problem = count_calls(processes, lambda: counts.extend(self._move()["counts"]))
        kind = {"counts_system_calls": True}
        if problem:
            return self.cell.failed(self.setting, problem) | kind
        found = self._verified(number, batches, counts)
        return found | {"seconds": None, "system_calls": calls} | kind

    def _prepare(self, number: int, iterations: int) -> int:
        """Write a round's bytes into the source; returns the batches of each thread."""
        batches = self.cell.shape.batches(iterations)
        self.pair.source.call(self.deadline, "prepare", round=number, batches=batches)
        return batches

    def _move(self) -> dict[str, Any]:
        limit_s = self.cell.options.round_s
        return self.pair.source.call(self.deadline, "run", limit_s=limit_s)

    def _target_cpu_s(self) -> float:
        return self.pair.target.call(self.deadline, "usage")["cpu_s"]

    def _verified(self, number: int, batches: int, counts: list[int]) -> Sample:
        """Compare the target's bytes; returns a sample without times."""
        facts = {"round": number, "batches": batches, "counts": counts}
        differing = self.pair.target.call(self.deadline, "verify", **facts)["differing_blocks"]
        blocks = sum(counts) * self.cell.shape.batch
        return self.cell.facts(self.setting) | {
            "round": number,
            "batches": counts,
            "blocks": blocks,
            "bytes": blocks * self.cell.shape.block_bytes,
            "verified": differing == 0,
            "differing_blocks": differing,
            "error": None,
        }


def rate(sample: Sample) -> float:
    """Return GB/s of a sample."""
    return sample["bytes"] / sample["seconds"] / 1e9


def missing_packages(peer: str) -> str:
    """Return which packages of a peer are not installed; empty if all are."""
    missing: list[str] = []
    for package in PEERS[peer].packages:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    if not missing:
        return ""
    return f"not installed: {', '.join(missing)} (make bench-transport-peers installs it)"

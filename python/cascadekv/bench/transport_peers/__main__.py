"""Measures transports of others: `python -m cascadekv.bench.transport_peers [JSON options]`.

Prints one JSON object a line for each sample, and what it found to standard error.
docs/transport-benchmark.md describes options and samples.
"""

import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from cascadekv.bench.transport_peers.blocks import WORD_BYTES, Shape
from cascadekv.bench.transport_peers.movers import PEERS
from cascadekv.bench.transport_peers.pair import COUNTERS, Pair, PairError
from cascadekv.bench.transport_peers.system_calls import count_calls

KIB, MIB = 1 << 10, 1 << 20
LADDER = (*(KIB << power for power in range(9)), MIB, 16 * MIB)
BEST, FIRST = "best", "first"
SHORT: Mapping[str, Any] = {
    "block_bytes": (4 * KIB, 64 * KIB),
    "batch": 64,
    "threads": (1,),
    "rounds": 1,
    "iterations": 2,
    "warm_up": 1,
    "setting": FIRST,
    "region_bytes_min": 16 * MIB,
}
"""Options for tests: such samples show that everything works, their times mean nothing."""
FAULTS = ("", "corrupt", "stale", "hang")
START_S = 60.0
"""How long both processes may take to start, to write their regions and to connect."""

Sample = dict[str, Any]


class OptionError(Exception):
    """An option is unknown or has a wrong value."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how."""

    peers: tuple[str, ...] = tuple(PEERS)
    block_bytes: tuple[int, ...] = LADDER
    batch: int = 1538
    threads: tuple[int, ...] = (1, 4)
    rounds: int = 5
    """Samples of each cell."""
    iterations: int = 20
    """Batches of each thread in a round; fewer where the regions have no room for them."""
    warm_up: int = 5
    """Batches of each thread before the first round; they are verified, not timed."""
    round_s: float = 2.0
    """No batch begins later in a round."""
    cell_s: float = 60.0
    """Deadline of a cell after its start."""
    setting: str = BEST
    """A setting of the peer, its `first`, or `best`: all are tried, the fastest is measured."""
    region_bytes_min: int = 256 * MIB
    region_bytes_max: int = 1024 * MIB
    count_system_calls: bool = False
    """Whether one more round, which is not timed, counts system calls."""
    fault: str = ""
    """For tests: what is done wrong on purpose, so that it must be seen."""

    @classmethod
    def parse(cls, text: str) -> "Options":
        """Read options from JSON; `is_short` chooses those of `SHORT`. Raises `OptionError`."""
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise OptionError(f"the options are not JSON: {error}") from None
        if not isinstance(given, dict):
            raise OptionError("the options are not a JSON object")
        values = cast("dict[str, Any]", given)
        known = [field.name for field in fields(cls)]
        defaults: dict[str, Any] = dict(SHORT) if values.pop("is_short", False) else {}
        for name, value in values.items():
            if name not in known:
                raise OptionError(f"unknown option {name!r}; known: is_short, {', '.join(known)}")
            if isinstance(value, list):
                values[name] = tuple(cast("list[Any]", value))
        options = cls(**(defaults | values))
        options._check()
        return options

    def _check(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise OptionError(f"unknown peer {peer!r}; known: {', '.join(PEERS)}")
            settings = [BEST, FIRST, *PEERS[peer].settings]
            if self.setting not in settings:
                known = ", ".join(settings)
                raise OptionError(f"unknown setting {self.setting!r} of {peer}; known: {known}")
        for size in self.block_bytes:
            if size <= 0 or size % WORD_BYTES or size > self.region_bytes_max:
                raise OptionError(f"{size} is not a size of blocks: a multiple of {WORD_BYTES}")
        least = (self.batch, self.rounds, self.iterations, self.warm_up + 1, *self.threads)
        if min(least) < 1 or max(self.threads) > COUNTERS:
            raise OptionError("batch, rounds, iterations and threads are at least 1")
        if self.fault not in FAULTS:
            raise OptionError(f"unknown fault {self.fault!r}")


@dataclass(frozen=True)
class Cell:
    """A peer with one size of blocks and number of threads."""

    options: Options
    peer: str
    shape: Shape

    def samples(self) -> Iterator[Sample]:
        """Measure it. Ends with a sample that has an `error` if the peer failed."""
        if missing := missing_packages(self.peer):
            yield self._failed("", missing)
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
            samples = list(self._measure(setting, 2, is_trial=True))
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
                yield from self._rounds(pair, setting, rounds, is_trial=is_trial)
        except PairError as error:
            yield self._failed(setting, str(error))

    def _rounds(self, pair: Pair, setting: str, rounds: int, *, is_trial: bool) -> Iterator[Sample]:
        deadline = time.monotonic() + self.options.cell_s
        number = 0
        try:
            if self.options.warm_up:
                number += 1
                # A warm-up that returns wrong bytes is a sample, so that it is seen.
                first = self._round(pair, setting, number, self.options.warm_up, deadline)
                if not first["verified"]:
                    yield first | {"is_warm_up": True}
            for _ in range(rounds):
                number += 1
                yield self._round(pair, setting, number, self.options.iterations, deadline)
            if self.options.count_system_calls and not is_trial:
                yield self._count(pair, setting, number + 1, deadline)
        except PairError as error:
            blocks = int(pair.counters[: self.shape.threads].sum()) * self.shape.batch
            yield self._failed(setting, str(error)) | {
                "round": number,
                "blocks": blocks,
                "bytes": blocks * self.shape.block_bytes,
            }

    def _round(
        self, pair: Pair, setting: str, number: int, iterations: int, deadline: float
    ) -> Sample:
        batches = self._prepare(pair, number, iterations, deadline)
        before = pair.target.call(deadline, "usage")["cpu_s"]
        if self.options.fault == "hang":
            pair.target.signal(signal.SIGSTOP)
        ran = pair.source.call(deadline, "run", limit_s=self.options.round_s)
        target_s = pair.target.call(deadline, "usage")["cpu_s"] - before
        times = {
            "seconds": ran["seconds"],
            "source_cpu_s": ran["cpu_s"],
            "target_cpu_s": target_s,
        }
        return self._verified(pair, setting, number, batches, ran["counts"], deadline) | times

    def _count(self, pair: Pair, setting: str, number: int, deadline: float) -> Sample:
        """Count system calls in one more round, whose time means nothing."""
        batches = self._prepare(pair, number, 1, deadline)
        counts: list[int] = []

        def work() -> None:
            ran = pair.source.call(deadline, "run", limit_s=self.options.round_s)
            counts.extend(ran["counts"])

        calls, problem = count_calls((pair.source.pid, pair.target.pid), work)
        kind = {"counts_system_calls": True}
        if problem:
            return self._failed(setting, problem) | kind
        found = self._verified(pair, setting, number, batches, counts, deadline)
        return found | {"seconds": None, "system_calls": calls} | kind

    def _prepare(self, pair: Pair, number: int, iterations: int, deadline: float) -> int:
        """Write a round's bytes into the source; returns the batches of each thread."""
        batches = self.shape.batches(iterations)
        pair.source.call(deadline, "prepare", round=number, batches=batches)
        return batches

    def _verified(  # noqa: PLR0913 # what a round was
        self,
        pair: Pair,
        setting: str,
        number: int,
        batches: int,
        counts: list[int],
        deadline: float,
    ) -> Sample:
        """Compare the target's bytes; returns a sample without times."""
        found = pair.target.call(deadline, "verify", round=number, batches=batches, counts=counts)
        blocks = sum(counts) * self.shape.batch
        return self._facts(setting) | {
            "round": number,
            "batches": counts,
            "blocks": blocks,
            "bytes": blocks * self.shape.block_bytes,
            "verified": found["differing_blocks"] == 0,
            "differing_blocks": found["differing_blocks"],
            "error": None,
        }

    def _facts(self, setting: str) -> Sample:
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

    def _failed(self, setting: str, error: str) -> Sample:
        return self._facts(setting) | {
            "blocks": 0,
            "bytes": 0,
            "seconds": None,
            "verified": False,
            "error": error,
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


def cells(options: Options) -> Iterator[Cell]:
    """Return all cells, in an order that shows the smallest blocks of each peer first."""
    for peer in options.peers:
        is_limit = PEERS[peer].is_limit
        for threads in (1,) if is_limit else options.threads:
            for block_bytes in (MIB,) if is_limit else options.block_bytes:
                shape = Shape.fit(
                    block_bytes,
                    options.batch,
                    threads,
                    region_bytes=(options.region_bytes_min, options.region_bytes_max),
                    is_random=not is_limit,
                )
                yield Cell(options, peer, shape)


def describe(cell: Cell, samples: list[Sample]) -> str:
    """Return a line about a cell for people."""
    shape = cell.shape
    threads = f"{shape.threads} thread" + ("s" if shape.threads > 1 else "")
    name = f"{cell.peer:15} {shape.block_bytes // KIB:6} KiB x {shape.batch:4} {threads:9}"
    timed = [s for s in samples if s["error"] is None and s["seconds"]]
    text = ""
    if timed:
        rates = sorted(rate(s) for s in timed)
        cpu = statistics.median(
            (s["source_cpu_s"] + s["target_cpu_s"]) / s["blocks"] for s in timed
        )
        text = (
            f"{statistics.median(rates):7.3f} GB/s ({rates[0]:.3f} to {rates[-1]:.3f})"
            f" {cpu * 1e6:8.2f} us CPU a block  {timed[0]['setting']}"
        )
    for sample in samples:
        if sample["error"] is not None:
            text += f"  FAILED: {sample['error']}"
        elif not sample["verified"]:
            text += f"  WRONG BYTES in {sample['differing_blocks']} blocks of round "
            text += f"{sample['round']}"
        elif "system_calls" in sample:
            text += f"  {sample['system_calls'] / sample['blocks']:.2f} system calls a block"
    return f"{name} {text}"


def main() -> int:
    """Measure all cells. Returns 1 if one failed or returned wrong bytes, 2 for wrong options."""
    try:
        options = Options.parse(sys.argv[1] if len(sys.argv) > 1 else "{}")
    except (OptionError, TypeError) as error:
        print(f"transport_peers: {error}", file=sys.stderr)  # noqa: T201 # a program's output
        return 2
    is_good = True
    for cell in cells(options):
        samples: list[Sample] = []
        for sample in cell.samples():
            samples.append(sample)
            print(json.dumps(sample), flush=True)  # noqa: T201 # likewise
        is_good &= all(sample["verified"] for sample in samples)
        print(describe(cell, samples), file=sys.stderr)  # noqa: T201 # likewise
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

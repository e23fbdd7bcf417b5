"""The throughput of the disk without a store: the best of fio's engines over several depths.

The definition is that of `cascade bench core` (crates/bench/src/disk_limit.rs).
"""

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FINALISTS = 3
"""Ways that are measured in every round: one short trial may pick a slower one by chance."""
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
ENGINES = ("io_uring", "libaio", "psync")
TRIAL_BYTES = 64 << 20
SECONDS_MAX = 60.0
"""Limit of one run of fio."""
GIB = float(1 << 30)


class LimitError(Exception):
    """The disk could not be measured."""


@dataclass(frozen=True)
class Best:
    """The fastest way to use the disk."""

    engine: str
    depth: int

    def describe(self) -> str:
        """Say how it was found."""
        return (
            f"fio, {self.engine}, O_DIRECT, depth {self.depth}: the best of "
            f"{', '.join(ENGINES)} at depths {DEPTHS[0]} to {DEPTHS[-1]}"
        )


def fio_version() -> str | None:
    """Return fio's version; None if it is not installed."""
    program = shutil.which("fio")
    if program is None:
        return None
    command = [program, "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 # fio
    return run.stdout.strip() if run.returncode == 0 else None


class DiskLimit:
    """A file to measure the disk with."""

    def __init__(self, path: Path, size: int, block_bytes: int) -> None:
        self._path, self._bytes, self._block_bytes = path, size, block_bytes
        self._samples: dict[str, dict[Best, list[float]]] = {}
        with path.open("wb") as file:
            piece = b"\7" * (1 << 20)
            for _ in range(0, size, len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def calibrate(self, direction: str, progress: Callable[[str], None]) -> None:
        """Find the fastest engines and depths of `direction`: read or write."""
        trial = min(max(TRIAL_BYTES, 2 * self._block_bytes), self._bytes)
        rates: dict[Best, float] = {}
        errors: list[str] = []
        for engine in ENGINES:
            progress(f"fio {direction}, {engine}")
            try:
                for depth in DEPTHS:
                    # psync has a thread for each request, and each thread needs a block.
                    if engine != "psync" or depth * self._block_bytes <= trial:
                        best = Best(engine, depth)
                        rates[best] = self._rate(direction, best, trial)
            except LimitError as error:  # An engine that this kernel forbids: the others count.
                errors.append(str(error))
        if not rates:
            raise LimitError("; ".join(errors))
        fastest = sorted(rates, key=lambda best: rates[best], reverse=True)[:FINALISTS]
        self._samples[direction] = {best: [] for best in fastest}

    def measure(self, direction: str) -> None:
        """Read or write the whole file in each of the fastest ways."""
        for best, samples in self._samples[direction].items():
            samples.append(self._rate(direction, best, self._bytes))

    def best(self, direction: str) -> tuple[Best, list[float]]:
        """Return the fastest way by its median, and its samples in GiB/s."""
        samples = self._samples[direction]
        best = max(samples, key=lambda one: statistics.median(samples[one]))
        return best, samples[best]

    def _rate(self, direction: str, best: Best, size: int) -> float:
        # Synchronous requests are one at a time per thread.
        depth, jobs = (1, best.depth) if best.engine == "psync" else (best.depth, 1)
        job_bytes = max(size // jobs // self._block_bytes, 1) * self._block_bytes
        command = [
            *("fio", "--name=limit", "--direct=1", "--output-format=json", "--group_reporting"),
            *("--thread", f"--ioengine={best.engine}", f"--filename={self._path}"),
            *(f"--rw={direction}", f"--bs={self._block_bytes}", f"--size={job_bytes}"),
            *(f"--offset_increment={job_bytes}", f"--numjobs={jobs}", f"--iodepth={depth}"),
        ]
        try:
            run = subprocess.run(  # noqa: S603 # fio, with our own arguments
                command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
            )
            rate = json.loads(run.stdout)["jobs"][0][direction]["bw_bytes"] / GIB
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LimitError(f"fio with {best.engine}: {error}") from error
        except (ValueError, LookupError) as error:
            what = (run.stderr.strip() or run.stdout.strip() or "no output")[:200]
            raise LimitError(f"fio with {best.engine}: {what}") from error
        if rate <= 0:
            raise LimitError(f"fio with {best.engine} reported no throughput")
        return rate

"""Compares cold reads and writes of files: Cascade, one file per block, HDF5, LMCache, and fio."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import environment
import figures
from competitors import COMPETITORS, Cascade
from disk_limit import DiskLimit, LimitError, fio_version
from rounds import COLD_GET, FIO, WRITE, Plan, Rounds, Samples
from worker import Worker

KIB, MIB = 1 << 10, 1 << 20
SIZES = {figures.size_name(size): size for size in (128 * KIB, MIB, 2 * MIB, 16 * MIB)}
ROUNDS, ROUND_MIB = 5, 256
MIB_MIN = 32

ABOUT = """\
Each system stores and reads the same blocks, one thread of one process calling, in turn:
  write         put all blocks and flush: the system has handed them to the kernel
  cold-get      copy all blocks to the caller's memory; none of them is in memory before
  durable-put   the same with durable settings: they are synced to the disk
A block's bytes are a function of its name, and every byte read is compared with it, untimed. Before
a cold read, the pages of the files are dropped from the page cache; mincore shows that they are
gone, and /proc/self/io that the bytes came from the disk, else the figure is refused.

cascade makes calls of 32 MiB, cascade-one-call one call for everything.

fio is the limit: the best of io_uring, libaio and psync at depths 1 to 64, O_DIRECT. If it is not
installed, shares are not measured (Debian: apt-get install fio). A system whose package is missing
is skipped, and one that fails is named; the others go on."""

EXAMPLES = """\
examples:
  peers_files --json reports/peers-files.json
      All sizes and systems: five to eight minutes on two virtual cores.
  peers_files --sizes 2MiB --rounds 9 --mib 1024
      One block size, more rounds of 1 GiB.
  peers_files --sizes 128KiB --systems cascade,plain-files --rounds 1 --mib 64
      Check in seconds that it works; such figures mean nothing.

exit status: 0; 1 if a system failed or returned a wrong byte; 2 for a wrong argument.
Run it on an idle machine: a wide range of samples means that it was busy."""


def sizes_of(text: str) -> tuple[int, ...]:
    """Read block sizes: names separated by commas."""
    return tuple(SIZES[name] for name in _names(text, list(SIZES)))


def systems_of(text: str) -> list[str]:
    """Read names of systems separated by commas."""
    return _names(text, list(COMPETITORS))


def _names(text: str, known: list[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def at_least(least: int, text: str) -> int:
    """Read a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="peers_files",
        description=f"{__doc__}\n\n{ABOUT}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write rows and samples, and FILE's environment"
    )
    made.add_argument(
        "--directory", type=Path, default=Path(), metavar="DIR", help="on the disk to measure (.)"
    )
    made.add_argument(
        "--sizes", type=sizes_of, default=tuple(SIZES.values()), help=f"of {','.join(SIZES)} (all)"
    )
    made.add_argument(
        "--systems", type=systems_of, help=f"of {','.join(COMPETITORS)} (all that are installed)"
    )
    made.add_argument(
        "--rounds", type=lambda text: at_least(1, text), default=ROUNDS, help=f"({ROUNDS})"
    )
    made.add_argument(
        "--mib",
        type=lambda text: at_least(MIB_MIN, text),
        default=ROUND_MIB,
        help=f"MiB of a round of one system, at least {MIB_MIN} ({ROUND_MIB})",
    )
    return made


class Progress:
    """One line on stderr: what runs, and for how long already."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._what = ""
        self._is_terminal = sys.stderr.isatty()

    def size(self, name: str) -> None:
        """Begin a block size."""
        self._what = f"{name} blocks: "

    def tell(self, step: str) -> None:
        """Name the next step."""
        text = f"{time.monotonic() - self._start:4.0f} s  {self._what}{step}"
        print(f"\r\x1b[K{text}" if self._is_terminal else text, end="", file=sys.stderr)
        print("" if self._is_terminal else "\n", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room for output."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def missing_package(name: str) -> str | None:
    """Return why a system cannot be measured; None if its packages are installed."""
    missing = [one for one in COMPETITORS[name].packages if find_spec(one) is None]
    if not missing:
        return None
    return f"skipped: {' and '.join(missing)} not installed (make bench-peers installs them)"


def disk_limit(
    plan: Plan, block_bytes: int, progress: Progress
) -> tuple[DiskLimit | None, str | None]:
    """Calibrate fio. Returns the limit, or why there is none."""
    if fio_version() is None:
        return None, "not measured: fio is not installed"
    try:
        limit = DiskLimit(plan.directory / "limit.bin", plan.size, block_bytes)
        limit.calibrate("write", progress.tell)
        limit.calibrate("read", progress.tell)
    except LimitError as error:
        return None, f"not measured: {error}"
    return limit, None


def measure(
    plan: Plan, systems: list[str], skipped: dict[str, str]
) -> tuple[list[figures.Row], dict[str, str]]:
    """Measure everything, print each size's rows when they are ready, and return all rows."""
    progress, found = Progress(), []
    rounds = Rounds(
        plan, systems, lambda name: Worker(name, plan.directory / f"{name}.log"), progress.tell
    )
    try:
        failed = rounds.start()
        print(figures.HEADER, flush=True)
        for block_bytes in plan.sizes:
            progress.size(figures.size_name(block_bytes))
            limit, problem = disk_limit(plan, block_bytes, progress)
            samples = rounds.measure(block_bytes, limit, failed)
            limit_is = {}
            if limit is not None and samples[FIO].problem is None:
                kinds = {WRITE: "write", COLD_GET: "read"}
                limit_is = {kind: limit.best(one)[0].describe() for kind, one in kinds.items()}
            samples |= {name: Samples(problem=why) for name, why in skipped.items()}
            if problem is not None:
                samples[FIO] = Samples(problem=problem)
            rows = figures.rows(block_bytes, samples, limit_is, rounds.versions)
            progress.clear()
            print("\n".join(figures.line(row) for row in rows), flush=True)
            found += rows
    finally:
        rounds.end()
    return found, rounds.versions


def check_room(directory: Path, size: int) -> None:
    """End the program if the disk has no room for two systems' files."""
    free = shutil.disk_usage(directory).free
    if free < 3 * size:
        needed, has = 3 * size >> 20, free >> 20
        raise SystemExit(
            f"{directory} has {has} MiB free, {needed} are needed: a smaller --mib helps"
        )


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    options = parser().parse_args(arguments)
    chosen = options.systems or list(COMPETITORS)
    missing = {name: missing_package(name) for name in chosen}
    skipped = {name: why for name, why in missing.items() if why is not None}
    if Cascade.name in skipped:
        raise SystemExit("cascadekv is not installed in this environment: make bench-peers does it")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise SystemExit(f"--json: the directory of {options.json} does not exist")
    if not options.directory.is_dir():
        raise SystemExit(f"--directory: {options.directory} is not a directory")
    check_room(options.directory, options.mib * MIB)
    scratch = options.directory.resolve() / f"cascade-peers-{os.getpid()}"
    plan = Plan(options.sizes, options.rounds, options.mib * MIB, scratch)
    scratch.mkdir()
    try:
        about = environment.capture(scratch, {}, arguments)
        measured = [name for name in chosen if name not in skipped]
        rows, versions = measure(plan, measured, skipped)
    finally:
        shutil.rmtree(scratch)
    about["versions"] |= versions | ({"fio": version} if (version := fio_version()) else {})
    for name, number in about["versions"].items():
        print(f"{name} {number}", end="; ")
    print(f"{about['cpu_count']} x {about['cpu']}, {about['kernel']}, load {about['load_average']}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        beside = options.json.with_suffix(".environment.json")
        beside.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    problems = [row["problem"] for row in rows if row["problem"] is not None]
    return int(any(problem.startswith("failed") for problem in problems))


def stop(number: int, _frame: object) -> None:
    """End the program on a signal, so that its processes end and its files are removed."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main(sys.argv[1:]))

"""Runs all Rust and Python tests several times beside a load, and lists those that ever failed.

    flaky.py ROUNDS

The load: two busy processes and one that writes and syncs. A test that fails here but passes alone
is a fault of the test or of the product. Rust tests run in random groups, Python tests in random
order. Logs of the failures, with the seed of each round, are below .cache/flaky.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "flaky"
PYTHON = ROOT / ".venv" / "bin" / "python"
NEXTEST = (str(ROOT / ".venv" / "bin" / "cargo-nextest"), "nextest")
WORKSPACE = ("--locked", "--workspace", "--cargo-quiet")
PYTEST = (str(PYTHON), "-m", "pytest", "--quiet", "-p", "randomly")
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
GROUPS = 8
"""Groups of Rust tests: those of one group run beside each other."""
BUSY = "while True: pass"
WRITE = """
import os, sys
with open(sys.argv[1], "wb") as file:
    while True:
        file.seek(0)
        for _ in range(64):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
"""

Failures = dict[str, list[str]]


@contextmanager
def load() -> Iterator[None]:
    """Keep two processors and a disk busy."""
    scratch = tempfile.mkdtemp(dir=LOGS)
    commands = [[BUSY], [BUSY], [WRITE, str(Path(scratch) / "load")]]
    processes = [subprocess.Popen([sys.executable, "-c", *each]) for each in commands]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(scratch)


def rust_groups(chance: random.Random) -> list[str]:
    """Return filters of nextest that divide all tests into random groups."""
    listed = subprocess.check_output(
        [*NEXTEST, "list", *WORKSPACE, "--message-format", "json"],
        cwd=ROOT,
    )
    tests = [
        f"(binary_id(={binary}) & test(={name}))"
        for binary, suite in json.loads(listed)["rust-suites"].items()
        for name, test in suite["testcases"].items()
        if not test["ignored"] and test["filter-match"]["status"] == "matches"
    ]
    chance.shuffle(tests)
    return [" | ".join(tests[at::GROUPS]) for at in range(GROUPS)]


def failures_of(junit: Path) -> tuple[int, list[str]]:
    """Return how many tests a JUnit file has, and the names of those that failed."""
    if not junit.exists():
        return 0, [f"no result: {junit.name}"]
    cases = ET.parse(junit).getroot().findall(".//testcase")
    names = [
        f"{case.get('classname')} {case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return len(cases), names


def run(command: list[str], log: Path, **environment: str) -> None:
    """Run a command with its output in a file. The JUnit file says what failed."""
    with log.open("wb") as output:
        subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )


def one_round(number: int, failures: Failures) -> int:
    """Run all tests once; returns how many ran."""
    seed = secrets.randbits(32)
    chance = random.Random(seed)
    count = 0
    for at, group in enumerate(rust_groups(chance)):
        name = f"round-{number}-rust-{at}"
        kept = LOGS / f"{name}.xml"
        written = TARGET / "nextest" / "flaky" / "junit.xml"
        written.unlink(missing_ok=True)
        run(
            [*NEXTEST, "run", *WORKSPACE, "--hide-progress-bar", "--profile", "flaky", "-E", group],
            LOGS / f"{name}.log",
            PROPTEST_RNG_SEED=str(seed),
        )
        if written.exists():
            shutil.move(written, kept)
        count += note(failures_of(kept), f"{name}.xml, seed {seed}", failures)
    name = f"round-{number}-python"
    run(
        [*PYTEST, "--numprocesses=2", f"--randomly-seed={seed}", f"--junit-xml={LOGS / name}.xml"],
        LOGS / f"{name}.log",
        PYTHONPATH=str(ROOT / "python"),
    )
    return count + note(failures_of(LOGS / f"{name}.xml"), f"{name}.log, seed {seed}", failures)


def note(result: tuple[int, list[str]], where: str, failures: Failures) -> int:
    """Record and print the failures of one run; returns how many tests ran."""
    count, names = result
    for name in names:
        failures[name].append(where)
        sys.stdout.write(f"  failed: {name} ({where})\n")
    sys.stdout.flush()
    return count


def main() -> int:
    """Run the rounds and print what ever failed, the most frequent first."""
    rounds = int(sys.argv[1])
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    failures: Failures = defaultdict(list)
    done = 0
    with load():
        for number in range(1, rounds + 1):
            started = time.monotonic()
            try:
                count = one_round(number, failures)
            except KeyboardInterrupt:
                break
            done += 1
            seconds = time.monotonic() - started
            sys.stdout.write(f"round {number} of {rounds}: {count} tests in {seconds:.0f} s\n")
            sys.stdout.flush()
    for name, places in sorted(failures.items(), key=lambda each: -len(each[1])):
        sys.stdout.write(f"{len(places)} of {done} rounds: {name}\n    {'; '.join(places)}\n")
    sys.stdout.write(f"{done} rounds, {len(failures)} tests failed at least once; logs: {LOGS}\n")
    return 1 if failures or not done else 0


if __name__ == "__main__":
    sys.exit(main())

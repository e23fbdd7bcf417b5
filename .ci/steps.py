"""Runs the gate, or everything else that can be tested here: each step is a target of the Makefile.

    steps.py gate              what protects main; `.ci/run` runs it
    steps.py full              all steps of `make full` that have not passed with these sources
    steps.py full NAME...      these steps, in any case
    steps.py list              the steps of both

Each step has a time limit. Its log and how it ended are kept below .cache/gate and .cache/full. A
failed step does not stop the others. The summary names what failed and the command that repeats it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GATE_LANES = 2
"""Steps of the gate that run at once: at its last crate a compiler leaves a processor idle."""
LAST_LINES = 40
"""Lines of a failed step that the summary repeats."""
SKIPPED = "skipped, no test was run: "
"""How the last line of a target begins that cannot run on this machine."""
LINTS = ".ci/rustc-with-lints"
"""What compiles and checks the workspace's crates in one go."""
GATE_SEED = 7
"""Seed of the gate's property tests: the same sources get the same verdict."""


@dataclass(frozen=True)
class Step:
    """A target of the Makefile, and when it runs."""

    target: str
    requires: tuple[str, ...] = ()
    """Steps that have to pass first; this one is skipped if one does not."""
    after: tuple[str, ...] = ()
    """Steps that have to end first, because both would wait for the same lock."""
    limit_s: int = 900
    can_be_missing: bool = False
    """Whether the machine may lack what it installs. It is skipped then, with its last line."""
    has_lints: bool = False
    """Whether its Rust code is compiled with Clippy. A warning is an error then."""


GATE = (
    Step("environment", limit_s=300),
    Step("check-source", requires=("environment",)),
    Step("test", requires=("environment",), limit_s=2700, has_lints=True),
    Step("build", requires=("environment",), limit_s=2700),
    Step("vllm", requires=("build",), limit_s=300, can_be_missing=True),
    Step("smoke-vllm", requires=("vllm",), limit_s=600),
    Step("run", requires=("build",)),
    Step("prove-wheel", requires=("build",), limit_s=300),
    Step("check-python", requires=("check-source",), after=("test",), has_lints=True),
)

# Quick ones first. The time limits are for a machine that does nothing else.
FULL = (
    Step("environment"),
    Step("check-source"),
    Step("check-rust"),
    Step("check-python"),
    Step("docs"),
    Step("loom"),
    Step("test-all", limit_s=2400),
    Step("test-wheel"),
    Step("prove-wheel"),
    Step("test-gpu-fake"),
    Step("sim"),
    Step("sim-transport"),
    Step("test-machine"),
    Step("smoke-bench"),
    Step("soak"),
    Step("run"),
    Step("sanitize", limit_s=1800),
    Step("fuzz", limit_s=2400),
    Step("test-slow-store", limit_s=1200),
    Step("test-slow-served", limit_s=1200),
    Step("test-slow-python", limit_s=1200),
    Step("test-container"),
    Step("test-rdma", limit_s=1800),
    Step("test-vllm", limit_s=3600),
    Step("test-vllm-versions", limit_s=3600),
    Step("dist", limit_s=2400),
    Step("flaky", limit_s=7200),
)


@dataclass
class Running:
    """A step in a process group of its own."""

    step: Step
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    is_late: bool = False


@dataclass
class Ended:
    """How a step ended."""

    step: Step
    verdict: str
    note: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def line(self) -> str:
        """Return the step's line of the summary."""
        times = f"{self.wall_s:5.0f} s  {self.cpu_s:5.0f} s" if self.wall_s else " " * 16
        return f"{self.verdict:<8} {times}  {self.step.target}{self.note and ': ' + self.note}"


class Runner:
    """Runs steps in lanes and collects how they ended."""

    def __init__(self, kind: str, lanes: int, seed: int) -> None:
        """Prepare the directory of the logs and the environment of the steps."""
        self.lanes = lanes
        self.seed = seed
        self.begun = time.monotonic()
        self.running: list[Running] = []
        self.ended: dict[str, Ended] = {}
        self.logs = ROOT / ".cache" / kind
        self.logs.mkdir(parents=True, exist_ok=True)
        # A `make` that started this would have the steps look for its job server.
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "STEP", "SEED"}
        }
        self.environment |= {
            "CARGO_INCREMENTAL": "0",
            "CARGO_TERM_PROGRESS_WHEN": "never",
            "PROPTEST_RNG_SEED": str(seed),
        }
        if kind == "full":
            self.environment["SEED"] = str(seed)
        if kind == "gate":
            # A panic names its line without it.
            self.environment["CARGO_PROFILE_DEV_DEBUG"] = "0"

    def elapsed(self) -> int:
        """Return the seconds since the start."""
        return int(time.monotonic() - self.begun)

    def start(self, step: Step) -> None:
        """Start a step, or skip it because another did not pass."""
        failed = [name for name in step.requires if self.ended[name].verdict != "passed"]
        if failed:
            self.end(Ended(step, "skipped", f"{failed[0]} did not pass"))
            return
        say(f"==> {step.target} (at {self.elapsed()} s): make {step.target}")
        log = self.logs / f"{step.target}.log"
        environment = self.environment
        if step.has_lints:
            environment = environment | {"RUSTC_WORKSPACE_WRAPPER": str(ROOT / LINTS)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["make", "--no-print-directory", step.target],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(Running(step, process, log, time.monotonic()))

    def end(self, ended: Ended) -> None:
        """Record how a step ended."""
        self.ended[ended.step.target] = ended
        if ended.verdict == "skipped":
            say(f"==> {ended.step.target} skipped: {ended.note}")

    def wait(self) -> Ended:
        """Wait until a running step has ended or is over its time limit."""
        while True:
            for each in self.running:
                pid, status, usage = os.wait4(each.process.pid, os.WNOHANG)
                if pid:
                    return self.finish(each, status, usage.ru_utime + usage.ru_stime)
                if not each.is_late and time.monotonic() - each.started > each.step.limit_s:
                    each.is_late = True
                    kill(each.process.pid)
            time.sleep(0.1)

    def finish(self, running: Running, status: int, cpu_s: float) -> Ended:
        """Record how a step's process ended."""
        self.running.remove(running)
        running.process.returncode = os.waitstatus_to_exitcode(status)
        kill(running.process.pid)  # what it left behind
        step = running.step
        ended = Ended(step, "passed", "", time.monotonic() - running.started, cpu_s)
        if running.is_late:
            ended.verdict, ended.note = "FAILED", f"not ended after {step.limit_s} s"
        elif running.process.returncode:
            ended.verdict, ended.note = "FAILED", f"exit {running.process.returncode}"
        last = " ".join(last_lines(running.log, 1))
        if ended.verdict == "passed" and last.startswith(SKIPPED):
            ended.verdict, ended.note = "skipped", last.removeprefix(SKIPPED)
        if ended.verdict == "FAILED" and step.can_be_missing:
            reason = ended.note if running.is_late else " ".join(last_lines(running.log, 3))
            ended.verdict, ended.note = "skipped", reason
        self.end(ended)
        return ended

    def stop(self) -> None:
        """End all running steps."""
        for each in self.running:
            kill(each.process.pid)
            self.ended[each.step.target] = Ended(each.step, "FAILED", "stopped by a signal")

    def summary(self) -> int:
        """Print how all steps ended; returns the exit status."""
        failed = [each for each in self.ended.values() if each.verdict == "FAILED"]
        for each in failed:
            say(f"\n<== {each.step.target} failed, last lines")
            say("\n".join(last_lines(self.logs / f"{each.step.target}.log", LAST_LINES)))
        say(f"\n==> summary after {self.elapsed()} s\n             wall      CPU  step")
        for each in self.ended.values():
            say(each.line())
        for each in failed:
            say(f"to repeat: {self.command(each.step)}")
        verdict = f"{len(failed)} steps failed" if failed else "no step failed"
        say(f"{verdict}; logs: {self.logs.relative_to(ROOT)}")
        return 1 if failed else 0

    def command(self, step: Step) -> str:
        """Return the command that runs a step again with the same seed."""
        seed = f" SEED={self.seed}" if "SEED" in self.environment else ""
        return f"make {step.target} PROPTEST_RNG_SEED={self.seed}{seed}"


def say(text: str) -> None:
    """Print at once: whoever watches wants to see what runs."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def kill(group: int) -> None:
    """Kill a process group, which may have ended already."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the end of a log."""
    return log.read_text(errors="replace").splitlines()[-count:] if log.exists() else []


def next_step(waiting: list[Step], runner: Runner) -> Step | None:
    """Return the first step that can start now."""
    running = {each.step.target for each in runner.running}
    open_steps = running | {step.target for step in waiting}
    if len(running) >= runner.lanes:
        return None
    return next((s for s in waiting if open_steps.isdisjoint(s.requires + s.after)), None)


def gate(runner: Runner) -> int:
    """Run the gate's steps; prints the output of each when it ends."""
    waiting = list(GATE)
    while waiting or runner.running:
        step = next_step(waiting, runner)
        if step:
            waiting.remove(step)
            runner.start(step)
            continue
        ended = runner.wait()
        say(f"\n<== {ended.step.target}")
        sys.stdout.write((runner.logs / f"{ended.step.target}.log").read_text(errors="replace"))
        say(f"--- {ended.line()}\n")
    return runner.summary()


def sources() -> str:
    """Return git's hash of the tree as it is on disk, new files included."""
    index = {"GIT_INDEX_FILE": str(ROOT / ".cache" / "full" / "index")}
    git = ["git", "-C", str(ROOT)]
    subprocess.run([*git, "add", "--all"], env=os.environ | index, check=True)
    written = [*git, "write-tree"]
    return subprocess.check_output(written, env=os.environ | index, text=True).strip()


def full(runner: Runner, names: list[str]) -> int:
    """Run the named steps, or all that have not passed with these sources."""
    tree = sources()
    steps = [step for step in FULL if not names or step.target in names]
    for step in steps:
        record = runner.logs / f"{step.target}.json"
        if not names and record.exists():
            before = json.loads(record.read_text())
            if before["verdict"] == "passed" and before["tree"] == tree:
                runner.end(Ended(step, "passed", f"before, with seed {before['seed']}"))
                continue
        runner.start(step)
        ended = runner.wait()
        say(f"<== {ended.line()}")
        record.write_text(
            json.dumps(
                {
                    "tree": tree,
                    "verdict": ended.verdict,
                    "note": ended.note,
                    "seed": runner.seed,
                    "wall_s": round(ended.wall_s, 1),
                    "cpu_s": round(ended.cpu_s, 1),
                    "command": runner.command(step),
                }
            )
        )
    return runner.summary()


def main() -> int:
    """Run what the command line names."""
    kind, *names = sys.argv[1:] or ["list"]
    if kind == "list":
        for title, steps in (("gate", GATE), ("full", FULL)):
            say(f"{title}: {' '.join(step.target for step in steps)}")
        return 0
    unknown = set(names) - {step.target for step in FULL}
    if kind not in {"gate", "full"} or (kind == "gate" and names) or unknown:
        say(f"unknown: {' '.join(unknown or sys.argv[1:])}; see `make help` and .ci/steps.py list")
        return 2
    seed = GATE_SEED if kind == "gate" else int(os.environ.get("SEED") or secrets.randbits(63))
    runner = Runner(kind, GATE_LANES if kind == "gate" else 1, seed)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return gate(runner) if kind == "gate" else full(runner, names)
    except KeyboardInterrupt:
        runner.stop()
        runner.summary()
        return 1


if __name__ == "__main__":
    sys.exit(main())

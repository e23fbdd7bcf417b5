"""Starts, drives and ends engines and nodes as child processes; every wait has a time-out."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from cascadekv._program import program

__all__ = ["EngineError", "EngineProcess", "EngineSpec", "RunResult", "serve_node"]

START_S = 300.0
"""Time-out for the start of an engine; vLLM inspects its models on the first start."""
COMMAND_S = 600.0
"""Time-out for a command."""
STOP_S = 60.0
"""Time-out for the end of an engine."""
LOG_LINES = 12
"""Last lines of an engine's log in an error message."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineError(Exception):
    """An engine did not start, failed or timed out; the message has the end of its log."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The configuration of an engine."""

    model: Path
    dtype: str
    tokens_max: int
    """Most tokens of a prompt and its output together."""
    block_tokens: int = 128
    requests_max: int = 8
    """Most requests in a batch."""
    transfer: Mapping[str, object] | None = None
    """The engine's `kv_transfer_config`; `None`: no connector."""
    has_prefix_cache: bool = False
    """Whether vLLM's own prefix cache is on."""
    environment: tuple[tuple[str, str], ...] = ()
    """Additional environment variables of this engine."""

    def to_json(self) -> str:
        """Return the configuration as JSON for `engine.py`."""
        fields = (
            "dtype",
            "tokens_max",
            "block_tokens",
            "requests_max",
            "transfer",
            "has_prefix_cache",
        )
        return json.dumps(
            {name: getattr(self, name) for name in fields} | {"model": f"{self.model}"}
        )


@dataclass(frozen=True)
class RunResult:
    """The results of prompts that were served together, one item for each prompt."""

    first_token_s: list[float]
    """Time to first token in seconds."""
    answers: list[list[int]]
    """Generated tokens."""
    hit_tokens: list[int]
    """Number of prompt tokens that were not computed."""
    save: dict[str, float]
    """Seconds in the connector's save calls: `wall_s`, `cpu_s`; 0 without a connector."""
    load: dict[str, float]
    """Seconds in the connector's load calls, likewise."""
    connector_s: float = 0.0
    """Seconds in all calls of the connector until the last first token."""
    connector_stats: dict[str, float] = field(default_factory=dict[str, float])
    """The connector's own statistics of the run, such as `load_seconds`; empty if it has none."""

    @property
    def first_token_mean_s(self) -> float:
        """The mean time to first token."""
        return sum(self.first_token_s) / len(self.first_token_s)

    @property
    def load_s(self) -> float:
        """The time of loads, from the connector's statistics if it has them.

        They include loads in background threads, which the time of its calls does not.
        """
        return self.connector_stats.get("load_seconds", self.load["wall_s"])

    def cpu_s(self, kind: str) -> float:
        """Return the CPU time of `save` or `load`, from the connector's statistics if available."""
        calls: dict[str, float] = getattr(self, kind)
        return self.connector_stats.get(f"{kind}_cpu_seconds", calls["cpu_s"])


class EngineProcess:
    """An engine in a child process. A context manager that ends it."""

    def __init__(self, spec: EngineSpec, directory: Path, name: str) -> None:
        """Start the engine; files and the log are in `directory`. Raises `EngineError`."""
        config = directory / f"{name}.json"
        config.write_text(spec.to_json(), encoding="utf-8")
        self._name = name
        self._log = directory / f"{name}.log"
        self._rest = b""
        environment = os.environ | ENVIRONMENT | dict(spec.environment)
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # noqa: S603 # our own command
                [sys.executable, "-m", "cascadekv.bench.engine", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self.facts = self._read(START_S)

    def __enter__(self) -> Self:
        """Return the running engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the engine."""
        self.stop()

    def run(self, prompts: Sequence[list[int]], new: int = 16) -> RunResult:
        """Serve prompts together. Raises `EngineError`."""
        return RunResult(**self._send(command="run", prompts=list(prompts), new=new))

    def serve(
        self, prompts: Sequence[list[int]], hints: Sequence[Mapping[str, object]]
    ) -> list[int]:
        """Serve prompts one by one; returns the hit tokens of each. Raises `EngineError`."""
        result = self._send(command="serve", prompts=list(prompts), hints=list(hints))
        return cast("list[int]", result["hit_tokens"])

    def look_up(self, tokens: list[int], repeats: int) -> dict[str, Any]:
        """Call only the scheduler's side of the connector. Raises `EngineError`."""
        return self._send(command="look_up", tokens=tokens, repeats=repeats)

    def stop(self) -> None:
        """End the engine; kill it after a time-out."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, **command: object) -> dict[str, Any]:
        """Send a command and return its result."""
        if self._process.stdin is None:
            raise EngineError(f"the engine {self._name} has no standard input")
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(self._explain("has ended")) from error
        return self._read(COMMAND_S)

    def _read(self, seconds: float) -> dict[str, Any]:
        """Read a line of JSON; an engine that times out is killed."""
        if self._process.stdout is None:
            raise EngineError(f"the engine {self._name} has no standard output")
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(descriptor, 1 << 20) if ready else b""
            if not read:
                self._process.kill()
                self.stop()
                what = "has ended" if ready else f"took more than {seconds:.0f} s"
                raise EngineError(self._explain(what))
            self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return cast("dict[str, Any]", json.loads(line))

    def _explain(self, what: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        end = [line for line in lines if line.strip()][-LOG_LINES:]
        return f"the engine {self._name} {what}; the end of {self._log}:\n" + "\n".join(end)


@contextmanager
def serve_node(directory: Path, *flags: str) -> Generator[str]:
    """Run a node with a DRAM tier; yields the value for `cascade.node`."""
    path = directory / "node.sock"
    command = [str(program()), "serve", "--socket", str(path)]
    command += ["--pipeline", "Dram", "--log-filter", "warn", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 # our own
        try:
            if process.stdout is None:
                raise EngineError("the node has no standard output")
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            if not ready or b"ready" not in process.stdout.readline():
                raise EngineError(f"the node did not start: {' '.join(command)}")
            yield f"unix:{path}"
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()

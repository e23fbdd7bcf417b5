"""Starts engines and nodes as processes, gives them orders and ends them; no wait is endless."""

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

__all__ = ["Answer", "EngineError", "EngineProcess", "EngineSpec", "serve_node"]

START_S = 300.0
"""How long an engine may take to start: the first on a machine inspects its models."""
ORDER_S = 600.0
"""How long an order may take."""
STOP_S = 60.0
"""How long an engine may take to end."""
LOG_LINES = 12
"""Lines of an engine's log that its failure shows."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineError(Exception):
    """An engine did not start, failed or took too long; its log tells."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What to start."""

    model: Path
    dtype: str
    tokens_max: int
    """Longest prompt and answer together."""
    block_tokens: int = 128
    requests_max: int = 8
    """Most requests that are computed at a time."""
    transfer: Mapping[str, object] | None = None
    """The engine's `kv_transfer_config`; `None` is no connector."""
    has_prefix_cache: bool = False
    """Whether vLLM's own prefix cache is on."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of this engine beside those of all."""

    def to_json(self) -> str:
        """Give it the form that `engine.py` reads."""
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
class Answer:
    """What became of prompts that were served at once."""

    first_token_s: list[float]
    """Seconds to the first token, a prompt."""
    answers: list[list[int]]
    """Tokens that were generated, a prompt."""
    hit_tokens: list[int]
    """Tokens of the prompt that were not computed, a prompt."""
    save: dict[str, float]
    """Seconds within the connector's saves: `wall_s`, `cpu_s`; all 0 without a connector."""
    load: dict[str, float]
    """Likewise within its loads."""
    connector_s: float = 0.0
    """Seconds within all of the connector's calls, up to the last first token."""
    told: dict[str, float] = field(default_factory=dict[str, float])
    """The connector's own figures of the run, such as `load_seconds`; empty where it has none."""

    @property
    def first_token_mean_s(self) -> float:
        """The mean over prompts."""
        return sum(self.first_token_s) / len(self.first_token_s)

    @property
    def load_s(self) -> float:
        """Time of loads as the connector tells, which may go on beside the engine."""
        return self.told.get("load_seconds", self.load["wall_s"])

    def cpu_s(self, kind: str) -> float:
        """Give the processor time of a kind, `save` or `load`, told or else within its calls."""
        within: dict[str, float] = getattr(self, kind)
        return self.told.get(f"{kind}_cpu_seconds", within["cpu_s"])


class EngineProcess:
    """An engine that runs until the `with` block ends."""

    def __init__(self, spec: EngineSpec, room: Path, name: str) -> None:
        """Start it; files and the log go to `room`. Raises `EngineError` if it does not start."""
        job = room / f"{name}.json"
        job.write_text(spec.to_json(), encoding="utf-8")
        self._name = name
        self._log = room / f"{name}.log"
        self._rest = b""
        environment = os.environ | ENVIRONMENT | dict(spec.environment)
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # noqa: S603 # our own command
                [sys.executable, "-m", "cascadekv.bench.engine", str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self.facts = self._read(START_S)

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.stop()

    def run(self, prompts: Sequence[list[int]], new: int = 16) -> Answer:
        """Serve prompts at once. Raises `EngineError`."""
        told = self._ask(order="run", prompts=list(prompts), new=new)
        return Answer(**told)

    def serve(
        self, prompts: Sequence[list[int]], hints: Sequence[Mapping[str, object]]
    ) -> list[int]:
        """Serve prompts one after the other; tells the tokens hit. Raises `EngineError`."""
        told = self._ask(order="serve", prompts=list(prompts), hints=list(hints))
        return cast("list[int]", told["hit_tokens"])

    def look_up(self, tokens: list[int], repeats: int) -> dict[str, Any]:
        """Ask the scheduler's side of the connector alone. Raises `EngineError`."""
        return self._ask(order="look_up", tokens=tokens, repeats=repeats)

    def stop(self) -> None:
        """End it in order; kill it where it does not end."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, **order: object) -> dict[str, Any]:
        if self._process.stdin is None:
            raise EngineError(f"{self._name}: takes no orders")
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(self._explain("has ended")) from error
        return self._read(ORDER_S)

    def _read(self, seconds: float) -> dict[str, Any]:
        """Wait for a line; an engine that ends or takes too long is over."""
        if self._process.stdout is None:
            raise EngineError(f"{self._name}: gives no answers")
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
        told = [line for line in lines if line.strip()][-LOG_LINES:]
        return f"the engine {self._name} {what}; the end of {self._log}:\n" + "\n".join(told)


@contextmanager
def serve_node(room: Path, *flags: str) -> Generator[str]:
    """Serve a store from DRAM in a process of its own; gives `cascade.node`'s value."""
    path = room / "node.sock"
    command = [sys.executable, "-m", "cascadekv", "serve", "--socket", str(path)]
    command += ["--pipeline", "Dram", "--log-filter", "warn", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 # our own
        try:
            if process.stdout is None:
                raise EngineError("the node tells nothing")
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

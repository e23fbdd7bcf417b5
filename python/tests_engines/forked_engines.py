"""vLLM engines in child processes, on small models, and a reference for their answers.

Engines are forked from a server that has imported vLLM once, so that a start takes seconds. Tests
call functions of `engine_calls.py`, which run in the engine's process.
"""

import contextlib
import functools
import multiprocessing
import multiprocessing.context
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import engine_calls
import pytest
from engine_calls import Answer

BLOCK = 128
"""Tokens of a block."""
CALL_S = 400
"""Time-out for a call to an engine, on a loaded machine."""
STOP_S = 60
"""Time-out for the end of an engine."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # OpenMP threads that spin for each other starve on a loaded machine.
    "OMP_NUM_THREADS": "1",
}
IMPORTS = [
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "cascadekv.connectors.vllm",
]
"""Imports of every engine; they start no threads, which a fork would lose."""
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    # Less than some prompts, so that they are computed in several steps.
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 96,
}


class Engine:
    """One engine; `store` is the connector's extra configuration, `None` means no connector."""

    def __init__(
        self,
        model: Path,
        store: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        is_one_process: bool = True,
        **options: object,
    ) -> None:
        context = _fork_server()
        self._pipe, child_pipe = context.Pipe()
        multiprocessing_mode = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if is_one_process else "1"}
        self.process = context.Process(
            target=engine_calls.serve,
            args=(
                child_pipe,
                {**multiprocessing_mode, **(environment or {})},
                {"model": str(model), **OPTIONS, **options},
                store,
            ),
        )
        self.process.start()
        child_pipe.close()
        self._receive()

    def call(self, work: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of `engine_calls.py` in the engine's process; raises what it raises."""
        self._pipe.send((work, arguments))
        return self._receive()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = 8,
        *,
        salt: str | None = None,
        adapter: tuple[str, int, str] | None = None,
    ) -> list[Answer]:
        """Answer prompts that come at once."""
        answers: list[Answer] = self.call(
            engine_calls.generate, list(prompts), tokens, salt, adapter
        )
        return answers

    def one(self, prompt: Sequence[int], tokens: int = 8, *, salt: str | None = None) -> Answer:
        """Answer one prompt."""
        return self.run([prompt], tokens, salt=salt)[0]

    def kill(self) -> None:
        """Kill the engine, as in a crash."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """End the engine cleanly."""
        if self.process.is_alive():
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
            self.process.join(STOP_S)
        if self.process.is_alive():
            self.kill()
            pytest.fail(f"the engine did not end within {STOP_S} s")
        self._pipe.close()

    def _receive(self) -> Any:
        if not self._pipe.poll(CALL_S):
            os.kill(self.process.pid, signal.SIGABRT)
            pytest.fail(f"the engine did not answer within {CALL_S} s")
        try:
            fault, answer = self._pipe.recv()
        except EOFError:
            self.process.join(STOP_S)
            pytest.fail(f"the engine ended with exit code {self.process.exitcode}")
        if fault is not None:
            pytest.fail(f"in the engine: {fault}")
        return answer


@functools.cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the fork server, which imports vLLM once."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context


class Reference:
    """The answers of an engine without connector; each prompt is computed once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int = 8) -> list[tuple[int, ...]]:
        """Return the right tokens."""
        names = [tuple(prompt) for prompt in prompts]
        new = [n for n in dict.fromkeys(names) if len(self._known.get(n, ())) < tokens]
        for name, answer in zip(new, self._engine.run(new, tokens) if new else [], strict=True):
            self._known[name] = answer.tokens
        return [self._known[name][:tokens] for name in names]

    def check(self, engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 8) -> list[int]:
        """Compare an engine's answers to concurrent prompts; returns the hit tokens of each."""
        answers = engine.run(prompts, tokens)
        right = self.answers(prompts, tokens)
        wrong = [at for at, answer in enumerate(answers) if answer.tokens != right[at]]
        assert not wrong, [(len(prompts[at]), answers[at], right[at]) for at in wrong]
        return [answer.cached for answer in answers]

    def check_one(self, engine: Engine, prompt: Sequence[int], tokens: int = 8) -> int:
        """Compare an engine's answer to one prompt; returns its hit tokens."""
        return self.check(engine, [prompt], tokens)[0]


@contextlib.contextmanager
def engines(model: Path) -> Iterator[Callable[..., Engine]]:
    """Yield a function that starts engines; ends the engines afterwards."""
    started: list[Engine] = []

    def start(store: Mapping[str, object] | None = None, **options: Any) -> Engine:
        started.append(Engine(model, store, **options))
        return started[-1]

    try:
        yield start
    finally:
        for engine in started:
            engine.close()


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Iterator[Reference]:
    """Return the answers of an engine without connector."""
    with engines(tiny_model) as start:
        yield Reference(start())


@pytest.fixture(scope="module")
def start(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    """Start engines for one module."""
    with engines(tiny_model) as starter:
        yield starter

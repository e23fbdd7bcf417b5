"""One vLLM engine in its own process, driven by commands and results as lines of JSON.

`engine_process.py` starts it. The time to first token is measured in this process, from the
submission of a request until the return of the engine's step with its first token.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    # Not installed where types are checked.
    torch: Any
    vllm: Any
else:
    import torch
    import vllm
    import vllm.config
    import vllm.distributed.kv_transfer
    import vllm.distributed.kv_transfer.kv_connector.v1
    import vllm.v1.request

__all__ = ["CallTimer", "Engine", "main"]

SAVE_CALLS = ("save_kv_layer", "wait_for_save")
LOAD_CALLS = ("start_load_kv", "wait_for_layer_load")
STEP_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
    "bind_connector_metadata",
    "handle_preemptions",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    *LOAD_CALLS,
    *SAVE_CALLS,
)
"""The calls of a connector in an engine's steps, on the scheduler's and on the worker's side."""
SETTLE_S = 0.25
"""Pause before a run: idle OpenMP threads of another engine spin for about this long."""


@dataclass
class CallTimer:
    """The time spent in some of a connector's calls."""

    calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the whole process during the calls, including threads of the store."""
    _is_timing: bool = False

    def wrap(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return a timed version of a call; nested calls count once."""

        def timed(*args: object, **kwargs: object) -> object:
            if self._is_timing:
                return call(*args, **kwargs)
            self._is_timing = True
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._is_timing = False
                self.wall_s += time.perf_counter() - wall
                self.cpu_s += time.process_time() - cpu
                self.calls += 1

        return timed

    def take(self) -> dict[str, float]:
        """Return the times and start over."""
        times = {"calls": self.calls, "wall_s": self.wall_s, "cpu_s": self.cpu_s}
        self.calls, self.wall_s, self.cpu_s = 0, 0.0, 0.0
        return times


@dataclass
class StatsTotals:
    """Totals of the connector's own statistics since the last `take`, by name."""

    totals: dict[str, float] = field(default_factory=dict[str, float])

    def wrap(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a version of the call for a step's statistics that adds them to the totals."""

        def counted() -> Any:  # noqa: ANN401 # the connector's own
            stats = call()
            if stats is not None:
                self._add(stats.data)
            return stats

        return counted

    def take(self) -> dict[str, float]:
        """Return the totals and start over."""
        totals, self.totals = self.totals, {}
        return totals

    def _add(self, data: Mapping[str, Any]) -> None:
        """Add numbers by name, and labelled ones by label as well: `loaded_blocks.dram`."""
        for name, amount in data.get("sums", {}).items():
            self.totals[name] = self.totals.get(name, 0.0) + amount
        for name, by_label in data.get("labels", {}).items():
            for label, amount in by_label.items():
                for total in (name, f"{name}.{label}"):
                    self.totals[total] = self.totals.get(total, 0.0) + amount


@dataclass
class Engine:
    """vLLM with one model and at most one connector."""

    llm: Any
    save: CallTimer = field(default_factory=CallTimer)
    load: CallTimer = field(default_factory=CallTimer)
    all_calls: CallTimer = field(default_factory=CallTimer)
    """Every call of the connector."""
    stats: StatsTotals = field(default_factory=StatsTotals)
    _serial: int = 0

    @classmethod
    def start(cls, spec: Mapping[str, Any]) -> "Engine":
        """Start an engine; `spec` has the fields of `EngineSpec`."""
        transfer = spec["transfer"]
        llm = vllm.LLM(
            model=spec["model"],
            dtype=spec["dtype"],
            seed=0,
            enforce_eager=True,
            enable_prefix_caching=spec["has_prefix_cache"],
            block_size=spec["block_tokens"],
            max_model_len=spec["tokens_max"],
            # A prompt must fit one step: ExampleConnector stores only the first step of it.
            max_num_batched_tokens=spec["tokens_max"],
            max_num_seqs=spec["requests_max"],
            kv_transfer_config=vllm.config.KVTransferConfig(**transfer) if transfer else None,
        )
        engine = cls(llm)
        if transfer:
            engine.attach_timers()
        return engine

    def attach_timers(self) -> None:
        """Time the calls of both sides of the connector, and total its statistics."""
        worker_side = vllm.distributed.kv_transfer.get_kv_transfer_group()
        for timer, names in ((self.save, SAVE_CALLS), (self.load, LOAD_CALLS)):
            for name in names:
                setattr(worker_side, name, timer.wrap(getattr(worker_side, name)))
        scheduler_side = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        for side in (worker_side, scheduler_side):
            for name in STEP_CALLS:
                if hasattr(side, name):
                    setattr(side, name, self.all_calls.wrap(getattr(side, name)))
        counted = self.stats.wrap(scheduler_side.get_kv_connector_stats)
        scheduler_side.get_kv_connector_stats = counted

    def run(
        self,
        prompts: list[list[int]],
        new: int,
        hints: list[dict[str, object]] | None = None,
        settle_s: float = SETTLE_S,
    ) -> dict[str, object]:
        """Serve prompts together; returns the fields of `RunResult`.

        `hints` are the `kv_transfer_params` of each prompt.
        """
        engine = self.llm.llm_engine
        time.sleep(settle_s)
        for counter in (self.save, self.load, self.all_calls, self.stats):
            counter.take()
        names = [f"{self._serial + n}" for n in range(len(prompts))]
        self._serial += len(prompts)
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        connector_s = 0.0
        sampling = [_sampling(new, each) for each in hints or [{}] * len(prompts)]
        started = time.perf_counter()
        for name, tokens, params in zip(names, prompts, sampling, strict=True):
            engine.add_request(name, {"prompt_token_ids": tokens}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs[0].token_ids and output.request_id not in first:
                    first[output.request_id] = time.perf_counter() - started
                    connector_s = self.all_calls.wall_s
                if output.finished:
                    done[output.request_id] = output
        return {
            "first_token_s": [first[name] for name in names],
            "answers": [list(done[name].outputs[0].token_ids) for name in names],
            "hit_tokens": [done[name].num_cached_tokens or 0 for name in names],
            "save": self.save.take(),
            "load": self.load.take(),
            "connector_s": connector_s,
            "connector_stats": self.stats.take(),
        }

    def serve(self, prompts: list[list[int]], hints: list[dict[str, object]]) -> dict[str, object]:
        """Serve prompts one by one without a pause, one token each; returns their hits."""
        results = [
            self.run([tokens], 1, [params], settle_s=0.0)
            for tokens, params in zip(prompts, hints, strict=True)
        ]
        return {"hit_tokens": [cast("list[int]", result["hit_tokens"])[0] for result in results]}

    def look_up(self, tokens: list[int], repeats: int) -> dict[str, object]:
        """Time the arrival and the lookup of requests in the scheduler's side, in seconds."""
        core = self.llm.llm_engine.engine_core.engine_core
        scheduler, hasher = core.scheduler, core.request_block_hasher
        params = vllm.SamplingParams(max_tokens=1)
        arrivals: list[float] = []
        lookups: list[float] = []
        matched = 0
        for repeat in range(repeats):
            request = vllm.v1.request.Request(
                f"lookup-{repeat}", tokens, params, None, block_hasher=hasher
            )
            start = time.perf_counter()
            scheduler.connector.on_new_request(request)
            arrived = time.perf_counter()
            matched, _ = scheduler.connector.get_num_new_matched_tokens(request, 0)
            lookups.append(time.perf_counter() - arrived)
            arrivals.append(arrived - start)
            self._abort(scheduler.connector, request)
        return {"arrival_s": arrivals, "lookup_s": lookups, "matched_tokens": matched}

    def _abort(self, connector: Any, request: Any) -> None:  # noqa: ANN401 # the engine's own
        """End a request that never ran, like an abort while it waits."""
        request.status = vllm.v1.request.RequestStatus.FINISHED_ABORTED
        if vllm.distributed.kv_transfer.kv_connector.v1.supports_hma(connector):
            connector.request_finished_all_groups(request, ())
        else:
            connector.request_finished(request, [])

    def facts(self) -> dict[str, object]:
        """Return the parameters of the engine that affect the figures."""
        config = self.llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "block_tokens": config.cache_config.block_size,
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }

    def stop(self) -> None:
        """Shut the engine down, so that the connector finishes its work."""
        self.llm.llm_engine.engine_core.shutdown()


def _sampling(new: int, hints: Mapping[str, object]) -> Any:  # noqa: ANN401 # the engine's own
    extra = {"kv_transfer_params": dict(hints)} if hints else None
    return vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, extra_args=extra)


def _private_output() -> TextIO:
    """Reserve standard output for results; what the engine prints goes to standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(own, "w", buffering=1, encoding="utf-8")


def main() -> int:
    """Start the engine that a file describes, and run commands until standard input ends."""
    results = _private_output()
    spec = cast("dict[str, Any]", json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    engine = Engine.start(spec)
    results.write(json.dumps(engine.facts()) + "\n")
    commands: dict[str, Callable[..., dict[str, object]]] = {
        "run": engine.run,
        "serve": engine.serve,
        "look_up": engine.look_up,
    }
    for line in sys.stdin:
        arguments = cast("dict[str, Any]", json.loads(line))
        result = commands[arguments.pop("command")](**arguments)
        results.write(json.dumps(result) + "\n")
    engine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

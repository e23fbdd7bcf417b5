"""First and second runs of prompts, round by round, and the figures that come of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cascadekv.bench.engine_process import Answer
from cascadekv.bench.figures import Figure, Target
from cascadekv.bench.prompts import block_aligned

__all__ = ["GAIN", "OVERHEAD", "Pairs", "connector_share", "hit_most", "overhead"]

GAIN = Target(at_least=5.2)
"""Times that the second run is faster, from `GAIN_TOKENS` on."""
GAIN_TOKENS = 4096
OVERHEAD = Target(at_most=2.0)
"""Percent of the time to the first token that a request may lose which misses everything."""


def hit_most(tokens: int, block_tokens: int) -> int:
    """Count the tokens of whole blocks that a prompt can hit: its last token is always computed."""
    return block_aligned(tokens - 1, block_tokens)


@dataclass
class Pairs:
    """Slow runs that missed and fast runs that hit, a pair a round."""

    name: str
    """What follows `gain/` in the figures' names, such as `dram/91m/4096`."""
    tokens: int
    hit_tokens_least: int
    """What the fast run has to hit to count."""
    slow: list[Answer] = field(default_factory=list[Answer])
    fast: list[Answer] = field(default_factory=list[Answer])
    compares_answers: bool = True
    """Whether both runs had the same prompts."""
    faults: list[str] = field(default_factory=list[str])
    facts: dict[str, object] = field(default_factory=dict[str, object])

    def figures(self, *, is_short: bool) -> list[Figure]:
        """Make figures: both times, and how many times faster the second is."""
        name, measured = self.name, "from handing requests over to their first tokens, mean"
        first = [answer.first_token_mean_s for answer in self.slow]
        second = [answer.first_token_mean_s for answer in self.fast]
        faults = [*self.faults, *self._faults()]
        is_asked = self.tokens >= GAIN_TOKENS and not is_short and self.compares_answers
        return [
            Figure(f"first/{name}", "s", first, measured=measured),
            Figure(f"second/{name}", "s", second, faults=faults, measured=measured),
            Figure(
                f"gain/{name}",
                "x",
                [slow / fast for slow, fast in zip(first, second, strict=True)],
                target=GAIN if is_asked else None,
                faults=faults,
                measured="first run over second run of the same round",
                facts=self._facts(),
            ),
        ]

    def _faults(self) -> list[str]:
        least = self.hit_tokens_least
        hits = [hit for answer in self.fast for hit in answer.hit_tokens]
        short = [hit for hit in hits if hit < least]
        early = [hit for answer in self.slow for hit in answer.hit_tokens if hit > 0]
        faults: list[str] = []
        if short:
            faults.append(
                f"{len(short)} of {len(hits)} requests hit too little: {min(short)} tokens, not"
                f" {least}"
            )
        if early:
            faults.append(f"{len(early)} first runs hit {max(early)} tokens: they were not cold")
        return faults

    def _facts(self) -> dict[str, object]:
        told: dict[str, object] = {
            "tokens": self.tokens,
            "hit_tokens": [answer.hit_tokens for answer in self.fast],
        }
        if self.compares_answers:
            pairs = zip(self.slow, self.fast, strict=True)
            # In bfloat16 near ties may fall the other way; equality is proved in float32 elsewhere.
            told["answers_that_differ"] = sum(a.answers != b.answers for a, b in pairs)
        return told | self.facts


def overhead(name: str, bare: Sequence[Answer], ours: Sequence[Answer]) -> Figure:
    """Make the figure of what a request loses that misses everything, as a whole.

    The time of a prompt varies by more than what is looked for, so nothing is asked of it.
    """
    pairs = list(zip(bare, ours, strict=True))
    return Figure(
        f"miss-overhead/{name}",
        "%",
        [(b.first_token_mean_s / a.first_token_mean_s - 1) * 100 for a, b in pairs],
        faults=_hits(ours),
        measured="first run with the connector over the same prompt without one, in turn",
        facts={"answers_that_differ": sum(a.answers != b.answers for a, b in pairs)},
    )


def connector_share(name: str, ours: Sequence[Answer], *, is_short: bool) -> Figure:
    """Make the figure of what the engine waits for the connector in a request that misses."""
    return Figure(
        f"miss-share/{name}",
        "%",
        [answer.connector_s / answer.first_token_mean_s * 100 for answer in ours],
        target=None if is_short else OVERHEAD,
        faults=_hits(ours),
        measured="time within the connector's calls, lookup to saves, over time to the first token",
        facts={"connector_s": [answer.connector_s for answer in ours]},
    )


def _hits(ours: Sequence[Answer]) -> list[str]:
    hits = sum(hit for answer in ours for hit in answer.hit_tokens)
    return [f"{hits} tokens were hit"] if hits else []

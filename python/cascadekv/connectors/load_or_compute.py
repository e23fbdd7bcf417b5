"""Load or compute: how many of a request's leading blocks are worth loading, by what was measured.

A load takes a fixed time and a time for each block, both of its tier; computing takes a time for
each token that grows with the tokens before it. All of them are learnt from what loads and steps
took. What is not known yet counts as free to load: the first requests load, and teach.
"""

import time
from collections.abc import Callable, Sequence
from itertools import groupby

__all__ = ["LoadOrCompute"]

DECAY = 0.8
"""Weight of what was known when a sample comes: the last five or so samples count."""
USUAL = 4.0
"""A sample this many times above or below what was expected is unusual."""
TAKEN = 2.0
"""What a lone unusual sample may move: it counts as this many times the expected."""
SAME = 0.01
"""Samples whose spread, relative and squared, is below this say nothing about a slope."""
OFFSET_MIN = 0.1
"""The least share of the mean that does not depend on the slope's argument."""
PROBE_BLOCKS = 4
"""How many blocks a probe of a tier loads at most."""


class LoadOrCompute:
    """Decides for one engine. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(
        self,
        *,
        block_tokens: int,
        block_bytes: int,
        probe_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know nothing yet. Raises `ValueError` for sizes below 1 and a negative interval."""
        if block_tokens < 1 or block_bytes < 1:
            raise ValueError(
                f"block_tokens is {block_tokens} and block_bytes {block_bytes}; at least 1 each"
            )
        if probe_interval_s < 0:
            raise ValueError(f"probe_interval_s is {probe_interval_s}; it cannot be negative")
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._loads: dict[str, _Line] = {}
        self._tried_at: dict[str, float] = {}
        self._prefill = _Line()
        self._recent_block_s = 0.0
        self._probes = 0
        self._declined_blocks = 0

    def observe_load(self, tier: str, blocks: int, seconds: float) -> None:
        """Learn from a load of that many blocks out of one tier, a failed or late one included."""
        if blocks < 1 or not seconds > 0:
            return
        block_s = seconds / blocks
        self._loads.setdefault(tier, _Line()).learn(1 / blocks, block_s)
        self._tried_at[tier] = self._clock()
        known = self._recent_block_s
        self._recent_block_s = DECAY * known + (1 - DECAY) * block_s if known else block_s

    def observe_prefill(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """Learn from a step that computed `tokens` behind `context_tokens`.

        Steps of less than a block tell the cost of a step, not of its tokens, and are left out.
        """
        if tokens < self._block_tokens or context_tokens < 0 or not seconds > 0:
            return
        self._prefill.learn(context_tokens + tokens / 2, seconds / tokens)

    def choose(self, tiers: Sequence[str], *, total_tokens: int, waiting_blocks: int = 0) -> int:
        """Say how many leading blocks to load; `tiers` has each found block's fastest tier.

        `total_tokens` are the request's, loaded or not; `waiting_blocks` those of loads that are
        under way or wait. The answer is what takes least time, plus, once in an interval, a few
        blocks more of a tier that lost, so that it is found out when that tier is well again.
        """
        if not tiers:
            return 0
        best = len(tiers)
        if self._prefill.is_known:
            best = self._fastest(tiers, total_tokens, waiting_blocks)
        if best < len(tiers):
            best += self._probe(tiers, best)
        self._declined_blocks += len(tiers) - best
        return best

    def figures(self) -> dict[str, float]:
        """Give what is known, in seconds and bytes a second, and what was decided so far."""
        figures: dict[str, float] = {
            "probes": self._probes,
            "declined_blocks": self._declined_blocks,
        }
        if self._prefill.is_known:
            token_s, growth_s = self._prefill.fit()
            figures["prefill_token_seconds"] = token_s
            figures["prefill_token_seconds_per_context_token"] = growth_s
        for tier, line in sorted(self._loads.items()):
            block_s, latency_s = line.fit()
            figures[f"{tier}_latency_seconds"] = latency_s
            figures[f"{tier}_bytes_per_second"] = self._block_bytes / block_s
        return figures

    def _fastest(self, tiers: Sequence[str], total_tokens: int, waiting_blocks: int) -> int:
        """Count the leading blocks after which computing the rest ends first.

        Along a run of one tier the time to load grows evenly and the time to compute falls ever
        faster, so that the best of a run is its first block or its last.
        """
        costs = {tier: line.fit() for tier, line in self._loads.items()}
        begun: set[str] = set()
        best, best_s = 0, self._compute_s(0, total_tokens)
        load_s = waiting_blocks * self._recent_block_s
        before = 0
        for tier, blocks in groupby(tiers):
            block_s, latency_s = costs.get(tier, (0.0, 0.0))
            if tier not in begun:
                begun.add(tier)
                load_s += latency_s
            count = len(list(blocks))
            for loaded in (1, count):
                end = before + loaded
                took_s = load_s + loaded * block_s
                took_s += self._compute_s(end * self._block_tokens, total_tokens)
                # At the same time, loading leaves the engine free for others.
                if took_s <= best_s:
                    best, best_s = end, took_s
            before += count
            load_s += count * block_s
        return best

    def _compute_s(self, first: int, end: int) -> float:
        """Seconds to compute the tokens from `first` to `end`."""
        token_s, growth_s = self._prefill.fit()
        count = max(end - first, 0)
        return count * (token_s + growth_s * (first + count / 2))

    def _probe(self, tiers: Sequence[str], best: int) -> int:
        """Count the blocks to load behind `best` to see how their tier is now."""
        tier = tiers[best]
        now = self._clock()
        if now - self._tried_at.get(tier, now) < self._probe_interval_s:
            return 0
        self._tried_at[tier] = now
        self._probes += 1
        count = 0
        while count < PROBE_BLOCKS and best + count < len(tiers) and tiers[best + count] == tier:
            count += 1
        return count


class _Line:
    """A cost that is an offset and a slope times something, neither of them negative."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._at = 0.0
        self._at_at = 0.0
        self._cost = 0.0
        self._cost_at = 0.0
        self._unusual = 1.0

    @property
    def is_known(self) -> bool:
        """Whether there was a sample."""
        return self._weight > 0

    def learn(self, at: float, cost: float) -> None:
        """Take a sample. One that is unusual alone moves little; two in a row move everything."""
        if self.is_known:
            expected = self._of(at)
            ratio = cost / expected
            if 1 / USUAL <= ratio <= USUAL:
                self._unusual = 1.0
            elif (ratio > 1) == (self._unusual > 1) and self._unusual != 1.0:
                # The whole is slower or faster than it was: its shape stays.
                self._cost *= ratio
                self._cost_at *= ratio
                self._unusual = 1.0
            else:
                self._unusual = ratio
                cost = expected * (TAKEN if ratio > 1 else 1 / TAKEN)
        self._weight = DECAY * self._weight + 1
        self._at = DECAY * self._at + at
        self._at_at = DECAY * self._at_at + at * at
        self._cost = DECAY * self._cost + cost
        self._cost_at = DECAY * self._cost_at + cost * at

    def fit(self) -> tuple[float, float]:
        """Give the offset and the slope that fit best."""
        mean_at = self._at / self._weight
        mean = self._cost / self._weight
        spread = self._at_at / self._weight - mean_at * mean_at
        slope = 0.0
        if spread > SAME * mean_at * mean_at:
            slope = max((self._cost_at / self._weight - mean * mean_at) / spread, 0.0)
        offset = mean - slope * mean_at
        if offset < OFFSET_MIN * mean:
            offset = OFFSET_MIN * mean
            slope = (mean - offset) / mean_at
        return offset, slope

    def _of(self, at: float) -> float:
        offset, slope = self.fit()
        return offset + slope * at

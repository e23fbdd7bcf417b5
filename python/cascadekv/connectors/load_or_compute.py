"""Decides how many leading blocks of a request are loaded, and how many are computed.

The cost model is linear. A load costs a latency and a time per block, both of its tier. Computing
costs a time per token that grows with the tokens before it. All coefficients are estimated from
measured loads and steps. A tier without measurements counts as free, so that the first requests
load and measure it.
"""

import time
from collections.abc import Callable, Sequence
from itertools import groupby

__all__ = ["LoadOrCompute"]

DECAY = 0.8
"""Decay of older samples by each new one; about the last five samples count."""
OUTLIER_FACTOR = 4.0
"""A sample this many times above or below the prediction is an outlier."""
OUTLIER_CLAMP = 2.0
"""A single outlier is clamped to this many times the prediction, or its reciprocal."""
RELATIVE_VARIANCE_MIN = 0.01
"""Least variance of the argument, relative to its squared mean, for which a slope is estimated."""
OFFSET_SHARE_MIN = 0.1
"""Least share of the mean cost that is attributed to the offset."""
PROBE_BLOCKS = 4
"""Most blocks that a probe of a tier loads."""


class LoadOrCompute:
    """Decides for one engine. Not thread-safe: call it from the scheduler's thread only."""

    def __init__(
        self,
        *,
        block_tokens: int,
        block_bytes: int,
        probe_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without estimates. Raises `ValueError` for sizes below 1 or a negative interval."""
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
        self._loads: dict[str, _LinearCost] = {}
        """By tier, the time per block over 1 / blocks: the slope is the latency of a load."""
        self._loaded_at: dict[str, float] = {}
        self._prefill = _LinearCost()
        """The time per token as a function of the mean context length."""
        self._recent_block_s = 0.0
        self._probes = 0
        self._declined_blocks = 0

    def observe_load(self, tier: str, blocks: int, seconds: float) -> None:
        """Record the time of a load of `blocks` blocks from one tier, including failed loads."""
        if blocks < 1 or not seconds > 0:
            return
        block_s = seconds / blocks
        # seconds = latency + blocks * block time, divided by the number of blocks.
        self._loads.setdefault(tier, _LinearCost()).observe(1 / blocks, block_s)
        self._loaded_at[tier] = self._clock()
        known = self._recent_block_s
        self._recent_block_s = DECAY * known + (1 - DECAY) * block_s if known else block_s

    def observe_prefill(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """Record the time of a step that computed `tokens` after `context_tokens`.

        Steps of less than a block are ignored: their fixed cost hides the cost of a token.
        """
        if tokens < self._block_tokens or context_tokens < 0 or not seconds > 0:
            return
        self._prefill.observe(context_tokens + tokens / 2, seconds / tokens)

    def choose(self, tiers: Sequence[str], *, total_tokens: int, queued_blocks: int = 0) -> int:
        """Return how many leading blocks to load; `tiers` has each found block's fastest tier.

        `total_tokens` is the length of the request; `queued_blocks` counts the blocks of loads in
        flight. The result is the fastest choice. Once per interval it includes a few blocks of a
        tier that was too slow, as a probe that detects when the tier has recovered.
        """
        if not tiers:
            return 0
        best = len(tiers)
        if self._prefill.is_known:
            best = self._fastest(tiers, total_tokens, queued_blocks)
        if best < len(tiers):
            best += self._probe(tiers, best)
        self._declined_blocks += len(tiers) - best
        return best

    def estimates(self) -> dict[str, float]:
        """Return the estimated coefficients, in seconds and bytes per second, and the counters."""
        estimates: dict[str, float] = {
            "probes": self._probes,
            "declined_blocks": self._declined_blocks,
        }
        if self._prefill.is_known:
            token_s, growth_s = self._prefill.fit()
            estimates["prefill_token_seconds"] = token_s
            estimates["prefill_token_seconds_per_context_token"] = growth_s
        for tier, cost in sorted(self._loads.items()):
            block_s, latency_s = cost.fit()
            estimates[f"{tier}_latency_seconds"] = latency_s
            estimates[f"{tier}_bytes_per_second"] = self._block_bytes / block_s
        return estimates

    def _fastest(self, tiers: Sequence[str], total_tokens: int, queued_blocks: int) -> int:
        """Return the number of leading blocks to load for the least total time.

        Within a run of blocks of one tier, the load time grows linearly, and the time to compute
        the rest is concave in the number of loaded blocks. The total is concave as well, so its
        minimum over a run is at the first or the last block, and only these are compared.
        """
        costs = {tier: cost.fit() for tier, cost in self._loads.items()}
        used_tiers: set[str] = set()
        best, best_s = 0, self._compute_s(0, total_tokens)
        # Loads in flight are served first.
        load_s = queued_blocks * self._recent_block_s
        before = 0
        for tier, blocks in groupby(tiers):
            block_s, latency_s = costs.get(tier, (0.0, 0.0))
            # The latency of a tier is paid once, however many runs it has.
            if tier not in used_tiers:
                used_tiers.add(tier)
                load_s += latency_s
            count = len(list(blocks))
            for loaded in (1, count):
                end = before + loaded
                total_s = load_s + loaded * block_s
                total_s += self._compute_s(end * self._block_tokens, total_tokens)
                # On a tie, loading is better: the engine can compute other requests meanwhile.
                if total_s <= best_s:
                    best, best_s = end, total_s
            before += count
            load_s += count * block_s
        return best

    def _compute_s(self, first: int, end: int) -> float:
        """Return the seconds to compute the tokens from `first` to `end`.

        The cost of a token is linear in its position, so the sum is the cost at the mean position.
        """
        token_s, growth_s = self._prefill.fit()
        count = max(end - first, 0)
        return count * (token_s + growth_s * (first + count / 2))

    def _probe(self, tiers: Sequence[str], best: int) -> int:
        """Return how many blocks after `best` to load in order to measure their tier again."""
        tier = tiers[best]
        now = self._clock()
        if now - self._loaded_at.get(tier, now) < self._probe_interval_s:
            return 0
        self._loaded_at[tier] = now
        self._probes += 1
        count = 0
        while count < PROBE_BLOCKS and best + count < len(tiers) and tiers[best + count] == tier:
            count += 1
        return count


class _LinearCost:
    """A cost `offset + slope * x` with non-negative coefficients, fitted by least squares.

    Keeps exponentially decayed sums of the samples (x, y).
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._sum_x = 0.0
        self._sum_xx = 0.0
        self._sum_y = 0.0
        self._sum_xy = 0.0
        self._outlier_ratio = 1.0
        """Ratio of the last sample to its prediction if it was an outlier; 1 otherwise."""

    @property
    def is_known(self) -> bool:
        """Whether there was a sample."""
        return self._weight > 0

    def observe(self, x: float, y: float) -> None:
        """Add a sample. A single outlier is clamped; a second one in a row rescales the model."""
        if self.is_known:
            predicted = self._predict(x)
            ratio = y / predicted
            if 1 / OUTLIER_FACTOR <= ratio <= OUTLIER_FACTOR:
                self._outlier_ratio = 1.0
            elif (ratio > 1) == (self._outlier_ratio > 1) and self._outlier_ratio != 1.0:
                # The second outlier in one direction: the cost has changed. Scale both
                # coefficients; few samples of the new cost could not determine a slope.
                self._sum_y *= ratio
                self._sum_xy *= ratio
                self._outlier_ratio = 1.0
            else:
                self._outlier_ratio = ratio
                y = predicted * (OUTLIER_CLAMP if ratio > 1 else 1 / OUTLIER_CLAMP)
        self._weight = DECAY * self._weight + 1
        self._sum_x = DECAY * self._sum_x + x
        self._sum_xx = DECAY * self._sum_xx + x * x
        self._sum_y = DECAY * self._sum_y + y
        self._sum_xy = DECAY * self._sum_xy + y * x

    def fit(self) -> tuple[float, float]:
        """Return the offset and the slope of the weighted least-squares fit."""
        mean_x = self._sum_x / self._weight
        mean_y = self._sum_y / self._weight
        variance = self._sum_xx / self._weight - mean_x * mean_x
        slope = 0.0
        # Nearly equal arguments determine no slope; the division would amplify noise.
        if variance > RELATIVE_VARIANCE_MIN * mean_x * mean_x:
            slope = max((self._sum_xy / self._weight - mean_y * mean_x) / variance, 0.0)
        offset = mean_y - slope * mean_x
        # A zero or negative offset would predict free blocks or tokens; the mean is kept.
        if offset < OFFSET_SHARE_MIN * mean_y:
            offset = OFFSET_SHARE_MIN * mean_y
            slope = (mean_y - offset) / mean_x
        return offset, slope

    def _predict(self, x: float) -> float:
        offset, slope = self.fit()
        return offset + slope * x

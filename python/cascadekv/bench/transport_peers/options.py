"""What is measured, and how: the options of the program."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from cascadekv.bench.transport_peers.blocks import WORD_BYTES
from cascadekv.bench.transport_peers.movers import PEERS
from cascadekv.bench.transport_peers.pair import COUNTERS

__all__ = ["BEST", "FIRST", "KIB", "MIB", "OptionError", "Options"]

KIB, MIB = 1 << 10, 1 << 20
LADDER = (*(KIB << power for power in range(9)), MIB, 16 * MIB)
BEST, FIRST = "best", "first"
SHORT: Mapping[str, Any] = {
    "block_bytes": (4 * KIB, 64 * KIB),
    "batch": 64,
    "threads": (1,),
    "rounds": 1,
    "iterations": 2,
    "warm_up": 1,
    "setting": FIRST,
    "region_bytes_min": 16 * MIB,
}
"""Options for tests: such samples show that everything works, their times mean nothing."""
FAULTS = ("", "corrupt", "stale", "hang")


class OptionError(Exception):
    """An option is unknown or has a wrong value."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how."""

    peers: tuple[str, ...] = tuple(PEERS)
    block_bytes: tuple[int, ...] = LADDER
    batch: int = 1538
    threads: tuple[int, ...] = (1, 4)
    rounds: int = 5
    """Samples of each cell."""
    iterations: int = 20
    """Batches of each thread in a round; fewer where the regions have no room for them."""
    warm_up: int = 5
    """Batches of each thread before the first round; they are verified, not timed."""
    round_s: float = 2.0
    """No batch begins later in a round."""
    cell_s: float = 60.0
    """Deadline of a cell after its start."""
    setting: str = BEST
    """A setting of the peer, its `first`, or `best`: all are tried, the fastest is measured."""
    region_bytes_min: int = 256 * MIB
    region_bytes_max: int = 1024 * MIB
    count_system_calls: bool = False
    """Whether one more round, which is not timed, counts system calls."""
    fault: str = ""
    """For tests: what is done wrong on purpose, so that it must be seen."""

    @classmethod
    def parse(cls, text: str) -> "Options":
        """Read options from JSON; `is_short` chooses those of `SHORT`. Raises `OptionError`."""
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise OptionError(f"the options are not JSON: {error}") from None
        if not isinstance(given, dict):
            raise OptionError("the options are not a JSON object")
        values = cast("dict[str, Any]", given)
        known = [field.name for field in fields(cls)]
        defaults: dict[str, Any] = dict(SHORT) if values.pop("is_short", False) else {}
        for name, value in values.items():
            if name not in known:
                raise OptionError(f"unknown option {name!r}; known: is_short, {', '.join(known)}")
            if isinstance(value, list):
                values[name] = tuple(cast("list[Any]", value))
        options = cls(**(defaults | values))
        options._check()
        return options

    def _check(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise OptionError(f"unknown peer {peer!r}; known: {', '.join(PEERS)}")
            settings = [BEST, FIRST, *PEERS[peer].settings]
            if self.setting not in settings:
                known = ", ".join(settings)
                raise OptionError(f"unknown setting {self.setting!r} of {peer}; known: {known}")
        for size in self.block_bytes:
            if size <= 0 or size % WORD_BYTES or size > self.region_bytes_max:
                raise OptionError(f"{size} is not a size of blocks: a multiple of {WORD_BYTES}")
        least = (self.batch, self.rounds, self.iterations, self.warm_up + 1, *self.threads)
        if min(least) < 1 or max(self.threads) > COUNTERS:
            raise OptionError("batch, rounds, iterations and threads are at least 1")
        if self.fault not in FAULTS:
            raise OptionError(f"unknown fault {self.fault!r}")

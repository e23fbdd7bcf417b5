"""Synthetic traffic to measure hints: sessions of turns that return soon, late or never.

The traffic depends on the seed only, so that engines with and without a hint receive the same
requests in the same order.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cascadekv.bench.prompts import prompt

__all__ = ["HINTS", "Turn", "turns"]

LIVE = 24
"""Number of concurrent sessions."""
TURN_TOKENS = 256
"""Tokens that a turn adds."""
TURNS = (1, 6)
"""Least and most turns of a session."""
SOON, LATE = (1, 4), (30, 60)
"""Requests of other sessions before the next turn: after a tool call, and after an answer."""
IMPORTANT_EVERY = 4
"""One of this many sessions is important."""


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    tokens: list[int]
    is_last: bool
    is_tool: bool
    """Whether its session calls tools and returns soon."""
    is_important: bool


@dataclass
class _Session:
    number: int
    seed: int
    turns: int
    is_tool: bool
    history: list[int] = field(default_factory=list[int])

    def next(self) -> Turn:
        turn = len(self.history) // TURN_TOKENS + 1
        self.history += prompt(TURN_TOKENS, "session", self.seed, self.number, turn)
        is_important = self.number % IMPORTANT_EVERY == 0
        return Turn(list(self.history), turn == self.turns, self.is_tool, is_important)


HINTS: Mapping[str, Callable[[Turn], dict[str, object]]] = {
    "ends-session": lambda turn: {"cascade.ends_session": True} if turn.is_last else {},
    "stop": lambda turn: {"cascade.stop": "tool_use" if turn.is_tool else "end_turn"},
    "workload": lambda turn: {"cascade.workload": 1 if turn.is_tool else 2},
    "priority": lambda turn: {"cascade.priority": "high"} if turn.is_important else {},
}
"""The request parameters of a turn, for each hint that is measured."""


def turns(count: int, seed: int) -> Iterator[Turn]:
    """Yield that many requests in order."""
    chance = random.Random(seed)  # noqa: S311 # no secret
    waiting: list[tuple[int, int, _Session]] = []
    begun = 0
    for at in range(count):
        while len(waiting) < LIVE:
            session = _Session(begun, seed, chance.randint(*TURNS), chance.random() < 0.5)  # noqa: PLR2004 # half of them
            heapq.heappush(waiting, (at + chance.randint(0, LIVE), begun, session))
            begun += 1
        _, number, session = heapq.heappop(waiting)
        turn = session.next()
        yield turn
        if not turn.is_last:
            gap = chance.randint(*(SOON if session.is_tool else LATE))
            heapq.heappush(waiting, (at + gap, number, session))

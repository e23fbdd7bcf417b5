"""Hints for the eviction policy about the future use of blocks. Every hint is optional."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum


class StopReason(StrEnum):
    """Why the engine stopped generating."""

    TOOL_USE = "tool_use"
    """The model called a tool: the chain is usually reused within seconds."""
    END_TURN = "end_turn"
    """The model ended its turn: the chain is reused if the user replies."""
    LENGTH = "length"
    """The output reached its length limit."""
    CANCELLED = "cancelled"
    """The request was cancelled before its end."""


class Priority(StrEnum):
    """The caller's priority of a chain."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """Hints about one chain."""

    ends_session: bool = False
    """The session ends with this request: blocks that no other session uses are not reused."""
    stop: StopReason | None = None
    """How the request ended."""
    priority: Priority = Priority.NORMAL
    """The caller's priority."""
    workload: int | None = None
    """A number from 0 to 255 for the class of workload; reuse is estimated for each class."""
    expected_within: float | str | timedelta | None = None
    """A waiting request will use this chain within that duration, such as 2.5 or "250ms"."""

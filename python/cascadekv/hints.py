"""What a caller may know about the future of its blocks. Every hint is optional."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum


class StopReason(StrEnum):
    """Why the engine stopped generating."""

    TOOL_USE = "tool_use"
    """The model called a tool: the same chain usually comes back within seconds."""
    END_TURN = "end_turn"
    """The model ended its turn: whether the chain comes back is up to a person."""
    LENGTH = "length"
    """The output reached its limit."""
    CANCELLED = "cancelled"
    """The caller went away before the end."""


class Priority(StrEnum):
    """How much the caller cares about a chain."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What a caller knows about one chain beyond its blocks."""

    ends_session: bool = False
    """The session ends with this request: what it alone used will not be asked for again."""
    stop: StopReason | None = None
    """How the request ended."""
    priority: Priority = Priority.NORMAL
    """How much the caller cares."""
    workload: int | None = None
    """A number from 0 to 255 for the kind of work; equal numbers are expected to behave alike."""
    expected_within: float | str | timedelta | None = None
    """A waiting request will ask for this chain within that duration, such as 2.5 or "250ms"."""

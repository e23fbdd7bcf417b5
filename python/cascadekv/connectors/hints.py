"""Hints of an engine's requests: what a caller says in `kv_transfer_params`, and how one ended.

Hints are advice: one that makes no sense is left out, with a sentence for the log, and the request
goes on.
"""

import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from cascadekv.hints import Hints, Priority, StopReason

__all__ = ["PARAMETERS", "finish_hints", "request_hints", "session_name"]

PREFIX = "cascade."
SESSION = "cascade.session"
SESSION_CHARS_MAX = 256
WORKLOAD_MAX = 255
EXPECTED_WITHIN_S_MAX = 3600.0
"""The longest wait that a hint may announce, in seconds."""

PARAMETERS = (
    SESSION,
    "cascade.ends_session",
    "cascade.priority",
    "cascade.stop",
    "cascade.workload",
    "cascade.expected_within",
)
"""Every parameter of a request."""


def request_hints(
    params: Mapping[str, object] | None, *, priority: int = 0
) -> tuple[Hints, list[str]]:
    """Read a request's parameters: the hints, and a sentence for each that was left out.

    Only names that begin with `cascade.` are read; others are the engine's. `priority` is vLLM's
    own, where lower is more urgent; `cascade.priority` wins over it. Never raises.
    """
    hints = Hints(priority=_of_engine(priority))
    complaints: list[str] = []
    try:
        given = {name: value for name, value in (params or {}).items() if _is_ours(name)}
    except (AttributeError, TypeError, ValueError):
        return hints, [f"kv_transfer_params: {_shown(params)} is no mapping; left out"]
    for name, value in given.items():
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(PARAMETERS)}"
            complaints.append(f"{_shown(name)}: no such parameter; {advice}")
            continue
        if value is None:
            continue
        read, expected = _READERS[name]
        found = read(value)
        if found is None:
            complaints.append(f"{name}: {_shown(value)} is not {expected}; left out")
        elif name != SESSION:
            hints = dataclasses.replace(hints, **{name.removeprefix(PREFIX): found})
    return hints, complaints


def session_name(
    params: Mapping[str, object] | None, *, engine_session: str | None = None
) -> bytes | None:
    """Give a short name of the request's session, equal for equal sessions; `None` without one.

    `cascade.session` wins over the engine's own session id. The name is a digest: what a caller
    calls a session may be personal.
    """
    value = params.get(SESSION) if isinstance(params, Mapping) else None
    name = _session(value) or _session(engine_session)
    if name is None:
        return None
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def finish_hints(hints: Hints, *, status_name: str, stop_reason: object) -> Hints:
    """Add how the request ended, by vLLM's `RequestStatus` and `stop_reason`.

    What a caller said by `cascade.stop` stays: only the caller tells a tool's turn from a person's.
    A text at which to stop is found outside the engine's core, which then sees an abort. So
    `FINISHED_ABORTED` is `CANCELLED` only without a `stop_reason`. Statuses that say nothing of a
    next turn (errors, ignored requests) leave the hint out.
    """
    if hints.stop is not None:
        return hints
    stop = _FINISHES.get(status_name)
    if status_name == "FINISHED_ABORTED" and stop_reason is not None:
        stop = StopReason.END_TURN
    return hints if stop is None else dataclasses.replace(hints, stop=stop)


_FINISHES = {
    "FINISHED_STOPPED": StopReason.END_TURN,
    "FINISHED_LENGTH_CAPPED": StopReason.LENGTH,
    "FINISHED_REPETITION": StopReason.LENGTH,
    "FINISHED_ABORTED": StopReason.CANCELLED,
}


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def _of_engine(priority: int) -> Priority:
    if priority == 0:
        return Priority.NORMAL
    return Priority.HIGH if priority < 0 else Priority.LOW


def _session(value: object) -> str | None:
    if isinstance(value, str) and 0 < len(value) <= SESSION_CHARS_MAX:
        return value
    return None


def _switch(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _priority(value: object) -> Priority | None:
    return next((priority for priority in Priority if priority.value == value), None)


def _stop(value: object) -> StopReason | None:
    return next((stop for stop in StopReason if stop.value == value), None)


def _workload(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= WORKLOAD_MAX:
        return None
    return value


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= EXPECTED_WITHIN_S_MAX else None


_READERS: dict[str, tuple[Callable[[object], Any], str]] = {
    SESSION: (_session, f"a text of 1 to {SESSION_CHARS_MAX} characters"),
    "cascade.ends_session": (_switch, "true or false"),
    "cascade.priority": (_priority, "one of low, normal, high"),
    "cascade.stop": (_stop, "one of tool_use, end_turn, length, cancelled"),
    "cascade.workload": (_workload, f"a whole number from 0 to {WORKLOAD_MAX}"),
    "cascade.expected_within": (
        _seconds,
        f"a number of seconds from 0 to {EXPECTED_WITHIN_S_MAX:g}",
    ),
}


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or too deep
        text = f"a {type(value).__name__}"
    longest = 60
    return text if len(text) <= longest else text[:longest] + "..."

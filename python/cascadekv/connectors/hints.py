"""Hints of an engine's requests: from `kv_transfer_params`, and from how the request ended.

Hints are optional: an invalid one is ignored with a warning, and the request goes on.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from cascadekv.hints import Hints, Priority, StopReason
from cascadekv.messages import advice, shown

__all__ = ["PARAMETERS", "finish_hints", "given_hints", "request_hints", "session_name"]

PREFIX = "cascade."
SESSION = "cascade.session"
SESSION_CHARS_MAX = 256
WORKLOAD_MAX = 255
UNKNOWN_MAX = 8
"""Most unknown parameters of a request that get a warning each."""
EXPECTED_WITHIN_S_MAX = 3600.0
"""Largest value of `cascade.expected_within`."""

PARAMETERS = (
    SESSION,
    "cascade.ends_session",
    "cascade.priority",
    "cascade.stop",
    "cascade.workload",
    "cascade.expected_within",
)
"""All parameters of a request."""


def request_hints(
    params: Mapping[str, object] | None, *, priority: int = 0
) -> tuple[Hints, list[str]]:
    """Parse a request's parameters; returns the hints, and a warning for each ignored parameter.

    Only names that begin with `cascade.` are read; others are the engine's. `priority` is vLLM's
    own, where lower is more urgent; `cascade.priority` takes precedence. Never raises.
    """
    hints = Hints(priority=_from_engine_priority(priority))
    try:
        given = {name: value for name, value in (params or {}).items() if _is_ours(name)}
    except (AttributeError, TypeError, ValueError):
        return hints, [f"kv_transfer_params: {shown(params)} is not a mapping; ignored"]
    unknown = [name for name in given if name not in PARAMETERS]
    warnings = [
        f"{shown(name)}: no such parameter; {advice(name, PARAMETERS)}"
        for name in unknown[:UNKNOWN_MAX]
    ]
    for name in PARAMETERS:
        value = given.get(name)
        if value is None:
            continue
        parse, expected = _PARSERS[name]
        parsed = parse(value)
        if parsed is None:
            warnings.append(f"{name}: {shown(value)} is not {expected}; ignored")
        elif name != SESSION:
            hints = dataclasses.replace(hints, **{name.removeprefix(PREFIX): parsed})
    return hints, warnings


def given_hints(params: Mapping[str, object] | None) -> list[str]:
    """Return the names, without `cascade.`, of the valid parameters of a request."""
    given: Mapping[str, object] = params if isinstance(params, Mapping) else {}
    return [
        name.removeprefix(PREFIX)
        for name in PARAMETERS
        if given.get(name) is not None and _PARSERS[name][0](given[name]) is not None
    ]


def session_name(
    params: Mapping[str, object] | None, *, engine_session: str | None = None
) -> bytes | None:
    """Return a 16-byte name of the request's session; `None` if the request has no session.

    `cascade.session` takes precedence over the engine's own session id. The name is a digest,
    because a session id may contain personal data.
    """
    value = params.get(SESSION) if isinstance(params, Mapping) else None
    name = _session(value) or _session(engine_session)
    if name is None:
        return None
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def finish_hints(hints: Hints, *, status_name: str, stop_reason: object) -> Hints:
    """Add how the request ended, from vLLM's `RequestStatus` and `stop_reason`.

    `cascade.stop` takes precedence: only the caller can tell a tool call from the end of a turn.
    Statuses that do not predict another turn (errors, ignored requests) add no hint.
    """
    if hints.stop is not None:
        return hints
    stop = _STOP_BY_STATUS.get(status_name)
    # vLLM matches stop strings outside its core and then aborts the request with a `stop_reason`.
    if status_name == "FINISHED_ABORTED" and stop_reason is not None:
        stop = StopReason.END_TURN
    return hints if stop is None else dataclasses.replace(hints, stop=stop)


_STOP_BY_STATUS = {
    "FINISHED_STOPPED": StopReason.END_TURN,
    "FINISHED_LENGTH_CAPPED": StopReason.LENGTH,
    "FINISHED_REPETITION": StopReason.LENGTH,
    "FINISHED_ABORTED": StopReason.CANCELLED,
}


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def _from_engine_priority(priority: int) -> Priority:
    if priority == 0:
        return Priority.NORMAL
    return Priority.HIGH if priority < 0 else Priority.LOW


def _session(value: object) -> str | None:
    if isinstance(value, str) and 0 < len(value) <= SESSION_CHARS_MAX:
        return value
    return None


def _boolean(value: object) -> bool | None:
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


_PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    SESSION: (_session, f"text of 1 to {SESSION_CHARS_MAX} characters"),
    "cascade.ends_session": (_boolean, "true or false"),
    "cascade.priority": (_priority, "one of low, normal, high"),
    "cascade.stop": (_stop, "one of tool_use, end_turn, length, cancelled"),
    "cascade.workload": (_workload, f"a whole number from 0 to {WORKLOAD_MAX}"),
    "cascade.expected_within": (
        _seconds,
        f"a number of seconds from 0 to {EXPECTED_WITHIN_S_MAX:g}",
    ),
}

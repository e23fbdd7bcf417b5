"""Trace context: makes calls to a node spans of the caller's trace."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from cascadekv._native import replace_trace

__all__ = ["current_trace", "part_of_trace"]

current_trace: ContextVar[str | None] = ContextVar("cascadekv trace", default=None)
"""The trace context of this task; `cascadekv.aio` passes it to the thread that makes the call."""


@contextmanager
def part_of_trace(traceparent: str | None) -> Generator[None]:
    """Make this thread's calls to served stores part of a trace.

    `traceparent` is the W3C header as OpenTelemetry's propagators write it:
    `00-<trace>-<span>-<flags>`. A node that exports traces (`traces_endpoint`) records each call as
    a child span. `None`, and text that is not a valid header, means no trace.
    """
    before = replace_trace(traceparent)
    token = current_trace.set(traceparent)
    try:
        yield
    finally:
        current_trace.reset(token)
        replace_trace(before)

"""Whose work calls are part of: traces of the caller that go on in the node."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from cascadekv._native import replace_trace

__all__ = ["current_trace", "part_of_trace"]

current_trace: ContextVar[str | None] = ContextVar("cascadekv trace", default=None)
"""The trace of this task; `cascadekv.aio` carries it to the thread that makes the call."""


@contextmanager
def part_of_trace(traceparent: str | None) -> Generator[None]:
    """Have this thread's calls of a served store be part of a trace.

    `traceparent` is the W3C header, as OpenTelemetry's propagators write it:
    `00-<trace>-<span>-<flags>`. A node that exports traces (`traces_endpoint`) makes each call a
    span under the caller's. What is no such header, and `None`, is nobody's trace.
    """
    before = replace_trace(traceparent)
    token = current_trace.set(traceparent)
    try:
        yield
    finally:
        current_trace.reset(token)
        replace_trace(before)

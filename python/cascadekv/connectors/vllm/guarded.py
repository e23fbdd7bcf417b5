"""Calls of the engine that do not fail: a bug in the cache costs computing, not the engine."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["guarded"]

_LOG = logging.getLogger("vllm.cascade")
Result = TypeVar("Result")


def guarded(
    default: Callable[[], Any],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Log an exception in a call of the engine, and return `default()` instead."""

    def wrap(call: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(call)
        def guard(*arguments: Any, **named: Any) -> Result:
            try:
                return call(*arguments, **named)
            except Exception:  # noqa: BLE001 # a bug in the cache must not fail the engine
                _LOG.exception("Cascade: %s failed; the engine continues without", call.__name__)
                return default()

        return guard

    return wrap

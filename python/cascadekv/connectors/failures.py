"""Failures of the cache as an engine sees them: counted all, logged once in a while."""

import logging
import threading
import time

__all__ = ["EVERY_S", "FailureLog"]

EVERY_S = 30.0
"""How often a kind of failure is logged at most."""


class FailureLog:
    """Counts failures by kind, so that a store that is away does not fill the engine's log."""

    def __init__(self, logger: logging.Logger, *, every: float = EVERY_S) -> None:
        """Log to `logger`, each kind at most once in `every` seconds."""
        self._logger = logger
        self._every = every
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged: dict[str, tuple[float, int]] = {}

    def count(self, kind: str, error: BaseException | str) -> None:
        """Count a failure of this kind; the message says what it means for the engine."""
        now = time.monotonic()
        with self._lock:
            total = self._counts[kind] = self._counts.get(kind, 0) + 1
            logged_at, logged = self._logged.get(kind, (-self._every, 0))
            due = now - logged_at >= self._every
            if due:
                self._logged[kind] = (now, total)
        if due:
            self._logger.warning(
                "Cascade: %s failed (%d since the last line like this, %d in all); the engine "
                "computes instead: %s",
                kind,
                total - logged,
                total,
                error,
            )

    def counts(self) -> dict[str, int]:
        """Give the number of failures of each kind."""
        with self._lock:
            return dict(self._counts)

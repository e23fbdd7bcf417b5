"""Failures of the cache in an engine: all are counted, and logging is rate-limited."""

import logging
import threading
import time

from cascadekv import CascadeError

__all__ = ["LOG_INTERVAL_S", "STORE_FAILURES", "FailureLog"]

LOG_INTERVAL_S = 30.0
"""Least time between two log lines for one kind of failure."""
STORE_FAILURES = (CascadeError, ValueError, BufferError)
"""Exceptions of the store and of copies; any other exception is a bug and is logged as such."""


class FailureLog:
    """Counts failures by kind; an unavailable store does not fill the engine's log."""

    def __init__(self, logger: logging.Logger, *, interval_s: float = LOG_INTERVAL_S) -> None:
        """Log to `logger`, each kind at most once in `interval_s` seconds."""
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged: dict[str, tuple[float, int]] = {}
        self._failing: set[str] = set()
        """Kinds that failed and were logged, and have not succeeded since."""

    def count(self, kind: str, error: BaseException | str) -> None:
        """Count a failure of this kind, and log it unless the kind was logged recently."""
        now = time.monotonic()
        with self._lock:
            total = self._counts[kind] = self._counts.get(kind, 0) + 1
            logged_at, logged = self._logged.get(kind, (-self._interval_s, 0))
            is_due = now - logged_at >= self._interval_s
            if is_due:
                self._logged[kind] = (now, total)
                self._failing.add(kind)
        if is_due:
            self._logger.warning(
                "Cascade: %s failed (%d times since the last such message, %d in total); requests "
                "continue without it: %s",
                kind,
                total - logged,
                total,
                error,
            )

    def succeed(self, kind: str) -> None:
        """Log that what failed works again, once for each line about its failure."""
        if kind not in self._failing:
            return
        with self._lock:
            if kind not in self._failing:
                return
            self._failing.remove(kind)
            total = self._counts[kind]
        self._logger.warning("Cascade: %s works again (%d failures in total)", kind, total)

    def counts(self) -> dict[str, int]:
        """Return the number of failures of each kind."""
        with self._lock:
            return dict(self._counts)

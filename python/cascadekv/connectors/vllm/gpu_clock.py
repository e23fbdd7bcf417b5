"""The time of an engine's steps by the clock of its GPU, which runs behind the engine's thread."""

from collections import deque

from cascadekv import GpuEvent
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.vllm.memory import GpuPages
from cascadekv.connectors.vllm.metadata import StepPlan

__all__ = ["StepClock"]

STEPS_MAX = 64
"""Most steps whose end is awaited; older ones are forgotten."""


class StepClock:
    """Measures steps that compute several tokens of one request, without a wait for any.

    A step begins with an event before its kernels, after its loads, and ends with one after them.
    """

    def __init__(self, memory: GpuPages, failures: FailureLog) -> None:
        """Measure by the events of a GPU on the engine's stream."""
        self._memory = memory
        self._failures = failures
        self._began: GpuEvent | None = None
        self._steps: deque[tuple[int, int, GpuEvent, GpuEvent]] = deque(maxlen=STEPS_MAX)

    def begin(self, plan: StepPlan) -> None:
        """Mark the start of a step: called before its kernels."""
        is_measured = plan.requests == 1 and plan.tokens > 1
        self._began = self._mark() if is_measured else None

    def begin_after_loads(self, *, is_layerwise: bool) -> None:
        """Move the start of the step behind the loads that its kernels wait for.

        A step whose layers wait one by one is not measured.
        """
        if self._began is not None:
            self._began = None if is_layerwise else self._mark()

    def end(self, plan: StepPlan) -> None:
        """Mark the end of a step: called after its kernels, before its saves."""
        began, self._began = self._began, None
        ended = self._mark() if began is not None else None
        if began is not None and ended is not None:
            self._steps.append((plan.tokens, plan.context_tokens, began, ended))

    def take(self) -> tuple[int, int, float] | None:
        """Return the latest step that is over: its tokens, those before them, and its seconds."""
        latest: tuple[int, int, float] | None = None
        try:
            while self._steps and self._steps[0][3].is_over():
                tokens, context_tokens, began, ended = self._steps.popleft()
                seconds = ended.seconds_since(began)
                if seconds is not None:
                    latest = tokens, context_tokens, seconds
        except STORE_FAILURES as error:
            self._failures.count("timing a step", error)
            self._steps.clear()
        return latest

    def _mark(self) -> GpuEvent | None:
        try:
            return self._memory.mark()
        except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
            self._failures.count("timing a step", error)
            return None

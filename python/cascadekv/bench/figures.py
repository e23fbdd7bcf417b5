"""Figures of a measurement with an engine: samples, verdicts, the table and the JSON.

The JSON is a list in the form of `cascade bench core`; a figure has besides a `verdict` and what
was noticed beside its value.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TextIO

__all__ = ["Figure", "Sheet", "Target", "Verdict"]

Verdict = Literal["met", "MISSED", "INVALID", "skipped", ""]


@dataclass(frozen=True)
class Target:
    """What is asked of a figure: at least or at most a value of its unit; one of the two."""

    at_least: float | None = None
    at_most: float | None = None

    def is_reached(self, value: float) -> bool:
        """Whether the value is what was asked for."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most

    def __str__(self) -> str:
        """Show it as in the table."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}"

    def to_json(self) -> dict[str, float]:
        """Give it the form that the other measurements have."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Figure:
    """One figure: the median of its samples, one sample a round."""

    name: str
    """What was measured, such as `gain/dram/91m/4096`."""
    unit: str
    samples: Sequence[float]
    """One a round; empty where nothing could be measured, and then `skipped` says why."""
    target: Target | None = None
    faults: Sequence[str] = ()
    """What makes the figure worthless, such as a second run that hit nothing."""
    skipped: str = ""
    """Why there is no figure."""
    measured: str = ""
    """What was timed, in words."""
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    """What was noticed beside: hits, answers that differ, bytes."""

    @property
    def value(self) -> float | None:
        """The median, if there is one."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def verdict(self) -> Verdict:
        """Whether the target is met; a figure with faults is INVALID, however good it looks."""
        if self.skipped:
            return "skipped"
        if self.faults or self.value is None:
            return "INVALID"
        if self.target is None:
            return ""
        return "met" if self.target.is_reached(self.value) else "MISSED"

    def to_json(self) -> dict[str, object]:
        """Give it the form that the other measurements have, and the verdict."""
        is_reached = {"met": True, "MISSED": False, "INVALID": False}.get(self.verdict)
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "limit": None,
            "share": None,
            "samples": list(self.samples),
            "limit_samples": [],
            "limit_is": "",
            "target": self.target.to_json() if self.target else "none",
            "is_reached": is_reached if self.target else None,
            "verdict": self.verdict,
            "measured": self.measured,
            "faults": list(self.faults),
            "skipped": self.skipped,
            "facts": dict(self.facts),
        }

    def row(self) -> str:
        """Show the figure as a line under `Sheet.HEADER`."""
        if self.skipped:
            return f"{self.name:<40}{'-':>9} {self.unit:<7}  skipped: {self.skipped}"
        target = str(self.target) if self.target else ""
        value = "-" if self.value is None else _number(self.value)
        spread = ""
        if self.samples:
            spread = f"{_number(min(self.samples))}..{_number(max(self.samples))}"
        row = f"{self.name:<40}{value:>9} {self.unit:<7}  {target:<9}{self.verdict:<9}{spread}"
        return row + "".join(f"\n    {fault}" for fault in self.faults)


class Sheet:
    """Shows each figure as it comes, and writes all of them down."""

    HEADER = f"{'figure':<40}{'median':>9} {'unit':<7}  {'target':<9}{'verdict':<9}range of samples"

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self.figures: list[Figure] = []
        self._out = out

    def begin(self, headline: str) -> None:
        """Show what is measured, and the head of the table."""
        self._show(headline)
        self._show(self.HEADER)

    def add(self, figure: Figure) -> None:
        """Take a figure and show it."""
        self.figures.append(figure)
        self._show(figure.row())

    def end(self) -> int:
        """Show how many targets were met; the exit code is 1 if a figure is INVALID."""
        verdicts = [figure.verdict for figure in self.figures if figure.target]
        asked = sum(verdict != "skipped" for verdict in verdicts)
        invalid = sum(figure.verdict == "INVALID" for figure in self.figures)
        tail = f", {invalid} figures INVALID" if invalid else ""
        self._show(f"{verdicts.count('met')} of {asked} targets met{tail}")
        return 1 if invalid else 0

    def write(self, path: Path, environment: Mapping[str, object]) -> None:
        """Write the figures, and beside them what they were measured on."""
        _write_json(path, [figure.to_json() for figure in self.figures])
        _write_json(path.with_suffix(".environment.json"), dict(environment))

    def _show(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1000:  # noqa: PLR2004 # digits that mean something
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 100 else f"{value:.3g}"  # noqa: PLR2004 # likewise

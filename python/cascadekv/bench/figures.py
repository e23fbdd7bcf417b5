"""Results of measurements with an engine: samples, targets, verdicts, and their table and JSON.

The JSON is a list in the format of `cascade bench core`, with the additional fields `verdict`,
`measured`, `faults`, `skipped` and `facts`.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TextIO

__all__ = ["Figure", "FigureTable", "Target", "Verdict"]

Verdict = Literal["met", "MISSED", "INVALID", "skipped", ""]


@dataclass(frozen=True)
class Target:
    """The target of a figure: a least or a most value in its unit; exactly one of the two."""

    at_least: float | None = None
    at_most: float | None = None

    def is_reached(self, value: float) -> bool:
        """Whether the value meets the target."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most

    def __str__(self) -> str:
        """Show it as in the table."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}"

    def to_json(self) -> dict[str, float]:
        """Return the target in the format of other measurements."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of its samples, with one sample per round."""

    name: str
    """What was measured, such as `gain/dram/91m/4096`."""
    unit: str
    samples: Sequence[float]
    """One sample per round; empty if the measurement was skipped or failed."""
    target: Target | None = None
    faults: Sequence[str] = ()
    """What invalidates the figure, such as a second run without hits."""
    skipped: str = ""
    """Why the figure was not measured."""
    measured: str = ""
    """Description of the measured quantity."""
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    """Additional observations: hits, number of different answers, bytes."""

    @property
    def value(self) -> float | None:
        """The median; `None` without samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def verdict(self) -> Verdict:
        """Whether the target is met; a figure with faults is INVALID whatever its value."""
        if self.skipped:
            return "skipped"
        if self.faults or self.value is None:
            return "INVALID"
        if self.target is None:
            return ""
        return "met" if self.target.is_reached(self.value) else "MISSED"

    def to_json(self) -> dict[str, object]:
        """Return the figure in the format of other measurements, with the additional fields."""
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
        """Return the figure as a line of the table below `FigureTable.HEADER`."""
        if self.skipped:
            return f"{self.name:<40}{'-':>9} {self.unit:<7}  skipped: {self.skipped}"
        target = str(self.target) if self.target else ""
        value = "-" if self.value is None else _number(self.value)
        spread = ""
        if self.samples:
            spread = f"{_number(min(self.samples))}..{_number(max(self.samples))}"
        row = f"{self.name:<40}{value:>9} {self.unit:<7}  {target:<9}{self.verdict:<9}{spread}"
        return row + "".join(f"\n    {fault}" for fault in self.faults)


class FigureTable:
    """Prints each figure when it is added, and writes all figures to a file."""

    HEADER = f"{'figure':<40}{'median':>9} {'unit':<7}  {'target':<9}{'verdict':<9}range of samples"

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self.figures: list[Figure] = []
        self._out = out

    def begin(self, headline: str) -> None:
        """Print a headline and the head of the table."""
        self._show(headline)
        self._show(self.HEADER)

    def add(self, figure: Figure) -> None:
        """Add a figure and print it."""
        self.figures.append(figure)
        self._show(figure.row())

    def end(self) -> int:
        """Print how many targets were met; returns the exit code, 1 if a figure is INVALID."""
        verdicts = [figure.verdict for figure in self.figures if figure.target]
        measured = sum(verdict != "skipped" for verdict in verdicts)
        invalid = sum(figure.verdict == "INVALID" for figure in self.figures)
        tail = f", {invalid} figures INVALID" if invalid else ""
        self._show(f"{verdicts.count('met')} of {measured} targets met{tail}")
        return 1 if invalid else 0

    def write(self, path: Path, environment: Mapping[str, object]) -> None:
        """Write the figures to `path`, and the environment to a file next to it."""
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
    if size >= 1000:  # noqa: PLR2004 # three significant digits
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 100 else f"{value:.3g}"  # noqa: PLR2004 # likewise

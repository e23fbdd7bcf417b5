"""Rows of the results: medians, shares of the limit, multiples of the best other system."""

import statistics
from typing import Any

from competitors import COMPETITORS, Cascade, CascadeOneCall
from rounds import COLD_GET, DURABLE_PUT, FIO, KINDS, WRITE, Samples

UNIT = "GiB/s"
SHARES = {COLD_GET: 0.95, WRITE: 0.9}
"""Least share of the disk's limit that Cascade has to reach."""
TIMES = {(DURABLE_PUT, 128 << 10): 2.0, (DURABLE_PUT, 2 << 20): 1.2}
"""Least multiple of the best other system."""
OURS = (Cascade.name, CascadeOneCall.name, FIO)
"""What is not another system."""
LIMIT_OF = {COLD_GET: COLD_GET, WRITE: WRITE, DURABLE_PUT: WRITE}
"""The kind of fio's samples that limit a kind. fio syncs nothing."""

Row = dict[str, Any]


def size_name(size: int) -> str:
    """Return a size as in names of figures: 128KiB."""
    return f"{size >> 20}MiB" if size % (1 << 20) == 0 else f"{size >> 10}KiB"


def rows(
    block_bytes: int,
    samples: dict[str, Samples],
    limit_is: dict[str, str],
    versions: dict[str, str],
) -> list[Row]:
    """Return the rows of one block size: all of one kind together."""
    found = []
    for kind in KINDS:
        limits = samples[FIO].rates[LIMIT_OF[kind]] if FIO in samples else []
        others = {
            name: statistics.median(one.rates[kind])
            for name, one in samples.items()
            if name not in OURS and one.rates[kind] and one.problem is None
        }
        for name, one in samples.items():
            if name == FIO and kind == DURABLE_PUT:
                continue
            row = _row(f"{kind}/{size_name(block_bytes)}/{name}", one, kind, limits)
            row["limit_is"] = limit_is.get(LIMIT_OF[kind], "")
            if name == Cascade.name:
                _judge(row, kind, block_bytes, others)
            if name != FIO:
                competitor = COMPETITORS[name]
                row["settings"], row["cold"] = competitor.settings, competitor.cold
                row["versions"] = versions
            found.append(row)
    return found


def _row(name: str, samples: Samples, kind: str, limits: list[float]) -> Row:
    measured = [] if samples.problem is not None else samples.rates[kind]
    value = statistics.median(measured) if measured else None
    limit = statistics.median(limits) if limits else None
    row: Row = {
        "name": name,
        "value": value,
        "unit": UNIT,
        "limit": limit,
        "share": value / limit if value is not None and limit else None,
        "samples": samples.rates[kind],
        "limit_samples": limits,
        "problem": samples.problem,
    }
    if kind == COLD_GET:
        row["cached_bytes_max"] = samples.cached_bytes_max
        row["disk_bytes_min"] = samples.disk_bytes_min
    return row


def _judge(row: Row, kind: str, block_bytes: int, others: dict[str, float]) -> None:
    """Compare Cascade with the best other system and with the target."""
    best = max(others, key=lambda name: others[name]) if others else None
    row["best_other"] = best
    row["times_best_other"] = row["value"] / others[best] if best and row["value"] else None
    reached: float | None = None
    row["target"], row["is_reached"] = None, None
    if kind in SHARES:
        row["target"], reached = {"share_at_least": SHARES[kind]}, row["share"]
    elif (kind, block_bytes) in TIMES:
        least = TIMES[kind, block_bytes]
        row["target"], reached = {"times_best_other_at_least": least}, row["times_best_other"]
    if row["target"] is not None and reached is not None:
        row["is_reached"] = reached >= next(iter(row["target"].values()))


HEADER = (
    f"{'figure':36}{'median':>8} {'unit':6}{'of fio':>7}{'of best other':>15}"
    f"  {'target':10}{'verdict':9}range"
)


def line(row: Row) -> str:
    """Return a row of the table under `HEADER`."""
    if row["value"] is None:
        return f"{row['name']:36}{'-':>8}  {row['problem']}"
    share = f"{row['share']:.0%}" if row["share"] is not None else "-"
    times = f"{row['times_best_other']:.2f}x" if row.get("times_best_other") else ""
    target = ""
    if row.get("target"):
        name, least = next(iter(row["target"].items()))
        target = f">= {least:.0%}" if name == "share_at_least" else f">= {least}x"
    verdict = {True: "met", False: "MISSED", None: ""}[row.get("is_reached")]
    spread = f"{min(row['samples']):.2f}..{max(row['samples']):.2f}"
    return (
        f"{row['name']:36}{row['value']:8.2f} {row['unit']:6}{share:>7}{times:>15}"
        f"  {target:10}{verdict:9}{spread}"
    )

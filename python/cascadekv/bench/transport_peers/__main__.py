"""Measures transports of others: `python -m cascadekv.bench.transport_peers [JSON options]`.

Prints one JSON object a line for each sample, and what it found to standard error.
docs/transport-benchmark.md describes options and samples.
"""

import json
import statistics
import sys
from collections.abc import Iterator

from cascadekv.bench.transport_peers.blocks import Shape
from cascadekv.bench.transport_peers.cell import Cell, Sample, rate
from cascadekv.bench.transport_peers.movers import PEERS
from cascadekv.bench.transport_peers.options import KIB, MIB, OptionError, Options


def cells(options: Options) -> Iterator[Cell]:
    """Return all cells, in an order that shows the smallest blocks of each peer first."""
    for peer in options.peers:
        is_limit = PEERS[peer].is_limit
        for threads in (1,) if is_limit else options.threads:
            for block_bytes in (MIB,) if is_limit else options.block_bytes:
                shape = Shape.fit(
                    block_bytes,
                    options.batch,
                    threads,
                    region_bytes=(options.region_bytes_min, options.region_bytes_max),
                    is_random=not is_limit,
                )
                yield Cell(options, peer, shape)


def describe(cell: Cell, samples: list[Sample]) -> str:
    """Return a line about a cell for people."""
    shape = cell.shape
    threads = f"{shape.threads} thread" + ("s" if shape.threads > 1 else "")
    name = f"{cell.peer:15} {shape.block_bytes // KIB:6} KiB x {shape.batch:4} {threads:9}"
    timed = [s for s in samples if s["error"] is None and s["seconds"]]
    text = ""
    if timed:
        rates = sorted(rate(s) for s in timed)
        cpu = statistics.median(
            (s["source_cpu_s"] + s["target_cpu_s"]) / s["blocks"] for s in timed
        )
        text = (
            f"{statistics.median(rates):7.3f} GB/s ({rates[0]:.3f} to {rates[-1]:.3f})"
            f" {cpu * 1e6:8.2f} us CPU a block  {timed[0]['setting']}"
        )
    for sample in samples:
        if sample["error"] is not None:
            text += f"  FAILED: {sample['error']}"
        elif not sample["verified"]:
            text += f"  WRONG BYTES in {sample['differing_blocks']} blocks of round "
            text += f"{sample['round']}"
        elif "system_calls" in sample:
            text += f"  {sample['system_calls'] / sample['blocks']:.2f} system calls a block"
    return f"{name} {text}"


def main() -> int:
    """Measure all cells. Returns 1 if one failed or returned wrong bytes, 2 for wrong options."""
    try:
        options = Options.parse(sys.argv[1] if len(sys.argv) > 1 else "{}")
    except (OptionError, TypeError) as error:
        print(f"transport_peers: {error}", file=sys.stderr)  # noqa: T201 # a program's output
        return 2
    is_good = True
    for cell in cells(options):
        samples: list[Sample] = []
        for sample in cell.samples():
            samples.append(sample)
            print(json.dumps(sample), flush=True)  # noqa: T201 # likewise
        is_good &= all(sample["verified"] for sample in samples)
        print(describe(cell, samples), file=sys.stderr)  # noqa: T201 # likewise
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

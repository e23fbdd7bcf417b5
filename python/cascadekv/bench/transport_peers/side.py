"""One of the two processes of a measurement: it answers commands on its standard input.

Its standard output carries answers only: what libraries print goes to standard error.
"""

import ctypes
import json
import mmap
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cascadekv.bench.transport_peers.blocks import Region, Shape, contents, order
from cascadekv.bench.transport_peers.movers import Mover, make_mover

POLLS = 64
"""Polls of a target between two looks at its standard input."""
PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h."""
ROUNDS_MAX = 1 << 20
"""More than any round's number: the target's first bytes are those of no round."""

Command = dict[str, Any]


class Commands:
    """Commands from the parent process, and answers to it."""

    def __init__(self) -> None:
        """Take the standard output away from libraries."""
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._rest = b""

    def answer(self, **fields: object) -> None:
        """Answer a command."""
        self._answers.write(json.dumps(fields) + "\n")
        self._answers.flush()

    def read(self, poll: Callable[[], None] | None) -> Iterator[Command]:
        """Yield commands until the parent closes the pipe; calls `poll` meanwhile."""
        while True:
            while poll and not select.select([0], [], [], 0)[0]:
                for _ in range(POLLS):
                    poll()
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


def cpu_s() -> float:
    """Return the processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Target:
    """The process whose region is written."""

    def __init__(self, shape: Shape, mover: Mover, fault: str) -> None:
        """Fill the region with bytes of no round."""
        self._shape, self._fault = shape, fault
        self.region = Region(shape, is_shared=mover.needs_shared_memory)
        self._expected = contents(np.arange(shape.slots), ROUNDS_MAX)
        self.region.fill(self._expected)
        self.description = mover.serve(self.region)

    def usage(self, _: Command) -> Command:
        """Return the processor time so far."""
        return {"cpu_s": cpu_s()}

    def verify(self, command: Command) -> Command:
        """Compare the whole region: what moved, and that nothing else has changed."""
        number, counts = command["round"], command["counts"]
        source, target = order(self._shape, number, command["batches"]).moved(counts)
        self._expected[target] = contents(source, number)
        if self._fault == "corrupt" and len(target):
            self.region.bytes[int(target[-1]) * self._shape.block_bytes] ^= 1
        return {"differing_blocks": self.region.differing(self._expected)}


class Source:
    """The process that calls the peer."""

    def __init__(self, shape: Shape, mover: Mover, fault: str, progress: int) -> None:
        """Map the region and the counters, which the parent reads even if a call never returns."""
        self._shape, self._mover, self._fault = shape, mover, fault
        self._region = Region(shape)
        self._counters = np.frombuffer(mmap.mmap(progress, 0), dtype=np.uint64)
        self._batches: list[list[object]] = []

    def connect(self, command: Command) -> Command:
        """Connect to the target."""
        self._region.fill(contents(np.arange(self._shape.slots), 0))
        self._mover.connect(self._region, command["target"])
        return {}

    def prepare(self, command: Command) -> Command:
        """Write the bytes of a round into the region, and make the arguments of all calls."""
        number = 0 if self._fault == "stale" else command["round"]
        self._region.fill(contents(np.arange(self._shape.slots), number))
        moves = order(self._shape, command["round"], command["batches"])
        self._batches = [
            [
                self._mover.batch(moves.source[batch, thread], moves.target[batch, thread])
                for batch in range(command["batches"])
            ]
            for thread in range(self._shape.threads)
        ]
        self._counters[:] = 0
        return {}

    def run(self, command: Command) -> Command:
        """Move the batches of a round, for `limit_s` at most but at least one each."""
        threads = self._shape.threads
        start = threading.Barrier(threads)
        spans: list[tuple[float, float]] = [(0, 0)] * threads
        errors: list[str] = []

        def work(thread: int) -> None:
            try:
                start.wait()
                begun = time.perf_counter()
                for batch in self._batches[thread]:
                    self._mover.move(thread, batch)
                    self._counters[thread] += np.uint64(1)
                    if time.perf_counter() - begun > command["limit_s"]:
                        break
                spans[thread] = begun, time.perf_counter()
            except Exception as error:  # noqa: BLE001 # whatever a peer raises is its result
                errors.append(f"{type(error).__name__}: {error}")

        used = cpu_s()
        if threads == 1:
            work(0)
        else:
            workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if errors:
            return {"error": errors[0]}
        return {
            "seconds": max(end for _, end in spans) - min(begun for begun, _ in spans),
            "cpu_s": cpu_s() - used,
            "counts": self._counters[:threads].tolist(),
        }


def main() -> None:
    """Run one side until the parent closes the pipe or ends."""
    # However the parent ends, this process ends with it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    side, text = sys.argv[1:]
    options = json.loads(text)
    commands = Commands()
    shape = Shape(**options["shape"])
    mover = make_mover(options["peer"], options["setting"], shape, side)
    if side == "target":
        target = Target(shape, mover, options["fault"])
        commands.answer(**target.description)
        calls = {"usage": target.usage, "verify": target.verify}
    else:
        source = Source(shape, mover, options["fault"], options["progress"])
        commands.answer()
        calls = {"connect": source.connect, "prepare": source.prepare, "run": source.run}
    poll = mover.poll if side == "target" and mover.must_be_polled else None
    for command in commands.read(poll):
        commands.answer(**calls[command["call"]](command))
    # Libraries may end badly when their objects are destroyed in another order than they wish.
    os._exit(0)


if __name__ == "__main__":
    main()

"""The two processes of a measurement, seen from their parent; every wait has a deadline."""

import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

__all__ = ["Pair", "PairError", "Side"]

LOG_LINES = 3
"""Last lines of a process's log in an error message."""
COUNTERS = 256
"""Most threads."""
STOP_S = 2.0
"""How long a process that was told to end may take. Then it is killed."""


class PairError(Exception):
    """A process ended, answered with an error, or was too late."""


class Side:
    """One process."""

    def __init__(
        self, name: str, options: Mapping[str, object], environment: Mapping[str, str], kept: int
    ) -> None:
        """Start it; it keeps the file `kept` open."""
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # closed in stop()
        self._rest = b""
        program = [sys.executable, "-m", "cascadekv.bench.transport_peers.side"]
        self._process = subprocess.Popen(  # noqa: S603 # our own command
            [*program, name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | environment,
            pass_fds=[kept],
        )

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def call(self, deadline: float, name: str, **fields: object) -> dict[str, Any]:
        """Send a command and return its answer. Raises `PairError`."""
        assert self._process.stdin is not None  # noqa: S101 # it is a pipe
        try:
            self._process.stdin.write(json.dumps({"call": name} | fields).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PairError(self._ended()) from None
        return self.answer(deadline, name)

    def answer(self, deadline: float, what: str) -> dict[str, Any]:
        """Return the next answer. Raises `PairError`."""
        assert self._process.stdout is not None  # noqa: S101 # it is a pipe
        output = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([output], [], [], wait_s)[0]:
                raise PairError(f"the {self.name} did not end its {what} by the deadline")
            data = os.read(output, 1 << 16)
            if not data:
                raise PairError(self._ended())
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if error := answer.get("error"):
            raise PairError(str(error))
        return answer

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ended(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " | ".join([f"the {self.name} ended with status {status}", *lines[-LOG_LINES:]])


class Pair:
    """A source and a target that are connected. A context manager that ends them."""

    def __init__(
        self, options: Mapping[str, object], environment: Mapping[str, str], deadline: float
    ) -> None:
        """Start and connect both. Raises `PairError`."""
        self._progress = os.memfd_create("progress")
        os.ftruncate(self._progress, COUNTERS * 8)
        self.counters = np.frombuffer(mmap.mmap(self._progress, 0), dtype=np.uint64)
        options = dict(options) | {"progress": self._progress}
        self.target = Side("target", options, environment, self._progress)
        self.source = Side("source", options, environment, self._progress)
        try:
            described = self.target.answer(deadline, "start")
            self.source.answer(deadline, "start")
            self.source.call(deadline, "connect", target=described)
        except PairError:
            self.stop()
            raise

    def __enter__(self) -> Self:
        """Return the connected pair."""
        return self

    def __exit__(self, *_: object) -> None:
        """End both processes."""
        self.stop()

    def stop(self) -> None:
        """End both processes."""
        self.source.stop()
        self.target.stop()
        os.close(self._progress)

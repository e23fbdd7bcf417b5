"""A competitor in a process of its own: idle while others are measured, and it may fail alone.

Commands and answers are lines of JSON on a socket; the process prints to a log file.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from competitors import COMPETITORS
from session import Session

CALL_SECONDS = 180.0
"""Limit of one command, such as a put of all blocks."""
START_SECONDS = 300.0
"""Limit of the start: torch takes half a minute to load on a busy machine."""
END_SECONDS = 10.0
LOG_LINES = 3


class WorkerError(Exception):
    """A competitor's process failed, ended, or did not answer in time."""


class Worker:
    """The process of one competitor, as the parent sees it."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        ours, theirs = socket.socketpair()
        # What these libraries print is not about the benchmark, and LMCache reports its usage.
        environment = {**os.environ, "LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 # our own program
                [sys.executable, __file__, name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self._socket = ours
        self._answers = ours.makefile("r", encoding="utf-8")

    def versions(self) -> dict[str, str]:
        """Wait until the process has started; return the versions of what it measures."""
        return self._ask({"do": "versions"}, START_SECONDS)["versions"]

    def call(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run one command. Raises `WorkerError` if it fails."""
        return self._ask(command, CALL_SECONDS)

    def end(self) -> None:
        """End the process, by force if it does not end by itself."""
        self._answers.close()
        self._socket.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(json.dumps(command).encode() + b"\n")
            line = self._answers.readline()
        except TimeoutError as error:
            self._process.kill()
            raise WorkerError(f"no answer within {seconds:.0f} s") from error
        except OSError:  # The process has closed its end.
            line = ""
        if not line:
            raise WorkerError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = " | ".join([line.strip() for line in lines if line.strip()][-LOG_LINES:])
        return f"its process ended with {how}" + (f": {said}" if said else "")


def serve(name: str, descriptor: int) -> None:
    """Answer commands until the parent closes the socket."""
    with socket.socket(fileno=descriptor) as ours, ours.makefile("rw", encoding="utf-8") as lines:
        session: Session | None = None
        for line in lines:
            try:
                session = session or Session(COMPETITORS[name]())
                answer = session.run(json.loads(line))
            except Exception as error:  # noqa: BLE001 - whatever fails is the parent's to name
                answer = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    # LMCache's threads and PyTorch's would hold the exit up; nothing is left to be kept.
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))

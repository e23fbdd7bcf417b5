"""Counts the system calls of running processes with strace."""

import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["count_calls", "total"]

ATTACH_S = 5.0
"""How long strace may take to attach and to detach."""


def count_calls(processes: Sequence[int], work: Callable[[], object]) -> tuple[int, str]:
    """Return how many system calls the processes make during `work`, or 0 and why not."""
    if shutil.which("strace") is None:
        return 0, "strace is not installed (Debian: apt-get install strace)"
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "calls"
        attach = [word for process in processes for word in ("-p", str(process))]
        strace = subprocess.Popen(  # noqa: S603 # our own command
            ["strace", "-f", "-c", "-o", str(output), *attach],  # noqa: S607 # on the path
            stderr=subprocess.PIPE,
        )
        try:
            is_attached = _wait_for(strace, len(processes))
            if is_attached:
                work()
        finally:
            strace.send_signal(signal.SIGINT)
            strace.wait(ATTACH_S)
        if not is_attached:
            return 0, "strace may not attach to processes here"
        return total(output.read_text(encoding="utf-8")), ""


def _wait_for(strace: "subprocess.Popen[bytes]", count: int) -> bool:
    assert strace.stderr is not None  # noqa: S101 # it is a pipe
    deadline, text = time.monotonic() + ATTACH_S, b""
    while text.count(b" attached") < count:
        wait_s = max(0.0, deadline - time.monotonic())
        if not select.select([strace.stderr], [], [], wait_s)[0]:
            return False
        data = os.read(strace.stderr.fileno(), 1 << 12)
        if not data:
            return False
        text += data
    return True


def total(table: str) -> int:
    """Read the number of calls from strace's table, whose last line has the sums."""
    lines = [line.split() for line in table.splitlines() if line.strip().endswith("total")]
    # The columns: share of time, seconds, microseconds a call, calls, errors.
    return int(lines[-1][3]) if lines else 0

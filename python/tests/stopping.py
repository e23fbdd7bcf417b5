"""Stops processes as a debugger or a frozen host does."""

import os
import signal
import time
from pathlib import Path

LIMIT_S = 30


def stop(pid: int) -> None:
    """Stop a process, and return once all of its threads have stopped.

    The signal only asks for it: until then its threads may still answer others.
    """
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + LIMIT_S
    threads = Path(f"/proc/{pid}/task")
    while not all(_is_stopped(thread) for thread in threads.iterdir()):
        assert time.monotonic() < end, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        stat = (thread / "stat").read_text()
    except OSError:
        return True  # the thread has ended
    return stat.rpartition(") ")[2].startswith("T")

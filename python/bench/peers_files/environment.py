"""The machine and the versions behind the figures; no path of the machine."""

import os
import platform
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any


def capture(directory: Path, versions: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    """Return what affects the figures. `arguments` is the command line without the program."""
    return {
        "cpu": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "disk": _mount_of(directory),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {"numpy": version("numpy"), **versions},
        "started_unix_ms": time.time_ns() // 1_000_000,
        "argv": ["peers_files", *(Path(one).name if "/" in one else one for one in arguments)],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _mount_of(directory: Path) -> dict[str, str] | None:
    """Return file system, device and options of a directory's mount."""
    full, found, longest = directory.resolve(), None, -1
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, file_system = line.partition(" - ")
        fields, rest = mount.split(" "), file_system.split(" ")
        point = Path(fields[4])
        if full.is_relative_to(point) and len(point.parts) > longest:
            longest = len(point.parts)
            found = {"file_system": rest[0], "source": rest[1], "options": fields[5]}
    return found


def _commit() -> str:
    """Return what the program `cascade` beside the measured package says about itself."""
    try:
        program = import_module("cascadekv._program").program()
        command = [program, "--version"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 # ours
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        print(f"note: the commit is unknown: {error}", file=sys.stderr)
        return "unknown"
    return run.stdout.strip()

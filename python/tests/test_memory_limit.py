"""A control group with less memory than the pool: refused before it is allocated, not killed."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 256 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group with a limit, or skip: only root can, where the kernel lets it."""
    found = next(_places(), None)
    if found is None:
        pytest.skip("no control group can be made here")
    directory, limit = found
    directory.mkdir()
    (directory / limit).write_text(str(LIMIT))
    yield directory
    directory.rmdir()


def _places() -> Iterator[tuple[Path, str]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
        if "memory" in controllers.split(","):
            root, limit = root / "memory", "memory.limit_in_bytes"
        elif controllers:
            continue
        directory = root / path.lstrip("/") / f"cascade-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            directory.mkdir()
            has_limit = (directory / limit).exists()
            directory.rmdir()
            if has_limit:
                yield directory, limit


def run(group: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    within = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", within, "sh", sys.executable, "-m", "cascadekv", *arguments]
    return subprocess.run(  # noqa: S603 # our own command
        command, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_pool_beyond_the_limit_is_refused_and_doctor_says_so(group: Path, tmp_path: Path) -> None:
    settings = ["--socket", str(tmp_path / "socket"), "--dram", "1GiB", "--keep-pool", "never"]
    served = run(group, "serve", *settings)
    assert served.returncode == 1, served
    assert "a pool of 1.0 GiB does not fit" in served.stderr
    report = json.loads(run(group, "doctor", *settings, "--json").stdout)
    (memory,) = [check for check in report["checks"] if check["id"] == "memory"]
    assert memory["state"] == "failed", memory
    assert "MemoryMax" in memory["remedy"]

"""File systems that hang or fail, for tests that run as root; they are skipped elsewhere."""

import contextlib
import subprocess
import tempfile

import pytest

THAW_S = 120
"""A frozen file system is thawed after this time even if the test fails."""
LIMIT_S = 60
"""Time-out of a command and of a request for metrics."""


class CommandError(Exception):
    """A command cannot be run, or failed."""


def run(*command):
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)  # noqa: S603 # fixed
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise CommandError(f"{' '.join(command[:2])}: {error.stderr.strip()}") from error


@contextlib.contextmanager
def ext4(place):
    """Mount a new file system that can be frozen; skips the test if that is not possible here."""
    place.mkdir()
    # In memory: a slow disk of this machine must not look like the fault of a test.
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as image, contextlib.ExitStack() as mounted:
        image.truncate(96 << 20)
        try:
            run("mkfs.ext4", "-q", image.name)
            run("mount", "-o", "loop", image.name, str(place))
            mounted.callback(run, "umount", "-l", str(place))
            with frozen(place):
                pass
        except CommandError as error:
            pytest.skip(f"a file system cannot be mounted and frozen here: {error}")
        yield place


@contextlib.contextmanager
def frozen(place):
    """Make every write to a file system hang in the kernel, uninterruptible by signals."""
    later = subprocess.Popen(["sh", "-c", f"sleep {THAW_S}; fsfreeze -u '{place}'"])  # noqa: S603, S607 # fixed
    try:
        run("fsfreeze", "-f", str(place))
        try:
            yield
        finally:
            run("fsfreeze", "-u", str(place))
    finally:
        later.kill()
        later.wait()

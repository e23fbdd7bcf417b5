"""`python -m cascadekv`: the program `cascade`."""

import os
import signal
import sys

from cascadekv._program import program


def main() -> None:
    """Replace this process by the program."""
    # Python ignores it, and a program inherits what is ignored. Rust sets SIGPIPE itself.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    path = program()
    os.execv(path, [path, *sys.argv[1:]])  # noqa: S606 # our own program


if __name__ == "__main__":
    main()

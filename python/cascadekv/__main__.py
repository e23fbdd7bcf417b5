"""The command `cascade`. The native code parses the arguments."""

import signal
import sys

from cascadekv._native import run_command


def main() -> int:
    """Run the command; Ctrl-C ends it at once, as in a native program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run_command(["cascade", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

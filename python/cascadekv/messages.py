"""Parts of error messages: advice for an unknown name, and a short form of a value."""

import difflib
from collections.abc import Sequence

__all__ = ["advice", "shown"]

SHOWN_MAX = 60
"""Most characters of a value in a message."""


def advice(name: str, known: Sequence[str], *, prefix: str = "") -> str:
    """Return advice for an unknown name: a similar known name, else all known names.

    `known` are the names without the prefix, which `name` may have.
    """
    # A request may have a name of any length, and the time of the search grows with it.
    near = difflib.get_close_matches(name.removeprefix(prefix)[:SHOWN_MAX], known, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known are {', '.join(prefix + each for each in known)}"


def shown(value: object) -> str:
    """Return a value as text of bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or nested too deeply
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."

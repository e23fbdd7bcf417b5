"""Which prefixes are usable for layers that need only the last blocks of a prefix."""

from collections.abc import Sequence

__all__ = ["complete_windows"]


def complete_windows(present: Sequence[bool], window: int) -> list[bool]:
    """Return for each block whether the prefix that ends there has its last `window` blocks.

    A prefix shorter than the window needs all of its blocks. Takes linear time for any window.
    """
    complete: list[bool] = []
    run = 0
    for end, is_present in enumerate(present, 1):
        run = run + 1 if is_present else 0
        complete.append(run >= min(window, end))
    return complete

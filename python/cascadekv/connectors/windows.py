"""Which blocks of a prefix are needed by layers whose tokens see only the last tokens before them.

A window counts the token itself, as a model's `sliding_window` does: with a window of 4, token 9
sees tokens 6 to 9. The blocks of a prefix are needed from that of the first token that the next
computed token sees; later tokens see later ones. All connectors use these functions.
"""

from collections.abc import Callable, Sequence

__all__ = ["complete_windows", "first_needed_block", "next_computed_token"]


def next_computed_token(prefix_tokens: int, request_tokens: int) -> int:
    """Return which token of a request is computed first after its prefix was loaded.

    The last token is always computed, also if the prefix is the whole request: the next token is
    sampled from its output.
    """
    return min(prefix_tokens, request_tokens - 1)


def first_needed_block(next_token: int, window: int | None, block_tokens: int) -> int:
    """Return the first block of a prefix that is needed to compute the next token and later ones.

    Without a window, all blocks are needed. The block of the next token itself is one of the
    needed ones if it has tokens of the prefix: the engine shares it later as a whole.
    """
    if window is None:
        return 0
    return max(0, next_token - window + 1) // block_tokens


def complete_windows(present: Sequence[bool], first_needed: Callable[[int], int]) -> list[bool]:
    """Return for each block whether the prefix that ends there has all blocks that it needs.

    `first_needed` returns the first needed block of a prefix of that many blocks. Takes linear
    time for any window.
    """
    complete: list[bool] = []
    run = 0
    for end, is_present in enumerate(present, 1):
        run = run + 1 if is_present else 0
        complete.append(run >= end - max(0, first_needed(end)))
    return complete

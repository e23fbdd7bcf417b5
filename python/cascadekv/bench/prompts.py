"""Prompts as token ids, with prefixes that differ or are shared as required."""

import random

__all__ = ["FIRST_TOKEN", "VOCABULARY", "block_aligned", "prompt", "with_prefix"]

FIRST_TOKEN = 2
"""Smaller token ids are special: begin and end of text."""
VOCABULARY = 1000
"""Number of token ids in prompts; every model of `models.py` has them."""


def prompt(tokens: int, *parts: object) -> list[int]:
    """Generate a prompt from `parts`; other parts, or another length, share no prefix."""
    chance = random.Random(repr((tokens, parts)))  # noqa: S311 # no secret
    return [FIRST_TOKEN + chance.randrange(VOCABULARY) for _ in range(tokens)]


def with_prefix(first: list[int], shared: int, *parts: object) -> list[int]:
    """Generate a prompt as long as `first` whose first `shared` tokens are those of `first`."""
    tail = prompt(len(first) - shared, *parts)
    if shared < len(first) and tail[0] == first[shared]:
        tail[0] = FIRST_TOKEN + (tail[0] - FIRST_TOKEN + 1) % VOCABULARY
    return first[:shared] + tail


def block_aligned(tokens: int, block_tokens: int) -> int:
    """Round down to whole blocks."""
    return tokens // block_tokens * block_tokens

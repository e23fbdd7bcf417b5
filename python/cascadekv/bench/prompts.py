"""Prompts as token ids: distinct where they are to miss, equal as far as they are to hit."""

import random

__all__ = ["FIRST_TOKEN", "VOCABULARY", "block_aligned", "prompt", "with_prefix"]

FIRST_TOKEN = 2
"""Tokens below have meanings: begin and end of text."""
VOCABULARY = 1000
"""Tokens that prompts are made of; every model of `models.py` has them."""


def prompt(tokens: int, *parts: object) -> list[int]:
    """Make a prompt that follows from `parts`: others, or another length, share nothing."""
    chance = random.Random(repr((tokens, parts)))  # noqa: S311 # no secret
    return [FIRST_TOKEN + chance.randrange(VOCABULARY) for _ in range(tokens)]


def with_prefix(first: list[int], shared: int, *parts: object) -> list[int]:
    """Make a prompt as long as `first` that begins with `shared` tokens of it."""
    tail = prompt(len(first) - shared, *parts)
    if shared < len(first) and tail[0] == first[shared]:
        tail[0] = FIRST_TOKEN + (tail[0] - FIRST_TOKEN + 1) % VOCABULARY
    return first[:shared] + tail


def block_aligned(tokens: int, block_tokens: int) -> int:
    """Round down to whole blocks."""
    return tokens // block_tokens * block_tokens

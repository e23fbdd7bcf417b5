"""Bytes of blocks as a function of their names, so that every byte read can be checked."""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

STEP = np.uint64(0x9E3779B97F4A7C15)
"""Added for each word: odd, so that no word occurs twice in a block."""
SHIFT = np.uint64(29)
WORD_BYTES = 8
PIECE_WORDS = 32 << 10
"""Words that are computed at a time: they stay in the processor's cache."""
RAMP = np.arange(PIECE_WORDS, dtype=np.uint64) * STEP


class WrongByteError(Exception):
    """A byte of a block differs from what its name says."""


def seed(name: str) -> np.uint64:
    """Return the first word's state for a block with this name."""
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()))


def _pieces(block: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """Yield each piece of a block as words, and the index of its first word."""
    words = block.view(np.uint64)
    for at in range(0, words.size, PIECE_WORDS):
        yield at, words[at : at + PIECE_WORDS]


def _expected(
    state: np.uint64, at: int, out: NDArray[np.uint64], mixed: NDArray[np.uint64]
) -> None:
    """Compute the words from index `at` on. The mixing is a bijection."""
    with np.errstate(over="ignore"):
        start = state + np.uint64(at) * STEP
        np.add(RAMP[: out.size], start, out=out)
    np.right_shift(out, SHIFT, out=mixed)
    np.bitwise_xor(out, mixed, out=out)


def fill(name: str, block: NDArray[np.uint8]) -> None:
    """Fill a block, whose size is a multiple of 8 bytes, with the payload of its name."""
    state, mixed = seed(name), np.empty(PIECE_WORDS, np.uint64)
    for at, words in _pieces(block):
        _expected(state, at, words, mixed[: words.size])


def check(name: str, block: NDArray[np.uint8]) -> None:
    """Compare a block with the payload of its name. Raises `WrongByteError` if a byte differs."""
    state = seed(name)
    out, mixed = np.empty(PIECE_WORDS, np.uint64), np.empty(PIECE_WORDS, np.uint64)
    for at, words in _pieces(block):
        expected = out[: words.size]
        _expected(state, at, expected, mixed[: words.size])
        if not np.array_equal(words, expected):
            wrong = np.flatnonzero(words.view(np.uint8) != expected.view(np.uint8))[0]
            offset = at * WORD_BYTES + int(wrong)
            raise WrongByteError(f"block {name!r}: the byte at offset {offset} is wrong")

"""Results of calls, one for each block."""

from enum import IntEnum, StrEnum

from cascadekv._native import Changes, GetResult, PrefixMatch, PutResult, View, Views

__all__ = [
    "ChangeKind",
    "Changes",
    "DeclineReason",
    "GetResult",
    "GetStatus",
    "PrefixMatch",
    "PutResult",
    "PutStatus",
    "View",
    "Views",
]


class PutStatus(StrEnum):
    """The outcome of a put for one block."""

    STORED = "stored"
    """The block was copied into the first tier."""
    DEDUPLICATED = "deduplicated"
    """Equal bytes were present under another key; nothing was copied."""
    PRESENT = "present"
    """The key was already present with the same bytes."""
    CONFLICT = "conflict"
    """The key is present with other bytes, which were kept."""
    DECLINED = "declined"
    """Not stored, without a failure; `PutResult.reason` says why."""
    FAILED = "failed"
    """Not stored because of a failure; `PutResult.error` has the exception."""


class DeclineReason(StrEnum):
    """Why a block was not stored, without a failure."""

    PARTIAL = "partial"
    """The last block of a request is not full; such blocks are almost never reused."""
    TOO_LARGE = "too_large"
    """The block is larger than a tier of the pipeline can hold."""
    FULL = "full"
    """Every resident block is pinned or viewed, or this client's share is used up."""
    WORTH_LESS = "worth_less"
    """The eviction policy expects fewer hits from it than from every resident block."""
    EMPTY = "empty"
    """The pipeline has no tier that stores blocks."""


class GetStatus(StrEnum):
    """The outcome of a get for one block."""

    HIT = "hit"
    """The bytes are at the start of the buffer."""
    MISS = "miss"
    """The block is absent, or its bytes were damaged."""
    TOO_SHORT = "too_short"
    """The buffer is shorter than the block (`GetResult.needed_bytes`); nothing was written."""
    FAILED = "failed"
    """Reading failed; `GetResult.error` has the exception."""


class ChangeKind(IntEnum):
    """The kind of one change; one byte of `Changes.kinds`."""

    STORED = 0
    """The block is present in some tier."""
    GONE = 1
    """The block is in no tier any more. May occur without an earlier `STORED`."""
    CLEARED = 2
    """All blocks were removed; this change has no key."""

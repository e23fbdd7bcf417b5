"""What became of each block of a call."""

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
    """What became of one block of a put."""

    STORED = "stored"
    """Its bytes are in the first tier."""
    DEDUPLICATED = "deduplicated"
    """Equal bytes were there under another key; nothing was copied."""
    PRESENT = "present"
    """The key was there already, with the same bytes."""
    CONFLICT = "conflict"
    """The key is there with other bytes, which stay."""
    DECLINED = "declined"
    """Not taken although nothing failed; `PutResult.reason` says why."""
    FAILED = "failed"
    """Failed; `PutResult.error` has the exception."""


class DeclineReason(StrEnum):
    """Why a block was not taken although nothing failed."""

    PARTIAL = "partial"
    """A request's last partial block; such blocks are almost never asked for again."""
    TOO_LARGE = "too_large"
    """Larger than a tier of the pipeline can hold."""
    FULL = "full"
    """Everything resident is pinned or held by views, or what this client holds leaves no room."""
    WORTH_LESS = "worth_less"
    """The eviction policy expects less of it than of everything resident."""
    EMPTY = "empty"
    """The pipeline stores nothing."""


class GetStatus(StrEnum):
    """What became of one block of a copying get."""

    HIT = "hit"
    """The bytes are at the start of the buffer."""
    MISS = "miss"
    """Not here, or no longer right."""
    TOO_SHORT = "too_short"
    """The buffer is shorter than the block (`GetResult.needed_bytes`); nothing was written."""
    FAILED = "failed"
    """Failed; `GetResult.error` has the exception."""


class ChangeKind(IntEnum):
    """What happened to a block, as a follower of a store is told it; a byte of `Changes.kinds`."""

    STORED = 0
    """It is here, in some tier."""
    GONE = 1
    """It is in no tier any more. Also told of a block that was not told to be stored."""
    CLEARED = 2
    """No block is here any more; has no key."""

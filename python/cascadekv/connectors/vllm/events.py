"""KV events for the blocks in the store, in vLLM's own stream and format.

A router that applies the events knows which prefixes can be loaded. An event contains the tokens of
its blocks, so only blocks whose tokens this engine knows are announced. Their presence follows the
store's change log, no matter which client stored or removed them.
"""

import functools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash

from cascadekv._native import BlockKeys
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.background import BackgroundThread
from cascadekv.errors import AwayError, CascadeError, ConfigError

__all__ = ["DeferredStore", "EventSource", "FollowedStore"]

logger = logging.getLogger(__name__)

KEY_BYTES = 32
CHANGES_MAX = 1024
"""Most changes that one call of the store returns, and most blocks in the events of one `take`."""
RETRY_S = 1.0
"""Delay before the store is called again after a failure."""
_STORED, _GONE, _CLEARED = range(3)
"""The values of `ChangeKind`."""


class FollowedStore(Protocol):
    """The calls of a store that are used here."""

    def changes(self, since: bytes | None = None, *, limit: int = ...) -> Any:
        """Return the changes since a cursor."""
        ...

    def contains(self, keys: Any, /) -> list[bool]:
        """Return whether each block is present."""
        ...


class DeferredStore:
    """A store that may be unavailable at first: until then, every call raises `AwayError`."""

    def __init__(self, store: Callable[[], FollowedStore | None]) -> None:
        """`store` returns the store, or `None` while it is unavailable."""
        self._store = store

    def changes(self, since: bytes | None = None, *, limit: int = CHANGES_MAX) -> Any:
        """Return the changes since a cursor."""
        return self._opened().changes(since, limit=limit)

    def contains(self, keys: Any, /) -> list[bool]:
        """Return whether each block is present."""
        return self._opened().contains(keys)

    def _opened(self) -> FollowedStore:
        store = self._store()
        if store is None:
            raise AwayError("the store is not available yet")
        return store


@dataclass(slots=True, eq=False)
class _KnownBlock:
    """A block whose tokens are known."""

    parts: tuple[bytes, ...]
    """The keys of its parts; events use the first one."""
    parent: bytes | None
    token_ids: list[int]
    lora_id: int | None
    lora_name: str | None
    present: int = 0
    """Bit mask of the parts that the store has."""
    is_announced: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the store has every part."""
        return self.present == (1 << len(self.parts)) - 1


class EventSource:
    """Follows one store for one engine. Not thread-safe: call it from the scheduler's thread."""

    def __init__(  # noqa: PLR0913 # each is independent
        self,
        store: FollowedStore,
        *,
        block_tokens: int,
        medium: str,
        max_blocks: int = 1 << 17,
        background: BackgroundThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without known blocks; beyond `max_blocks`, the oldest ones are forgotten.

        `background` makes the calls to a node; an embedded store is called directly. Raises
        `ConfigError` if the store has no change log, and for sizes below 1.
        """
        if not hasattr(store, "changes"):
            raise ConfigError("KV events require a store with a change log; update Cascade")
        if block_tokens < 1 or max_blocks < 1:
            raise ConfigError(
                f"block_tokens is {block_tokens}, max_blocks {max_blocks}; each must be at least 1"
            )
        self._store = store
        self._block_tokens = block_tokens
        self._medium = medium
        self._max_blocks = max_blocks
        self._background = background
        self._clock = clock
        self._cursor: bytes | None = None
        self._blocks: OrderedDict[bytes, _KnownBlock] = OrderedDict()
        """Known blocks by the key of their first part, least recently saved first."""
        self._by_part: dict[bytes, tuple[_KnownBlock, int]] = {}
        """The block and the index of each part's key."""
        self._partly_stored: dict[_KnownBlock, None] = {}
        """Blocks with a stored part, in the order of their events: a clear visits only these."""
        self._unchecked: deque[_KnownBlock] = deque()
        """New blocks whose presence in the store is not known yet."""
        self._call: Future[Callable[[], None]] | None = None
        """The call of the store in flight; its result applies the store's answer."""
        self._checking: list[_KnownBlock] = []
        """The blocks that the call in flight checks."""
        self._pending: deque[tuple[bool, _KnownBlock]] = deque()
        """Events to emit: whether the block was stored, and the block."""
        self._is_resyncing = False
        """Whether the cursor was lost and the present blocks are being listed again."""
        self._is_current = False
        self._is_follow_next = True
        """Whether the next call reads changes rather than checks new blocks."""
        self._retry_at: float | None = None
        self._failures = FailureLog(logger)

    @property
    def known_blocks(self) -> int:
        """Number of blocks whose tokens are known."""
        return len(self._blocks)

    @property
    def is_current(self) -> bool:
        """Whether the events up to the last call of `take` include all changes of the store."""
        return self._is_current and not self._unchecked and not self._checking and not self._pending

    def saved(  # noqa: PLR0913 # the fields of an event
        self,
        keys: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        lora_id: int | None = None,
        lora_name: str | None = None,
        *,
        other_parts: Sequence[Sequence[bytes]] = (),
    ) -> None:
        """Record the tokens of consecutive blocks that were saved, or found in the store.

        `keys` name the blocks in events; `parent` is the block before the first. If blocks have
        several parts, `other_parts` has the keys of each further part. A block is announced while
        the store has all of its parts. Does not call the store.
        """
        if len(token_ids) != len(keys) * self._block_tokens:
            raise ValueError(
                f"{len(keys)} blocks of {self._block_tokens} tokens, but {len(token_ids)} tokens"
            )
        for index, key in enumerate(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            else:
                start = index * self._block_tokens
                block = _KnownBlock(
                    parts=(key, *(part[index] for part in other_parts)),
                    parent=parent,
                    token_ids=list(token_ids[start : start + self._block_tokens]),
                    lora_id=lora_id,
                    lora_name=lora_name,
                )
                self._blocks[key] = block
                for bit, part in enumerate(block.parts):
                    self._by_part[part] = (block, bit)
                self._unchecked.append(block)
            parent = key
        while len(self._blocks) > self._max_blocks:
            self._forget(self._blocks.popitem(last=False)[1])

    def take(self) -> list[Any]:
        """Return the changes since the last call as vLLM's events, oldest first.

        Never waits for a node: the events come from the calls that have ended, and at most one call
        is in flight. Returns at most `CHANGES_MAX` blocks; the next calls return the rest.
        """
        self._apply_answer()
        if self._call is None and len(self._pending) < CHANGES_MAX and self._may_call():
            self._start_call()
            # An embedded store has answered already.
            self._apply_answer()
        return list(self._events())

    def _may_call(self) -> bool:
        if self._retry_at is not None and self._clock() < self._retry_at:
            return False
        self._retry_at = None
        return True

    def _start_call(self) -> None:
        """Start the next call of the store. Calls alternate between the log and new blocks."""
        checking = [] if self._is_follow_next else self._take_unchecked()
        self._checking, self._is_follow_next = checking, bool(checking)
        if checking:
            parts = BlockKeys(b"".join(part for block in checking for part in block.parts))
            call = functools.partial(self._store.contains, parts)
            apply = functools.partial(self._apply_presence, checking)
        else:
            call = functools.partial(self._store.changes, self._cursor, limit=CHANGES_MAX)
            apply = self._apply_changes

        def answer() -> Callable[[], None]:
            return functools.partial(apply, call())

        if self._background is not None:
            # Its queue is never full: this is its only call.
            self._call = self._background.submit(answer)
            return
        answered: Future[Callable[[], None]] = Future()
        try:
            answered.set_result(answer())
        except CascadeError as error:
            answered.set_exception(error)
        self._call = answered

    def _apply_answer(self) -> None:
        """Apply the answer of the call in flight, if it has ended."""
        call, checking = self._call, self._checking
        if call is None or not call.done():
            return
        self._call, self._checking = None, []
        try:
            call.result()()
        except CascadeError as error:
            self._unchecked.extendleft(reversed(checking))
            self._is_current = False
            self._retry_at = self._clock() + RETRY_S
            self._failures.count("following the store's changes", error)

    def _take_unchecked(self) -> list[_KnownBlock]:
        """Remove the next blocks to check from the queue."""
        blocks: list[_KnownBlock] = []
        parts = 0
        while self._unchecked and parts < CHANGES_MAX:
            block = self._unchecked.popleft()
            # Not if it was forgotten meanwhile.
            if self._blocks.get(block.parts[0]) is block:
                blocks.append(block)
                parts += len(block.parts)
        return blocks

    def _apply_presence(self, blocks: Sequence[_KnownBlock], presence: Sequence[bool]) -> None:
        """Apply the presence of new blocks: the log may have reported them before they were known.

        The order of this query and the log does not matter. Changes that the log reports later are
        newer, or repeat a change that this query has seen; repeating it leads to the same state.
        """
        results = iter(presence)
        for block in blocks:
            for part in block.parts:
                self._set_presence(part, is_present=next(results))

    def _apply_changes(self, changes: Any) -> None:
        """Apply the next changes of the log."""
        self._cursor = changes.next
        self._is_current = changes.is_current
        if changes.is_lost:
            # Announced blocks are withdrawn only once all present blocks are listed: otherwise
            # routers would see every block removed and stored again.
            for block in self._partly_stored:
                block.present = 0
            self._partly_stored.clear()
            self._is_resyncing = True
        keys = bytes(changes.keys)
        for index, kind in enumerate(changes.kinds):
            if kind == _CLEARED:
                self._clear()
            else:
                start = index * KEY_BYTES
                self._set_presence(keys[start : start + KEY_BYTES], is_present=kind == _STORED)
        if self._is_resyncing and changes.is_current:
            self._is_resyncing = False
            for block in self._blocks.values():
                if not block.is_complete:
                    self._withdraw(block)

    def _set_presence(self, part: bytes, *, is_present: bool) -> None:
        block, bit = self._by_part.get(part, (None, 0))
        if block is None:
            return
        if is_present:
            block.present |= 1 << bit
            self._partly_stored[block] = None
            if block.is_complete:
                self._announce(block)
        else:
            block.present &= ~(1 << bit)
            if not block.present:
                self._partly_stored.pop(block, None)
            self._withdraw(block)

    def _clear(self) -> None:
        """Apply a clear. A client may clear an empty store often: that visits no block."""
        for block in self._partly_stored:
            block.present = 0
            self._withdraw(block)
        self._partly_stored.clear()

    def _forget(self, block: _KnownBlock) -> None:
        """Stop following a block, and withdraw it: its removal would go unnoticed."""
        for part in block.parts:
            self._by_part.pop(part, None)
        self._partly_stored.pop(block, None)
        self._withdraw(block)

    def _announce(self, block: _KnownBlock) -> None:
        if not block.is_announced:
            block.is_announced = True
            self._pending.append((True, block))

    def _withdraw(self, block: _KnownBlock) -> None:
        if block.is_announced:
            block.is_announced = False
            self._pending.append((False, block))

    def _events(self) -> Iterator[Any]:
        """Yield the oldest pending events: one for each run of a chain, or of removed blocks."""
        run: list[_KnownBlock] = []
        is_stored = True
        for _ in range(min(len(self._pending), CHANGES_MAX)):
            next_is_stored, block = self._pending.popleft()
            if run and (
                next_is_stored != is_stored or (is_stored and not _follows(run[-1], block))
            ):
                yield self._event(is_stored, run)
                run = []
            is_stored = next_is_stored
            run.append(block)
        if run:
            yield self._event(is_stored, run)

    def _event(self, is_stored: bool, run: Sequence[_KnownBlock]) -> Any:  # noqa: FBT001
        hashes = [_hash(block.parts[0]) for block in run]
        if not is_stored:
            return BlockRemoved(block_hashes=hashes, medium=self._medium)
        first = run[0]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if first.parent is None else _hash(first.parent),
            token_ids=[token for block in run for token in block.token_ids],
            block_size=self._block_tokens,
            lora_id=first.lora_id,
            medium=self._medium,
            lora_name=first.lora_name,
        )


def _hash(key: bytes) -> ExternalBlockHash:
    """Return a key as events name blocks: complete, or shortened by the engine's setting."""
    return maybe_convert_block_hash(BlockHash(key))


def _follows(before: _KnownBlock, block: _KnownBlock) -> bool:
    adapters = (before.lora_id, before.lora_name), (block.lora_id, block.lora_name)
    return block.parent == before.parts[0] and adapters[0] == adapters[1]

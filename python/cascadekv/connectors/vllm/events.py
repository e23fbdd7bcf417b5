"""KV events: what of this engine's blocks the store has, in vLLM's own stream and format.

A router that applies them knows which prefixes load instead of compute. Only blocks whose tokens
this engine knows are announced, because an event has to say them. The store's change log decides
when one is there, whoever stored or dropped it.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash

from cascadekv._native import BlockKeys
from cascadekv.connectors.failures import FailureLog
from cascadekv.errors import AwayError, CascadeError, ConfigError

__all__ = ["EventSource", "FollowedStore", "StoreOnceThere"]

logger = logging.getLogger(__name__)

KEY_BYTES = 32
CHANGES_MAX = 1024
"""Most changes that a call takes from the store, and most blocks that its events name."""
RETRY_S = 1.0
"""How long the store is left alone after it failed to answer."""
_STORED, _GONE, _CLEARED = range(3)
"""The values of `ChangeKind`."""


class FollowedStore(Protocol):
    """What is used of a store."""

    def changes(self, since: bytes | None = None, *, limit: int = ...) -> Any:
        """Say what came and went."""
        ...

    def contains(self, keys: Any, /) -> list[bool]:
        """Say which blocks are there."""
        ...


class StoreOnceThere:
    """A store that may be away at first: until it is there, every call raises `AwayError`."""

    def __init__(self, store: Callable[[], FollowedStore | None]) -> None:
        """`store` gives it once it is there."""
        self._store = store

    def changes(self, since: bytes | None = None, *, limit: int = CHANGES_MAX) -> Any:
        """Say what came and went."""
        return self._there().changes(since, limit=limit)

    def contains(self, keys: Any, /) -> list[bool]:
        """Say which blocks are there."""
        return self._there().contains(keys)

    def _there(self) -> FollowedStore:
        store = self._store()
        if store is None:
            raise AwayError("the store is not there yet")
        return store


@dataclass(slots=True, eq=False)
class _Block:
    """A block whose tokens are known."""

    parts: tuple[bytes, ...]
    parent: bytes | None
    token_ids: list[int]
    lora_id: int | None
    lora_name: str | None
    here: int = 0
    """A bit for each part that the store has."""
    is_announced: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the store has every part."""
        return self.here == (1 << len(self.parts)) - 1


class EventSource:
    """Follows one store for one engine. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(
        self,
        store: FollowedStore,
        *,
        block_tokens: int,
        medium: str,
        max_blocks: int = 1 << 17,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know no blocks yet; of more than `max_blocks`, the longest known go.

        Raises `ConfigError` where the store has no change log, and for sizes below 1.
        """
        if not hasattr(store, "changes"):
            raise ConfigError("KV events need a store with a change log; update Cascade")
        if block_tokens < 1 or max_blocks < 1:
            raise ConfigError(
                f"block_tokens is {block_tokens}, max_blocks {max_blocks}; at least 1"
            )
        self._store = store
        self._block_tokens = block_tokens
        self._medium = medium
        self._max_blocks = max_blocks
        self._clock = clock
        self._cursor: bytes | None = None
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        self._of_part: dict[bytes, tuple[_Block, int]] = {}
        self._unasked: deque[_Block] = deque()
        self._news: deque[tuple[bool, _Block]] = deque()
        self._begins_anew = False
        self._is_current = False
        self._asks_for_changes = True
        self._retry_at: float | None = None
        self._failures = FailureLog(logger)

    @property
    def known_blocks(self) -> int:
        """How many blocks have tokens here."""
        return len(self._blocks)

    @property
    def is_current(self) -> bool:
        """Whether the last call of `take` told all that the store had to say then."""
        return self._is_current and not self._unasked and not self._news

    def saved(  # noqa: PLR0913 # what an event says of a block
        self,
        keys: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        lora_id: int | None = None,
        lora_name: str | None = None,
        *,
        other_parts: Sequence[Sequence[bytes]] = (),
    ) -> None:
        """Learn the tokens of a run of blocks that were saved, or found there.

        `keys` name the blocks in events, `parent` the block before the first. With several parts a
        block, `other_parts` has the keys of each further part, and a block is announced while the
        store has all of its parts. Asks the store nothing.
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
                block = _Block(
                    parts=(key, *(part[index] for part in other_parts)),
                    parent=parent,
                    token_ids=list(token_ids[start : start + self._block_tokens]),
                    lora_id=lora_id,
                    lora_name=lora_name,
                )
                self._blocks[key] = block
                for bit, part in enumerate(block.parts):
                    self._of_part[part] = (block, bit)
                self._unasked.append(block)
            parent = key
        while len(self._blocks) > self._max_blocks:
            self._forget(self._blocks.popitem(last=False)[1])

    def take(self) -> list[Any]:
        """Give what happened since the last call, as vLLM's events, oldest first.

        Asks the store at most once, and names at most `CHANGES_MAX` blocks; what is left comes with
        the next calls.
        """
        if len(self._news) < CHANGES_MAX and self._may_ask():
            try:
                if self._asks_for_changes or not self._unasked:
                    self._follow()
                    self._asks_for_changes = False
                else:
                    self._ask_of_new()
                    self._asks_for_changes = True
            except CascadeError as error:
                self._is_current = False
                self._retry_at = self._clock() + RETRY_S
                self._failures.count("following the store's changes", error)
        return list(self._events())

    def _may_ask(self) -> bool:
        if self._retry_at is not None and self._clock() < self._retry_at:
            return False
        self._retry_at = None
        return True

    def _ask_of_new(self) -> None:
        """Ask whether blocks that became known are there: the log may have told it before.

        What the log tells later is later, or is told a second time and ends the same.
        """
        blocks: list[_Block] = []
        parts: list[bytes] = []
        while self._unasked and (not parts or len(parts) < CHANGES_MAX):
            block = self._unasked.popleft()
            if self._blocks.get(block.parts[0]) is block:
                blocks.append(block)
                parts += block.parts
        if not parts:
            return
        try:
            answers = iter(self._store.contains(BlockKeys(b"".join(parts))))
        except CascadeError:
            self._unasked.extendleft(reversed(blocks))
            raise
        for block in blocks:
            for part in block.parts:
                self._note(part, is_here=next(answers))

    def _follow(self) -> None:
        """Apply the next changes."""
        told = self._store.changes(self._cursor, limit=CHANGES_MAX)
        self._cursor = told.next
        self._is_current = told.is_current
        if told.is_lost:
            # Announced blocks stay so until it is known what the store has now.
            for block in self._blocks.values():
                block.here = 0
            self._begins_anew = True
        keys = bytes(told.keys)
        for index, kind in enumerate(told.kinds):
            if kind == _CLEARED:
                self._clear()
            else:
                start = index * KEY_BYTES
                self._note(keys[start : start + KEY_BYTES], is_here=kind == _STORED)
        if self._begins_anew and told.is_current:
            self._begins_anew = False
            self._withdraw_absent()

    def _note(self, part: bytes, *, is_here: bool) -> None:
        block, bit = self._of_part.get(part, (None, 0))
        if block is None:
            return
        if is_here:
            block.here |= 1 << bit
            if block.is_whole:
                self._announce(block)
        else:
            block.here &= ~(1 << bit)
            self._withdraw(block)

    def _clear(self) -> None:
        for block in self._blocks.values():
            block.here = 0
        self._withdraw_absent()

    def _withdraw_absent(self) -> None:
        for block in self._blocks.values():
            if not block.is_whole:
                self._withdraw(block)

    def _forget(self, block: _Block) -> None:
        """Let go of a block; what is not followed any more is not announced any more either."""
        for part in block.parts:
            self._of_part.pop(part, None)
        self._withdraw(block)

    def _announce(self, block: _Block) -> None:
        if not block.is_announced:
            block.is_announced = True
            self._news.append((True, block))

    def _withdraw(self, block: _Block) -> None:
        if block.is_announced:
            block.is_announced = False
            self._news.append((False, block))

    def _events(self) -> Iterator[Any]:
        """Turn the oldest news into events: one for each run of a chain, or of what went."""
        run: list[_Block] = []
        is_stored = True
        for _ in range(min(len(self._news), CHANGES_MAX)):
            next_is_stored, block = self._news.popleft()
            if run and (
                next_is_stored != is_stored or (is_stored and not _follows(run[-1], block))
            ):
                yield self._event(is_stored, run)
                run = []
            is_stored = next_is_stored
            run.append(block)
        if run:
            yield self._event(is_stored, run)

    def _event(self, is_stored: bool, run: Sequence[_Block]) -> Any:  # noqa: FBT001
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
    """Give a key as events name blocks: whole, or shortened as the engine is told to."""
    return maybe_convert_block_hash(BlockHash(key))


def _follows(before: _Block, block: _Block) -> bool:
    adapters = (before.lora_id, before.lora_name), (block.lora_id, block.lora_name)
    return block.parent == before.parts[0] and adapters[0] == adapters[1]

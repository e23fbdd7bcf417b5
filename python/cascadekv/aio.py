"""Stores for asyncio: the calls of `cascadekv.Store` as coroutines, embedded or served.

>>> import asyncio, cascadekv
>>> from cascadekv import aio
>>> async def main():
...     async with aio.open_store(dram="16MiB") as store:
...         key = cascadekv.BlockKey(bytes(32))
...         await store.put(key, [b"a block"])
...         async with await store.view(key) as views:
...             return bytes(views[0])
>>> asyncio.run(main())
b'a block'

A call runs in a thread of the store's own pool of at most `threads` threads; further calls are
queued. The deadline of a call starts when a thread starts the call.

Cancellation:

- A queued call is not made.
- A running `put`, `put_reserved`, `seal`, `get` or `gather` uses the caller's memory. The
  cancellation is raised once the call has ended: at its deadline at the latest, or once a `gather`
  has copied its pages. A put is complete then, and its results are discarded.
- Any other running call is cancelled at once. The call continues in its thread, and its result is
  undone: views are released, pins are removed and reserved memory returns to the pool.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Protocol,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from cascadekv._native import (
    BlockKey,
    BlockKeys,
    Changes,
    GetResult,
    Gpu,
    Namespace,
    PagedMemory,
    PrefixMatch,
    PreparedPut,
    PutResult,
    Reservation,
    Store,
    View,
    Views,
)
from cascadekv._native import (
    connect as connect_blocking,
)
from cascadekv.config import StoreConfig, StoreSettings
from cascadekv.errors import ClosedError, ConfigError, ForkError
from cascadekv.hints import Hints
from cascadekv.stats import Stats
from cascadekv.traces import current_trace, part_of_trace

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "AsyncPreparedPut",
    "AsyncStore",
    "AsyncViews",
    "PutKeywords",
    "TextPutKeywords",
    "connect",
    "open_store",
]

THREADS = 8
"""Default number of threads of a store."""
THREADS_MAX = 256

Key: TypeAlias = BlockKey | bytes
Keys: TypeAlias = "BlockKeys | BlockKey | Buffer | Iterable[BlockKey | bytes]"
Duration: TypeAlias = float | str | timedelta
Size: TypeAlias = int | str
T = TypeVar("T")


class PutKeywords(TypedDict, total=False):
    """The keywords of `AsyncStore.put`, `put_reserved` and `prepare`, as for `Store.put`."""

    parent: Key | None
    chain: bool
    is_prefix: bool
    last_is_partial: bool
    ttl: Duration | None
    namespace: Namespace | None
    timeout: Duration | None


class TextPutKeywords(TypedDict, total=False):
    """The keywords of `AsyncStore.put` with a text key, as for `Store.put`."""

    chain: bool
    is_prefix: bool
    ttl: Duration | None
    timeout: Duration | None


class _Call(Protocol):
    """`AsyncStore._call`: runs a call in a thread of the store."""

    async def __call__(
        self,
        call: Callable[[], T],
        *,
        undo: Callable[[T], object] | None = None,
        uses_buffers: bool = False,
    ) -> T: ...


class _ReleasedOnExit(ABC):
    """An asynchronous context manager that is released when its block ends."""

    @abstractmethod
    def release(self) -> None:
        """Release what the object holds. May be called again."""

    async def __aenter__(self) -> Self:
        """Use as a context manager that calls `release`."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Call `release`."""
        self.release()


class AsyncViews(_ReleasedOnExit):
    """The views of one batch: `cascadekv.Views` as an asynchronous context manager.

    All blocks stay in the pool until the `async with` block ends or `release` is called.
    """

    def __init__(self, views: Views) -> None:
        self.views = views
        """The underlying views, for calls such as `scatter`."""

    def __len__(self) -> int:
        """Return the number of keys in the batch."""
        return len(self.views)

    def __getitem__(self, index: int) -> View | None:
        """Return the view at an index; `None` for a miss."""
        return self.views[index]

    @property
    def hits(self) -> int:
        """Number of blocks that were found."""
        return self.views.hits

    def release(self) -> None:
        """Release every block now."""
        self.views.release()


class AsyncPreparedPut(_ReleasedOnExit):
    """A put in two phases: `cascadekv.PreparedPut` as an asynchronous context manager.

    When the `async with` block ends, the memory of blocks that were not sealed returns to the pool.
    """

    def __init__(self, prepared: PreparedPut, call: _Call) -> None:
        self.prepared = prepared
        """The underlying prepared put."""
        self._call = call

    @property
    def needed(self) -> list[int]:
        """Indices of the keys whose bytes the store needs."""
        return self.prepared.needed

    async def gather(
        self,
        memory: PagedMemory,
        pages: "Buffer | Iterable[int]",
        *,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Copy page `pages[i]` into block i, for every needed block.

        Do not write the pages until this returns or raises. `pages` has one page for each key.
        `count` regions from `first` on are copied, all by default, so that a connector can save
        layer by layer.
        """
        await self._call(
            lambda: self.prepared.gather(memory, pages, first=first, count=count),
            uses_buffers=True,
        )

    async def seal(self, *, timeout: Duration | None = None) -> list[PutResult]:
        """Store the blocks; returns one result for each key, needed or not.

        Raises `ValueError`, and changes nothing, if bytes of needed blocks were not gathered yet.
        """
        return await self._call(lambda: self.prepared.seal(timeout=timeout), uses_buffers=True)

    def release(self) -> None:
        """Return the memory of blocks that were not sealed. Waits for a running `gather`."""
        self.prepared.release()


class AsyncStore:
    """A store whose calls are awaited, from `open_store` or `connect`, or wrapping a `Store`.

    Arguments and results are those of `cascadekv.Store`. Tasks of several event loops may use one
    store. `close` also closes a wrapped `Store`.
    """

    def __init__(self, store: Store, *, threads: int = THREADS) -> None:
        self.store = _checked_store(store)
        """The underlying store, for calls that this class does not have."""
        count = _checked_threads(threads)
        self._workers = ThreadPoolExecutor(count, thread_name_prefix="cascade-aio")
        self._process = os.getpid()
        self._is_closed = False

    @overload
    async def put(
        self, keys: str, blocks: "Buffer | Iterable[Buffer]", **keywords: Unpack[TextPutKeywords]
    ) -> PutResult: ...
    @overload
    async def put(
        self, keys: Keys, blocks: "Buffer | Iterable[Buffer]", **keywords: Unpack[PutKeywords]
    ) -> list[PutResult]: ...
    async def put(
        self,
        keys: "Keys | str",
        blocks: "Buffer | Iterable[Buffer]",
        **keywords: Unpack[PutKeywords],
    ) -> list[PutResult] | PutResult:
        """Store blocks. Do not modify the buffers until this returns or raises.

        A text key has one result, and its errors are raised.
        """
        call = cast("Callable[..., list[PutResult] | PutResult]", self.store.put)
        return await self._call(lambda: call(keys, blocks, **keywords), uses_buffers=True)

    async def reserve(self, size: Size, *, timeout: Duration | None = None) -> Reservation:
        """Reserve pool memory for a block of `size` bytes: write it, then call `put_reserved`."""
        return await self._call(
            lambda: self.store.reserve(size, timeout=timeout), undo=Reservation.release
        )

    async def put_reserved(
        self,
        keys: Keys,
        reservations: Sequence[Reservation],
        **keywords: Unpack[PutKeywords],
    ) -> list[PutResult]:
        """Store blocks that were written in place, without a copy.

        Release every array and memoryview of the reservations before the call. Do not use the
        reservations until this returns or raises. If it is cancelled before a thread starts the
        call, the reservations are not used up: put them again, or release them.
        """
        return await self._call(
            lambda: self.store.put_reserved(keys, reservations, **keywords), uses_buffers=True
        )

    async def prepare(
        self, keys: Keys, size: Size, **keywords: Unpack[PutKeywords]
    ) -> AsyncPreparedPut:
        """Reserve pool memory for those of these blocks of `size` bytes that the store needs.

        A key that is already stored with the same length counts as present; its bytes are not
        compared.
        """
        prepared = await self._call(
            lambda: self.store.prepare(keys, size, **keywords), undo=PreparedPut.release
        )
        return AsyncPreparedPut(prepared, self._call)

    @overload
    async def get(
        self, keys: str, buffers: None = None, *, timeout: Duration | None = None
    ) -> bytes | None: ...
    @overload
    async def get(
        self, keys: Keys, buffers: "Buffer | Iterable[Buffer]", *, timeout: Duration | None = None
    ) -> list[GetResult]: ...
    async def get(
        self,
        keys: "Keys | str",
        buffers: "Buffer | Iterable[Buffer] | None" = None,
        *,
        timeout: Duration | None = None,
    ) -> list[GetResult] | bytes | None:
        """Copy blocks into buffers. Do not use the buffers until this returns or raises.

        For a text key, return a copy of its block, or `None` for a miss.
        """
        call = cast("Callable[..., list[GetResult] | bytes | None]", self.store.get)
        return await self._call(lambda: call(keys, buffers, timeout=timeout), uses_buffers=True)

    async def view(self, keys: Keys, *, timeout: Duration | None = None) -> AsyncViews:
        """Return views of blocks in the pool, without a copy; `None` for a miss."""
        views = await self._call(lambda: self.store.view(keys, timeout=timeout), undo=Views.release)
        return AsyncViews(views)

    async def acquire(
        self,
        keys: Keys,
        *,
        partial_tail: bool = False,
        hints: Hints | None = None,
        at: Duration | None = None,
        timeout: Duration | None = None,
    ) -> AsyncViews:
        """Look up a chain and return views of its leading available blocks, in one call."""
        views = await self._call(
            lambda: self.store.acquire(
                keys, partial_tail=partial_tail, hints=hints, at=at, timeout=timeout
            ),
            undo=Views.release,
        )
        return AsyncViews(views)

    async def lookup_prefix(
        self,
        keys: Keys,
        *,
        partial_tail: bool = False,
        hints: Hints | None = None,
        at: Duration | None = None,
    ) -> PrefixMatch:
        """Return how many leading blocks of a chain are available, and in which tiers."""
        return await self._call(
            lambda: self.store.lookup_prefix(keys, partial_tail=partial_tail, hints=hints, at=at)
        )

    async def hint(self, keys: Keys, *, hints: Hints, at: Duration | None = None) -> None:
        """Pass hints about a chain to the eviction policy. Does not count as an access."""
        await self._call(lambda: self.store.hint(keys, hints=hints, at=at))

    @overload
    async def contains(self, keys: str) -> bool: ...
    @overload
    async def contains(self, keys: Keys) -> list[bool]: ...
    async def contains(self, keys: "Keys | str") -> list[bool] | bool:
        """Return whether each block is in any tier."""
        call = cast("Callable[..., list[bool] | bool]", self.store.contains)
        return await self._call(lambda: call(keys))

    @overload
    async def locate(self, keys: str) -> list[str]: ...
    @overload
    async def locate(self, keys: Keys) -> list[list[str]]: ...
    async def locate(self, keys: "Keys | str") -> list[list[str]] | list[str]:
        """Return the tiers that have each block, fastest first."""
        call = cast("Callable[..., list[list[str]] | list[str]]", self.store.locate)
        return await self._call(lambda: call(keys))

    async def pin(self, keys: Keys) -> list[bool]:
        """Keep blocks in memory until `unpin`. Pins are counted."""
        # Copied: an iterator could not be read a second time to undo the pins.
        block_keys = await self._call(lambda: BlockKeys(keys))

        def unpin(results: list[bool]) -> None:
            pinned = [key for key, is_pinned in zip(block_keys, results, strict=True) if is_pinned]
            self.store.unpin(pinned)

        return await self._call(lambda: self.store.pin(block_keys), undo=unpin)

    async def unpin(self, keys: Keys) -> list[bool]:
        """Remove one pin from each block."""
        return await self._call(lambda: self.store.unpin(keys))

    @overload
    async def delete(self, keys: str) -> bool: ...
    @overload
    async def delete(self, keys: Keys) -> list[bool]: ...
    async def delete(self, keys: "Keys | str") -> list[bool] | bool:
        """Delete blocks from every tier. True if the block was present."""
        call = cast("Callable[..., list[bool] | bool]", self.store.delete)
        return await self._call(lambda: call(keys))

    async def prefetch(self, keys: Keys) -> int:
        """Read blocks into memory in the background; returns how many were accepted."""
        return await self._call(lambda: self.store.prefetch(keys))

    async def register(self, namespace: Namespace, *, timeout: Duration | None = None) -> None:
        """Store a namespace's manifest with the data."""
        await self._call(lambda: self.store.register(namespace, timeout=timeout))

    async def flush(self, *, timeout: Duration | None = None) -> None:
        """Wait until every tier has written all earlier puts, so that they survive a restart."""
        await self._call(lambda: self.store.flush(timeout=timeout))

    async def clear(self) -> None:
        """Delete every block from every tier."""
        await self._call(self.store.clear)

    async def changes(self, since: bytes | None = None, *, limit: int = 65_536) -> Changes:
        """Return the blocks that were stored and removed since the cursor `since`."""
        return await self._call(lambda: self.store.changes(since, limit=limit))

    async def stats(self) -> Stats:
        """Return counters and contents of the store. Also works after `close`."""
        return self.store.stats() if self._is_closed else await self._call(self.store.stats)

    async def close(self) -> None:
        """Close the store and end its threads. May be called again.

        Cancellation does not interrupt closing: it is raised once the store is closed.
        """
        if self._is_closed:
            return
        try:
            await self._call(self.store.close, uses_buffers=True)
        finally:
            self._is_closed = True
            self._workers.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        """Use as a context manager that closes the store."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the store."""
        await self.close()

    async def _call(
        self,
        call: Callable[[], T],
        *,
        undo: Callable[[T], object] | None = None,
        uses_buffers: bool = False,
    ) -> T:
        # A forked child has none of the pool's threads, so its call would never start.
        if os.getpid() != self._process:
            raise ForkError("this store belongs to the process that forked this one; open another")
        if self._is_closed:
            raise ClosedError("the store is closed")
        return await _run(self._workers, call, undo, uses_buffers=uses_buffers)


class _StoreOpener:
    """The result of `open_store` and `connect`: await it, or enter it with `async with`."""

    def __init__(self, open_: Callable[[], Awaitable[AsyncStore]]) -> None:
        self._open = open_
        self._store: AsyncStore | None = None

    def __await__(self) -> Generator[object, None, AsyncStore]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncStore:
        self._store = await self._open()
        return self._store

    async def __aexit__(self, *_error: object) -> None:
        if self._store is not None:
            await self._store.close()


def open_store(
    config: StoreConfig | None = None,
    *,
    threads: int = THREADS,
    **settings: Unpack[StoreSettings],
) -> _StoreOpener:
    """Open a store in this process: `await` it, or `async with` it. Settings as for `Store`."""
    return _StoreOpener(lambda: _open(lambda: Store(config, **settings), threads))


def connect(  # noqa: PLR0913 # the keywords of cascadekv.connect
    socket: str | os.PathLike[str] | None = None,
    *,
    token: str | bytes | None = None,
    access: str = "write",
    name: str | None = None,
    timeout: Duration = 5.0,
    gpu: Gpu | None = None,
    threads: int = THREADS,
) -> _StoreOpener:
    """Connect to the node of this host: `await` it, or `async with` it.

    Arguments as for `cascadekv.connect`.
    """

    def make() -> Store:
        return connect_blocking(
            socket, token=token, access=access, name=name, timeout=timeout, gpu=gpu
        )

    return _StoreOpener(lambda: _open(make, threads))


async def _open(make: Callable[[], Store], threads: int) -> AsyncStore:
    # Checked before the store is opened, which may take long.
    _checked_threads(threads)
    opener = ThreadPoolExecutor(1, thread_name_prefix="cascade-aio-open")
    try:
        store = await _run(opener, make, Store.close)
    finally:
        opener.shutdown(wait=False)
    return AsyncStore(store, threads=threads)


def _checked_store(store: object) -> Store:
    if not isinstance(store, Store):
        raise TypeError(f"store: <{type(store).__name__}> is not a cascadekv.Store")
    return store


def _checked_threads(threads: object) -> int:
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 < threads <= THREADS_MAX:
        shown = repr(threads) if isinstance(threads, int | float) else f"<{type(threads).__name__}>"
        raise ConfigError(f"threads: {shown} is not a number from 1 to {THREADS_MAX}")
    return threads


async def _run(
    workers: ThreadPoolExecutor,
    call: Callable[[], T],
    undo: Callable[[T], object] | None,
    *,
    uses_buffers: bool = False,
) -> T:
    """Run a call in a thread and wait for it.

    If the caller is cancelled, `undo` receives the result of the running call. With `uses_buffers`,
    a running call is waited for before the cancellation is raised, because its thread still reads
    or writes the caller's buffers, or would store what the caller writes into them afterwards.
    """
    # Context variables do not reach threads of an executor.
    trace = current_trace.get()

    def traced() -> T:
        with part_of_trace(trace):
            return call()

    work = workers.submit(traced)
    try:
        await _wait_for(work)
    except asyncio.CancelledError:
        # `cancel` returns False if the call is running or has ended.
        if not work.cancel():
            if uses_buffers:
                await _wait_uncancelled(work)
            elif undo is not None:
                work.add_done_callback(lambda done: _undo(done, undo))
        raise
    return work.result()


async def _wait_for(work: "Future[T]") -> None:
    """Return when the call has ended, by a result or an exception."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def set_ended() -> None:
        # The waiting task may have been cancelled, and this future with it.
        if not ended.done():
            ended.set_result(None)

    def notify(_work: "Future[T]") -> None:
        try:
            loop.call_soon_threadsafe(set_ended)
        except RuntimeError:
            # A closed loop has no waiting task.
            if not loop.is_closed():
                raise

    work.add_done_callback(notify)
    await ended


async def _wait_uncancelled(work: "Future[T]") -> None:
    """Return when the call has ended; cancellations do not interrupt the wait."""
    while not work.done():
        try:
            await _wait_for(work)
        except asyncio.CancelledError:
            continue


def _undo(work: "Future[T]", undo: Callable[[T], object]) -> None:
    if not work.cancelled() and work.exception() is None:
        undo(work.result())

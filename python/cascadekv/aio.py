"""Stores for asyncio: the calls of `cascadekv.Store`, awaitable, embedded or served.

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

A call runs in one of the store's own threads, `threads` of them at most; calls beyond that wait
their turn. Every call has a deadline, and its time begins when a thread takes it up.

What a cancelled call does:

- One that no thread has taken up yet is never made.
- A put or a get uses the caller's buffers, so the cancellation arrives once the call has ended,
  which is at its deadline at the latest. The put is then done as a whole, with its outcomes unread.
- Of others the cancellation arrives at once. The call goes on to its end in its thread, and what it
  brings is given back: views are released, pins taken back, reservations returned.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeAlias, TypeVar, Unpack

from typing_extensions import Buffer

from cascadekv._native import (
    BlockKey,
    BlockKeys,
    Changes,
    GetResult,
    Namespace,
    PrefixMatch,
    PutResult,
    Store,
    View,
    Views,
)
from cascadekv._native import (
    connect as connect_now,
)
from cascadekv.config import StoreConfig, StoreSettings
from cascadekv.errors import ClosedError, ConfigError, ForkError
from cascadekv.hints import Hints
from cascadekv.stats import Stats
from cascadekv.traces import current_trace, part_of_trace

__all__ = ["AsyncStore", "AsyncViews", "connect", "open_store"]

THREADS = 8
"""Threads of a store unless it is given another number."""
THREADS_MAX = 256

Key: TypeAlias = BlockKey | bytes
Keys: TypeAlias = BlockKeys | BlockKey | Buffer | Iterable[BlockKey | bytes]
Duration: TypeAlias = float | str | timedelta
T = TypeVar("T")


class AsyncViews:
    """The views of one batch: `cascadekv.Views` as an asynchronous context manager.

    All blocks stay in the pool until the block of `async with` ends, or `release` is called.
    """

    def __init__(self, views: Views) -> None:
        self.views = views
        """The views themselves, for `scatter` and the like."""

    def __len__(self) -> int:
        """Count the keys of the batch."""
        return len(self.views)

    def __getitem__(self, index: int) -> View | None:
        """Give the view at a position; `None` for a miss."""
        return self.views[index]

    @property
    def hits(self) -> int:
        """Blocks that were found."""
        return self.views.hits

    def release(self) -> None:
        """Let go of every block now."""
        self.views.release()

    async def __aenter__(self) -> Self:
        """Use as a context manager that releases the views."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the views."""
        self.release()


class AsyncStore:
    """A store whose calls are awaited. From `open_store` and `connect`, or around a `Store`.

    Arguments and results are those of `cascadekv.Store`. One store may be used by tasks of several
    event loops. Around a `Store` of the caller's, `close` closes that one too.
    """

    def __init__(self, store: Store, *, threads: int = THREADS) -> None:
        self.store = _plain(store)
        """The store itself, for calls that this class does not have."""
        self._workers = ThreadPoolExecutor(_threads(threads), thread_name_prefix="cascade-aio")
        self._process = os.getpid()
        self._is_closed = False

    async def put(  # noqa: PLR0913 # the keywords of Store.put
        self,
        keys: Keys,
        blocks: Buffer | Iterable[Buffer],
        *,
        parent: Key | None = None,
        chain: bool = True,
        is_prefix: bool = False,
        last_is_partial: bool = False,
        ttl: Duration | None = None,
        namespace: Namespace | None = None,
        timeout: Duration | None = None,
    ) -> list[PutResult]:
        """Store blocks. Do not change them until this returns or raises."""
        return await self._call(
            lambda: self.store.put(
                keys,
                blocks,
                parent=parent,
                chain=chain,
                is_prefix=is_prefix,
                last_is_partial=last_is_partial,
                ttl=ttl,
                namespace=namespace,
                timeout=timeout,
            ),
            uses_buffers=True,
        )

    async def get(
        self, keys: Keys, buffers: Buffer | Iterable[Buffer], *, timeout: Duration | None = None
    ) -> list[GetResult]:
        """Copy blocks into buffers. Leave these alone until this returns or raises."""
        return await self._call(
            lambda: self.store.get(keys, buffers, timeout=timeout), uses_buffers=True
        )

    async def view(self, keys: Keys, *, timeout: Duration | None = None) -> AsyncViews:
        """Give views on blocks in the pool, without a copy; `None` for a miss."""
        views = await self._call(
            lambda: self.store.view(keys, timeout=timeout), give_back=Views.release
        )
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
        """Look a chain up and view the leading blocks that are available, in one call."""
        views = await self._call(
            lambda: self.store.acquire(
                keys, partial_tail=partial_tail, hints=hints, at=at, timeout=timeout
            ),
            give_back=Views.release,
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
        """Say how many leading blocks of a chain are available, and where."""
        return await self._call(
            lambda: self.store.lookup_prefix(keys, partial_tail=partial_tail, hints=hints, at=at)
        )

    async def hint(self, keys: Keys, *, hints: Hints, at: Duration | None = None) -> None:
        """Say what the caller knows about a chain, without asking for it."""
        await self._call(lambda: self.store.hint(keys, hints=hints, at=at))

    async def contains(self, keys: Keys) -> list[bool]:
        """Say whether each block is in any tier."""
        return await self._call(lambda: self.store.contains(keys))

    async def locate(self, keys: Keys) -> list[list[str]]:
        """Name the tiers that have each block, fast to slow."""
        return await self._call(lambda: self.store.locate(keys))

    async def pin(self, keys: Keys) -> list[bool]:
        """Keep blocks in memory until `unpin`, counted."""
        known = await self._call(lambda: BlockKeys(keys))

        def unpin(pinned: list[bool]) -> None:
            taken = [key for key, is_pinned in zip(known, pinned, strict=True) if is_pinned]
            self.store.unpin(taken)

        return await self._call(lambda: self.store.pin(known), give_back=unpin)

    async def unpin(self, keys: Keys) -> list[bool]:
        """Take one pin from each block."""
        return await self._call(lambda: self.store.unpin(keys))

    async def delete(self, keys: Keys) -> list[bool]:
        """Forget blocks in every tier. True for those that were here."""
        return await self._call(lambda: self.store.delete(keys))

    async def prefetch(self, keys: Keys) -> int:
        """Ask for blocks to be brought to memory in the background."""
        return await self._call(lambda: self.store.prefetch(keys))

    async def register(self, namespace: Namespace, *, timeout: Duration | None = None) -> None:
        """Keep a namespace's manifest with the data."""
        await self._call(lambda: self.store.register(namespace, timeout=timeout))

    async def flush(self, *, timeout: Duration | None = None) -> None:
        """Wait until every tier has what was put, and would have it after a restart."""
        await self._call(lambda: self.store.flush(timeout=timeout))

    async def clear(self) -> None:
        """Forget every block in every tier."""
        await self._call(self.store.clear)

    async def changes(self, since: bytes | None = None, *, limit: int = 65_536) -> Changes:
        """Say what came and went since the answer that gave `since`."""
        return await self._call(lambda: self.store.changes(since, limit=limit))

    async def stats(self) -> Stats:
        """Say what the store holds and did. Also after `close`."""
        return self.store.stats() if self._is_closed else await self._call(self.store.stats)

    async def close(self) -> None:
        """Close the store and end its threads. May be repeated.

        Closing goes on when it is cancelled, and the cancellation arrives when it has ended.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the store."""
        await self.close()

    async def _call(
        self,
        call: Callable[[], T],
        *,
        give_back: Callable[[T], object] | None = None,
        uses_buffers: bool = False,
    ) -> T:
        # A forked child has none of the threads: its call would never be taken up.
        if os.getpid() != self._process:
            raise ForkError("this store belongs to the process that forked this one; open another")
        if self._is_closed:
            raise ClosedError("the store is closed")
        return await _run(self._workers, call, give_back, uses_buffers=uses_buffers)


class _Opening:
    """A store that is about to be opened: awaited, or entered with `async with`."""

    def __init__(self, opening: Callable[[], Awaitable[AsyncStore]]) -> None:
        self._opening = opening
        self._opened: AsyncStore | None = None

    def __await__(self) -> Generator[object, None, AsyncStore]:
        return self._opening().__await__()

    async def __aenter__(self) -> AsyncStore:
        self._opened = await self._opening()
        return self._opened

    async def __aexit__(self, *_error: object) -> None:
        if self._opened is not None:
            await self._opened.close()


def open_store(
    config: StoreConfig | None = None,
    *,
    threads: int = THREADS,
    **settings: Unpack[StoreSettings],
) -> _Opening:
    """Open a store in this process: `await` it, or `async with` it. Settings as for `Store`."""
    return _Opening(lambda: _open(lambda: Store(config, **settings), threads))


def connect(  # noqa: PLR0913 # the keywords of cascadekv.connect
    socket: str | os.PathLike[str] | None = None,
    *,
    token: str | bytes | None = None,
    access: str = "write",
    name: str | None = None,
    timeout: Duration = 5.0,
    threads: int = THREADS,
) -> _Opening:
    """Connect to the node of this host: `await` it, or `async with` it.

    Arguments as for `cascadekv.connect`.
    """

    def make() -> Store:
        return connect_now(socket, token=token, access=access, name=name, timeout=timeout)

    return _Opening(lambda: _open(make, threads))


async def _open(make: Callable[[], Store], threads: int) -> AsyncStore:
    _threads(threads)
    opener = ThreadPoolExecutor(1, thread_name_prefix="cascade-aio-open")
    try:
        store = await _run(opener, make, Store.close)
    finally:
        opener.shutdown(wait=False)
    return AsyncStore(store, threads=threads)


def _plain(store: object) -> Store:
    if not isinstance(store, Store):
        raise TypeError(f"store: <{type(store).__name__}> is not a cascadekv.Store")
    return store


def _threads(threads: object) -> int:
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 < threads <= THREADS_MAX:
        shown = repr(threads) if isinstance(threads, int | float) else f"<{type(threads).__name__}>"
        raise ConfigError(f"threads: {shown} is not a number from 1 to {THREADS_MAX}")
    return threads


async def _run(
    workers: ThreadPoolExecutor,
    call: Callable[[], T],
    give_back: Callable[[T], object] | None,
    *,
    uses_buffers: bool = False,
) -> T:
    """Make a call in a thread and wait for it.

    `give_back` gets the result of a call whose caller was cancelled meanwhile. With `uses_buffers`
    a call that has begun is waited for before the cancellation goes on: the thread still reads or
    writes what the caller owns.
    """
    trace = current_trace.get()

    def traced() -> T:
        with part_of_trace(trace):
            return call()

    work = workers.submit(traced)
    try:
        await _ended(work)
    except asyncio.CancelledError:
        # False when a thread has taken the call up.
        if not work.cancel():
            if uses_buffers:
                await _wait_out(work)
            elif give_back is not None:
                work.add_done_callback(lambda done: _give_back(done, give_back))
        raise
    return work.result()


async def _ended(work: "Future[T]") -> None:
    """Return when the call has ended, whatever came of it."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def tell(_work: "Future[T]") -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            # The loop was closed: nobody waits any more.
            if not loop.is_closed():
                raise

    work.add_done_callback(tell)
    await woken


async def _wait_out(work: "Future[T]") -> None:
    """Return when the call has ended, however often the task is cancelled."""
    while not work.done():
        try:
            await _ended(work)
        except asyncio.CancelledError:
            continue


def _give_back(work: "Future[T]", give_back: Callable[[T], object]) -> None:
    if not work.cancelled() and work.exception() is None:
        give_back(work.result())

"""Calls of `cascadekv.aio`: results of the blocking store; cancelled calls leak nothing."""

import asyncio
import contextlib
import gc
import re
import threading
import time

import cascadekv
import pytest
from cascadekv import PagedMemory, PutStatus, aio

MIB = 1 << 20
LAYERS, PAGES, PAGE = 3, 12, range(1000)


class Gate:
    """A stage whose reads wait for a gate, so that a test can act during a call."""

    def __init__(self):
        """Start without records."""
        self.records = {}
        self.reached = threading.Event()
        self.open = threading.Event()

    def put(self, name, record):
        """Store a copy."""
        self.records[name] = bytes(record)

    def get(self, name, into):
        """Wait for the gate, then copy the record; headers of 160 bytes are read at once."""
        if len(into) > 160:
            self.reached.set()
            self.open.wait(20)
        part = self.records[name][: len(into)]
        into[: len(part)] = part
        return len(part)

    def delete(self, names):
        """Delete records."""
        for name in names:
            self.records.pop(name, None)

    def names(self):
        """List all records."""
        return [(name, len(record)) for name, record in self.records.items()]

    def probe(self):
        """Succeed always."""


class Slow:
    """An object with one slow method: it waits for `go_on`, and its results are kept."""

    def __init__(self, wrapped, name):
        """Wrap an object whose method `name` is the slow one."""
        self.wrapped, self.name = wrapped, name
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.results = []

    def __getattr__(self, name):
        """Return a method of the wrapped object."""
        method = getattr(self.wrapped, name)
        return self._slow(method) if name == self.name else method

    def _slow(self, method):
        def call(*arguments, **keywords):
            self.begun.set()
            self.go_on.wait(20)
            # A reference, as in a traceback: only a release returns what the result holds.
            self.results.append(method(*arguments, **keywords))
            return self.results[-1]

        return call

    async def wait_until_begun(self):
        """Wait until a thread calls the slow method."""
        await asyncio.to_thread(self.begun.wait, 30)
        assert self.begun.is_set()


@pytest.fixture
def gated(keys_of, bytes_of):
    """Open a store whose only block is behind the gate."""
    gate, keys = Gate(), keys_of(range(1))
    settings = {"pipeline": "Dram|Gate", "dram": "8MiB", "huge_pages": False}
    with cascadekv.Store(**settings, stages={"Gate": gate}) as before:
        assert before.put(keys, [bytes_of(keys[0])])[0].ok
    store = cascadekv.Store(**settings, stages={"Gate": gate}, timeout="20s")
    gate.reached.clear()
    yield store, gate, keys
    gate.open.set()
    store.close()


async def reached(gate):
    await asyncio.to_thread(gate.reached.wait, 30)
    assert gate.reached.is_set()


def held_bytes(store) -> int:
    return store.stats()["pool"]["requested_bytes"]


def paged_memory():
    """Create an engine's cache: its layers, different in every byte of a page, as `PagedMemory`."""
    layers = [
        bytearray((page * 31 + layer * 7 + byte) % 251 for page in range(PAGES) for byte in PAGE)
        for layer in range(LAYERS)
    ]
    regions = [(layer, 0, len(PAGE), len(PAGE)) for layer in layers]
    return layers, PagedMemory(regions, PAGES)


def block_of(layers, page) -> bytes:
    return b"".join(layer[page * len(PAGE) : (page + 1) * len(PAGE)] for layer in layers)


def test_every_call_returns_what_the_blocking_call_returns(store, keys_of, bytes_of):
    keys = keys_of(range(4))

    async def main():
        wrapped = aio.AsyncStore(store, threads=2)
        results = await wrapped.put(keys, [bytes_of(key) for key in keys], timeout="5s")
        assert [result.status for result in results] == [PutStatus.STORED] * 4
        assert (await wrapped.lookup_prefix(keys)).blocks == 4
        async with await wrapped.view(keys) as views:
            assert views.hits == len(views) == 4
            assert bytes(views[2]) == bytes_of(keys[2])
        assert len(views) == 0
        async with await wrapped.acquire(keys) as views:
            assert views.hits == 4
        buffer = bytearray(10_000)
        assert (await wrapped.get(keys[:1], buffer))[0].ok
        assert bytes(buffer) == bytes_of(keys[0])
        assert await wrapped.contains(keys) == [True] * 4
        assert await wrapped.locate(keys[:1]) == [["dram"]]
        assert await wrapped.pin(keys[:1]) == [True]
        assert await wrapped.unpin(keys[:2]) == [True, False]
        assert await wrapped.prefetch(keys) >= 0
        await wrapped.hint(keys, hints=cascadekv.Hints(ends_session=True))
        assert (await wrapped.changes()).is_current
        assert await wrapped.delete(keys[:1]) == [True]
        await wrapped.flush(timeout=10)
        await wrapped.clear()
        assert await wrapped.contains(keys) == [False] * 4
        assert (await wrapped.stats())["puts"] >= 4
        await wrapped.close()
        await wrapped.close()
        for closed in (wrapped.view(keys), wrapped.reserve(1), wrapped.prepare(keys, 1)):
            with pytest.raises(cascadekv.ClosedError):
                await closed
        assert (await wrapped.stats())["puts"] >= 4

    asyncio.run(main())


def test_a_block_written_in_place_is_stored(store, keys_of, bytes_of):
    keys = keys_of(range(1))

    async def main():
        wrapped = aio.AsyncStore(store)
        reservation = await wrapped.reserve("10000", timeout="20s")
        with memoryview(reservation) as writer:
            writer[:] = bytes_of(keys[0])
            with pytest.raises(BufferError, match="still in use"):
                await wrapped.put_reserved(keys, [reservation])
        results = await wrapped.put_reserved(keys, [reservation], ttl="1h", timeout="20s")
        assert [result.status for result in results] == [PutStatus.STORED]
        async with await wrapped.view(keys) as views:
            assert bytes(views[0]) == bytes_of(keys[0])
        with pytest.raises(ValueError, match="already"):
            await wrapped.put_reserved(keys, [reservation])

    asyncio.run(main())


def test_pages_gathered_by_concurrent_tasks_are_sealed(store, keys_of):
    keys = keys_of(range(4))
    pages = [7, 0, 3, 4]

    async def main():
        wrapped = aio.AsyncStore(store)
        layers, memory = paged_memory()
        async with await wrapped.prepare(keys, memory.block_bytes, timeout="20s") as prepared:
            assert prepared.needed == [0, 1, 2, 3]
            await prepared.gather(memory, pages, first=0, count=1)
            with pytest.raises(ValueError, match="not gathered"):
                await prepared.seal()
            assert await wrapped.contains(keys) == [False] * 4
            rest = range(1, LAYERS)
            await asyncio.gather(*(prepared.gather(memory, pages, first=n, count=1) for n in rest))
            results = await prepared.seal(timeout="20s")
        assert [result.status for result in results] == [PutStatus.STORED] * 4
        async with await wrapped.view(keys) as views:
            for index, page in enumerate(pages):
                assert bytes(views[index]) == block_of(layers, page)
        async with await wrapped.prepare(keys, memory.block_bytes) as prepared:
            assert prepared.needed == []
            assert [result.status for result in await prepared.seal()] == [PutStatus.PRESENT] * 4

    asyncio.run(main())


def test_keywords_of_a_put_reach_every_kind_of_put(store, keys_of):
    keys = keys_of(range(1))

    async def main():
        wrapped = aio.AsyncStore(store)
        for results in (
            await wrapped.put(keys, [b"x"], last_is_partial=True),
            await wrapped.put_reserved(keys, [await wrapped.reserve(1)], last_is_partial=True),
            await (await wrapped.prepare(keys, 1, last_is_partial=True)).seal(),
        ):
            assert [result.reason for result in results] == [cascadekv.DeclineReason.PARTIAL]

    asyncio.run(main())


def test_memory_of_an_abandoned_put_returns_to_the_pool(store, keys_of, eventually):
    keys = keys_of(range(4))
    eventually(lambda: held_bytes(store) == 0)

    async def main():
        wrapped = aio.AsyncStore(store)
        memory = paged_memory()[1]
        prepared = await wrapped.prepare(keys, memory.block_bytes)
        assert held_bytes(store) == 4 * memory.block_bytes
        async with prepared:
            await prepared.gather(memory, range(4))
        eventually(lambda: held_bytes(store) == 0)
        prepared.release()
        failed = await wrapped.prepare(keys, memory.block_bytes)
        with pytest.raises(RuntimeError):
            async with failed:
                raise RuntimeError
        eventually(lambda: held_bytes(store) == 0)
        for used in (prepared, failed):
            with pytest.raises(ValueError, match="already"):
                await used.seal()
        assert await wrapped.contains(keys) == [False] * 4

    asyncio.run(main())


@pytest.mark.parametrize("phase", ["reserve", "prepare"])
def test_memory_of_a_cancelled_call_returns_to_the_pool(store, keys_of, eventually, phase):
    arguments = {"reserve": [MIB], "prepare": [keys_of(range(2)), MIB]}[phase]
    eventually(lambda: held_bytes(store) == 0)
    slow = Slow(store, phase)

    async def main():
        wrapped = aio.AsyncStore(store)
        wrapped.store = slow
        call = asyncio.create_task(getattr(wrapped, phase)(*arguments))
        await slow.wait_until_begun()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert slow.results == [], "the cancellation waited for the call"
        slow.go_on.set()
        wrapped._workers.shutdown(wait=True)  # noqa: SLF001 # waits for the call

    asyncio.run(main())
    assert len(slow.results) == 1
    eventually(lambda: held_bytes(store) == 0)


@pytest.mark.parametrize("phase", ["put_reserved", "gather", "seal"])
def test_a_cancelled_call_does_not_use_its_memory_afterwards(store, keys_of, eventually, phase):
    keys = keys_of(range(1))
    eventually(lambda: held_bytes(store) == 0)

    async def main():
        wrapped = aio.AsyncStore(store)
        memory = paged_memory()[1]
        if phase == "put_reserved":
            wrapped.store = slow = Slow(store, phase)
            running = wrapped.put_reserved(keys, [await wrapped.reserve(100)])
        else:
            prepared = await wrapped.prepare(keys, memory.block_bytes)
            await prepared.gather(memory, [0])
            prepared.prepared = slow = Slow(prepared.prepared, phase)
            running = prepared.gather(memory, [0]) if phase == "gather" else prepared.seal()
        call = asyncio.create_task(running)
        await slow.wait_until_begun()
        for _ in range(2):  # a second cancellation does not end the wait either
            call.cancel()
            await asyncio.sleep(0.05)
        assert not call.done(), "the thread still uses the memory"
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(slow.results) == 1
        # A put that a thread started is complete.
        assert store.contains(keys) == [phase != "gather"]
        if phase == "gather":
            prepared.release()

    asyncio.run(main())
    store.delete(keys)
    eventually(lambda: held_bytes(store) == 0)


def test_a_put_cancelled_in_the_queue_leaves_its_memory_to_the_caller(gated, keys_of, eventually):
    store, gate, keys = gated
    others = keys_of(range(5, 7))

    async def main():
        wrapped = aio.AsyncStore(store, threads=1)
        reservation = await wrapped.reserve(MIB)
        async with await wrapped.prepare(others[1:], 0x1000) as prepared:
            view = asyncio.create_task(wrapped.view(keys))
            await reached(gate)
            queued = [wrapped.put_reserved(others[:1], [reservation]), prepared.seal()]
            for call in [asyncio.create_task(call) for call in queued]:
                await asyncio.sleep(0.01)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert len(reservation) == MIB
            reservation.release()
        gate.open.set()
        async with await view as views:
            assert views.hits == 1
        assert await wrapped.contains(others) == [False, False]
        await wrapped.delete(keys)

    asyncio.run(main())
    eventually(lambda: held_bytes(store) == 0)


def test_errors_of_a_put_in_two_phases_name_the_argument(store, keys_of):
    keys = keys_of(range(1))

    async def main():
        wrapped = aio.AsyncStore(store)
        reservation = await wrapped.reserve(8)
        async with await wrapped.prepare(keys, 8) as prepared:
            for call, start in (
                (wrapped.reserve(-1), "size: -1 is not a size"),
                (wrapped.reserve(8, timeout="soon"), 'timeout: "soon" is not a duration'),
                (wrapped.prepare(keys, None), "size: None is not a size"),
                (wrapped.prepare(5, 8), "keys: 5 is not"),
                (wrapped.prepare(keys, 8, ttl="1 hour"), 'ttl: "hour" in "1 hour"'),
                (wrapped.put_reserved(keys, [5]), "reservations[0]: 5 is not a Reservation"),
                (wrapped.put_reserved(keys, [reservation], chain="no"), 'chain: "no" is not'),
                (prepared.gather(None, [0]), "memory: None is not a PagedMemory"),
                (prepared.gather(paged_memory()[1], [PAGES]), f"pages[0]: {PAGES}; pages are"),
                (prepared.seal(timeout=-1), "timeout: -1 is not a duration"),
            ):
                with pytest.raises((TypeError, ValueError), match="^" + re.escape(start)):
                    await call
        # An error changes nothing.
        assert (await wrapped.put_reserved(keys, [reservation]))[0].ok

    asyncio.run(main())


def test_stores_are_opened_and_connected_to(serve, keys_of):
    node = serve("--dram", "8MiB")
    keys = keys_of(range(1))

    async def main():
        async with aio.open_store(dram="8MiB", huge_pages=False) as embedded:
            assert (await embedded.put(keys, [b"here"]))[0].ok
        opened = await aio.open_store(dram="8MiB", huge_pages=False)
        await opened.close()
        async with aio.connect(node.socket, name="aio", timeout="5s") as served:
            assert (await served.put(keys, [b"there"]))[0].ok
        with pytest.raises(cascadekv.ConfigError, match="dram"):
            await aio.open_store(dram=-1)
        with pytest.raises(cascadekv.ConfigError, match="threads"):
            await aio.open_store(threads="many")
        with pytest.raises(cascadekv.AwayError):
            await aio.connect("/nonexistent/node.sock")

    asyncio.run(main())


def test_a_cancelled_view_releases_its_lease(gated, eventually):
    store, gate, keys = gated

    async def main():
        wrapped = aio.AsyncStore(store)
        view = asyncio.create_task(wrapped.view(keys))
        await reached(gate)
        view.cancel()
        with pytest.raises(asyncio.CancelledError):
            await view
        # The call is still running: the cancellation did not wait for it.
        assert not gate.open.is_set()
        gate.open.set()
        return wrapped

    wrapped = asyncio.run(main())
    eventually(lambda: store.stats()["hits"] == 1)
    store.delete(keys)
    # The block is deleted, so only a lease could hold its memory.
    eventually(lambda: held_bytes(store) == 0)
    del wrapped


def test_a_cancelled_pin_is_removed(gated):
    store, gate, keys = gated
    gate.open.set()
    assert store.view(keys).hits == 1

    async def main():
        wrapped = aio.AsyncStore(store)
        wrapped.store = slow = Slow(store, "pin")
        pin = asyncio.create_task(wrapped.pin(keys))
        await slow.wait_until_begun()
        pin.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pin
        slow.go_on.set()
        wrapped._workers.shutdown(wait=True)  # noqa: SLF001 # waits for the call

    asyncio.run(main())
    assert store.unpin(keys) == [False]


def test_a_cancelled_get_does_not_write_the_buffer_afterwards(gated, bytes_of):
    store, gate, keys = gated

    async def main():
        wrapped = aio.AsyncStore(store)
        buffer = bytearray(10_000)
        get = asyncio.create_task(wrapped.get(keys, buffer))
        await reached(gate)
        get.cancel()
        await asyncio.sleep(0.05)
        get.cancel()  # a second cancellation does not end the wait either
        await asyncio.sleep(0.05)
        assert not get.done(), "the thread still writes into the buffer"
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await get
        after = bytes(buffer)
        assert after == bytes_of(keys[0])
        buffer[:] = bytes(10_000)
        await asyncio.sleep(0.05)
        assert bytes(buffer) == bytes(10_000)

    asyncio.run(main())


def test_a_cancelled_put_stores_all_blocks_or_none(store, keys_of, bytes_of):
    async def main():
        wrapped = aio.AsyncStore(store, threads=1)
        for number in range(40):
            keys = keys_of(range(number * 8, number * 8 + 8))
            blocks = [bytearray(bytes_of(key)) for key in keys]
            put = asyncio.create_task(wrapped.put(keys, blocks))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            put.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await put
            # The buffers belong to the caller again: changes must not reach the store.
            for block in blocks:
                block[:] = bytes(len(block))
            present = store.contains(keys)
            assert all(present) or not any(present)
            with store.view(keys) as views:
                for key, view in zip(keys, views, strict=True):
                    assert view is None or bytes(view) == bytes_of(key)
                view = None
        store.clear()

    asyncio.run(main())


def test_a_cancelled_call_in_the_queue_is_never_made(gated, keys_of):
    store, gate, keys = gated
    other = keys_of(range(5, 6))

    async def main():
        wrapped = aio.AsyncStore(store, threads=1)
        view = asyncio.create_task(wrapped.view(keys))
        await reached(gate)
        put = asyncio.create_task(wrapped.put(other, [b"never"]))
        await asyncio.sleep(0.01)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        gate.open.set()
        assert (await view).hits == 1
        assert await wrapped.contains(other) == [False]

    asyncio.run(main())


def test_threads_are_bounded_and_end_with_the_store(keys_of):
    before = set(threading.enumerate())

    def threads():
        started = set(threading.enumerate()) - before
        return [t for t in started if t.name.startswith("cascade-aio")]

    async def main():
        async with aio.open_store(dram="8MiB", huge_pages=False, threads=3) as store:
            await asyncio.gather(*(store.contains(keys_of(range(1))) for _ in range(200)))
            assert 0 < len([t for t in threads() if "open" not in t.name]) <= 3

    asyncio.run(main())
    end = time.monotonic() + 30
    while threads():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_closing_the_loop_during_a_call_neither_hangs_nor_leaks_a_lease(gated, eventually):
    store, gate, keys = gated
    loop = asyncio.new_event_loop()
    wrapped = aio.AsyncStore(store)
    view = loop.create_task(wrapped.view(keys))
    loop.run_until_complete(reached(gate))
    # The task was not cancelled, as in a program that closes its loop and continues.
    loop.close()
    gate.open.set()
    eventually(lambda: store.stats()["hits"] == 1)
    view._log_destroy_pending = False  # noqa: SLF001 # asyncio would log a warning
    del view
    gc.collect()
    store.delete(keys)
    eventually(lambda: held_bytes(store) == 0)

    async def again():
        return await wrapped.contains(keys)

    assert asyncio.run(again()) == [False]


def test_an_asyncio_timeout_cancels_a_call(gated):
    store, gate, keys = gated

    async def main():
        wrapped = aio.AsyncStore(store)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await wrapped.view(keys)
        gate.open.set()
        async with await wrapped.view(keys) as views:
            assert views.hits == 1

    asyncio.run(main())


def test_a_call_on_a_stopped_node_ends_at_its_deadline(serve, keys_of):
    node = serve("--dram", "8MiB")
    keys = keys_of(range(1))

    async def main():
        async with aio.connect(node.socket, timeout="500ms") as store:
            assert (await store.put(keys, [b"block"]))[0].ok
            node.suspend()
            try:
                async with await store.view(keys) as views:
                    assert views.hits == 0
                with pytest.raises(cascadekv.CascadeError):
                    await store.reserve(100)
                async with await store.prepare(keys, 100) as prepared:
                    assert prepared.needed == []
                    assert not (await prepared.seal())[0].ok
            finally:
                node.resume()

    asyncio.run(main())

"""Calls of `cascadekv.aio`: results of the blocking store; cancelled calls leak nothing."""

import asyncio
import contextlib
import gc
import threading
import time

import cascadekv
import pytest
from cascadekv import PutStatus, aio

MIB = 1 << 20


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
        with pytest.raises(cascadekv.ClosedError):
            await wrapped.view(keys)
        assert (await wrapped.stats())["puts"] >= 4

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
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        """The store, with a slow `pin`."""

        def pin(self, wanted):
            begun.set()
            go_on.wait(20)
            return store.pin(wanted)

        def unpin(self, wanted):
            return store.unpin(wanted)

    async def main():
        wrapped = aio.AsyncStore(store)
        wrapped.store = Slow()
        pin = asyncio.create_task(wrapped.pin(keys))
        await asyncio.to_thread(begun.wait, 30)
        pin.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pin
        go_on.set()
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
    def threads():
        return [t for t in threading.enumerate() if t.name.startswith("cascade-aio")]

    async def main():
        async with aio.open_store(dram="8MiB", huge_pages=False, threads=3) as store:
            await asyncio.gather(*(store.contains(keys_of(range(1))) for _ in range(200)))
            assert 0 < len([t for t in threads() if "open" not in t.name]) <= 3

    before = len(threads())
    asyncio.run(main())
    end = time.monotonic() + 30
    while len(threads()) > before:
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
            finally:
                node.resume()

    asyncio.run(main())

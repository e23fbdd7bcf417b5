"""Threads share a store; in a forked child every call raises `ForkError`."""

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cascadekv
import pytest
from cascadekv import PutStatus, Store

MIB = 1 << 20


@pytest.fixture
def stuck_store(keys_of) -> Iterator[Store]:
    """Open a store whose write-back is stuck: its limit is one byte per second."""
    store = Store(
        pipeline="Dram|Fake",
        dram="8MiB",
        huge_pages=False,
        mover_rate=1,
        dirty_max="2MiB",
        timeout=0.1,
    )
    store.put(keys_of(range(1)), [bytes(MIB)])
    store.flush(timeout=60)
    store.put(keys_of(range(1, 2)), [bytes(MIB)])
    yield store
    with contextlib.suppress(cascadekv.DeadlineError):
        store.close()


def test_a_waiting_call_lets_other_threads_run(stuck_store):
    # Only another thread can end the wait, by closing the store. If the flush held the GIL, it
    # would run into its deadline. If closing comes first, the flush is refused at once.
    def close() -> None:
        with pytest.raises(cascadekv.DeadlineError):
            stuck_store.close()

    helper = threading.Thread(target=close)
    helper.start()
    with contextlib.suppress(cascadekv.ClosedError):
        stuck_store.flush(timeout=60)
    helper.join()


def test_a_deadline_is_kept_and_named(stuck_store):
    with pytest.raises(cascadekv.DeadlineError, match="10 ms"):
        stuck_store.flush(timeout=0.01)


def test_puts_fail_while_write_back_is_stuck(stuck_store, keys_of):
    results = [stuck_store.put(key, [bytes(MIB)], timeout=0.01)[0] for key in keys_of(range(2, 6))]
    assert results[-1].status is PutStatus.FAILED
    assert isinstance(results[-1].error, cascadekv.BusyError | cascadekv.DeadlineError)


def hammer(store, keys, blocks, seed: int, rounds: int) -> list[cascadekv.BlockKey]:
    """Put, view, get and delete at random; return the keys of blocks that were read wrong."""
    chance = random.Random(seed)
    wrong = []
    for _ in range(rounds):
        some = chance.sample(list(keys), 8)
        action = chance.randrange(4)
        if action == 0:
            store.put(some, [blocks[key] for key in some], chain=False)
        elif action == 1:
            # Views are released at once: held views would leave too little memory for others.
            with store.view(some) as views:
                found = zip(some, views, strict=True)
                wrong += [k for k, v in found if v and bytes(v) != blocks[k]]
                del found
        elif action == 2:
            buffers = [bytearray(200_000) for _ in some]
            results = store.get(some, buffers)
            triples = zip(some, results, buffers, strict=True)
            wrong += [k for k, r, b in triples if r.ok and b != blocks[k]]
        else:
            store.delete(some[:2])
    return wrong


def race(store, keys, bytes_of, rounds: int) -> None:
    blocks = {key: bytes_of(key, 200_000) for key in keys}
    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(hammer, store, keys, blocks, seed, rounds) for seed in range(4)]
        assert [thread.result() for thread in threads] == [[]] * 4
    stats = store.stats()
    assert stats["hits"] > 0
    assert stats["damaged_blocks"] == 0


def test_concurrent_threads_read_no_wrong_byte(store, keys_of, bytes_of):
    race(store, keys_of(range(128)), bytes_of, rounds=150)


@pytest.mark.stress
def test_concurrent_threads_read_no_wrong_byte_from_two_tiers(two_tiers, keys_of, bytes_of):
    race(two_tiers, keys_of(range(256)), bytes_of, rounds=2_000)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_does_not_hang(store, keys_of):
    keys = keys_of(range(1))
    store.put(keys, [b"block"])
    views = store.view(keys)
    view = views[0]
    reservation = store.reserve(100)
    prepared = store.prepare(keys_of(range(1, 2)), 100)
    memory = cascadekv.PagedMemory([(bytearray(b"x" * 100), 0, 100, 100)], 1)
    prepared.gather(memory, [0])
    child = os.fork()
    if child == 0:
        code = 3
        try:
            held = (views, view, reservation, prepared)
            code = _child_of_a_fork(store, keys, *held)
            # Deleting the parent's objects must not affect the parent either.
            del store, views, view, reservation, prepared, held
            gc.collect()
        except BaseException:  # noqa: BLE001 # any: the child must end here
            code = 3
            traceback.print_exc()
        finally:
            # In every case: an exception would run the rest of the tests in the child, too.
            os._exit(code)
    watchdog = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    watchdog.start()
    _, status = os.waitpid(child, 0)
    watchdog.cancel()
    assert os.waitstatus_to_exitcode(status) == 0
    assert bytes(view) == b"block"
    reservation.release()
    assert prepared.seal()[0].ok
    store.close()


def _child_of_a_fork(store, keys, *held) -> int:
    views, view, reservation, prepared = held
    uses = {
        "put": lambda: store.put(keys, [b"block"]),
        "view": lambda: store.view(keys),
        "stats": lambda: store.stats(),
        "close": lambda: store.close(),
        "views": lambda: len(views),
        "buffer": lambda: memoryview(view),
        "release": lambda: reservation.release(),
        "prepare": lambda: store.prepare(keys, 100),
        "seal": lambda: prepared.seal(),
        "release prepared": lambda: prepared.release(),
    }
    for name, use in uses.items():
        try:
            use()
        except cascadekv.ForkError as error:
            if "belongs to process" in str(error):
                continue
        print(f"{name} was not refused in a forked child", file=sys.stderr)
        return 1
    with Store(dram="8MiB") as own:
        return 0 if own.put(keys, [b"block"])[0].ok else 2


def _use_a_store_of_its_own(answer) -> None:
    with Store(dram="8MiB") as store:
        key = cascadekv.Namespace(cascadekv.Manifest({})).key_of_id("a")
        answer.put(store.put(key, [b"block"])[0].status.value)


def test_a_spawned_child_opens_its_own_store():
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=_use_a_store_of_its_own, args=(answer,))
    child.start()
    assert answer.get(timeout=60) == "stored"
    child.join()
    answer.close()
    answer.join_thread()

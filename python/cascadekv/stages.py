"""Stages in Python: tiers below DRAM over anything that keeps bytes by name.

A `Stage` is handed to an embedded store, `Store(pipeline="Dram|Objects", stages={"Objects": it})`,
and then keeps what leaves DRAM: in a table, an object store, another program. It sees names and
opaque records, nothing else. Each record carries its own name, key, length and checksums, and is
checked whenever it is read: a record that was cut, changed or swapped is a miss, never a wrong
byte. The same holds for whatever else a stage does: raise, return nonsense, or never return.
"""

import atexit
import errno
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from cascadekv._native import StageCall, StageCalls, check_stage
from cascadekv.errors import CascadeError

__all__ = ["Stage", "StageFullError", "check_stage"]

_JOIN_S = 1.0
"""How long the end of the interpreter waits for threads of stages that were closed."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StageFullError(CascadeError):
    """To be raised by a stage's `put` when it has no room; the store drops old blocks for it.

    `MemoryError`, and an `OSError` that says the device or the quota is full, mean the same.
    """


@runtime_checkable
class Stage(Protocol):
    """What an object needs to be a stage. It belongs to one open store at a time.

    Names have 24 characters: `cascade-` and 16 hexadecimal digits, and are never used twice. They
    sort by age. A stage may also have these, each optional:

    - `capacity_bytes: int`: how much it may take, headers included; the store then drops the oldest
      blocks that nobody asked for since. Without it, until `put` raises `StageFullError`.
    - `threads: int`: how many calls may be made at once, each on a thread of its own, up to 16.
      Default: 1; then all calls come from one thread, one after the other.
    - `flush() -> None`: returns once all that was put would survive a restart.
    - `probe() -> None`: returns if the stage works. Asked every 5 s while it is idle or was given
      up; without it, a record of 160 bytes is put, read and deleted.
    - `close() -> None`: the last call.

    All are looked at once, when the store opens. An exception is a failure, and its text is told
    by `Store.stats()` and the next `flush`; a stage that fails or hangs twice is left alone until
    it works again. A call that has not begun by its deadline is not made.
    """

    def put(self, name: str, record: memoryview, /) -> None:
        """Keep a record under a new name: a copy of it, since the view ends with the call."""
        ...

    def get(self, name: str, into: memoryview, /) -> int:
        """Copy the record's first `len(into)` bytes into `into`, and return how many there were.

        Raises `KeyError` when there is no such record. The view ends with the call.
        """
        ...

    def delete(self, names: Sequence[str], /) -> None:
        """Forget these records; names that are not there are none of its concern."""
        ...

    def names(self) -> Iterable[tuple[str, int]]:
        """Give the name and the length of every record that is there, in any order.

        Asked once, when a store opens; the store then reads the first 160 bytes of each.
        """
        ...


_lock = threading.Lock()
_threads: set[threading.Thread] = set()
_open: set[StageCalls] = set()


def start_threads(name: str, stage: Stage, calls: StageCalls, count: int) -> None:
    """Start the threads that make a stage's calls; they end when its store is closed."""
    arguments = (stage, calls)
    named = [f"cascade-{name}-{number}" for number in range(count)]
    for thread in [threading.Thread(None, _serve, each, arguments, daemon=True) for each in named]:
        with _lock:
            _open.add(calls)
            _threads.add(thread)
        thread.start()


def _serve(stage: Stage, calls: StageCalls) -> None:
    try:
        while (call := calls.next()) is not None:
            _make(stage, call)
            del call
    finally:
        with _lock:
            _threads.discard(threading.current_thread())
            _open.discard(calls)


def _make(stage: Stage, call: StageCall) -> None:
    """Make one call and say what became of it, whatever that is."""
    method = call.method
    try:
        result = getattr(stage, method)(*call.take_arguments())
        call.answer(list(result) if method == "names" else result)
    except BaseException as error:  # noqa: BLE001 # the thread goes on; the store is told
        if method == "get" and isinstance(error, KeyError):
            call.miss()
        elif method == "put" and _is_full(error):
            call.overflow()
        else:
            call.fail(f"{type(stage).__qualname__}.{method} raised {_text(error)}")


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return isinstance(error, StageFullError | MemoryError)


def _text(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception:  # noqa: BLE001 # an exception that cannot say itself
        return kind


def _forget() -> None:
    """Of a forked child neither the threads nor the stores are."""
    global _lock  # noqa: PLW0603 # another thread may have held it
    _lock = threading.Lock()
    _threads.clear()
    _open.clear()


def _at_exit(join_s: float = _JOIN_S) -> None:
    """Close what is open while Python can still run, and see its threads off."""
    with _lock:
        still_open, threads = list(_open), list(_threads)
    failures: list[Exception] = []
    for calls in still_open:
        try:
            calls.close_store()
        except CascadeError as error:
            failures.append(error)
        calls.end()
    end = time.monotonic() + join_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if failures:
        raise ExceptionGroup("stores with stages in Python were not closed in order", failures)


os.register_at_fork(after_in_child=_forget)
atexit.register(_at_exit)

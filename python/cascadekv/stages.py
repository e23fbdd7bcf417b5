"""Stages in Python: tiers below DRAM over anything that stores bytes by name.

Pass a `Stage` to an embedded store: `Store(pipeline="Dram|Objects", stages={"Objects": stage})`. It
stores the blocks that leave DRAM, for example in a table, an object store or another process. It
handles names and opaque records. Each record contains its name, key, length and checksums, and is
verified on every read: a truncated, modified or swapped record is a miss, never wrong bytes. A
stage that raises, returns an invalid value or hangs costs misses as well, never wrong bytes.
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
"""How long the interpreter's exit waits for the threads of closed stages."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StageFullError(CascadeError):
    """Raise this in `put` if the stage has no room; the store then deletes old blocks from it.

    `MemoryError`, and `OSError` with `ENOSPC` or `EDQUOT`, mean the same.
    """


@runtime_checkable
class Stage(Protocol):
    """The interface of a stage. A stage belongs to one open store at a time.

    Names have 24 characters: `cascade-` and 16 hexadecimal digits. They are never reused and sort
    by age. Optional members:

    - `capacity_bytes: int`: capacity, including headers. The store evicts the oldest blocks that
      were not read since. Default: no limit until `put` raises `StageFullError`.
    - `threads: int`: number of concurrent calls, each in its own thread, at most 16. Default: 1,
      all calls in one thread.
    - `flush() -> None`: returns once all records survive a restart.
    - `probe() -> None`: returns if the stage works. Called every 5 s while the stage is idle or its
      circuit is open. Default: a record of 160 bytes is put, read and deleted.
    - `close() -> None`: the last call.

    The members are read once, when the store opens. An exception is a failure; `Store.stats()` and
    the next `flush` report its text. After two failures or time-outs the circuit opens: the stage
    is not called until a probe succeeds. A call that has not started by its deadline is dropped.
    """

    def put(self, name: str, record: memoryview, /) -> None:
        """Store a copy of a record under a new name. The view is valid during the call only."""
        ...

    def get(self, name: str, into: memoryview, /) -> int:
        """Copy the record's first `len(into)` bytes into `into`; returns the number of bytes.

        Raises `KeyError` if the record does not exist. The view is valid during the call only.
        """
        ...

    def delete(self, names: Sequence[str], /) -> None:
        """Delete these records; ignore names that do not exist."""
        ...

    def names(self) -> Iterable[tuple[str, int]]:
        """Return the name and the length of every record, in any order.

        Called once, when a store opens; the store then reads the first 160 bytes of each record.
        """
        ...


_lock = threading.Lock()
_threads: set[threading.Thread] = set()
_open: set[StageCalls] = set()


def start_threads(name: str, stage: Stage, calls: StageCalls, count: int) -> None:
    """Start the threads that carry out a stage's calls; they end when its store is closed."""
    for number in range(count):
        # Daemons: the interpreter must be able to exit although a stage hangs.
        thread = threading.Thread(
            target=_serve, name=f"cascade-{name}-{number}", args=(stage, calls), daemon=True
        )
        with _lock:
            _open.add(calls)
            _threads.add(thread)
        thread.start()


def _serve(stage: Stage, calls: StageCalls) -> None:
    try:
        while (call := calls.next()) is not None:
            _carry_out(stage, call)
            # The call holds the record's memory; without this, until the next call comes.
            del call
    finally:
        with _lock:
            _threads.discard(threading.current_thread())
            _open.discard(calls)


def _carry_out(stage: Stage, call: StageCall) -> None:
    """Carry out one call and report its outcome, including any exception."""
    method = call.method
    try:
        result = getattr(stage, method)(*call.take_arguments())
        call.answer(list(result) if method == "names" else result)
    except BaseException as error:  # noqa: BLE001 # reported to the store; the thread continues
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
    except Exception:  # noqa: BLE001 # an exception whose __str__ raises
        return kind


def _after_fork() -> None:
    """Reset the state in a forked child, which has neither the threads nor the stores."""
    global _lock  # noqa: PLW0603 # a thread of the parent may have held the lock
    _lock = threading.Lock()
    _threads.clear()
    _open.clear()


def _at_exit(join_s: float = _JOIN_S) -> None:
    """Close open stores while Python threads can still run, then wait for the threads."""
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
        raise ExceptionGroup("stores with stages in Python were not closed cleanly", failures)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)

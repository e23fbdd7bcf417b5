"""LMCache on Cascade: an L2 adapter for LMCache's `plugin` loader.

lmcache server --l1-size-gb 60 --eviction-policy LRU --l2-adapter '{"type": "plugin",
    "module_path": "cascadekv.connectors.lmcache", "class_name": "CascadeL2Adapter",
    "adapter_params": {"cascade.node": "unix:/run/cascade/cascade.sock"}}'
"""

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cascadekv._native import BlockKey, Store
from cascadekv.connectors.failures import STORE_FAILURES, FailureLog
from cascadekv.connectors.lmcache_keys import KeySpace, Layout, layout_of
from cascadekv.connectors.lmcache_lanes import Lane, Locks
from cascadekv.connectors.settings import KEYS, PREFIX, StoreLink, read_settings
from cascadekv.connectors.weight_digests import WeightDigests, digests_place
from cascadekv.errors import AwayError, CascadeError, ConfigError
from cascadekv.messages import advice
from cascadekv.results import PutStatus

if TYPE_CHECKING:

    class L2AdapterInterface:
        """The members of LMCache's class used here; LMCache is not installed for type checks."""

        def __init__(self, max_capacity_bytes: int = 0) -> None: ...
        def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None: ...
        def _notify_keys_accessed(self, keys: list[Any]) -> None: ...
        def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None: ...

    def Bitmap(size: int) -> Any: ...  # noqa: N802 # LMCache's name
    def L2StoreResult(success: bool, bytes_transferred: int) -> Any: ...  # noqa: FBT001, N802 # LMCache's
    def create_event_notifier() -> Any: ...
else:
    try:
        from lmcache.lmcache_native import Bitmap
        from lmcache.v1.distributed.internal_api import L2StoreResult
        from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
        from lmcache.v1.platform import create_event_notifier
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise ImportError(f"Cascade's adapter requires LMCache 0.5.6: {error}") from error

__all__ = ["LOCK_TTL_S", "CascadeL2Adapter"]

logger = logging.getLogger(__name__)

WEIGHTS = "cascade.weights"
"""The key of the text that identifies the weights and the precision of the KV."""
LOCK_TTL_S = 600.0
"""A lock that LMCache does not release ends after this time, as LMCache's own write locks do."""
LOAD_THREADS = 2
"""Loads that run at once; each is one batch of the store."""


class CascadeL2Adapter(L2AdapterInterface):
    """Stores LMCache's objects in a Cascade store, embedded or served.

    Failures of the store do not reach LMCache: lookups and loads are misses, stores fail as tasks.
    Failures are counted, and logged at a limited rate. Only the constructor raises.
    """

    def __init__(self, options: Mapping[str, object], l1_memory_desc: Any = None) -> None:
        """Open the store; `options` are LMCache's `adapter_params`.

        Raises `ConfigError` that names an invalid setting, and what opening a store raises. An
        unavailable node is not an error: the connection is retried.
        """
        # Without a capacity, LMCache leaves eviction to the store.
        super().__init__(max_capacity_bytes=0)
        del l1_memory_desc
        settings = dict(options)
        weights = _take_weights(settings)
        for name in settings:
            if not name.startswith(PREFIX):
                known = [key.removeprefix(PREFIX) for key in (*KEYS, WEIGHTS)]
                raise ConfigError(f"{name}: no such setting; {advice(name, known, prefix=PREFIX)}")
        address = read_settings(settings)
        self._pid = os.getpid()
        self._timeout_s = address.timeout
        self._where = f"unix:{address.node}" if address.node else "embedded"
        self._digests = WeightDigests(digests_place(settings))
        self._keys = KeySpace(weights, self._digests)
        self._locks = Locks(LOCK_TTL_S)
        self._failures = FailureLog(logger)
        self._tasks = itertools.count()
        self._link = StoreLink(address, name="lmcache")
        if self._link.last_error is not None:
            self._failures.count("connecting", self._link.last_error)
        self._stores = self._lane("storing", 1)
        self._lookups = self._lane("looking up", 1)
        self._loads = self._lane("loading", LOAD_THREADS)

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is signalled when stores are complete."""
        return self._stores.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is signalled when lookups are complete."""
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is signalled when loads are complete."""
        return self._loads.notifier.fileno()

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects; the task succeeds if the store has all of them afterwards."""
        task = next(self._tasks)
        self._stores.submit(
            task,
            lambda deadline: self._put(keys, objects, deadline),
            failed=L2StoreResult(False, 0),  # noqa: FBT003 # LMCache's parameter
        )
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of stores that were not returned yet."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look up objects of the given layouts, and pin those that the store has."""
        task = next(self._tasks)
        self._lookups.submit(
            task, lambda _: self._look_up(keys, group_layout_descs), failed=Bitmap(len(keys))
        )
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a lookup's bitmap once; `None` while it is not complete."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Release one lock of each object. Pins in a node also end with the connection."""
        self._lookups.run(lambda: self._unlock(keys))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read objects into LMCache's memory."""
        task = next(self._tasks)
        self._loads.submit(
            task,
            lambda deadline: self._get(keys, objects, deadline),
            failed=Bitmap(len(keys)),
        )
        return task

    def query_load_result(self, task_id: int) -> Any:
        """Return a load's bitmap once; `None` while it is not complete."""
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects that are not locked, in every layout that was used for their model."""
        pairs = [
            (key, layout)
            for key in keys
            if not self._locks.is_held(key)
            for layout in self._keys.known_layouts(key)
        ]
        try:
            store = self._store()
            self._keys.check(keys)
            deleted = store.delete([self._keys.block_key(*pair) for pair in pairs])
        except STORE_FAILURES as error:
            self._failures.count("deleting", error)
            return
        gone = [pair for pair, is_deleted in zip(pairs, deleted, strict=True) if is_deleted]
        if gone:
            self._notify_keys_deleted(
                [key for key, _ in gone], [layout.size_bytes for _, layout in gone]
            )

    def report_status(self) -> dict[str, object]:
        """Return whether a store is open, where it is, and the counts of failures."""
        return {
            "is_healthy": os.getpid() == self._pid and self._link.store() is not None,
            "type": type(self).__name__,
            "store": self._where,
            "locked_key_count": len(self._locks),
            "failures": self.failures(),
        }

    def failures(self) -> dict[str, int]:
        """Return the number of failed calls, by operation."""
        return self._failures.counts()

    def close(self) -> None:
        """Finish all tasks, then close the store; later tasks fail. Stored objects are kept."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        self._digests.close()
        if os.getpid() != self._pid:
            return  # The store is the parent process's.
        try:
            self._unpin(self._locks.remove_all())
            self._link.close()
        except CascadeError as error:
            self._failures.count("closing", error)

    def _lane(self, name: str, threads: int) -> Lane[Any]:
        return Lane(
            name,
            create_event_notifier(),
            threads=threads,
            timeout_s=self._timeout_s,
            failures=self._failures,
        )

    def _store(self) -> Store:
        """Return the store; raises `AwayError` if there is none."""
        store = self._link.store() if os.getpid() == self._pid else None
        if store is None:
            raise AwayError(str(self._link.last_error or "the store is closed"))
        return store

    def _put(self, keys: list[Any], objects: list[Any], deadline: float) -> Any:
        store = self._store()
        self._keys.check(keys)
        layouts = [_layout_of_object(item) for item in objects]
        blocks = self._block_keys(keys, layouts)
        absent = [at for at, is_present in enumerate(store.contains(blocks)) if not is_present]
        if not absent:
            return L2StoreResult(True, 0)  # noqa: FBT003 # LMCache's parameter
        spaces = {self._keys.namespace(keys[at], layouts[at]).id for at in absent}
        results = store.put(
            [blocks[at] for at in absent],
            [_memory_of(objects[at], layouts[at]) for at in absent],
            chain=False,
            namespace=self._keys.namespace(keys[absent[0]], layouts[absent[0]])
            if len(spaces) == 1
            else None,
            timeout=_remaining(deadline),
        )
        new: list[int] = []
        is_complete = True
        for at, result in zip(absent, results, strict=True):
            # KV that is computed twice may differ in its last bits; the block stored first is
            # valid.
            if result.status in (PutStatus.STORED, PutStatus.DEDUPLICATED):
                new.append(at)
            elif not result.ok and result.status is not PutStatus.CONFLICT:
                is_complete = False
                self._failures.count("storing", result.error or f"declined: {result.reason}")
        sizes = [layouts[at].size_bytes for at in new]
        if new:
            self._notify_keys_stored([keys[at] for at in new], sizes)
        return L2StoreResult(is_complete, sum(sizes))

    def _look_up(self, keys: list[Any], descs: Mapping[int, Any]) -> Any:
        store = self._store()
        self._unpin(self._locks.remove_expired())
        self._keys.check(keys)
        found = Bitmap(len(keys))
        pairs = [
            (at, self._keys.block_key(key, layout))
            for at, key in enumerate(keys)
            for layout in self._layouts_to_find(key, descs)
        ]
        pinned = store.pin([block for _, block in pairs])
        rest: list[tuple[int, BlockKey]] = []
        locked: dict[int, list[BlockKey]] = {}
        for (at, block), is_pinned in zip(pairs, pinned, strict=True):
            if is_pinned:
                found.set(at)
                locked.setdefault(at, []).append(block)
            else:
                rest.append((at, block))
        for at, held in locked.items():
            self._locks.add(keys[at], held)
        # A node limits the pins of a client: a block may be present although it is not pinned.
        present = store.contains([block for _, block in rest]) if rest else []
        for (at, _), is_present in zip(rest, present, strict=True):
            if is_present:
                found.set(at)
        return found

    def _get(self, keys: list[Any], objects: list[Any], deadline: float) -> Any:
        store = self._store()
        self._keys.check(keys)
        layouts = [_layout_of_object(item) for item in objects]
        buffers = [_memory_of(item, layout) for item, layout in zip(objects, layouts, strict=True)]
        results = store.get(self._block_keys(keys, layouts), buffers, timeout=_remaining(deadline))
        loaded = Bitmap(len(keys))
        hits: list[Any] = []
        for at, (result, layout) in enumerate(zip(results, layouts, strict=True)):
            if result.ok and result.bytes == layout.size_bytes:
                loaded.set(at)
                hits.append(keys[at])
            elif result.error is not None:
                self._failures.count("loading", result.error)
        if hits:
            self._notify_keys_accessed(hits)
        return loaded

    def _block_keys(self, keys: list[Any], layouts: Sequence[Layout]) -> list[BlockKey]:
        pairs = zip(keys, layouts, strict=True)
        return [self._keys.block_key(key, layout) for key, layout in pairs]

    def _layouts_to_find(self, key: Any, descs: Mapping[int, Any]) -> list[Layout]:
        """Return the layout that LMCache asks for; if it names none, all that were used."""
        desc = descs.get(key.object_group_id)
        layout = layout_of(desc.shapes, desc.dtypes) if desc is not None else None
        return [layout] if layout is not None else self._keys.known_layouts(key)

    def _unlock(self, keys: list[Any]) -> None:
        try:
            self._unpin(self._locks.remove(keys))
        except CascadeError as error:
            self._failures.count("unlocking", error)

    def _unpin(self, blocks: list[BlockKey]) -> None:
        if blocks:
            self._store().unpin(blocks)


def _take_weights(settings: dict[str, object]) -> str | None:
    weights = settings.pop(WEIGHTS, None)
    if weights is not None and (not isinstance(weights, str) or not weights):
        raise ConfigError(f"{WEIGHTS}: {weights!r} is not text")
    return weights


def _layout_of_object(item: Any) -> Layout:
    """Return an object's layout; raises `ValueError` if its bytes are not those of the layout."""
    layout = layout_of(item.get_shapes(), item.get_dtypes())
    if layout is None or item.get_size() != layout.size_bytes:
        raise ValueError(
            f"an object of {item.get_size()} bytes has the layout {layout}; LMCache's serializers "
            f"are not supported"
        )
    return layout


def _memory_of(item: Any, layout: Layout) -> memoryview:
    """Return an object's memory; raises `ValueError` if it is not in host memory."""
    raw = item.raw_tensor
    if raw is None or raw.device.type != "cpu":
        raise ValueError("the object is not in host memory; LMCache's L1 must be in host memory")
    memory: memoryview = item.byte_array
    if len(memory) != layout.size_bytes:
        raise ValueError(f"the object has {len(memory)} bytes, not {layout.size_bytes}")
    return memory


def _remaining(deadline: float) -> float:
    """Return the seconds until a deadline; the store refuses 0."""
    return max(deadline - time.monotonic(), 0.001)

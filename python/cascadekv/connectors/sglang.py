"""SGLang's hierarchical cache on Cascade: a storage backend for its `dynamic` loader.

--enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
--hicache-storage-backend-extra-config '{"backend_name": "cascade",
    "module_path": "cascadekv.connectors.sglang", "class_name": "CascadeHiCacheStorage",
    "interface_v1": 1, "cascade.node": "unix:/run/cascade/cascade.sock"}'
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cascadekv._native import BlockKey, BlockKeys, Namespace, Store
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.host_pages import HostPages, HostPoolError
from cascadekv.connectors.settings import StoreLink, read_settings
from cascadekv.connectors.sglang_identity import engine_facts, manifests_of_pool
from cascadekv.errors import CascadeError, ConfigError
from cascadekv.results import GetStatus, PutStatus

if TYPE_CHECKING:

    class HiCacheStorage:
        """What this file uses of SGLang's class; SGLang is not where types are checked."""

        def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...
        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None: ...

    def PoolTransferResult(  # noqa: N802 # SGLang's name
        kv_hit_pages: int,
        extra_pool_hit_pages: Mapping[str, int],
        restorable_prefix_pages: list[int],
    ) -> Any: ...
else:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

__all__ = ["CascadeHiCacheStorage"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

KV = "kv"
"""SGLang's name of the pool that every other one is beside."""
SAMPLES_MAX = 4096
"""Most transfers that wait for `get_stats`; the oldest go first."""


class _PoolKeys:
    """The pages of one pool, and the keys of their pieces."""

    def __init__(self, pages: HostPages, namespaces: Sequence[Namespace]) -> None:
        self.pages = pages
        self.namespaces = namespaces
        share = pages.pieces // len(namespaces)
        self._pieces = [
            (space, f"/{piece}".encode()) for space in namespaces for piece in range(share)
        ]

    def keys(self, page_hashes: Sequence[str]) -> BlockKeys:
        """Give the keys of the pieces, page by page."""
        return BlockKeys(
            [
                space.key_of_id(page.encode() + piece)
                for page in page_hashes
                for space, piece in self._pieces
            ]
        )

    def last_key(self, page_hash: str) -> BlockKey:
        """Give the key of a page's last piece, which the next page follows."""
        space, piece = self._pieces[-1]
        return space.key_of_id(page_hash.encode() + piece)

    def by_page(self, pieces: Sequence[bool]) -> list[bool]:
        """Say which pages are whole."""
        step = self.pages.pieces
        return [all(pieces[at : at + step]) for at in range(0, len(pieces), step)]


class CascadeHiCacheStorage(HiCacheStorage):
    """Keeps the pages of SGLang's host pools in a Cascade store, embedded or served.

    No failure of the store reaches the engine: a read is a miss, a write says False, both are
    counted and logged once in a while. Only attaching raises, for what cannot work.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Open the store; `kwargs` is what the loader passes on, and unused.

        Raises `ConfigError` for settings that make no sense, naming them, and what opening a store
        raises. A node that does not answer is no error: it is asked again.
        """
        del kwargs
        self._config = storage_config
        options: Mapping[str, object] = storage_config.extra_config or {}
        address = read_settings(options)
        self._check_ranks(embedded=address.node is None)
        _check_page_hashes()
        self._moves_in_place = bool(options.get("interface_v1", 0))
        self._facts = engine_facts(storage_config.model_name)
        self._pools: dict[str, _PoolKeys] = {}
        self._has_logical_anchor = False
        self._failures = FailureLog(logger)
        self._samples = _Samples() if storage_config.enable_storage_metrics else None
        name = f"sglang tp{storage_config.tp_rank} pp{storage_config.pp_rank}"
        self._link = StoreLink(address, name=name)
        if self._link.last_error is not None:
            self._failures.count("connecting", self._link.last_error)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of KV; raises `ConfigError` for one whose pages cannot be kept."""
        super().register_mem_pool_host(mem_pool_host)
        self._has_logical_anchor = getattr(mem_pool_host, "kv_buffer", None) is None
        if not self._has_logical_anchor:
            self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool beside the KV, such as the state of linear attention."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name not in self._pools and getattr(host_pool, "layer_num", 1):
            self._register(name, host_pool)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Say how many leading pages are here, whole."""
        del extra_info
        kv = self._pools.get(KV)
        if kv is None or not keys:
            return 0

        def look_up(store: Store) -> int:
            return store.lookup_prefix(kv.keys(keys)).blocks // kv.pages.pieces

        return self._call("looking up", look_up, 0)

    def exists(self, key: str) -> bool:
        """Say whether a page is here, whole."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: Any = None,
    ) -> list[bool]:
        """Read pages into the pool of KV; True for those that are there, whole."""
        del extra_info
        if self._has_logical_anchor:
            return [True] * len(keys)
        return self._read(KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: Any = None,
    ) -> list[bool]:
        """Keep pages of the pool of KV; True for those that the store has now."""
        if self._has_logical_anchor:
            return [True] * len(keys)
        return self._write(KV, keys, host_indices, extra_info)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """Say how many leading pages can be restored with what every pool must have for them."""
        leading = len(keys) if self._has_logical_anchor else self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {KV: leading} if leading else {}
        restorable = set(range(1, leading + 1))
        for transfer in pool_transfers or ():
            policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
            if policy not in ("all_pages", "trailing_pages"):
                continue  # A verdict of its own, which never limits the KV; this store gives none.
            window = leading if policy == "all_pages" else max(1, len(transfer.keys or ()))
            present = self._present(str(transfer.name), keys[:leading])
            ends = {
                end for end in range(1, leading + 1) if all(present[max(0, end - window) : end])
            }
            if ends:
                hits[transfer.name] = max(ends)
            restorable &= ends
        stops = sorted(restorable)
        return PoolTransferResult(stops[-1] if stops else 0, hits, stops)

    def batch_get_v2(
        self,
        transfers: Sequence[Any],
        extra_info: Any = None,
    ) -> dict[str, list[bool]]:
        """Read pages into several pools."""
        del extra_info
        return {
            transfer.name: self._read(
                str(transfer.name), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    def batch_set_v2(
        self,
        transfers: Sequence[Any],
        extra_info: Any = None,
    ) -> dict[str, list[bool]]:
        """Keep pages of several pools."""
        return {
            transfer.name: self._write(
                str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page of KV into a flat tensor; `None` when it is not here."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[Any]:
        """Read pages of KV into flat tensors; `None` in place of each that is not here."""
        del target_sizes
        targets: list[Any] = list(target_locations or [])

        def copy(store: Store) -> list[Any]:
            kv = self._pool(KV)
            if len(targets) != len(keys):
                raise HostPoolError(f"{len(targets)} tensors for {len(keys)} pages")
            buffers = [piece for target in targets for piece in kv.pages.flat_memory(target)]
            found = self._fetch(store, kv, keys, buffers)
            pairs = zip(found, targets, strict=True)
            return [target if here else None for here, target in pairs]

        return self._call("reading", copy, [None] * len(keys))

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep a flat page of KV; True when the store has it now."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep flat pages of KV; True when the store has all of them now."""
        del target_locations, target_sizes
        pages: list[Any] = list(values or [])

        def keep(store: Store) -> bool:
            kv = self._pool(KV)
            if len(pages) != len(keys) or any(page is None for page in pages):
                raise HostPoolError(f"{len(pages)} tensors for {len(keys)} pages")
            whole = [page.contiguous() for page in pages]
            buffers = [piece for page in whole for piece in kv.pages.flat_memory(page)]
            return all(self._keep(store, kv, keys, buffers, None))

        return self._call("writing", keep, default=False)

    def clear(self) -> bool:
        """Forget every block of the store: with a node, all of this tenant's, whoever put them."""

        def forget(store: Store) -> bool:
            store.clear()
            return True

        return self._call("clearing", forget, default=False)

    def get_stats(self) -> Any:
        """Give what moved since the last call, as SGLang's metrics take it; `None` without them."""
        return None if self._samples is None else self._samples.take()

    def failures(self) -> dict[str, int]:
        """Give the number of calls that failed, by what they did."""
        return self._failures.counts()

    def close(self) -> None:
        """Close the store; blocks that a node or files keep stay there. Calls are misses then."""
        try:
            self._link.close()
        except CascadeError as error:
            self._failures.count("closing", error)

    def _check_ranks(self, *, embedded: bool) -> None:
        config = self._config
        if getattr(config, "dcp_size", 1) > 1:
            raise ConfigError(
                "decode context parallelism: SGLang supports it with file or mooncake"
            )
        ranks = config.tp_size * config.pp_size * config.attn_cp_size
        if embedded and ranks > 1:
            raise ConfigError(
                f"cascade.node: {ranks} ranks need one node for all (cascade serve); an embedded "
                "store is of one process"
            )

    def _register(self, name: str, pool: Any) -> None:
        config = self._config
        splits = name == KV and config.should_split_heads
        shards = config.tp_lcm_size // config.tp_size if splits else 1
        if shards > 1 and not self._moves_in_place:
            raise ConfigError('tp_lcm_size: shares of heads need "interface_v1": 1')
        pages = HostPages(pool, shards=shards)
        manifests = manifests_of_pool(
            config,
            pool,
            name=name,
            piece_bytes=pages.piece_bytes[: pages.pieces // shards],
            facts=self._facts,
            shards=shards,
        )
        missing = manifests[0].missing()
        if missing:
            raise ConfigError(f"SGLang does not tell {', '.join(missing)}; KV could be mistaken")
        self._pools[name] = _PoolKeys(pages, [Namespace(manifest) for manifest in manifests])
        how = "in place" if pages.in_place else "copied: choose a page_first layout"
        logger.info("Cascade: pool %s, layout %s, pages are %s", name, pool.layout, how)

    def _pool(self, name: str) -> _PoolKeys:
        if name not in self._pools:
            raise HostPoolError(f"the pool {name} is not registered")
        return self._pools[name]

    def _present(self, name: str, keys: list[str]) -> list[bool]:
        def look_up(store: Store) -> list[bool]:
            pool = self._pool(name)
            return pool.by_page(store.contains(pool.keys(keys)))

        return self._call("looking up", look_up, [False] * len(keys))

    def _read(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        def read(store: Store) -> list[bool]:
            pool = self._pool(name)
            pages = pool.pages
            if pages.in_place:
                return self._fetch(store, pool, keys, pages.memory(host_indices, len(keys)))
            starts = pages.starts(host_indices, len(keys))
            flat = [pages.new_page() for _ in starts]
            buffers = [piece for page in flat for piece in pages.flat_memory(page)]
            found = self._fetch(store, pool, keys, buffers)
            for start, page, here in zip(starts, flat, found, strict=True):
                if here:
                    pages.write_page(start, page)
            return found

        return self._call("reading", read, [False] * len(keys))

    def _write(
        self,
        name: str,
        keys: list[str],
        host_indices: Any,
        extra_info: Any,
    ) -> list[bool]:
        def write(store: Store) -> list[bool]:
            pool = self._pool(name)
            pages = pool.pages
            before: list[str] = getattr(extra_info, "prefix_keys", None) or []
            parent = pool.last_key(before[-1]) if before else None
            if pages.in_place:
                buffers = pages.memory(host_indices, len(keys))
            else:
                flat = [pages.read_page(at) for at in pages.starts(host_indices, len(keys))]
                buffers = [piece for page in flat for piece in pages.flat_memory(page)]
            return self._keep(store, pool, keys, buffers, parent)

        return self._call("writing", write, [False] * len(keys))

    def _fetch(
        self, store: Store, pool: _PoolKeys, keys: list[str], buffers: list[memoryview]
    ) -> list[bool]:
        started = time.monotonic()
        results = store.get(pool.keys(keys), buffers)
        failed = next((result.error for result in results if result.error is not None), None)
        if failed is not None:
            self._failures.count("reading", failed)
        # A block of fewer bytes is not this page, whatever its name says.
        found = pool.by_page(
            [
                result.status is GetStatus.HIT and result.bytes == len(buffer)
                for result, buffer in zip(results, buffers, strict=True)
            ]
        )
        if self._samples is not None:
            size = sum(pool.pages.piece_bytes)
            self._samples.add_read(sum(found), size, time.monotonic() - started)
        return found

    def _keep(
        self,
        store: Store,
        pool: _PoolKeys,
        keys: list[str],
        buffers: list[memoryview],
        parent: BlockKey | None,
    ) -> list[bool]:
        started = time.monotonic()
        pieces = pool.keys(keys)
        present = store.contains(pieces)
        first = present.index(False) if False in present else len(present)
        if first == len(present):
            return [True] * len(keys)
        results = store.put(
            pieces[first:],
            buffers[first:],
            parent=pieces[first - 1] if first else parent,
            namespace=pool.namespaces[0] if len(pool.namespaces) == 1 else None,
        )
        failed = next((result.error for result in results if result.error is not None), None)
        if failed is not None:
            self._failures.count("writing", failed)
        # Computed twice, KV may differ in its last bits; what was kept first is as right.
        kept = [result.ok or result.status is PutStatus.CONFLICT for result in results]
        if self._samples is not None:
            count = sum(kept) // pool.pages.pieces
            size = sum(pool.pages.piece_bytes)
            self._samples.add_write(count, size, time.monotonic() - started)
        return pool.by_page([True] * first + kept)

    def _call(self, what: str, action: Callable[[Store], _T], default: _T) -> _T:
        """Run a call on the store; what is wrong with that is counted, and the default given."""
        store = self._link.store()
        if store is None:
            self._failures.count(what, self._link.last_error or "the store is closed")
            return default
        try:
            return action(store)
        except (CascadeError, HostPoolError) as error:
            self._failures.count(what, error)
            return default


class _Samples:
    """Transfers since the last look, as SGLang's own metrics take them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = _Series()
        self._written = _Series()

    def add_read(self, pages: int, page_bytes: int, seconds: float) -> None:
        """Remember a read of so many pages."""
        with self._lock:
            self._read.add(pages, page_bytes, seconds)

    def add_write(self, pages: int, page_bytes: int, seconds: float) -> None:
        """Remember a write of so many pages."""
        with self._lock:
            self._written.add(pages, page_bytes, seconds)

    def take(self) -> Any:
        """Give and forget them, as SGLang's `StorageMetrics`."""
        collector: Any = importlib.import_module("sglang.srt.observability.metrics_collector")
        with self._lock:
            read, self._read = self._read, _Series()
            written, self._written = self._written, _Series()
        return collector.StorageMetrics(
            prefetch_pgs=read.pages,
            backup_pgs=written.pages,
            prefetch_bandwidth=read.gib_per_second,
            backup_bandwidth=written.gib_per_second,
        )


class _Series:
    """Transfers one way: pages of each, and its speed."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.gib_per_second: list[float] = []

    def add(self, pages: int, page_bytes: int, seconds: float) -> None:
        if pages:
            self.pages.append(pages)
            self.gib_per_second.append(pages * page_bytes / max(seconds, 1e-9) / (1 << 30))
            del self.pages[:-SAMPLES_MAX], self.gib_per_second[:-SAMPLES_MAX]


def _check_page_hashes() -> None:
    """Refuse an SGLang that names pages by their tokens alone, and so mixes up LoRA adapters."""
    hashes = importlib.import_module("sglang.srt.mem_cache.utils")
    if not hasattr(hashes, "storage_namespace_seed"):
        raise ConfigError(
            "this SGLang leaves adapters and cache salts out of the names of pages, so that their "
            "KV is mixed up; 0.5.23 does not"
        )

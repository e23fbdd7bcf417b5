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
from cascadekv.connectors.sglang_weights import RankWeights
from cascadekv.connectors.weight_digests import WeightDigests, digests_place
from cascadekv.connectors.windows import complete_windows
from cascadekv.errors import CascadeError, ConfigError
from cascadekv.results import GetStatus, PutStatus

if TYPE_CHECKING:

    class HiCacheStorage:
        """The members of SGLang's class used here; SGLang is not installed for type checks."""

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
"""SGLang's name of the main pool."""
SAMPLES_MAX = 4096
"""Most transfer samples kept for `get_stats`; the oldest are dropped."""


class _KeyedPool:
    """One host pool and the keys of its pages' pieces."""

    def __init__(self, pages: HostPages, namespaces: Sequence[Namespace]) -> None:
        self.pages = pages
        self.namespaces = namespaces
        share = pages.pieces // len(namespaces)
        self._pieces = [
            (space, f"/{piece}".encode()) for space in namespaces for piece in range(share)
        ]

    def keys(self, page_hashes: Sequence[str]) -> BlockKeys:
        """Return the keys of the pieces, page by page."""
        return BlockKeys(
            [
                space.key_of_id(page.encode() + piece)
                for page in page_hashes
                for space, piece in self._pieces
            ]
        )

    def last_key(self, page_hash: str) -> BlockKey:
        """Return the key of a page's last piece: the parent of the next page."""
        space, piece = self._pieces[-1]
        return space.key_of_id(page_hash.encode() + piece)

    def by_page(self, pieces: Sequence[bool]) -> list[bool]:
        """Return for each page whether all of its pieces are true."""
        step = self.pages.pieces
        return [all(pieces[at : at + step]) for at in range(0, len(pieces), step)]


class CascadeHiCacheStorage(HiCacheStorage):
    """Stores the pages of SGLang's host pools in a Cascade store, embedded or served.

    Failures of the store do not reach the engine: reads are misses and writes return False.
    Failures are counted, and logged at a limited rate. Only the constructor and the registration of
    pools raise, for configurations that cannot work.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Open the store. `kwargs` comes from SGLang's loader and is not used.

        Raises `ConfigError` that names an invalid setting, and what opening a store raises. An
        unavailable node is not an error: the connection is retried.
        """
        del kwargs
        self._config = storage_config
        options: Mapping[str, object] = storage_config.extra_config or {}
        address = read_settings(options)
        self._check_ranks(embedded=address.node is None)
        _check_page_hashes()
        self._moves_in_place = bool(options.get("interface_v1", 0))
        self._weights = RankWeights(WeightDigests(digests_place(options)))
        self._facts = engine_facts(storage_config.model_name, self._weights)
        self._pools: dict[str, _KeyedPool] = {}
        # A logical main pool has no memory of its own; its pages are in the additional pools.
        self._has_logical_anchor = False
        self._failures = FailureLog(logger)
        self._samples = _TransferSamples() if storage_config.enable_storage_metrics else None
        name = f"sglang tp{storage_config.tp_rank} pp{storage_config.pp_rank}"
        self._link = StoreLink(address, name=name)
        if self._link.last_error is not None:
            self._failures.count("connecting", self._link.last_error)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the main pool; raises `ConfigError` if its pages cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        self._has_logical_anchor = getattr(mem_pool_host, "kv_buffer", None) is None
        if not self._has_logical_anchor:
            self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register an additional pool, such as the state of linear attention."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name not in self._pools and getattr(host_pool, "layer_num", 1):
            self._register(name, host_pool)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are stored completely."""
        del extra_info
        kv = self._pools.get(KV)
        if kv is None or not keys:
            return 0

        def look_up(store: Store) -> int:
            return store.lookup_prefix(kv.keys(keys)).blocks // kv.pages.pieces

        return self._call("looking up", look_up, 0)

    def exists(self, key: str) -> bool:
        """Return whether a page is stored completely."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: Any = None,
    ) -> list[bool]:
        """Read pages into the main pool; True for each page that was read completely."""
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
        """Store pages of the main pool; True for each page that the store has now."""
        if self._has_logical_anchor:
            return [True] * len(keys)
        return self._write(KV, keys, host_indices, extra_info)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """Return how many leading pages can be restored, given what each pool requires for them.

        A prefix can end at a page if every pool has its window of pages before that end: all
        leading pages, or only the trailing ones, by the pool's hit policy.
        """
        leading = len(keys) if self._has_logical_anchor else self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {KV: leading} if leading else {}
        restorable = set(range(1, leading + 1))
        for transfer in pool_transfers or ():
            policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
            if policy not in ("all_pages", "trailing_pages"):
                continue  # Other policies do not limit the main pool; their hits are not reported.
            window = leading if policy == "all_pages" else max(1, len(transfer.keys or ()))
            present = self._present(str(transfer.name), keys[:leading])
            complete = complete_windows(present, lambda end, window=window: end - window)
            ends = {end for end, is_complete in enumerate(complete, 1) if is_complete}
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
        """Store pages of several pools."""
        return {
            transfer.name: self._write(
                str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page of the main pool into a flat tensor; `None` if it is not stored."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[Any]:
        """Read pages of the main pool into flat tensors; `None` for each page not stored."""
        del target_sizes
        targets: list[Any] = list(target_locations or [])

        def copy(store: Store) -> list[Any]:
            kv = self._pool(KV)
            if len(targets) != len(keys):
                raise HostPoolError(f"{len(targets)} tensors for {len(keys)} pages")
            buffers = [piece for target in targets for piece in kv.pages.flat_memory(target)]
            found = self._get_pages(store, kv, keys, buffers)
            pairs = zip(found, targets, strict=True)
            return [target if is_found else None for is_found, target in pairs]

        return self._call("reading", copy, [None] * len(keys))

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a flat page of the main pool; True if the store has it now."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages of the main pool; True if the store has all of them now."""
        del target_locations, target_sizes
        pages: list[Any] = list(values or [])

        def write(store: Store) -> bool:
            kv = self._pool(KV)
            if len(pages) != len(keys) or any(page is None for page in pages):
                raise HostPoolError(f"{len(pages)} tensors for {len(keys)} pages")
            contiguous = [page.contiguous() for page in pages]
            buffers = [piece for page in contiguous for piece in kv.pages.flat_memory(page)]
            return all(self._put_pages(store, kv, keys, buffers, None))

        return self._call("writing", write, default=False)

    def clear(self) -> bool:
        """Delete every block of the store; in a node, every block of this tenant."""

        def clear(store: Store) -> bool:
            store.clear()
            return True

        return self._call("clearing", clear, default=False)

    def get_stats(self) -> Any:
        """Return transfers since the last call as SGLang's `StorageMetrics`; `None` if disabled."""
        return None if self._samples is None else self._samples.take()

    def failures(self) -> dict[str, int]:
        """Return the number of failed calls, by operation."""
        return self._failures.counts()

    def close(self) -> None:
        """Close the store; later calls are misses. Blocks in a node or in files are kept."""
        self._weights.close()
        try:
            self._link.close()
        except CascadeError as error:
            self._failures.count("closing", error)

    def _check_ranks(self, *, embedded: bool) -> None:
        config = self._config
        if getattr(config, "dcp_size", 1) > 1:
            raise ConfigError(
                "decode context parallelism is not supported; SGLang supports it with the storage "
                "backends file and mooncake"
            )
        ranks = config.tp_size * config.pp_size * config.attn_cp_size
        if embedded and ranks > 1:
            raise ConfigError(
                f"cascade.node: {ranks} ranks need a shared node (cascade serve), because an "
                "embedded store serves one process"
            )

    def _register(self, name: str, pool: Any) -> None:
        config = self._config
        splits = name == KV and config.should_split_heads
        shards = config.tp_lcm_size // config.tp_size if splits else 1
        if shards > 1 and not self._moves_in_place:
            raise ConfigError('tp_lcm_size: splitting heads requires "interface_v1": 1')
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
            raise ConfigError(
                f"SGLang does not report {', '.join(missing)}, so KV of different engines could "
                f"not be told apart"
            )
        self._pools[name] = _KeyedPool(pages, [Namespace(manifest) for manifest in manifests])
        how = (
            "accessed in place"
            if pages.in_place
            else "copied; use a page_first layout to avoid the copy"
        )
        logger.info("Cascade: pool %s, layout %s: pages are %s", name, pool.layout, how)
        if unpinned := pages.unpinned_bytes:
            logger.warning(
                "Cascade: pool %s (%s): %d bytes are not pinned, so SGLang's copies between GPU "
                "and host are slow or fail; SGLang pins its pools when it starts: see its log for "
                "cudaHostRegister",
                name,
                type(pool).__name__,
                unpinned,
            )

    def _pool(self, name: str) -> _KeyedPool:
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
                return self._get_pages(store, pool, keys, pages.memory(host_indices, len(keys)))
            starts = pages.starts(host_indices, len(keys))
            flat = [pages.new_page() for _ in starts]
            buffers = [piece for page in flat for piece in pages.flat_memory(page)]
            found = self._get_pages(store, pool, keys, buffers)
            for start, page, is_found in zip(starts, flat, found, strict=True):
                if is_found:
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
            prefix: list[str] = getattr(extra_info, "prefix_keys", None) or []
            parent = pool.last_key(prefix[-1]) if prefix else None
            if pages.in_place:
                buffers = pages.memory(host_indices, len(keys))
            else:
                flat = [pages.read_page(at) for at in pages.starts(host_indices, len(keys))]
                buffers = [piece for page in flat for piece in pages.flat_memory(page)]
            return self._put_pages(store, pool, keys, buffers, parent)

        return self._call("writing", write, [False] * len(keys))

    def _get_pages(
        self, store: Store, pool: _KeyedPool, keys: list[str], buffers: list[memoryview]
    ) -> list[bool]:
        started = time.monotonic()
        results = store.get(pool.keys(keys), buffers)
        error = next((result.error for result in results if result.error is not None), None)
        if error is not None:
            self._failures.count("reading", error)
        # A block of another length is not this page: the rest of the buffer would be stale.
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

    def _put_pages(
        self,
        store: Store,
        pool: _KeyedPool,
        keys: list[str],
        buffers: list[memoryview],
        parent: BlockKey | None,
    ) -> list[bool]:
        started = time.monotonic()
        pieces = pool.keys(keys)
        # Leading pages are often stored already; they are not copied again.
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
        error = next((result.error for result in results if result.error is not None), None)
        if error is not None:
            self._failures.count("writing", error)
        # KV that is computed twice may differ in its last bits; the block stored first is valid.
        stored = [result.ok or result.status is PutStatus.CONFLICT for result in results]
        if self._samples is not None:
            count = sum(stored) // pool.pages.pieces
            size = sum(pool.pages.piece_bytes)
            self._samples.add_write(count, size, time.monotonic() - started)
        return pool.by_page([True] * first + stored)

    def _call(self, operation: str, action: Callable[[Store], _T], default: _T) -> _T:
        """Run an operation on the store; a failure is counted, and returns the default."""
        store = self._link.store()
        if store is None:
            self._failures.count(operation, self._link.last_error or "the store is closed")
            return default
        try:
            return action(store)
        except (CascadeError, HostPoolError) as error:
            self._failures.count(operation, error)
            return default


class _TransferSamples:
    """Transfers since the last call of `take`, in the form of SGLang's metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = _TransferSeries()
        self._written = _TransferSeries()

    def add_read(self, pages: int, page_bytes: int, seconds: float) -> None:
        """Record a read of pages."""
        with self._lock:
            self._read.add(pages, page_bytes, seconds)

    def add_write(self, pages: int, page_bytes: int, seconds: float) -> None:
        """Record a write of pages."""
        with self._lock:
            self._written.add(pages, page_bytes, seconds)

    def take(self) -> Any:
        """Return the transfers as SGLang's `StorageMetrics`, and start over."""
        collector: Any = importlib.import_module("sglang.srt.observability.metrics_collector")
        with self._lock:
            read, self._read = self._read, _TransferSeries()
            written, self._written = self._written, _TransferSeries()
        return collector.StorageMetrics(
            prefetch_pgs=read.pages,
            backup_pgs=written.pages,
            prefetch_bandwidth=read.gib_per_second,
            backup_bandwidth=written.gib_per_second,
        )


class _TransferSeries:
    """Transfers in one direction: the page count and the speed of each."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.gib_per_second: list[float] = []

    def add(self, pages: int, page_bytes: int, seconds: float) -> None:
        if pages:
            self.pages.append(pages)
            self.gib_per_second.append(pages * page_bytes / max(seconds, 1e-9) / (1 << 30))
            del self.pages[:-SAMPLES_MAX], self.gib_per_second[:-SAMPLES_MAX]


def _check_page_hashes() -> None:
    """Refuse an SGLang whose page hashes cover tokens only: KV of LoRA adapters would be mixed."""
    hashes = importlib.import_module("sglang.srt.mem_cache.utils")
    if not hasattr(hashes, "storage_namespace_seed"):
        raise ConfigError(
            "page hashes of this SGLang do not cover LoRA adapters and cache salts, so their KV "
            "would be mixed up; update SGLang to 0.5.23 or later"
        )

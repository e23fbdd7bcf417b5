"""`CascadeTier`: a store as a secondary tier of vLLM's native offload, behind its CPU tier.

vLLM copies between the GPU and its CPU tier; this tier copies between the CPU tier and the store.
It runs in the scheduler's process, whose loop must not block: background threads do lookups and
copies, and a failed or late operation is a miss.
"""

import functools
import logging
import queue
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

# First: with a vLLM that is too old, this raises a clear error, and the next import an obscure one.
from cascadekv.connectors import vllm_versions as versions

# isort: split
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from cascadekv import BlockKeys, CascadeError, Manifest, Namespace, PagedMemory, Store
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.settings import KEYS as STORE_KEYS
from cascadekv.connectors.settings import StoreLink, read_settings
from cascadekv.connectors.vllm.model_weights import NOT_DIGESTED
from cascadekv.connectors.vllm.offload import CascadeOffloadingConnector, engine_of_this_tier
from cascadekv.connectors.vllm.tier_identity import (
    WEIGHTS,
    doubt_of,
    hash_seed,
    manifest_of,
    untold_settings_warning,
)
from cascadekv.connectors.weight_digests import WeightDigests, digests_place
from cascadekv.errors import ConfigError
from cascadekv.messages import advice

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["CascadeOffloadingConnector", "CascadeTier", "manifest_of"]

_LOG = logging.getLogger("vllm.cascade")
_TENANT = "cascade.secret_file"
_KNOWN = (*STORE_KEYS, WEIGHTS, _TENANT)
COPIERS = 2
"""Number of copying threads for each direction."""
BATCH_BYTES = 64 << 20
"""Most bytes of one call, so that a job does not fill a small pool."""
_FAILURES = (CascadeError, ValueError, BufferError)


class CascadeTier(SecondaryTierManager):
    """Stores chunks of vLLM's CPU tier in a Cascade store."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        locality: str | None = None,
        **settings: object,
    ) -> None:
        """Open the store. Raises `ConfigError` that names the key of an invalid setting."""
        super().__init__(
            *versions.tier_arguments(
                offloading_spec, primary_kv_view, tier_type, backpressure_detector
            )
        )
        if (warning := versions.untested_warning()) is not None:
            _LOG.warning("Cascade: %s", warning)
        self.locality = None if locality is None else Locality(locality)
        weights, self._secret, store = _parse(settings)
        self._chunk_bytes = _chunk_bytes(primary_kv_view)
        config, engine = offloading_spec.config, engine_of_this_tier()
        self._digests = WeightDigests(digests_place(store))
        self._fields = manifest_of(config, self._chunk_bytes, weights, engine, self._digests)
        if (warning := untold_settings_warning(self._fields)) is not None:
            _LOG.warning("Cascade: %s", warning)
        self._generation = ""
        named, model = self._fields["weights"], config.model.name
        if named == NOT_DIGESTED:
            self._digests.start([model])
        if (doubt := doubt_of(model, engine, weights, named)) is not None:
            _LOG.warning("Cascade: no other engine uses the chunks of this one: %s", doubt)
            self._generation = uuid.uuid4().hex
        address = read_settings(store)
        self._timeout = address.timeout
        self._link = StoreLink(address, name=f"vllm offload {offloading_spec.config.model.name}")
        chunk = self._chunk_bytes
        chunks = len(primary_kv_view)
        self._memory: PagedMemory | None = PagedMemory([(primary_kv_view, 0, chunk, chunk)], chunks)
        self._batch = max(1, BATCH_BYTES // chunk)
        self._current_namespace: tuple[str, Namespace] | None = None
        """A generation and its namespace."""
        self._failures = FailureLog(_LOG)
        self._savers = ThreadPoolExecutor(COPIERS, thread_name_prefix="cascade-tier-save")
        self._loaders = ThreadPoolExecutor(COPIERS, thread_name_prefix="cascade-tier-load")
        self._jobs: set[Future[None]] = set()
        self._finished: queue.SimpleQueue[tuple[JobResult, list[OffloadKey]]] = queue.SimpleQueue()
        self._lookups = _StoreLookups(self._present, tier_type)

    # Calls of the scheduler, which never block.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Return the default options: chunks are offloaded as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is stored, or that the lookup is in flight."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue a copy of chunks from the CPU tier to the store."""
        self._submit(self._savers, self._save, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue a copy of chunks from the store to the CPU tier."""
        self._submit(self._loaders, self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call; chunks that failed become misses."""
        results: list[JobResult] = []
        while True:
            try:
                result, missing = self._finished.get_nowait()
            except queue.Empty:
                break
            self._lookups.mark_miss(missing)
            results.append(result)
        self._jobs = {job for job in self._jobs if not job.done()}
        return results

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """Start the lookups that this step collected."""
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Drop the lookup results of a request."""
        self._lookups.cleanup(req_context.req_id)

    def drain_jobs(self) -> None:
        """Wait for all jobs, and stop using all chunks stored so far.

        vLLM calls this when its cache is reset, which is the only sign that the weights may have
        changed. A running job ends by its own deadline. A queued one fails at once, because its
        chunks are of the generation that ends here.
        """
        self._generation = uuid.uuid4().hex
        wait(self._jobs)

    def shutdown(self) -> None:
        """End the threads, release the CPU tier's memory and close the store."""
        self._lookups.shutdown()
        self._digests.close()
        for pool in (self._savers, self._loaders):
            pool.shutdown(wait=True)
        self._memory = None
        try:
            self._link.close()
        except CascadeError as error:
            _LOG.warning("Cascade: closing the store failed: %s", error)

    # Work of the background threads.

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        copy: Callable[[Namespace, list[OffloadKey], list[int]], tuple[list[bool], int]],
        job: TransferJob,
    ) -> None:
        keys, chunks = list(job.keys), versions.job_chunks(job)
        # The namespace at the time of submission: a job must not write to a later one.
        call = functools.partial(copy, self._namespace(), keys, chunks)
        self._jobs.add(pool.submit(self._run, call, job, keys, self._generation))

    def _run(
        self,
        copy: Callable[[], tuple[list[bool], int]],
        job: TransferJob,
        keys: list[OffloadKey],
        generation: str,
    ) -> None:
        started = time.perf_counter()
        done, copied = [False] * len(keys), 0
        try:
            # A reset may have ended the generation while the job was queued.
            if generation == self._generation:
                done, copied = copy()
        except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
            # The result is reported anyway: vLLM holds the chunks of a job until then.
            _LOG.exception("Cascade: a copy failed; the engine computes instead")
            self._failures.count("copying chunks", error)
        succeeded = [key for key, is_done in zip(keys, done, strict=True) if is_done]
        missing = [key for key, is_done in zip(keys, done, strict=True) if not is_done]
        seconds = time.perf_counter() - started
        partial = succeeded if job.is_promotion and missing and succeeded else None
        result = versions.job_result(
            job_id=job.job_id,
            success=not missing,
            successful_keys=partial,
            transfer_time=seconds,
            transfer_bytes=copied,
        )
        self._finished.put((result, missing if job.is_promotion else []))

    def _save(
        self, space: Namespace, keys: list[OffloadKey], chunks: list[int]
    ) -> tuple[list[bool], int]:
        done: list[bool] = []
        copied = 0
        deadline = time.monotonic() + self._timeout
        while len(done) < len(keys):
            first, last = len(done), len(done) + self._batch
            results, written = self._save_batch(
                space, keys[first:last], chunks[first:last], deadline
            )
            copied += written
            stored = results.index(False) if False in results else len(results)
            # The pool may have room for the first chunks only; the others are tried again. If the
            # first chunk was not stored, it is skipped, so that every round makes progress.
            done += results[: max(1, stored)]
        return done, copied

    def _save_batch(
        self, space: Namespace, keys: Sequence[OffloadKey], chunks: Sequence[int], deadline: float
    ) -> tuple[list[bool], int]:
        store, left = self._link.store(), deadline - time.monotonic()
        if store is None or left <= 0 or self._memory is None:
            return [False] * len(keys), 0
        try:
            names = _names(space, keys)
            size = self._chunk_bytes
            with store.prepare(names, size, chain=False, namespace=space, timeout=left) as prepared:
                needed = len(prepared.needed)
                if needed:
                    prepared.gather(self._memory, chunks)
                results = prepared.seal(timeout=max(left, 0.01))
        except _FAILURES as error:
            self._failures.count("saving chunks", error)
            return [False] * len(keys), 0
        return [result.ok for result in results], needed * size

    def _load(
        self, space: Namespace, keys: list[OffloadKey], chunks: list[int]
    ) -> tuple[list[bool], int]:
        done = [False] * len(keys)
        deadline = time.monotonic() + self._timeout
        remaining = list(range(len(keys)))
        while remaining:
            batch, remaining = remaining[: self._batch], remaining[self._batch :]
            loaded, no_room = self._load_batch(
                space, [keys[at] for at in batch], [chunks[at] for at in batch], deadline
            )
            for at, is_loaded in zip(batch, loaded, strict=True):
                done[at] = is_loaded
            # Without any progress, a retry cannot succeed.
            if any(loaded):
                remaining = [batch[at] for at in no_room] + remaining
        return done, sum(done) * self._chunk_bytes

    def _load_batch(
        self, space: Namespace, keys: Sequence[OffloadKey], chunks: Sequence[int], deadline: float
    ) -> tuple[list[bool], list[int]]:
        """Return whether each chunk was loaded, and which chunks had no room in the pool."""
        store, left = self._link.store(), deadline - time.monotonic()
        if store is None or left <= 0 or self._memory is None:
            return [False] * len(keys), []
        try:
            with store.view(_names(space, keys), timeout=left) as views:
                loaded = views.scatter(self._memory, chunks)
                no_room = [
                    at
                    for at, is_loaded in enumerate(loaded)
                    if not is_loaded and views.error(at) is not None
                ]
        except _FAILURES as error:
            self._failures.count("loading chunks", error)
            return [False] * len(keys), []
        return loaded, no_room

    def _present(self, keys: Sequence[OffloadKey]) -> list[bool]:
        store: Store | None = self._link.store()
        if store is None:
            return [False] * len(keys)
        try:
            return store.contains(_names(self._namespace(), keys))
        except CascadeError as error:
            self._failures.count("looking up chunks", error)
            return [False] * len(keys)

    def _namespace(self) -> Namespace:
        """Return the namespace, created late: vLLM sets its hash seed after creating its tiers."""
        # Also called by the lookup thread, which may set a namespace after a reset has ended its
        # generation; that one is not used.
        generation, current = self._generation, self._current_namespace
        if current is None or current[0] != generation:
            fields = {**self._fields, "hash_seed": hash_seed()}
            if generation:
                fields["generation"] = generation
            current = generation, Namespace(Manifest(fields), self._secret)
            self._current_namespace = current
        return current[1]


class _StoreLookups(AsyncLookupManager):
    """vLLM's own manager for lookups in a background thread, over the store."""

    def __init__(self, present: Callable[[Sequence[OffloadKey]], list[bool]], tier: str) -> None:
        self._present = present
        super().__init__(tier_type=tier)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:  # noqa: ARG002
        return self._present(keys)


def _parse(settings: Mapping[str, object]) -> tuple[str, bytes | None, dict[str, object]]:
    """Return how weights are identified, the tenant's secret, and the store's keys."""
    for key in settings:
        if key not in _KNOWN:
            raise ConfigError(f"{key}: no such setting of CascadeTier; {advice(key, _KNOWN)}")
    weights: Any = settings.get(WEIGHTS, "digest")
    if not isinstance(weights, str) or not weights:
        raise ConfigError(f"{WEIGHTS}: {weights!r} is not digest, full, sampled, or a name")
    secret = None
    if _TENANT in settings:
        place: Any = settings[_TENANT]
        if not isinstance(place, str) or not Path(place).is_file():
            raise ConfigError(f"{_TENANT}: {place!r} is not an existing file")
        secret = Path(place).read_bytes().strip()
    return weights, secret, {key: v for key, v in settings.items() if key in STORE_KEYS}


def _chunk_bytes(view: memoryview) -> int:
    if view.strides is None:
        raise ValueError("the CPU tier's memory view has no strides, so its chunks are unknown")
    return view.strides[0]


def _names(space: Namespace, keys: Collection[OffloadKey]) -> BlockKeys:
    return BlockKeys([space.key_of_id(bytes(key)) for key in keys])

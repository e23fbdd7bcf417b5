"""`CascadeConnector`: vLLM's V1 interface for KV connectors, over a Cascade store.

Uses public interfaces of vLLM, and reads its list of loaded adapters. Errors of the cache do not
reach the engine: they are logged and counted, and the call returns as if nothing were cached.
"""

import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from cascadekv import Hints
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.file_changes import note_no_engine_yet
from cascadekv.connectors.hints import finish_hints, given_hints, request_hints
from cascadekv.connectors.load_or_compute import LoadOrCompute
from cascadekv.connectors.record import TraceRecorder
from cascadekv.connectors.vllm.adapters import LoadedAdapters, ReportedAdapters
from cascadekv.connectors.vllm.background import BackgroundThread
from cascadekv.connectors.vllm.engine_config import (
    load_mode,
    log_at_start,
    rank_of,
    wanted_layout,
)
from cascadekv.connectors.vllm.events import DeferredStore, EventSource
from cascadekv.connectors.vllm.groups import groups_of, windows_of
from cascadekv.connectors.vllm.guarded import guarded
from cascadekv.connectors.vllm.hbm import open_hbm
from cascadekv.connectors.vllm.identity import identity_of
from cascadekv.connectors.vllm.keys import RequestKeys, features_of, origin_of
from cascadekv.connectors.vllm.layout import HeldPart, LayoutError, describe
from cascadekv.connectors.vllm.memory import GpuPages, HostMemory, memory_of
from cascadekv.connectors.vllm.metadata import (
    Part,
    SaveResult,
    StepPlan,
    WorkerFacts,
    WorkerReport,
)
from cascadekv.connectors.vllm.metrics import CascadePromMetrics, CascadeStats
from cascadekv.connectors.vllm.namespaces import Namespaces
from cascadekv.connectors.vllm.pinned_pages import PinnedPages
from cascadekv.connectors.vllm.private_node import PrivateNode, private_socket
from cascadekv.connectors.vllm.registration import ManifestRegistration
from cascadekv.connectors.vllm.scheduler import Scheduler
from cascadekv.connectors.vllm.settings import read_connector_settings
from cascadekv.connectors.vllm.store import EngineStore
from cascadekv.connectors.vllm.transfer_setup import offered, open_transfers, transfers_between
from cascadekv.connectors.vllm.unused_settings import is_one_process
from cascadekv.connectors.vllm.worker import Worker
from cascadekv.connectors.vllm.worker_counts import WorkerCounts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from cascadekv.connectors.vllm.transfer_requests import TransferRequests
    from cascadekv.connectors.weight_digests import WeightDigests

__all__ = ["CascadeConnector"]

_LOG = logging.getLogger("vllm.cascade")
MEDIUM = "CPU"
"""The medium of blocks outside the engine, in KV events."""


class CascadeConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores the KV of prompts and outputs in a Cascade store, and loads it to avoid prefill."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Parse the settings and open the store. Raises `ConfigError` for an invalid setting."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.settings = read_connector_settings(extra)
        if role is KVConnectorRole.SCHEDULER:
            log_at_start(vllm_config, self._kv_transfer_config, self.settings)
        # The tokens of a block are split between all context parallel ranks.
        self._context_size = vllm_config.parallel_config.decode_context_parallel_size
        self._block_tokens = vllm_config.cache_config.block_size * self._context_size
        self._namespaces = Namespaces(self.settings.read_secret())
        self._scheduler: Scheduler | None = None
        self._adapters = ReportedAdapters()
        self._transfers: TransferRequests | None = None
        self._pins = PinnedPages()
        self._worker: Worker | None = None
        self._digests: WeightDigests | None = None
        self._counts = WorkerCounts(vllm_config.parallel_config.rank)
        self._parts: list[HeldPart] = []
        self._node: PrivateNode | None = None
        self._facts: WorkerFacts | None = None
        self._recorder: TraceRecorder | None = None
        self._counted_trace_drops = 0
        self._failures = FailureLog(_LOG)
        self._load_or_compute: LoadOrCompute | None = None
        self._events: EventSource | None = None
        self._event_parts: Sequence[str] = ()
        self._background: BackgroundThread | None = None
        self._events_background: BackgroundThread | None = None
        self._store = self._open()
        self._registration = ManifestRegistration(self._store.store, self._namespaces.current)

    # Both sides.

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped save costs a later miss only."""
        return False

    def shutdown(self) -> None:
        """Close the store; the first worker also ends the engine's private node."""
        threads = self._digests, self._registration, self._background, self._events_background
        for each in (self._worker, self._recorder, *threads):
            if each is not None:
                each.close()
        self._store.close()
        if self._node is not None:
            self._node.close()

    # The worker's side.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Attach the engine's KV memory."""
        try:
            self._facts = self._attach(kv_caches)
        except (LayoutError, OSError, ValueError) as reason:
            _LOG.warning("Cascade: this engine's KV is not stored: %s", reason)
            self._facts = WorkerFacts({}, [], refusal=str(reason))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's description for the scheduler."""
        return self._facts

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: the engine calls it before the step's kernels."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepPlan):
            self._worker.begin_step(connector_metadata)

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ARG002
        """Load what the step needs, and start asynchronous loads."""
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    @guarded(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return once the layer's blocks are loaded."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    @guarded(lambda: None)
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",  # noqa: ARG002
        attn_metadata: "AttentionMetadata",  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Push the layer to decode engines. The store gets all layers at the end of the step."""
        if self._worker is not None:
            self._worker.layer_computed(layer_name, self._plan())

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Save the blocks that the step computed."""
        if self._worker is not None:
            self._worker.save(self._plan())

    @guarded(lambda: (None, None))
    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002 # saves end with their step
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose pages were sent, and those whose asynchronous loads ended."""
        return self._sent(), self._arrivals()[0]

    @guarded(lambda: versions.transfer_results(set(), set()))
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Return the requests whose pages were sent, whose loads ended, and whose loads failed."""
        return versions.transfer_results(*self._arrivals(), self._sent())

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that could not be loaded; the engine computes their blocks."""
        return self._worker.take_failed_pages() if self._worker is not None else set()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the outcomes of loads and saves for the scheduler."""
        return self._worker.take_report() if self._worker is not None else None

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Receive the workers' descriptions, and start the scheduler's side."""
        facts = [it for at in sorted(metadata) if isinstance(it := metadata[at], WorkerFacts)]
        refusal = next((each.refusal for each in facts if each.refusal), None)
        cache = self._kv_cache_config
        groups, has_windows = len(cache.kv_cache_groups), bool(windows_of(cache))
        refusal = refusal or versions.unsupported_groups(groups, has_windows=has_windows)
        if refusal is None and len({_canonical(each.manifest) for each in facts}) != 1:
            refusal = "the compatibility manifests of its workers differ"
        if refusal is not None or not facts:
            reason = refusal or "no worker described its KV"
            _LOG.warning("Cascade: this engine's KV is not stored: %s", reason)
            return
        self._start_scheduler(facts)

    @guarded(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Receive the pool of the engine's pages."""
        self._pins.attach(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: "Request") -> None:
        """Start the lookup and the lookahead of a request that starts to wait."""
        if self._scheduler is None:
            return
        self._registration.start()
        self._scheduler.add_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether asynchronously."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load into the allocated blocks."""
        if self._scheduler is not None:
            self._scheduler.plan_load(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """Return how many of the loaded tokens come from each tier."""
        by_tier: dict[str, int] = {}
        if self._scheduler is not None:
            by_tier = self._scheduler.tokens_by_tier(request, num_external_tokens)
        return versions.hit_sources(by_tier, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the step's plan for the workers."""
        if self._scheduler is None:
            return StepPlan()
        return self._scheduler.plan_step(scheduler_output, self._namespaces.generation)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Apply the outcomes of earlier plans."""
        if self._transfers is not None:
            self._transfers.sent(connector_output.finished_sending or ())
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is None or not isinstance(report, WorkerReport):
            return
        self._scheduler.apply_report(report)
        if self._load_or_compute is not None:
            for each in report.times:
                self._load_or_compute.observe_load(each.tier, each.blocks, each.seconds)
            if report.prefill is not None:
                self._load_or_compute.observe_prefill(*report.prefill)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Remove a request; its blocks can be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Remove a request; its pages are kept if they are offered to a decode engine."""
        if self._scheduler is None:
            return False, None
        add_hints = functools.partial(
            finish_hints, status_name=request.status.name, stop_reason=request.stop_reason
        )
        keys = self._scheduler.finish(request, add_hints)
        if self._recorder is not None and keys is not None:
            self._recorder.record(
                input_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                keys=keys.prompt(request.num_prompt_tokens),
                arrived_unix_s=request.arrival_time,
            )
        # Last: if a call above raised, the pages would not be kept.
        return offered(
            self._transfers,
            request,
            block_ids,
            settings=(str(self._kv_transfer_config.engine_id), self.settings.transfer),
            failures=self._failures,
        )

    @guarded(lambda: False)
    def reset_cache(self) -> bool:
        """Stop using all blocks stored so far, because the weights may have changed.

        The engine uses a new namespace from then on. A shared node keeps the old blocks until they
        are evicted.
        """
        self._namespaces.renew()
        if self._scheduler is not None:
            self._scheduler.reset_keys()
        return True

    @guarded(tuple)
    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Return the blocks that were stored and removed, for vLLM's event stream."""
        return self._events.take() if self._events is not None else ()

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> CascadeStats | None:
        """Return statistics: of requests in the scheduler, of what it counts in a worker."""
        if self._scheduler is None:
            counts = self._counts.take()
            return counts and counts.named(self.settings.name)
        if self._recorder is not None:
            dropped = self._recorder.dropped
            self._scheduler.stats.count("trace_drops", dropped - self._counted_trace_drops)
            self._counted_trace_drops = dropped
        stats = self._scheduler.take_stats()
        return stats and stats.named(self.settings.name)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CascadeStats | None:
        """Create statistics from the data that another process sent."""
        return CascadeStats() if data is None else CascadeStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CascadePromMetrics:
        """Register the metrics with vLLM's endpoint."""
        return CascadePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Return the KV layout that the settings ask for; vLLM uses it if its kernels can."""
        return wanted_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers are waited for one by one: a full CUDA graph replays without the calls."""
        return read_connector_settings(extra_config).layerwise

    # Construction and callbacks.

    def _arrivals(self) -> tuple[set[str], set[str]]:
        return self._worker.arrivals() if self._worker is not None else (set(), set())

    def _open(self) -> EngineStore:
        config = self._vllm_config
        address, name = self.settings.address, f"vllm {config.model_config.served_model_name}"
        if self.role is KVConnectorRole.SCHEDULER:
            wait = self.settings.lookup_timeout
        else:
            wait = max(self.settings.load_timeout, self.settings.save_timeout)
        # Connectors of one engine, below a `MultiConnector`, may have different stores.
        options = sorted(self.settings.store_options.items())
        engine = f"{self._kv_transfer_config.engine_id} {options}"
        key = f"{engine} {'one process' if is_one_process(config) else self.role.name}"
        if address.node is None and is_one_process(config):
            return EngineStore(address, key=key, name=name)
        if self.role is KVConnectorRole.SCHEDULER:
            self._background = BackgroundThread("lookup")
        if address.node is not None:
            # A separate client for each side, because their time-outs differ.
            address = type(address)(node=address.node, token=address.token, timeout=wait)
            return EngineStore(address, key=f"{key} {self.role.name}", name=name)
        socket = private_socket(engine)
        if self.role is KVConnectorRole.WORKER and config.parallel_config.rank == 0:
            self._node = PrivateNode(socket, self.settings.store_options)
        address = type(address)(node=str(socket), timeout=wait)
        return EngineStore(address, key=key, name=name, is_private=True)

    def _attach(self, kv_caches: "dict[str, torch.Tensor]") -> WorkerFacts:
        import torch  # noqa: PLC0415 # only engines have it

        cache = self._kv_cache_config
        pieces = max(len(layer) for layer in kv_caches.values()) // cache.num_blocks
        self._parts = describe(
            cache, rank_of(self._vllm_config), self.settings.shards, pieces=pieces
        )
        first = next(iter(kv_caches.values()))
        storage = first.untyped_storage()
        for name, tensor in kv_caches.items():
            if tensor.untyped_storage().data_ptr() != storage.data_ptr():
                raise LayoutError(f"layer {name} is not in the same allocation as other layers")
        memory = torch.empty(0, dtype=torch.uint8, device=first.device)
        memory.set_(storage)
        pages = cache.num_blocks
        attached = [(held, memory_of(memory, held.regions, pages)) for held in self._parts]
        config = self._vllm_config
        manifest, doubt, self._digests = identity_of(config, cache, self.settings, pieces)
        self._namespaces.manifest = manifest
        held = self._parts, manifest, cache
        transfers = None
        if doubt is None:
            transfers = open_transfers(config, self.settings, held, memory, pieces)
        self._worker = Worker(
            self._store.store,
            self._namespaces.of,
            load_timeout=self.settings.load_timeout,
            save_timeout=self.settings.save_timeout,
            is_layerwise=self.settings.layerwise,
            hbm=open_hbm(self.settings, [memory for _, memory in attached]),
            transfers=transfers,
            adapters=LoadedAdapters(self._vllm_config, self._vllm_config.parallel_config.rank),
        )
        self._worker.attach(attached, list(cache.kv_cache_groups[0].layer_names))
        self._counts.attach((memory for _, memory in attached), transfers, self._node)
        # Launches of other devices return before the work is done: times on the host are wrong.
        is_timed = all(isinstance(memory, HostMemory | GpuPages) for _, memory in attached)
        listener = None if transfers is None else (transfers.address, transfers.id)
        return WorkerFacts(
            manifest, [it.part for it in self._parts], is_timed, listener, doubt=doubt
        )

    def _sent(self) -> set[str]:
        return self._worker.take_sent() if self._worker is not None else set()

    def _start_scheduler(self, facts: Sequence[WorkerFacts]) -> None:
        """Create the scheduler's side for the parts that the workers hold."""
        self._namespaces.manifest = facts[0].manifest
        doubt = next((each.doubt for each in facts if each.doubt), None)
        if doubt is not None:
            _LOG.warning(
                "Cascade: no other engine uses the KV of this one, nor does its next run: %s",
                doubt,
            )
            self._namespaces.renew()
        # Lite mode uses keys of its own: its blocks have no KV.
        prefix = "names only; " if self.settings.lite else ""
        parts = {
            prefix + part.name: Part(prefix + part.name, part.group, part.block_bytes)
            for each in facts
            for part in each.parts
        }
        settings = self.settings
        try:
            groups = groups_of(self._kv_cache_config, self._block_tokens, self._context_size)
        except LayoutError as reason:
            _LOG.warning("Cascade: this engine's KV is not stored: %s", reason)
            return
        self._adapters = ReportedAdapters(
            workers=len(facts),
            has_prefix_cache=bool(self._vllm_config.cache_config.enable_prefix_caching),
        )
        self._transfers = transfers_between(
            (self._vllm_config, lambda: self._namespaces.generation),
            settings,
            facts,
            (groups, self._block_tokens, self._pins, self._adapters),
            self._failures,
        )
        self._scheduler = Scheduler(
            self._store.store,
            list(parts.values()),
            groups,
            functools.partial(self._keys_of, list(parts)),
            settings.for_scheduler(load_mode(self._vllm_config, settings, groups)),
            block_tokens=self._block_tokens,
            choose=self._choose,
            hints_of=self._hints_of,
            on_saved=self._announce_saved if self._has_events() else None,
            background=self._background,
            transfers=self._transfers,
            adapters=self._adapters,
        )
        self._follow_changes(list(parts))
        block_bytes = sum(part.block_bytes for part in parts.values())
        if settings.load_or_compute and all(each.is_timed for each in facts):
            self._load_or_compute = LoadOrCompute(
                block_tokens=self._block_tokens, block_bytes=max(1, block_bytes)
            )
        if settings.record is not None:
            max_bytes, max_files = settings.record_limits
            self._recorder = TraceRecorder(
                settings.record,
                block_tokens=self._block_tokens,
                max_bytes=max_bytes,
                max_files=max_files,
            )

    def _has_events(self) -> bool:
        events = self._vllm_config.kv_events_config
        return events is not None and bool(events.enable_kv_cache_events)

    def _follow_changes(self, parts: Sequence[str]) -> None:
        """Follow the store's changes if the engine publishes KV events."""
        if not self._has_events():
            return
        self._event_parts = parts
        if self._background is not None:
            # Not the thread of lookups: a lookup waits for an answer only while that one is idle.
            self._events_background = BackgroundThread("events")
        self._events = EventSource(
            DeferredStore(self._store.store),
            block_tokens=self._block_tokens,
            medium=MEDIUM,
            background=self._events_background,
        )

    def _announce_saved(self, request: "Request", keys: RequestKeys, saved: SaveResult) -> None:
        """Pass the tokens of saved blocks to the event source."""
        if self._events is None:
            return
        first, last = saved.first, saved.first + len(saved.stored)
        runs = [keys.split(part, first, last) for part in self._event_parts]
        tokens = request.all_token_ids[first * self._block_tokens : last * self._block_tokens]
        adapter = request.lora_request
        self._events.saved(
            runs[0],
            keys.parent(self._event_parts[0], first),
            list(tokens),
            adapter and adapter.lora_int_id,
            adapter and adapter.lora_name,
            other_parts=runs[1:],
        )

    def _choose(self, tiers: Sequence[str], total_tokens: int) -> int:
        """Return how many leading blocks to load rather than to compute."""
        if self._load_or_compute is None:
            return len(tiers)
        return self._load_or_compute.choose(tiers, total_tokens=total_tokens)

    def _hints_of(self, request: "Request") -> Hints:
        """Return a request's hints; counts them, and its invalid parameters as failures."""
        params = request.kv_transfer_params
        hints, warnings = request_hints(params, priority=request.priority)
        for warning in warnings:
            reason = f"request {request.request_id}: {warning}"
            self._failures.count("reading the hints of a request", reason)
        if self._scheduler is not None:
            for name in given_hints(params):
                self._scheduler.stats.hint(name)
        return hints

    def _keys_of(self, parts: Sequence[str], request: "Request") -> RequestKeys:
        origin = origin_of(request, self._adapters.fingerprint)
        space = self._namespaces.current()
        return RequestKeys(space, parts, self._block_tokens, origin, features_of(request))

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        if not isinstance(plan, StepPlan):
            raise TypeError(f"expected a StepPlan from the scheduler, not a {type(plan).__name__}")
        return plan


def _canonical(fields: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(fields.items()))


note_no_engine_yet()
# MultiConnector finds the classes of its children by name. A second import raises ValueError.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector(
        "CascadeConnector", "cascadekv.connectors.vllm", "CascadeConnector"
    )

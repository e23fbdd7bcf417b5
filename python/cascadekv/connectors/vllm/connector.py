"""`CascadeConnector`: vLLM's V1 interface for KV connectors, over a Cascade store.

Public interface only. Every call of the engine ends here, and no fault of the cache leaves: it is
logged, counted, and answered as if nothing were cached.
"""

import contextlib
import functools
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from cascadekv import AwayError, CascadeError, Hints, Manifest, Namespace, Store
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.hints import finish_hints, request_hints
from cascadekv.connectors.load_or_compute import LoadOrCompute
from cascadekv.connectors.record import TraceRecorder
from cascadekv.connectors.vllm.background import Background
from cascadekv.connectors.vllm.engine_choices import is_one_process, load_mode, say_at_start
from cascadekv.connectors.vllm.events import EventSource, StoreOnceThere
from cascadekv.connectors.vllm.groups import groups_of
from cascadekv.connectors.vllm.identity import adapter_fingerprint, manifest_of
from cascadekv.connectors.vllm.keys import RequestKeys, origin_of
from cascadekv.connectors.vllm.layout import Held, LayoutError, Rank, describe
from cascadekv.connectors.vllm.memory import HostMemory, memory_of
from cascadekv.connectors.vllm.metadata import Part, Plan, Progress, Saved, WorkerFacts
from cascadekv.connectors.vllm.metrics import CascadePromMetrics, CascadeStats
from cascadekv.connectors.vllm.scheduler import Policy, Scheduler
from cascadekv.connectors.vllm.settings import ConnectorSettings, read_connector_settings
from cascadekv.connectors.vllm.store import (
    EngineStore,
    PrivateNode,
    private_socket,
)
from cascadekv.connectors.vllm.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["CascadeConnector"]

_LOG = logging.getLogger("vllm.cascade")
MEDIUM = "CPU"
"""What KV events call the place of blocks that are not in the engine."""
Answer = TypeVar("Answer")


def _guarded(
    default: Callable[[], Any],
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Answer `default()` where a call of the engine meets a fault of ours, which is logged."""

    def wrap(call: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(call)
        def guarded(self: "CascadeConnector", *arguments: Any, **named: Any) -> Answer:
            try:
                return call(self, *arguments, **named)
            except Exception:  # noqa: BLE001 # the engine must not fail because the cache did
                _LOG.exception("Cascade: %s failed; the engine goes on without", call.__name__)
                return default()

        return guarded

    return wrap


class CascadeConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of prompts and answers in a Cascade store, and loads it instead of computing."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Read the settings and open the store. Raises `ConfigError` for settings without sense."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.settings = read_connector_settings(extra)
        if role is KVConnectorRole.SCHEDULER:
            say_at_start(self._kv_transfer_config, self.settings)
        # A block is on all context parallel ranks, with its share of the tokens on each.
        self._context_size = vllm_config.parallel_config.decode_context_parallel_size
        self._block_tokens = vllm_config.cache_config.block_size * self._context_size
        self._secret = _secret(self.settings)
        self._manifest: dict[str, str] | None = None
        self._generation = ""
        self._spaces: dict[str, Namespace] = {}
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._held: list[Held] = []
        self._node: PrivateNode | None = None
        self._facts: WorkerFacts | None = None
        self._recorder: TraceRecorder | None = None
        self._economy: LoadOrCompute | None = None
        self._events: EventSource | None = None
        self._parts: Sequence[str] = ()
        self._introduced_to: Store | None = None
        self._background: Background | None = None
        self._store = self._open()

    # Both sides.

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing more."""
        return False

    def shutdown(self) -> None:
        """Close the store; an engine's private node ends with its first worker."""
        if self._worker is not None:
            self._worker.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._background is not None:
            self._background.close()
        self._store.close()
        if self._node is not None:
            self._node.close()

    # The worker's side.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Take the engine's KV memory."""
        try:
            self._facts = self._attach(kv_caches)
        except (LayoutError, OSError, ValueError) as why:
            _LOG.warning("Cascade: this engine's KV is not kept: %s", why)
            self._facts = WorkerFacts({}, [], refusal=str(why))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler what this worker holds."""
        return self._facts

    @_guarded(lambda: None)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ARG002
        """Load what the step needs, and begin to load what later steps need."""
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    @_guarded(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return once the layer's blocks are there."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Do nothing: blocks are copied whole when the step is over."""

    @_guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Copy what the step computed."""
        if self._worker is not None:
            self._worker.save(self._plan())

    @_guarded(lambda: (None, None))
    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002 # saves end with their step
    ) -> tuple[set[str] | None, set[str] | None]:
        """Name requests whose asynchronous loads ended."""
        return None, self._arrivals()[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Name requests whose asynchronous loads ended, and those that failed as a whole."""
        return versions.transfer_results(*self._arrivals())

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name blocks that are not there, late or damaged: the engine computes them."""
        return self._worker.bad_blocks() if self._worker is not None else set()

    @_guarded(lambda: None)
    def build_connector_worker_meta(self) -> Progress | None:
        """Tell the scheduler what became of its plan."""
        return self._worker.progress() if self._worker is not None else None

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn what the workers hold; from now on blocks are kept."""
        facts = [each for each in metadata.values() if isinstance(each, WorkerFacts)]
        refusal = next((each.refusal for each in facts if each.refusal), None)
        refusal = refusal or versions.refusal_of_groups(len(self._kv_cache_config.kv_cache_groups))
        if refusal is None and len({_canonical(each.manifest) for each in facts}) != 1:
            refusal = "its workers disagree on what their KV is"
        if refusal is not None or not facts:
            _LOG.warning("Cascade: this engine's KV is not kept: %s", refusal or "no worker said")
            return
        self._begin(facts)

    @_guarded(lambda: None)
    def on_new_request(self, request: "Request") -> None:
        """Take note of a request that begins to wait."""
        if self._scheduler is None:
            return
        if self._background is None:
            self._introduce()
        else:
            self._background.submit(self._introduce)
        self._scheduler.arrive(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded, and whether in the meantime."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    @_guarded(lambda: None)
    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that were given."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """Say from which tiers the tokens come."""
        sources: dict[Any, int] = {}
        left = num_external_tokens
        if self._scheduler is not None:
            for tier, tokens in self._scheduler.sources(request, num_external_tokens).items():
                source = versions.hit_source(tier)
                sources[source] = sources.get(source, 0) + min(tokens, left)
                left -= min(tokens, left)
        if left:
            unknown = versions.hit_source("unknown")
            sources[unknown] = sources.get(unknown, 0) + left
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Give the workers the step's plan."""
        if self._scheduler is None:
            return Plan()
        return self._scheduler.plan(scheduler_output, self._generation)

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take in what became of earlier plans."""
        progress = connector_output.kv_connector_worker_meta
        if self._scheduler is None or not isinstance(progress, Progress):
            return
        self._scheduler.learn(progress)
        if self._economy is not None:
            for loaded in progress.loaded:
                self._economy.observe_load(loaded.tier, loaded.blocks, loaded.seconds)
            if progress.prefill is not None:
                self._economy.observe_prefill(*progress.prefill)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],  # noqa: ARG002 # all that is saved was copied
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        if self._scheduler is None:
            return False, None
        finished = functools.partial(
            finish_hints, status_name=request.status.name, stop_reason=request.stop_reason
        )
        keys = self._scheduler.finish(request, finished)
        if self._recorder is not None and keys is not None:
            self._recorder.record(
                input_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                keys=keys.prompt(request.num_prompt_tokens),
                arrived_unix_s=request.arrival_time,
            )
        return False, None

    @_guarded(lambda: False)
    def reset_cache(self) -> bool:
        """Never again load what was kept up to now: the weights may be others.

        A shared node keeps the blocks under names that this engine does not ask for any more.
        """
        self._generation = uuid.uuid4().hex
        if self._scheduler is not None:
            self._scheduler.forget()
        return True

    @_guarded(tuple)
    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Tell routers which blocks came and went, in vLLM's own stream."""
        return self._events.take() if self._events is not None else ()

    @_guarded(lambda: None)
    def get_kv_connector_stats(self) -> CascadeStats | None:
        """Give the scheduler's side's figures; what workers did is in them."""
        return self._scheduler.figures() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CascadeStats | None:
        """Make figures of what crossed between processes."""
        return CascadeStats() if data is None else CascadeStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CascadePromMetrics:
        """Register the figures with vLLM's endpoint."""
        return CascadePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # How it is put together.

    def _arrivals(self) -> tuple[set[str], set[str]]:
        return self._worker.arrivals() if self._worker is not None else (set(), set())

    def _open(self) -> EngineStore:
        config = self._vllm_config
        address, name = self.settings.address, f"vllm {config.model_config.served_model_name}"
        if self.role is KVConnectorRole.SCHEDULER:
            wait = self.settings.lookup_timeout
        else:
            wait = max(self.settings.load_timeout, self.settings.save_timeout)
        engine = str(self._kv_transfer_config.engine_id)
        is_embedded = address.node is None and is_one_process(config)
        key = f"{engine} {'one process' if is_one_process(config) else self.role.name}"
        if is_embedded:
            return EngineStore(address, key=key, name=name)
        if self.role is KVConnectorRole.SCHEDULER:
            self._background = Background()
        if address.node is not None:
            # A handle for each side: their calls may take differently long.
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
        self._held = describe(cache, self._rank(), self.settings.shards, pieces=pieces)
        first = next(iter(kv_caches.values()))
        storage = first.untyped_storage()
        for name, tensor in kv_caches.items():
            if tensor.untyped_storage().data_ptr() != storage.data_ptr():
                raise LayoutError(f"layer {name} lies in a memory of its own")
        memory = torch.empty(0, dtype=torch.uint8, device=first.device)
        memory.set_(storage)
        pages = cache.num_blocks
        attached = [(each, memory_of(memory, each.regions, pages)) for each in self._held]
        manifest = manifest_of(self._vllm_config, cache, self.settings.weights, pieces)
        self._manifest = manifest
        self._worker = Worker(
            self._store.store,
            self._namespace,
            load_timeout=self.settings.load_timeout,
            save_timeout=self.settings.save_timeout,
            is_layerwise=self.settings.layerwise,
        )
        self._worker.attach(attached, list(cache.kv_cache_groups[0].layer_names))
        is_on_host = all(isinstance(memory, HostMemory) for _, memory in attached)
        return WorkerFacts(manifest, [each.part for each in self._held], is_on_host)

    def _rank(self) -> Rank:
        from vllm.distributed.parallel_state import (  # noqa: PLC0415
            get_tensor_model_parallel_rank,
        )

        model: Any = self._vllm_config.model_config
        parallel = self._vllm_config.parallel_config
        if parallel.prefill_context_parallel_size > 1:
            raise LayoutError("its prefill is context parallel, of which no layout is known here")
        context = self._context_size
        rank = get_tensor_model_parallel_rank()
        return Rank(
            rank,
            parallel.tensor_parallel_size,
            rank % context,
            context,
            1 if model.use_mla else model.get_total_num_kv_heads(),
        )

    def _begin(self, facts: Sequence[WorkerFacts]) -> None:
        self._manifest = facts[0].manifest
        prefix = "names only; " if self.settings.lite else ""
        named = {
            prefix + part.name: Part(prefix + part.name, part.group, part.block_bytes)
            for each in facts
            for part in each.parts
        }
        settings = self.settings
        policy = Policy(
            load_mode(self._vllm_config, settings),
            settings.hit_ratio,
            settings.min_tokens,
            settings.lite,
            settings.loads_max,
            settings.blocks_max,
            settings.lookahead,
            settings.lookup_timeout,
        )
        try:
            groups = groups_of(self._kv_cache_config, self._block_tokens, self._context_size)
        except LayoutError as why:
            _LOG.warning("Cascade: this engine's KV is not kept: %s", why)
            return
        self._scheduler = Scheduler(
            self._store.store,
            list(named.values()),
            groups,
            functools.partial(self._keys_of, list(named)),
            policy,
            block_tokens=self._block_tokens,
            choose=self._chosen,
            hints_of=_hints_of,
            on_saved=self._announce,
            background=self._background,
        )
        self._follow(list(named))
        block_bytes = sum(part.block_bytes for part in named.values())
        if settings.load_or_compute and all(each.is_on_host for each in facts):
            # On a device, launches return before the work is done: their times say nothing.
            self._economy = LoadOrCompute(
                block_tokens=self._block_tokens, block_bytes=max(1, block_bytes)
            )
        if settings.record is not None:
            self._recorder = TraceRecorder(settings.record, block_tokens=self._block_tokens)

    def _introduce(self) -> None:
        """Leave the manifest with the store, so that `cascade explain` can name what differs.

        A node that is away when the engine starts gets it once it is there.
        """
        store = self._store.store()
        if store is None or store is self._introduced_to:
            return
        try:
            store.register(self._namespace(self._generation))
        except AwayError:
            return
        except CascadeError as error:
            _LOG.warning("Cascade: the store did not take this engine's manifest: %s", error)
        self._introduced_to = store

    def _follow(self, parts: Sequence[str]) -> None:
        """Follow the store's changes where the engine publishes KV events."""
        events = self._vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            return
        self._parts = parts
        followed = StoreOnceThere(self._store.store)
        self._events = EventSource(followed, block_tokens=self._block_tokens, medium=MEDIUM)

    def _announce(self, request: "Request", keys: RequestKeys, saved: Saved) -> None:
        """Have the saved blocks announced."""
        if self._events is None:
            return
        first, last = saved.first, saved.first + len(saved.kept)
        runs = [keys.split(part, first, last) for part in self._parts]
        tokens = request.all_token_ids[first * self._block_tokens : last * self._block_tokens]
        adapter = request.lora_request
        self._events.saved(
            runs[0],
            keys.parent(self._parts[0], first),
            list(tokens),
            adapter and adapter.lora_int_id,
            adapter and adapter.lora_name,
            other_parts=runs[1:],
        )

    def _chosen(self, tiers: Sequence[str], total_tokens: int) -> int:
        """Say how many leading blocks are faster to load than to compute."""
        if self._economy is None:
            return len(tiers)
        return self._economy.choose(tiers, total_tokens=total_tokens)

    def _keys_of(self, parts: Sequence[str], request: "Request") -> RequestKeys:
        features = [
            (feature.mm_position.offset, feature.mm_position.length, feature.identifier)
            for feature in request.mm_features or ()
        ]
        origin = origin_of(request, adapter_fingerprint)
        space = self._namespace(self._generation)
        return RequestKeys(space, parts, self._block_tokens, origin, features)

    def _namespace(self, generation: str) -> Namespace:
        """Give the namespace; another one for every time that the engine forgot its cache."""
        if generation not in self._spaces:
            fields = dict(self._manifest or {})
            if generation:
                fields["generation"] = generation
            self._spaces = {generation: Namespace(Manifest(fields), self._secret)}
        return self._spaces[generation]

    def _plan(self) -> Plan:
        plan = self._get_connector_metadata()
        if not isinstance(plan, Plan):
            raise TypeError(f"the scheduler's side sent {type(plan).__name__}, not a plan")
        return plan


def _hints_of(request: "Request") -> Hints:
    hints, complaints = request_hints(request.kv_transfer_params, priority=request.priority)
    for complaint in complaints:
        _LOG.warning("Cascade: request %s: %s", request.request_id, complaint)
    return hints


def _canonical(fields: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(fields.items()))


def _secret(settings: ConnectorSettings) -> bytes | None:
    if settings.secret_file is None:
        return None
    with open(settings.secret_file, "rb") as file:  # noqa: PTH123 # checked by the settings
        return file.read().strip()


# MultiConnector finds its children's classes by name; a second import finds it there.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector(
        "CascadeConnector", "cascadekv.connectors.vllm", "CascadeConnector"
    )

"""An engine without a model: vLLM's own scheduler and both sides of the connector, on real tensors.

KV is a function of the tokens up to its position, so every page can be verified. A step reads every
page that attention would read. If one is wrong, the step's KV and output tokens are wrong too, as
with a real model. Answers and stored blocks are compared at the end.
"""

import contextlib
import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from cascadekv.connectors.vllm import connector as connector_module
from cascadekv.connectors.vllm.memory import memory_of
from cascadekv.connectors.vllm.metrics import CascadeStats
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_caches import config_of

BLOCK = 16
"""Tokens of a block."""
LAYERS = tuple(f"layers.{number}" for number in range(4))
HEADS, HEAD_SIZE = 2, 16
WORDS = 2 * HEAD_SIZE * 2 // 8
"""Number of 64-bit words of a token's K and V for one head, in 16-bit floats."""
VOCABULARY = 1000
MASK = (1 << 64) - 1
WRONG = 0xBADC0DE
LIMIT_S = 120
"""Time-out of a test's waits."""
PLAIN = SimpleNamespace(
    prompt_embeds=None, pooling_params=None, lora_request=None, cache_salt=None, mm_features=[]
)
_SPREAD = (
    np.arange(1, len(LAYERS) * HEADS * WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    | np.uint64(1)
).reshape(len(LAYERS), HEADS, 1, WORDS)


def states(tokens, weights=1):
    """Return a number for each position that depends on the weights and all tokens up to it."""
    state, every = weights, []
    for token in tokens:
        state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) & MASK
        every.append(state)
    return np.array(every, dtype=np.uint64)


def content(of):
    """Return the KV of positions from their states: layer, head, position, word."""
    return of[None, None, :, None] * _SPREAD


def next_token(tokens, weights=1):
    """Return the next output token."""
    return int(states(tokens, weights)[-1] >> np.uint64(40)) % VOCABULARY


def answer_of(prompt, count, weights=1):
    """Return the right answer to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, weights))
    return tokens[len(prompt) :]


@dataclass
class Row:
    """A request of a step: its tokens, its pages by group, and which positions are computed."""

    tokens: list
    tables: list
    start: int
    end: int
    is_right: bool = True


@dataclass
class Step:
    """A step in flight: the scheduler's plan and the step's output."""

    plan: object
    output: ModelRunnerOutput


@dataclass
class Facts:
    """Counters and results of an engine."""

    preemptions: int = 0
    compared_pages: int = 0
    loads_failed: int = 0
    """Pages that the worker reported as failed."""
    requests_failed: int = 0
    """Requests whose load failed as a whole."""
    answers: dict = field(default_factory=dict)
    finished: dict = field(default_factory=dict)
    params: dict = field(default_factory=dict)
    """By finished request: the `kv_transfer_params` of its response."""


class ScheduledEngine:
    """One engine; `memory` selects how its pages are copied, as on a host or as on a device."""

    def __init__(
        self,
        model,
        store,
        *,
        memory=memory_of,
        pages=64,
        is_async_scheduling=False,
        has_prefix_cache=False,
        has_events=False,
        policy="recompute",
        step_tokens=64,
        block=BLOCK,
        windows=(None,),
    ):
        """Start it; `store` are settings of the connector.

        `windows` are the sliding windows of its groups of layers, `None` for full attention.
        """
        self.block, self.windows = block, windows
        self.weights = 1
        """A number that stands for the weights of the model; all KV depends on it."""
        arguments = EngineArgs(
            model=str(model),
            dtype="bfloat16",
            block_size=block,
            max_model_len=512,
            max_num_batched_tokens=step_tokens,
            max_num_seqs=8,
            enforce_eager=True,
            enable_prefix_caching=has_prefix_cache,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=has_events, publisher="null"),
            kv_transfer_config={
                "kv_connector": "CascadeConnector",
                "kv_connector_module_path": "cascadekv.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "cascade.load_or_compute": False,
                    # Nothing is loaded: the files may be younger than this process.
                    "cascade.weights": "of a scheduled engine",
                    **store,
                },
            },
        )
        self.config = arguments.create_engine_config()
        # vLLM disables it on CPUs; the scheduler's part of it works anywhere.
        self.config.scheduler_config.async_scheduling = is_async_scheduling
        self.config.cache_config.num_gpu_blocks = pages
        cache = _cache(block, windows, pages)
        tensors = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.LBHNC)
        self._kv = [each.view(torch.int64).numpy().view(np.uint64) for each in tensors.values()]
        hasher = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hasher)
        self._hasher = get_request_block_hasher(block, hasher)
        with _memory(memory):
            role = KVConnectorRole.WORKER
            self.worker = KVConnectorFactory.create_connector(self.config, role, cache)
            self.worker.register_kv_caches(tensors)
        kind = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        handshake = {(0, 0): self.worker.get_handshake_metadata()}
        self.connector.set_xfer_handshake_metadata_pp_aware(handshake)
        self.depth = self.config.max_concurrent_batches
        """Number of steps in flight."""
        self._queue = deque()
        self._running = {}
        self._requested = {}
        self._weights = {}
        """By finished request: the weights at its end."""
        self._bad_pages = set()
        """Pages whose load failed and that are not computed yet; other requests may share them."""
        self._serial = 0
        self.is_loading = False
        """Whether the current step's plan has loads."""
        self.between = lambda: None
        """Called between the planning and the execution of a step."""
        self.facts = Facts()
        self._figures = CascadeStats()

    # Calls of tests.

    def add(self, prompt, new=6, hints=None, name=None):
        """Submit a request; returns its name. `hints` are its `kv_transfer_params`."""
        self._serial += 1
        name = name or f"request-{self._serial}"
        extra = {"kv_transfer_params": hints} if hints else None
        params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, extra_args=extra)
        params.update_from_generation_config({}, None)
        request = Request(name, list(prompt), params, None, block_hasher=self._hasher)
        self._requested[name] = (list(prompt), new)
        self.facts.answers[name] = []
        self.scheduler.add_request(request)
        return name

    def abort(self, name):
        """Abort a request."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._requested.pop(name, None)

    def run(self, seconds=LIMIT_S):
        """Step until all requests are finished."""
        end = time.monotonic() + seconds
        while self.scheduler.has_requests() or self._queue:
            assert time.monotonic() < end, f"requests hang: {self.scheduler.requests}"
            self.step()

    def step(self):
        """Run one step as the engine's core does, with or without a queue of steps."""
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self.facts.preemptions += len(plan.preempted_req_ids or ())
            self.is_loading = bool(plan.kv_connector_metadata.loads)
            self.between()
            self._queue.append(Step(plan, self._execute(plan)))
            is_idle = not plan.total_num_scheduled_tokens
            if is_idle:
                time.sleep(0.001)
            if len(self._queue) < self.depth and not is_idle:
                return
        if self._queue:
            done = self._queue.popleft()
            outputs = self.scheduler.update_from_output(done.plan, done.output)
            self._note(outputs)
            for each in outputs.get(0).outputs if outputs.get(0) else ():
                self.facts.answers[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.facts.finished[each.request_id] = each.finish_reason
                    self._weights[each.request_id] = self.weights
                    self.facts.params[each.request_id] = each.kv_transfer_params
            self.compare_running()

    def ask(self, *prompts, new=6):
        """Serve prompts together; raises if an answer or a page is wrong."""
        names = [self.add(prompt, new) for prompt in prompts]
        self.run()
        self.check()
        return names

    def check(self):
        """Compare answers with the right ones, and check that all blocks are free."""
        for name, (prompt, new) in self._requested.items():
            right = answer_of(prompt, new, self._weights.get(name, self.weights))
            assert self.facts.answers[name] == right, name
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are leaked"
        self._requested.clear()

    def reset_prefix_cache(self):
        """Empty the engine's own prefix cache, so that blocks are loaded from the store."""
        assert self.scheduler.reset_prefix_cache()

    def has_loads_in_flight(self):
        """Whether steps are in flight, or a request that is not running holds blocks."""
        manager = self.scheduler.kv_cache_manager
        holds = any(
            manager.get_block_ids(name)[0]
            for name, each in self.scheduler.requests.items()
            if each.status != RequestStatus.RUNNING
        )
        return holds or bool(self._queue)

    def keys(self, prompt):
        """Return the keys of a prompt's blocks."""
        (part,) = self.connector._scheduler._parts  # noqa: SLF001 # there is one
        keys = self.connector._keys_of([part.name], PLAIN)  # noqa: SLF001
        return keys.keys(part.name, 0, keys.extend(list(prompt)))

    def store(self):
        """Return the engine's store."""
        return self.connector._store.store()  # noqa: SLF001

    def stored(self, prompt):
        """Return whether each block of a prompt is stored; raises if one is wrong."""
        right = content(states(prompt, self.weights))
        with self.store().view(self.keys(prompt), timeout=LIMIT_S) as views:
            for at, view in enumerate(views):
                if view is not None:
                    own = np.frombuffer(bytes(view), np.uint64)
                    want = right[:, :, at * self.block : (at + 1) * self.block]
                    assert np.array_equal(own.reshape(want.shape), want), f"block {at} is wrong"
                    self.facts.compared_pages += 1
            return [view is not None for view in views]

    def take_figures(self):
        """Return the connector's statistics since the last call."""
        taken, self._figures = self._figures, CascadeStats()
        return taken.data

    def stop(self):
        """End the engine."""
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _note(self, outputs):
        """Collect the statistics that vLLM would send to its metrics."""
        for each in outputs.values():
            stats = each.scheduler_stats and each.scheduler_stats.kv_connector_stats
            if stats:
                self._figures = self._figures.aggregate(CascadeStats(stats))

    # The model runner's part.

    def compare_running(self):
        """Compare the pages of every running request with the KV of its tokens."""
        for request in self.scheduler.running:
            tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            done = request.num_computed_tokens - request.num_in_flight_tokens
            tokens = request.all_token_ids[: max(0, done)]
            assert self._is_right(list(tokens), tables), request.request_id

    def _is_right(self, tokens, tables):
        """Whether the pages of the tables hold the KV of these tokens, as far as it is needed."""
        right = content(states(tokens, self.weights))
        self.facts.compared_pages += -(-len(tokens) // self.block)
        return all(
            np.array_equal(own[page][:, first : first + count], right[layer][:, at : at + count])
            for layer, own in enumerate(self._kv)
            for page, at, first, count in self._spans(
                tables, layer, self._first_seen(layer, len(tokens)), len(tokens)
            )
            if page not in self._bad_pages
        )

    def _group(self, layer):
        """Return the number of a layer's group."""
        return layer * len(self.windows) // len(LAYERS)

    def _first_seen(self, layer, position):
        """Return the first position that a token at a position sees in a layer."""
        window = self.windows[self._group(layer)]
        return 0 if window is None else max(0, position - window + 1)

    def _spans(self, tables, layer, start, end):
        """Split positions into runs within a page: page, first position, place, and count."""
        table, at = tables[self._group(layer)], start
        while at < end:
            count = min(self.block - at % self.block, end - at)
            yield table[at // self.block], at, at % self.block, count
            at += count

    def _execute(self, plan):
        """Run a step: loads, layers in their order, saves, and the results."""
        rows = self._rows(plan)
        self.worker.bind_connector_metadata(plan.kv_connector_metadata)
        loads_first = plan.has_sync_kv_loads
        if loads_first:
            self.worker.start_load_kv(None)
        sampled = self._forward(rows)
        if not loads_first:
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(plan.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.facts.loads_failed += len(output.invalid_block_ids)
        self.facts.requests_failed += len(output.failed_recving or ())
        self._bad_pages |= output.invalid_block_ids
        self.worker.clear_connector_metadata()
        names = list(rows)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=output,
        )

    def _rows(self, plan):
        """Return the requests of a step, with the tokens that vLLM's model runner would have."""
        computed = {}
        for new in plan.scheduled_new_reqs:
            self._running[new.req_id] = self._known(new.req_id)
            computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                self._running[name] = self._known(name)
            else:
                # Tokens that were computed from a failed load were discarded.
                prompt = self.scheduler.requests[name].num_prompt_tokens
                del self._running[name][prompt + cached.num_output_tokens[at] :]
            computed[name] = cached.num_computed_tokens[at]
        rows = {}
        for name, count in plan.num_scheduled_tokens.items():
            tables = [list(table) for table in self._tables(name)]
            start = computed[name]
            rows[name] = Row(self._running[name], tables, start, start + count)
            assert start + count <= len(self._running[name]), f"{name}: unknown tokens"
        return rows

    def _tables(self, name):
        return self.scheduler.kv_cache_manager.get_block_ids(name)

    def _known(self, name):
        return list(self.scheduler.requests[name].all_token_ids)

    def _forward(self, rows):
        """Compute a step layer by layer; returns the sampled tokens."""
        right = {
            name: content(states(row.tokens[: row.end], self.weights)) for name, row in rows.items()
        }
        for layer, name_of_layer in enumerate(LAYERS if rows else ()):
            self.worker.wait_for_layer_load(name_of_layer)
            own = self._kv[layer]
            # As in attention: all requests write their own positions, then all read.
            for name, row in rows.items():
                for page, at, first, count in self._spans(row.tables, layer, row.start, row.end):
                    assert page, f"{name}: no page to write to"
                    want = right[name][layer][:, at : at + count]
                    own[page][:, first : first + count] = want if row.is_right else WRONG
                    self._bad_pages.discard(page)
            for name, row in rows.items():
                seen = self._first_seen(layer, row.start)
                for page, at, first, count in self._spans(row.tables, layer, seen, row.start):
                    want = right[name][layer][:, at : at + count]
                    there = own[page][:, first : first + count]
                    row.is_right = row.is_right and np.array_equal(there, want)
            self.worker.save_kv_layer(name_of_layer, None, None)
        sampled = {}
        for name, row in rows.items():
            sampled[name] = []
            if row.end == len(row.tokens):
                token = next_token(row.tokens, self.weights) if row.is_right else VOCABULARY
                row.tokens.append(token)
                sampled[name] = [token]
        return sampled


def _cache(block, windows, pages):
    """Describe the cache of an engine: one allocation, whose layers are split between groups."""
    sizes = {"num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    full = FullAttentionSpec(block_size=block, **sizes)
    specs = [
        full if w is None else SlidingWindowSpec(block_size=block, sliding_window=w, **sizes)
        for w in windows
    ]
    each = len(LAYERS) // len(windows)
    groups = [
        KVCacheGroupSpec(list(LAYERS[at * each : (at + 1) * each]), spec)
        for at, spec in enumerate(specs)
    ]
    return dataclasses.replace(config_of(LAYERS, full, "LBHNC", pages), kv_cache_groups=groups)


@contextlib.contextmanager
def _memory(kind):
    """Make the worker's side use this class of memory."""
    chosen = connector_module.memory_of
    connector_module.memory_of = kind
    try:
        yield
    finally:
        connector_module.memory_of = chosen

"""The scheduler's side: looks up the blocks of requests, and plans loads and saves.

Each request is looked up once, in one batch and with a deadline; a late result is a miss. Results
are cached for a short time, because the engine asks again in every step while a request waits. A
node is queried by a background thread; the engine defers the request until the result is there.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING

from cascadekv import CascadeError, Hints, Store, part_of_trace
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.adapters import ReportedAdapters
from cascadekv.connectors.vllm.background import BackgroundThread
from cascadekv.connectors.vllm.groups import (
    CacheGroup,
    UsablePrefix,
    lacks_pages,
    pages_of,
    usable_prefix,
)
from cascadekv.connectors.vllm.keys import RequestKeys, UnkeyableRequest
from cascadekv.connectors.vllm.metadata import (
    SLOW_TIERS,
    Load,
    Part,
    Save,
    SaveResult,
    StepPlan,
    WorkerReport,
)
from cascadekv.connectors.vllm.metrics import CascadeStats
from cascadekv.connectors.vllm.offers import PullPlan, PushPlan
from cascadekv.connectors.vllm.settings import SchedulerSettings
from cascadekv.connectors.vllm.store_calls import StoreCalls
from cascadekv.connectors.vllm.tasks import log_hits
from cascadekv.connectors.vllm.tracked import LookupResult, PendingLookup, TrackedRequest
from cascadekv.connectors.vllm.transfer_requests import TransferRequests
from cascadekv.connectors.vllm.unkeyed import UnkeyedRequests
from cascadekv.connectors.windows import next_computed_token

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Scheduler", "SchedulerSettings"]

_LOG = logging.getLogger("vllm.cascade")
LOOKUP_WAIT_S = 0.002
"""How long the scheduler's thread waits for a node's result, if no other call is queued."""
FINISHED_MAX = 256
"""Requests that are remembered after their end, if KV events are published."""
PEERS = "peers"
"""The name of the tier of pages in another engine."""
SAVE_RETRY_S = 5.0
"""Delay before a request's blocks are saved again after a save that stored none of them."""


class Scheduler:
    """The scheduler's side for one engine. Called from the scheduler's thread only."""

    def __init__(  # noqa: PLR0913 # each is independent
        self,
        store: Callable[[], Store | None],
        parts: Sequence[Part],
        groups: Sequence[CacheGroup],
        keys_of: Callable[["Request"], RequestKeys],
        settings: SchedulerSettings,
        *,
        block_tokens: int,
        choose: Callable[[Sequence[str], int], int],
        hints_of: Callable[["Request"], Hints],
        on_saved: Callable[["Request", RequestKeys, SaveResult], None] | None = None,
        background: BackgroundThread | None = None,
        transfers: TransferRequests | None = None,
        adapters: ReportedAdapters | None = None,
    ) -> None:
        """`choose` returns how many of the found blocks to load rather than to compute.

        `background` makes the calls to a node; an embedded store is called directly. `transfers`
        has the offers of prefill engines; `adapters` are those that the workers have loaded.
        """
        self._store = store
        self._parts = list(parts)
        self._groups = list(groups)
        self._has_windows = any(group.window is not None for group in groups)
        self._keys_of = keys_of
        self._settings = settings
        self._block_tokens = block_tokens
        self._choose = choose
        self._hints_of = hints_of
        self._on_saved = on_saved
        self._background = background
        self._transfers = transfers
        self._adapters = adapters or ReportedAdapters()
        self._unkeyed = UnkeyedRequests(self._adapters)
        self._calls = StoreCalls(store, self._parts)
        self._tracked: dict[str, TrackedRequest] = {}
        self._finished: dict[str, TrackedRequest] = {}
        """The last requests that finished, for saves of GPUs that end after their request."""
        self._loads: list[Load] = []
        """Loads for the next plan."""
        self._last_plan = self._completed_plan = self._reset_plan = 0
        self._async_blocks: dict[str, int] = {}
        """Number of blocks of each asynchronous load in flight, by request."""
        self._failures = FailureLog(_LOG)
        self.stats = CascadeStats()

    def add_request(self, request: "Request") -> None:
        """Start the lookup and the lookahead of a request that starts to wait.

        Lookahead prefetches its blocks, and keeps those in memory there for a bounded time.
        """
        if not self._unkeyed.add(request, self._last_plan):
            self._start(request)

    def _start(self, request: "Request") -> None:
        if self._transfers is not None:
            self._transfers.add(request)
        tracked = self._track(request)
        if tracked is None or not tracked.keys.blocks or not self._is_long_enough(request):
            return
        if self._background is not None:
            self._start_lookup(tracked, self._background)
        if not self._settings.is_lite and self._settings.lookahead_s:
            seconds = self._settings.lookahead_s
            self._run(functools.partial(self._calls.look_ahead, tracked, seconds))

    def _run(self, call: Callable[[], None]) -> None:
        """Run a call to the store, in the background thread if there is one.

        The call is dropped if the thread's queue is full.
        """
        if self._background is None:
            call()
        else:
            self._background.run(call)

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the computed ones to load, and whether asynchronously.

        `None` while the lookup is in flight: the engine asks again in its next step.
        """
        must_wait = self._waits_for_adapter(request)
        tracked = None
        if not must_wait:
            tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked is None:
            return (None if must_wait else 0), False
        tracked.load = None
        tracked.offer = None
        tracked.keys.extend(request.all_token_ids)
        pulled = self._tokens_to_pull(tracked, computed_tokens)
        if pulled:
            return pulled, True
        if tracked.result is None or not tracked.result.is_fresh(request.num_preemptions):
            result = self._look_up(tracked)
            if result is None:
                return None, False
            tracked.result = result
        computed = computed_tokens // self._block_tokens
        self._log_lookup(tracked, computed)
        first, last, is_async = self._blocks_to_load(tracked, request, computed)
        tokens = self._tokens_to_load(request, last * self._block_tokens) - computed_tokens
        if tokens <= 0 or not tracked.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if is_async and not self._may_load_async(last - first):
            self.stats.count("declined_blocks", last - first)
            return 0, False
        tracked.load, tracked.is_async = (first, last), is_async
        return tokens, is_async

    def _waits_for_adapter(self, request: "Request") -> bool:
        """Whether a request waits for the workers' answer which adapters they have loaded."""
        name = request.request_id
        tracked = self._tracked.get(name)
        if tracked is not None and not self._adapters.is_current(tracked.adapter):
            # Other weights since. Nothing of the request is computed when the engine asks.
            del self._tracked[name]
            self._unkeyed.add(request, self._last_plan)
            if self._transfers is not None:
                self._transfers.give_back(name)
        is_answered = self._unkeyed.is_answered(request, self._last_plan, self._completed_plan)
        if is_answered:
            self._start(request)
        return is_answered is None

    def _tokens_to_load(self, request: "Request", prefix_tokens: int) -> int:
        """Return how many tokens of a prefix the engine is told to be loaded.

        If these are all tokens of a request, the engine computes the last one again, but keeps the
        windows for the token after it, and its page for the first token of the window may be none.
        With windows it is therefore told of one token less.
        """
        if not self._has_windows:
            return prefix_tokens
        return next_computed_token(prefix_tokens, request.num_tokens)

    def plan_load(
        self, request: "Request", tables: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Plan a load into the blocks that the engine allocated for it."""
        tracked = self._tracked.get(request.request_id)
        is_pull = tracked is not None and tracked.offer is not None and external_tokens > 0
        if self._transfers is not None and not is_pull:
            # It is computed, or loaded from the store: the prefill engine need not wait for it.
            self._transfers.give_back(request.request_id)
        if tracked is None or tracked.load is None or not external_tokens:
            return
        first, most = tracked.load
        # Rounded up: the engine may count only some tokens of the last block as loaded.
        last = min(most, first + -(-external_tokens // self._block_tokens))
        tracked.load = None
        if last <= first:
            return
        result = tracked.result or LookupResult()
        load = Load(
            request.request_id,
            tracked.is_async,
            first,
            {},
            pages_of(tables, self._groups, first, last),
            result.tiers[last - 1] if last <= len(result.tiers) else "",
            trace=tracked.trace,
            has_windows=self._has_windows,
            adapter=tracked.adapter,
        )
        loaded = first * self._block_tokens + external_tokens
        following = next_computed_token(loaded, request.num_tokens)
        if lacks_pages(load.blocks, self._groups, (first, following, self._block_tokens)):
            # The workers report all blocks of a load without keys as failed.
            self._failures.count("planning a load", "the engine keeps no page for a needed block")
            self._loads.append(load)
            if self._transfers is not None:
                self._transfers.give_back(request.request_id)
            tracked.offer = None
            return
        if tracked.offer is not None and self._transfers is not None:
            load.tier = PEERS
            if isinstance(tracked.offer, PushPlan):
                load.push = tracked.offer
            else:
                load.pull = PullPlan(tracked.offer, self._transfers.workers)
            self._loads.append(load)
            self._transfers.use(request.request_id)
            tracked.offer = None
            self._async_blocks[request.request_id] = last - first
            return
        # Appended before anything can raise: the engine counts these tokens as loaded already. The
        # workers report all blocks of a load without keys as failed.
        self._loads.append(load)
        keys = tracked.keys
        load.keys = {part.name: keys.raw(part.name, first, last) for part in self._parts}
        load.parents = {part.name: keys.parent(part.name, first) for part in self._parts}
        tracked.saved = max(tracked.saved, last)
        if tracked.is_async:
            self._async_blocks[request.request_id] = last - first

    def tokens_by_tier(self, request: "Request", external_tokens: int) -> dict[str, int]:
        """Return how many of the loaded tokens come from each tier."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not external_tokens:
            return {}
        # vLLM calls this right after planning the load, so the last load is usually the right one.
        planned = (load for load in reversed(self._loads) if load.request == request.request_id)
        load = next(planned, None)
        if load is None:
            return {}
        if load.pull is not None or load.push is not None:
            return {PEERS: external_tokens}
        last = load.first + -(-external_tokens // self._block_tokens)
        result = tracked.result or LookupResult()
        blocks = Counter(result.tiers[load.first : last])
        return {tier: count * self._block_tokens for tier, count in blocks.items()}

    def plan_step(self, output: "SchedulerOutput", generation: str) -> StepPlan:
        """Return the loads and saves of the current step."""
        self._last_plan += 1
        plan = StepPlan(self._last_plan, self._completed_plan, generation, self._loads)
        plan.tokens = output.total_num_scheduled_tokens
        self._loads = []
        plan.requests = len(output.num_scheduled_tokens)
        plan.asks_adapters = self._unkeyed.note_plan(plan.number, output.num_scheduled_tokens)
        if self._transfers is not None:
            self._plan_transfers(self._transfers, output)
            plan.transfer = self._transfers.take_plan()
        try:
            self._plan_saves(output, plan)
        except Exception as error:  # noqa: BLE001 # a bug here must not fail the engine
            # The plan is returned anyway: its loads must reach the workers.
            _LOG.exception("Cascade: planning saves failed; the rest of this step is not saved")
            self._failures.count("planning saves", error)
        return plan

    def _plan_transfers(self, transfers: TransferRequests, output: "SchedulerOutput") -> None:
        """Plan what the step computes of requests whose pages other engines get."""
        if not transfers.has_given:
            return
        transfers.stop(output.preempted_req_ids or ())
        for name, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is not None and transfers.is_given(name):
                tables = versions.block_tables(output, name)
                if tables is None:
                    # vLLM 0.29.
                    transfers.stop([name])
                else:
                    transfers.compute(tracked.request, tokens, tables)

    def _plan_saves(self, output: "SchedulerOutput", plan: StepPlan) -> None:
        for name, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is None:
                continue
            request = tracked.request
            tracked.note_plan(plan.number)
            plan.context_tokens = request.num_computed_tokens
            # Only accepted tokens: speculative ones may be rejected.
            accepted = min(request.num_computed_tokens + tokens, len(request.all_token_ids))
            last = accepted // self._block_tokens
            is_due = last > tracked.saved and time.monotonic() >= tracked.save_after
            is_due = is_due and tracked.may_save
            if not is_due or not self._is_long_enough(request):
                continue
            if self._settings.is_lite:
                self._save_names(tracked, last)
                continue
            tables = versions.block_tables(output, name)
            if tables is None:
                continue
            tracked.keys.extend(request.all_token_ids[: last * self._block_tokens])
            plan.saves.append(self._save(tracked, tables, last))
            tracked.saved = last

    def apply_report(self, report: WorkerReport) -> None:
        """Apply the outcomes of loads and saves."""
        self._completed_plan = max(self._completed_plan, report.plan)
        if report.adapters is not None:
            self._adapters.apply(report.adapters)
            for request, first_plan in self._unkeyed.take_computed():
                self._track(request, first_plan)
        for loaded in report.loaded:
            self._async_blocks.pop(loaded.request, None)
            self.stats.count("failed_blocks", len(loaded.bad))
            self.stats.load_result(loaded)
            tracked = self._tracked.get(loaded.request)
            if tracked is not None and loaded.bad:
                tracked.may_load = False
                # The failed blocks are computed now, and saved again.
                tracked.saved = min(tracked.saved, loaded.bad[0])
        for saved in report.saved:
            stored = sum(saved.stored)
            self.stats.count("failed_save_blocks", len(saved.stored) - stored)
            self.stats.save(
                "dram",
                blocks=stored,
                bytes_moved=saved.bytes,
                seconds=saved.seconds,
                cpu_seconds=saved.cpu_seconds,
            )
            if saved.plan < self._reset_plan:
                # The request has other keys now.
                continue
            tracked = self._tracked.get(saved.request)
            announced = tracked or self._finished.get(saved.request)
            if announced is not None and stored and self._on_saved is not None:
                self._on_saved(announced.request, announced.keys, saved)
            if tracked is not None and not any(saved.stored):
                # The store is unavailable or slow. Blocks after a gap are useless, so the same
                # blocks are saved again later.
                tracked.saved = min(tracked.saved, saved.first)
                tracked.save_after = time.monotonic() + SAVE_RETRY_S

    def _tokens_to_pull(self, tracked: TrackedRequest, computed_tokens: int) -> int:
        """Return how many tokens to read from a prefill engine: all or none of its prompt."""
        request = tracked.request
        if self._transfers is None or not tracked.may_load or request.skip_reading_prefix_cache:
            return 0
        offer = self._transfers.offer(request)
        if offer is None:
            return 0
        end = self._tokens_to_load(request, offer.tokens)
        tokens = end - computed_tokens
        first = computed_tokens // self._block_tokens
        last = -(-end // self._block_tokens)
        if tokens <= 0 or not self._may_load_async(last - first):
            return 0
        tracked.load, tracked.offer, tracked.is_async = (first, last), offer, True
        return tokens

    def take_stats(self) -> CascadeStats | None:
        """Return the statistics since the last call; `None` if there are none."""
        return None if self.stats.is_empty() else self.stats.clone_and_reset()

    def finish(self, request: "Request", add_hints: Callable[[Hints], Hints]) -> RequestKeys | None:
        """Remove a request, and pass its final hints to the store. Returns its keys."""
        self._unkeyed.remove(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if self._on_saved is not None and tracked.saved:
            self._finished[request.request_id] = tracked
            if len(self._finished) > FINISHED_MAX:
                del self._finished[next(iter(self._finished))]
        hints = add_hints(tracked.hints)
        if hints != Hints() and tracked.keys.blocks:
            self._run(functools.partial(self._calls.send_hints, tracked.keys, hints))
        return tracked.keys

    def reset_keys(self) -> None:
        """Drop all lookup results after a cache reset: the keys of all blocks have changed."""
        self._finished.clear()
        self._reset_plan = self._last_plan + 1
        if self._transfers is not None:
            self._transfers.reset()
        for name, tracked in list(self._tracked.items()):
            try:
                is_new = tracked.restart(self._keys_of(tracked.request))
            except UnkeyableRequest as reason:
                self._failures.count("computing the keys of a request", reason)
                del self._tracked[name]
                continue
            if is_new and self._transfers is not None:
                self._transfers.open(tracked.request)

    def _track(self, request: "Request", first_plan: int = 0) -> TrackedRequest | None:
        if not self._unkeyed.has_weights(request):
            # No failure: every adapter has a first request.
            return None
        try:
            keys = self._keys_of(request)
            keys.extend(request.all_token_ids)
        except UnkeyableRequest as reason:
            self._failures.count("computing the keys of a request", reason)
            return None
        trace = (request.trace_headers or {}).get("traceparent")
        tracked = TrackedRequest(request, keys, self._hints_of(request), trace=trace)
        tracked.adapter = self._adapters.use(request.lora_request, first_plan)
        self._tracked[request.request_id] = tracked
        self._unkeyed.remove(request.request_id)
        return tracked

    def _look_up(self, tracked: TrackedRequest) -> LookupResult | None:
        """Look up a request; `None` while the lookup is in flight."""
        preemptions = tracked.request.num_preemptions
        if not tracked.keys.blocks or not self._is_long_enough(tracked.request):
            return LookupResult(UsablePrefix(), preemptions, time.monotonic())
        if self._background is None:
            started = time.perf_counter()
            tokens = tracked.request.num_tokens
            prefix = self._query(tracked.keys, tokens, tracked.hints, tracked.trace)
            return self._count_lookup(tracked, prefix, time.perf_counter() - started)
        pending = tracked.pending
        if pending is None or pending.preemptions != preemptions:
            is_idle = self._background.is_idle
            pending = self._start_lookup(tracked, self._background)
            if pending is None:
                return self._count_lookup(tracked, UsablePrefix(), 0.0)
            # A node on this host usually answers at once, which saves the request a step. A late
            # answer is not a failure: the next steps use it, until the deadline of the lookup.
            if is_idle:
                wait([pending.prefix], LOOKUP_WAIT_S)
        seconds = time.perf_counter() - pending.started
        if pending.prefix.done() and not pending.prefix.cancelled():
            tracked.pending = None
            return self._count_lookup(tracked, pending.prefix.result(), seconds)
        if seconds < self._settings.lookup_s:
            return None
        pending.prefix.cancel()
        tracked.pending = None
        self.stats.count("lookup_timeouts")
        self._failures.count("looking up", "no result before the deadline")
        return self._count_lookup(tracked, UsablePrefix(), seconds)

    def _start_lookup(
        self, tracked: TrackedRequest, background: BackgroundThread
    ) -> PendingLookup | None:
        tokens = tracked.request.num_tokens
        query = functools.partial(self._query, tracked.keys, tokens, tracked.hints, tracked.trace)
        prefix = background.submit(query)
        if prefix is None:
            tracked.pending = None
        else:
            preemptions = tracked.request.num_preemptions
            tracked.pending = PendingLookup(prefix, time.perf_counter(), preemptions)
        return tracked.pending

    def _query(
        self, keys: RequestKeys, tokens: int, hints: Hints, trace: str | None
    ) -> UsablePrefix:
        """Query the store for the leading blocks of so many tokens; a failure is a miss."""
        store = self._store()
        if store is None:
            return UsablePrefix()
        sizes = {"tokens": tokens, "block_tokens": self._block_tokens}
        try:
            with part_of_trace(trace):
                return usable_prefix(store, self._groups, self._parts, keys, hints, **sizes)
        except CascadeError as error:
            self._failures.count("looking up", error)
            return UsablePrefix()

    def _count_lookup(
        self, tracked: TrackedRequest, prefix: UsablePrefix, seconds: float
    ) -> LookupResult:
        preemptions = tracked.request.num_preemptions
        if tracked.lookup_counted != preemptions:
            tracked.lookup_counted = preemptions
            blocks, hits = tracked.keys.blocks, len(prefix.tiers)
            self.stats.lookup(blocks=blocks, hit_blocks=hits, seconds=seconds)
        return LookupResult(prefix, preemptions, time.monotonic())

    def _log_lookup(self, tracked: TrackedRequest, computed: int) -> None:
        """Log a request's hits once."""
        if tracked.is_logged:
            return
        tracked.is_logged = True
        self._log_hits(tracked, computed, (tracked.result or LookupResult()).blocks)

    def _log_hits(self, tracked: TrackedRequest, computed: int, last: int, way: str = "") -> None:
        counts = tracked.keys.blocks, computed, max(0, last - computed)
        log_hits(_LOG, tracked.request.request_id, counts, way)

    def _blocks_to_load(
        self, tracked: TrackedRequest, request: "Request", computed: int
    ) -> tuple[int, int, bool]:
        """Return the first and last block to load, and whether to load asynchronously."""
        result = tracked.result or LookupResult()
        is_first_choice = tracked.choice_counted != request.num_preemptions
        tracked.choice_counted = request.num_preemptions
        if self._settings.is_lite and is_first_choice:
            self.stats.count("would_hit_blocks", max(0, result.blocks - computed))
        if self._settings.is_lite or result.blocks <= computed:
            return computed, computed, False
        full_blocks = request.num_tokens // self._block_tokens
        last = result.prefix.longest(int(full_blocks * self._settings.hit_ratio))
        if is_first_choice and last < result.blocks:
            self._log_hits(tracked, computed, last, "Hijacked By MockConnector,")
        chosen = self._choose(result.tiers[computed:last], request.num_tokens) + computed
        # A shorter prefix may lack blocks of a window.
        chosen = result.prefix.longest(chosen)
        if is_first_choice:
            self.stats.count("declined_blocks", max(0, last - chosen))
        last = chosen
        is_whole_request = last * self._block_tokens >= request.num_tokens
        is_slow = not SLOW_TIERS.isdisjoint(result.tiers[computed:last])
        # Only an asynchronous load can fail as a whole. With several groups, the engine accepts no
        # single failed blocks. With a window, it would go on at the failed block, without pages for
        # the blocks before it.
        is_async = len(self._groups) > 1 or self._has_windows or self._settings.load == "async"
        is_async = is_async or (self._settings.load == "auto" and (is_whole_request or is_slow))
        if not is_async:
            # The step that loads must also compute a token. After an asynchronous load, the engine
            # recomputes the last token by itself.
            last = min(last, (request.num_tokens - 1) // self._block_tokens)
        return computed, last, is_async

    def _may_load_async(self, blocks: int) -> bool:
        """Whether the limits allow one more asynchronous load; a single load always may."""
        in_flight = sum(self._async_blocks.values())
        is_only_load = not self._async_blocks
        fits = is_only_load or in_flight + blocks <= self._settings.blocks_max
        return fits and len(self._async_blocks) < self._settings.loads_max

    def _is_long_enough(self, request: "Request") -> bool:
        return request.num_prompt_tokens >= self._settings.min_tokens

    def _save_names(self, tracked: TrackedRequest, last: int) -> None:
        """Store keys without KV, so that lite mode can count hits."""
        tracked.keys.extend(tracked.request.all_token_ids[: last * self._block_tokens])
        # An embedded store is called by the scheduler's thread: no longer than a lookup.
        timeout, put = self._settings.lookup_s, self._calls.put_names
        self._run(functools.partial(put, tracked.keys, tracked.saved, last, timeout))
        tracked.saved = last

    def _save(self, tracked: TrackedRequest, tables: Sequence[Sequence[int]], last: int) -> Save:
        first, keys = tracked.saved, tracked.keys
        return Save(
            tracked.request.request_id,
            first,
            {part.name: keys.raw(part.name, first, last) for part in self._parts},
            {part.name: keys.parent(part.name, first) for part in self._parts},
            pages_of(tables, self._groups, first, last),
            pages_of(tables, self._groups, 0, last),
            trace=tracked.trace,
            plan=self._last_plan,
            adapter=tracked.adapter,
        )

"""The scheduler side: which blocks of a request are here, which of them to load, what to save.

One batched lookup a request, within a budget: an answer that is late is a miss. Everything is
answered from this process's memory after that, so that being asked again costs nothing. A node is
asked by a thread of its own: until it answers, the engine is told to ask again later.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cascadekv import CascadeError, Hints, Store, part_of_trace
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.background import Background
from cascadekv.connectors.vllm.groups import Group, usable
from cascadekv.connectors.vllm.keys import RequestKeys, Unkeyed
from cascadekv.connectors.vllm.metadata import Load, Part, Plan, Progress, Save, Saved
from cascadekv.connectors.vllm.metrics import CascadeStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Found", "Policy", "Scheduler"]

_LOG = logging.getLogger("vllm.cascade")
SLOW_TIERS = frozenset(("files", "posix"))
"""Tiers whose loads are not waited for by the whole batch."""
ANSWER_S = 1.0
"""How long an answer of the store stands for a request that goes on waiting."""
ARRIVAL_S = 0.02
"""A store that takes longer has trouble; looking ahead is not worth more of the engine's time."""
AT_ONCE_S = 0.002
"""How long the scheduler's thread waits for an answer, where nothing else waits for the node."""
RETRY_S = 5.0
"""How long a request's blocks are not offered again after the store did not take them."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose."""

    load: str = "auto"
    hit_ratio: float = 1.0
    min_tokens: int = 0
    is_lite: bool = False
    loads_max: int = 8192
    blocks_max: int = 524_288
    lookahead_s: float = 30.0
    lookup_s: float = 0.1
    """What a lookup by a thread of its own may take; a miss after that."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup found."""

    blocks: int = 0
    """Leading blocks of the request that are here, as far as every group can use them."""
    tiers: tuple[str, ...] = ()
    """The slowest tier of each of them."""
    preemptions: int = 0
    """How often the request had been preempted when it was asked."""
    at: float = 0.0
    """When it was asked, by the monotonic clock."""


@dataclass(slots=True)
class _Asked:
    """A lookup under way."""

    answer: Future[tuple[str, ...]]
    started: float
    """By the performance counter."""
    preemptions: int


@dataclass(slots=True)
class _Tracked:
    """What is known of one request."""

    request: "Request"
    keys: RequestKeys
    hints: Hints
    found: Found | None = None
    asked: _Asked | None = None
    counted: int = -1
    """Preemptions when its lookup was last counted: one that waits is counted once."""
    decided: int = -1
    """Preemptions when what to load of it was last counted: a request may be asked about often."""
    is_reported: bool = False
    may_load: bool = True
    """False once a load failed: what is asked again is computed."""
    may_save: bool = True
    """False once its KV is to be forgotten while it is computed."""
    is_async: bool = False
    load: tuple[int, int] | None = None
    """Blocks to load, from and to."""
    saved: int = 0
    """Leading blocks that need no saving."""
    trace: str | None = None
    """The request's trace, as a `traceparent` header."""
    save_after: float = 0.0
    """When the store is offered blocks again, by the monotonic clock."""


class Scheduler:
    """Decides for one engine."""

    def __init__(  # noqa: PLR0913 # what it decides by
        self,
        store: Callable[[], Store | None],
        parts: Sequence[Part],
        groups: Sequence[Group],
        keys_of: Callable[["Request"], RequestKeys],
        policy: Policy,
        *,
        block_tokens: int,
        choose: Callable[[Sequence[str], int], int],
        hints_of: Callable[["Request"], Hints],
        on_saved: Callable[["Request", RequestKeys, Saved], None] | None = None,
        background: Background | None = None,
    ) -> None:
        """`choose` says how many of the blocks found are faster to load than to compute.

        `background` makes the calls of a node; a store in this process is called directly.
        """
        self._store = store
        self._parts = list(parts)
        self._groups = list(groups)
        self._keys_of = keys_of
        self._policy = policy
        self._block_tokens = block_tokens
        self._choose = choose
        self._hints_of = hints_of
        self._on_saved = on_saved
        self._background = background
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []
        self._plans = self._learned = 0
        self._waiting: dict[str, int] = {}
        self._failures = FailureLog(_LOG)
        self.stats = CascadeStats()

    def arrive(self, request: "Request") -> None:
        """Take note of a request that begins to wait.

        Its blocks are brought up meanwhile, and those in memory stay there for a bounded time.
        """
        tracked = self._track(request)
        if tracked is None or not tracked.keys.blocks or not self._is_long_enough(request):
            return
        if self._background is not None:
            self._begin_lookup(tracked, self._background)
        if not self._policy.is_lite and self._policy.lookahead_s:
            self._call(functools.partial(self._look_ahead, tracked))

    def _look_ahead(self, tracked: _Tracked) -> None:
        """Keep and fetch the blocks of a request that waits."""
        store = self._store()
        if store is None:
            return
        blocks = tracked.keys.blocks
        waits = Hints(expected_within=self._policy.lookahead_s)
        try:
            with part_of_trace(tracked.trace):
                ends = time.monotonic() + ARRIVAL_S
                for part in self._parts:
                    keys = tracked.keys.keys(part.name, 0, blocks)
                    for ask in (functools.partial(store.hint, hints=waits), store.prefetch):
                        if time.monotonic() > ends:
                            return
                        ask(keys)
        except CascadeError as error:
            self._failures.count("looking ahead", error)

    def _call(self, call: Callable[[], None]) -> None:
        """Call the store, by the background's thread if there is one; what it cannot take goes."""
        if self._background is None:
            call()
        else:
            self._background.submit(call)

    def matched(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens beyond the computed ones can be loaded, and whether meanwhile.

        `None` while the store has not answered yet: the engine asks again with its next step.
        """
        tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked is None:
            return 0, False
        tracked.load = None
        tracked.keys.extend(request.all_token_ids)
        if not _stands(tracked.found, request):
            found = self._look_up(tracked)
            if found is None:
                return None, False
            tracked.found = found
        computed = computed_tokens // self._block_tokens
        self._report(tracked, computed)
        first, last, is_async = self._wanted(tracked, request, computed)
        if last <= first or not tracked.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if is_async and not self._has_room(last - first):
            self.stats.count("declined_blocks", last - first)
            return 0, False
        tracked.load, tracked.is_async = (first, last), is_async
        return last * self._block_tokens - computed_tokens, is_async

    def allocated(
        self, request: "Request", tables: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Plan a load into the blocks that the engine gave for it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.load is None or not external_tokens:
            return
        first, most = tracked.load
        # A block of which the engine takes some tokens for loaded is loaded whole.
        last = min(most, first + -(-external_tokens // self._block_tokens))
        tracked.load = None
        if last <= first:
            return
        found = tracked.found or Found()
        load = Load(
            request.request_id,
            tracked.is_async,
            first,
            {},
            _select(tables, self._groups, first, last),
            found.tiers[last - 1] if last <= len(found.tiers) else "",
            trace=tracked.trace,
        )
        # Planned before anything can fail: the engine takes these tokens for loaded, and a load
        # without keys ends as one of which nothing is there.
        self._loads.append(load)
        load.keys = {part.name: tracked.keys.raw(part.name, first, last) for part in self._parts}
        tracked.saved = max(tracked.saved, last)
        if tracked.is_async:
            self._waiting[request.request_id] = last - first

    def sources(self, request: "Request", external_tokens: int) -> dict[str, int]:
        """Say from which tiers those tokens come."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.found is None or not external_tokens:
            return {}
        planned = [load for load in self._loads if load.request == request.request_id]
        tokens: dict[str, int] = {}
        for load in planned[-1:]:
            last = load.first + -(-external_tokens // self._block_tokens)
            for tier in tracked.found.tiers[load.first : last]:
                tokens[tier] = tokens.get(tier, 0) + self._block_tokens
        return tokens

    def plan(self, output: "SchedulerOutput", generation: str) -> Plan:
        """Give what the step under way loads and saves."""
        self._plans += 1
        plan = Plan(self._plans, self._learned, generation, self._loads)
        plan.tokens = output.total_num_scheduled_tokens
        self._loads = []
        plan.requests = len(output.num_scheduled_tokens)
        try:
            self._plan_saves(output, plan)
        except Exception as error:  # noqa: BLE001 # a fault of ours must not reach the engine
            # The loads have to reach the workers in any case.
            _LOG.exception("Cascade: planning saves failed; nothing more is saved in this step")
            self._failures.count("planning saves", error)
        return plan

    def _plan_saves(self, output: "SchedulerOutput", plan: Plan) -> None:
        for name, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is None:
                continue
            request = tracked.request
            plan.context_tokens = request.num_computed_tokens
            # Only tokens that are the request's for good: a guess may be taken back.
            known = min(request.num_computed_tokens + tokens, len(request.all_token_ids))
            last = known // self._block_tokens
            is_due = last > tracked.saved and time.monotonic() >= tracked.save_after
            is_due = is_due and tracked.may_save
            if not is_due or not self._is_long_enough(request):
                continue
            if self._policy.is_lite:
                self._note(tracked, last)
                continue
            tables = versions.block_tables(output, name)
            if tables is None:
                continue
            tracked.keys.extend(request.all_token_ids[: last * self._block_tokens])
            plan.saves.append(self._save(tracked, tables, last))
            tracked.saved = last

    def learn(self, progress: Progress) -> None:
        """Take in what became of loads and saves."""
        self._learned = max(self._learned, progress.plan)
        for loaded in progress.loaded:
            self._waiting.pop(loaded.request, None)
            self.stats.count("failed_blocks", len(loaded.bad))
            self.stats.load(
                loaded.tier,
                blocks=loaded.blocks - len(loaded.bad),
                bytes_moved=loaded.bytes,
                seconds=loaded.seconds,
                cpu_seconds=loaded.cpu_seconds,
            )
            tracked = self._tracked.get(loaded.request)
            if tracked is not None and loaded.bad:
                tracked.may_load = False
                tracked.saved = min(tracked.saved, loaded.bad[0])
        for saved in progress.saved:
            kept = sum(saved.kept)
            self.stats.count("failed_save_blocks", len(saved.kept) - kept)
            self.stats.save(
                "dram",
                blocks=kept,
                bytes_moved=saved.bytes,
                seconds=saved.seconds,
                cpu_seconds=saved.cpu_seconds,
            )
            tracked = self._tracked.get(saved.request)
            if tracked is not None and kept and self._on_saved is not None:
                self._on_saved(tracked.request, tracked.keys, saved)
            if tracked is not None and not any(saved.kept):
                # Away or slow: blocks behind a gap are of no use, so this one is tried again.
                tracked.saved = min(tracked.saved, saved.first)
                tracked.save_after = time.monotonic() + RETRY_S

    def figures(self) -> CascadeStats | None:
        """Give what happened since the last call; nothing if nothing did."""
        return None if self.stats.is_empty() else self.stats.clone_and_reset()

    def finish(self, request: "Request", hints: Callable[[Hints], Hints]) -> RequestKeys | None:
        """Forget a request; tells the store how it ended. Returns its keys."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        last = hints(tracked.hints)
        if last != Hints() and tracked.keys.blocks:
            self._call(functools.partial(self._tell_end, tracked.keys, last))
        return tracked.keys

    def _tell_end(self, keys: RequestKeys, hints: Hints) -> None:
        """Tell the store how a request ended."""
        store = self._store()
        if store is None:
            return
        try:
            for part in self._parts:
                store.hint(keys.keys(part.name, 0, keys.blocks), hints=hints)
        except CascadeError as error:
            self._failures.count("telling how a request ended", error)

    def forget(self) -> None:
        """Forget what was found: the keys are others from now on."""
        for tracked in self._tracked.values():
            request = tracked.request
            tracked.keys = self._keys_of(request)
            # What it computed or loaded up to now is of what was before, unless it begins anew.
            begins = request.num_computed_tokens == 0 and not (
                tracked.saved and request.status.name == "WAITING_FOR_REMOTE_KVS"
            )
            tracked.may_save = tracked.may_save and begins
            tracked.found, tracked.asked, tracked.load, tracked.saved = None, None, None, 0
            tracked.may_load = False

    def _track(self, request: "Request") -> _Tracked | None:
        try:
            keys = self._keys_of(request)
            keys.extend(request.all_token_ids)
        except Unkeyed as why:
            self._failures.count("naming a request's blocks", why)
            return None
        trace = (request.trace_headers or {}).get("traceparent")
        tracked = _Tracked(request, keys, self._hints_of(request), trace=trace)
        self._tracked[request.request_id] = tracked
        return tracked

    def _look_up(self, tracked: _Tracked) -> Found | None:
        """Look a request up; nothing while the answer is under way."""
        preemptions = tracked.request.num_preemptions
        if not tracked.keys.blocks or not self._is_long_enough(tracked.request):
            return Found(0, (), preemptions, time.monotonic())
        if self._background is None:
            started = time.perf_counter()
            tiers = self._ask(tracked.keys, tracked.keys.blocks, tracked.hints, tracked.trace)
            return self._found(tracked, tiers, time.perf_counter() - started)
        asked = tracked.asked
        if asked is None or asked.preemptions != preemptions:
            is_idle = self._background.is_idle
            asked = self._begin_lookup(tracked, self._background)
            if asked is None:
                return self._found(tracked, (), 0.0)
            if is_idle:
                _wait(asked.answer, AT_ONCE_S)
        seconds = time.perf_counter() - asked.started
        if asked.answer.done() and not asked.answer.cancelled():
            tracked.asked = None
            return self._found(tracked, asked.answer.result(), seconds)
        if seconds < self._policy.lookup_s:
            return None
        asked.answer.cancel()
        tracked.asked = None
        self.stats.count("lookup_timeouts")
        self._failures.count("looking up", "no answer in time")
        return self._found(tracked, (), seconds)

    def _begin_lookup(self, tracked: _Tracked, background: Background) -> _Asked | None:
        ask = functools.partial(
            self._ask, tracked.keys, tracked.keys.blocks, tracked.hints, tracked.trace
        )
        answer = background.submit(ask)
        if answer is None:
            tracked.asked = None
        else:
            tracked.asked = _Asked(answer, time.perf_counter(), tracked.request.num_preemptions)
        return tracked.asked

    def _ask(
        self, keys: RequestKeys, blocks: int, hints: Hints, trace: str | None
    ) -> tuple[str, ...]:
        """Ask the store which leading blocks it has; a failure is a miss."""
        store = self._store()
        if store is None:
            return ()
        try:
            with part_of_trace(trace):
                return usable(store, self._groups, self._parts, keys, hints)[:blocks]
        except CascadeError as error:
            self._failures.count("looking up", error)
            return ()

    def _found(self, tracked: _Tracked, tiers: tuple[str, ...], seconds: float) -> Found:
        preemptions = tracked.request.num_preemptions
        if tracked.counted != preemptions:
            tracked.counted = preemptions
            blocks, hits = tracked.keys.blocks, len(tiers)
            self.stats.lookup(blocks=blocks, hit_blocks=hits, seconds=seconds)
        return Found(len(tiers), tiers, preemptions, time.monotonic())

    def _report(self, tracked: _Tracked, computed: int) -> None:
        if tracked.is_reported:
            return
        tracked.is_reported = True
        found = tracked.found or Found()
        _LOG.info(
            "request_id: %s, total_blocks_num: %d, hit hbm: %d, hit external: %d",
            tracked.request.request_id,
            tracked.keys.blocks,
            computed,
            max(0, found.blocks - computed),
        )

    def _wanted(
        self, tracked: _Tracked, request: "Request", computed: int
    ) -> tuple[int, int, bool]:
        """Say which blocks to load, and whether while others compute."""
        found = tracked.found or Found()
        is_first = tracked.decided != request.num_preemptions
        tracked.decided = request.num_preemptions
        if self._policy.is_lite and is_first:
            self.stats.count("would_hit_blocks", max(0, found.blocks - computed))
        if self._policy.is_lite or found.blocks <= computed:
            return computed, computed, False
        whole = request.num_tokens // self._block_tokens
        last = min(found.blocks, int(whole * self._policy.hit_ratio))
        chosen = self._choose(found.tiers[computed:last], request.num_tokens) + computed
        if is_first:
            self.stats.count("declined_blocks", max(0, last - chosen))
        last = chosen
        is_whole = last * self._block_tokens >= request.num_tokens
        is_slow = not SLOW_TIERS.isdisjoint(found.tiers[computed:last])
        is_async = len(self._groups) > 1 or self._policy.load == "async"
        is_async = is_async or (self._policy.load == "auto" and (is_whole or is_slow))
        if not is_async:
            # The engine has to compute a token to go on from.
            last = min(last, (request.num_tokens - 1) // self._block_tokens)
        return computed, last, is_async

    def _has_room(self, blocks: int) -> bool:
        """Whether one more load may wait."""
        under_way = sum(self._waiting.values())
        is_first = not self._waiting
        fits = is_first or under_way + blocks <= self._policy.blocks_max
        return fits and len(self._waiting) < self._policy.loads_max

    def _is_long_enough(self, request: "Request") -> bool:
        return request.num_prompt_tokens >= self._policy.min_tokens

    def _note(self, tracked: _Tracked, last: int) -> None:
        """Remember names without bytes, to say what would have been hits."""
        tracked.keys.extend(tracked.request.all_token_ids[: last * self._block_tokens])
        self._call(functools.partial(self._put_names, tracked.keys, tracked.saved, last))
        tracked.saved = last

    def _put_names(self, names: RequestKeys, first: int, last: int) -> None:
        store = self._store()
        if store is None:
            return
        try:
            for part in self._parts:
                keys = names.keys(part.name, first, last)
                store.put(keys, bytes(len(keys)), parent=names.parent(part.name, first))
        except CascadeError as error:
            self._failures.count("keeping names", error)

    def _save(self, tracked: _Tracked, tables: Sequence[Sequence[int]], last: int) -> Save:
        first, keys = tracked.saved, tracked.keys
        return Save(
            tracked.request.request_id,
            first,
            {part.name: keys.raw(part.name, first, last) for part in self._parts},
            {part.name: keys.parent(part.name, first) for part in self._parts},
            _select(tables, self._groups, first, last),
            _select(tables, self._groups, 0, last),
            trace=tracked.trace,
        )


def _wait(answer: Future[tuple[str, ...]], seconds: float) -> None:
    """Wait for an answer for a moment."""
    with contextlib.suppress(NotYet):
        answer.result(seconds)


def _stands(found: Found | None, request: "Request") -> bool:
    """Whether an answer need not be asked for again."""
    if found is None or found.preemptions != request.num_preemptions:
        return False
    return time.monotonic() < found.at + ANSWER_S


def _select(
    tables: Sequence[Sequence[int]], groups: Sequence[Group], first: int, last: int
) -> dict[int, list[int]]:
    """Give some blocks of each group's table."""
    return {group.number: list(tables[group.number][first:last]) for group in groups}

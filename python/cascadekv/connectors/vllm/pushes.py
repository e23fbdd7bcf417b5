"""A prefill worker's side of pushes: writes each layer's blocks as soon as it has computed them.

A decode engine announces its pages, at any time: before, while or after the prompt is computed. A
write reads this worker's pages, so it is over before the engine uses them for something else.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cascadekv._native import TransportEndpoint
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.announcements import REFUSE, Announcement, message
from cascadekv.connectors.vllm.decode_worker import DecodeWorker, Target
from cascadekv.connectors.vllm.leases import GIVEN_BACK, READ
from cascadekv.connectors.vllm.offers import OTHER_PROMPT, Computed, Opened
from cascadekv.connectors.vllm.peer_workers import FAILURES
from cascadekv.connectors.vllm.transfer_geometry import Geometry

__all__ = ["Pushes"]

_LOG = logging.getLogger("vllm.cascade")
WAITING_MAX = 1024
"""Most announcements whose request has not come; the oldest one is refused for another."""
ENDED_MAX = 1024
"""Requests that are remembered after their end, to refuse what is announced too late."""
WORKERS_MAX = 64
"""Most workers of decode engines with open connections."""
STOP_S = 0.2
"""How long a write may end by itself when its pages are needed; then its connection is closed."""
WRITE_S = 10.0
"""Most time for the start of a write, and for its confirmation."""
WINDOW = 8
"""Writes to one decode worker that are not confirmed."""


@dataclass(slots=True)
class _Push:
    """A request's blocks for one worker of a decode engine."""

    announced: Announcement
    worker: DecodeWorker
    deadline: float
    target: Target | None = None
    """Where they belong; `None` until the list was read."""
    is_pumping: bool = False
    """Whether a thread writes, or is about to."""
    is_writing: bool = False
    """Whether a write reads this worker's pages."""
    is_stopped: bool = False
    """Whether nothing more is written: it was refused, or the decode engine wants nothing."""


@dataclass(slots=True)
class _Prompt:
    """A request that is computed here, and how far each layer is."""

    opened: Opened
    tables: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    ready: list[list[int]] = field(default_factory=list[list[int]])
    """By part and layer: units whose bytes are final."""
    step: int = 0
    """Units that the current step completes."""
    pushes: dict[int, _Push] = field(default_factory=dict[int, _Push])


class Pushes:
    """The pushes of one worker. The engine's thread, the receiver and the writers use it."""

    def __init__(
        self,
        own: TransportEndpoint,
        geometry: Geometry,
        *,
        is_any_host: bool,
        on_done: Callable[[Opened, Announcement, str], None],
    ) -> None:
        """Let nothing be announced yet.

        `on_done` is called when nothing more is written for a worker of a decode engine, with how
        that ended.
        """
        self._own = own
        self._geometry = geometry
        self._is_any_host = is_any_host
        self._on_done = on_done
        self._places: dict[str, list[tuple[int, int]]] = {}
        """By layer: part and number in the part."""
        for number, part in enumerate(geometry.parts):
            for layer, name in enumerate(part.layers):
                self._places.setdefault(name, []).append((number, layer))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._prompts: dict[str, _Prompt] = {}
        self._by_transfer: dict[str, str] = {}
        self._waiting: OrderedDict[int, _Push] = OrderedDict()
        """Announcements whose request has not come, by push."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._workers: OrderedDict[tuple[str, str], DecodeWorker] = OrderedDict()
        self._failures = FailureLog(_LOG)
        self.completed = 0
        """Pushes that were written completely."""

    # The engine's thread.

    def open(self, opened: Opened) -> None:
        """Let decode engines announce pages for a request."""
        if not opened.transfer:
            return
        prompt = _Prompt(opened)
        prompt.ready = [[0] * len(part.regions) for part in self._geometry.parts]
        with self._lock:
            self._prompts[opened.request] = prompt
            self._by_transfer[opened.transfer] = opened.request
            self._ended.pop(opened.transfer, None)
            mine = [it for it in self._waiting.values() if _is_for(it, opened)]
            for push in mine:
                del self._waiting[push.announced.push]
                self._add(prompt, push)

    def refuse(self, transfers: Iterable[str]) -> None:
        """Refuse what is announced for requests whose pages no other engine gets."""
        with self._lock:
            for transfer in transfers:
                self._note_end(transfer)
                waiting = list(self._waiting.values())
                for push in (it for it in waiting if it.announced.transfer == transfer):
                    del self._waiting[push.announced.push]
                    self._refuse(push, "the prompt is too short, or cannot be shared")

    def begin_step(self, computed: Iterable[Computed]) -> None:
        """Note what a step will compute, before it does."""
        with self._lock:
            for each in computed:
                prompt = self._prompts.get(each.request)
                if prompt is None:
                    continue
                first = self._units(prompt, each.first_token)
                if any(first < units for part in prompt.ready for units in part):
                    # Blocks are computed again: those that were written may have been wrong.
                    self._refuse_all(prompt, "the engine computes the prompt again")
                    prompt.ready = [[0] * len(part) for part in prompt.ready]
                prompt.tables, prompt.step = each.tables, self._units(prompt, each.end_token)

    def layer_computed(self, layer: str, requests: Iterable[str]) -> None:
        """Write what the step has computed of a layer, for these of its requests."""
        places = self._places.get(layer, ())
        with self._lock:
            for request in requests:
                prompt = self._prompts.get(request)
                if prompt is not None and prompt.tables:
                    for part, number in places:
                        prompt.ready[part][number] = prompt.step
                    self._pump_all(prompt)

    def end_step(self, requests: Iterable[str]) -> None:
        """Write what the step has computed of all layers, for these of its requests."""
        with self._lock:
            for request in requests:
                prompt = self._prompts.get(request)
                if prompt is not None and prompt.tables:
                    prompt.ready = [[prompt.step] * len(part) for part in prompt.ready]
                    self._pump_all(prompt)

    def stop(self, requests: Iterable[str], reason: str) -> None:
        """End the pushes of requests: afterwards no write reads their pages."""
        with self._lock:
            stopped: list[_Push] = []
            for request in requests:
                prompt = self._prompts.get(request)
                if prompt is not None:
                    stopped += prompt.pushes.values()
                    self._refuse_all(prompt, reason)
                    prompt.tables, prompt.step = {}, 0
                    prompt.ready = [[0] * len(part) for part in prompt.ready]
            self._wait_for_writes(stopped)

    def unfinished(self) -> set[str]:
        """Return the requests that are being written to a decode engine."""
        with self._lock:
            return {name for name, prompt in self._prompts.items() if prompt.pushes}

    def close_requests(self, requests: Iterable[str], reason: str) -> None:
        """End the pushes of requests for good; what is announced for them is refused."""
        names = [name for name in requests if name in self._prompts]
        if not names:
            return
        self.stop(names, reason)
        with self._lock:
            for name in names:
                transfer = self._prompts.pop(name).opened.transfer
                # Several outputs of a request have the same name.
                if self._by_transfer.get(transfer) == name:
                    del self._by_transfer[transfer]
                    self._note_end(transfer)

    def close_all(self, reason: str) -> None:
        """End all pushes for good."""
        self.close_requests(list(self._prompts), reason)

    def close(self) -> None:
        """End all pushes and connections."""
        self.close_all("the engine ends")
        for worker in list(self._workers.values()):
            worker.threads.abort()

    # The receiver's thread.

    def announce(self, announced: Announcement) -> None:
        """Start to write into announced pages, as soon as their blocks are computed."""
        with self._lock:
            worker = self._worker(announced)
            deadline = time.monotonic() + announced.seconds
            push = _Push(announced, worker, deadline, is_stopped=announced.is_declined)
            request = self._by_transfer.get(announced.transfer)
            if request is not None:
                self._add(self._prompts[request], push)
            elif announced.transfer in self._ended:
                self._refuse(push, "the request has ended")
            else:
                if len(self._waiting) >= WAITING_MAX:
                    _, oldest = self._waiting.popitem(last=False)
                    self._refuse(oldest, f"{WAITING_MAX} announcements wait for their requests")
                self._waiting[announced.push] = push

    def withdraw(self, number: int) -> None:
        """End a push that the decode engine does not wait for any more."""
        with self._lock:
            if (waiting := self._waiting.get(number)) is not None:
                # Kept: the pages of its request are not needed once that has come.
                waiting.is_stopped = True
                return
            for prompt in self._prompts.values():
                push = prompt.pushes.pop(number, None)
                if push is not None:
                    push.is_stopped = True
                    self._on_done(prompt.opened, push.announced, GIVEN_BACK)

    def check(self) -> None:
        """Forget what decode engines do not wait for any more, and end threads of lost ones."""
        with self._lock:
            self._drop_expired()
            pushes = [*self._waiting.values()]
            pushes += [push for it in self._prompts.values() for push in it.pushes.values()]
            used = {id(push.worker) for push in pushes}
            for key, worker in list(self._workers.items()):
                if worker.threads.is_lost and id(worker) not in used:
                    self._workers.pop(key).threads.close_later()

    # Under the lock.

    def _note_end(self, transfer: str) -> None:
        self._ended[transfer] = None
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _units(self, prompt: _Prompt, tokens: int) -> int:
        """Return how many units of the prompt these tokens complete."""
        unit, whole = self._geometry.unit_tokens, prompt.opened.tokens
        return -(-whole // unit) if tokens >= whole else tokens // unit

    def _worker(self, announced: Announcement) -> DecodeWorker:
        key = announced.address, announced.endpoint
        worker = self._workers.get(key)
        if worker is None:
            worker = DecodeWorker(*key, self._own, self._geometry, is_any_host=self._is_any_host)
            self._workers[key] = worker
            if len(self._workers) > WORKERS_MAX:
                self._workers.popitem(last=False)[1].threads.close_later()
        self._workers.move_to_end(key)
        worker.threads.use()
        return worker

    def _add(self, prompt: _Prompt, push: _Push) -> None:
        announced, opened = push.announced, prompt.opened
        if push.is_stopped:
            self._on_done(opened, announced, GIVEN_BACK)
            return
        if announced.prompt != opened.prompt or announced.tokens != opened.tokens:
            self._refuse(push, OTHER_PROMPT)
            self._on_done(opened, announced, GIVEN_BACK)
            return
        if announced.push in prompt.pushes:
            return
        prompt.pushes[announced.push] = push
        self._pump(prompt, push)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for number, push in list(self._waiting.items()):
            if push.deadline <= now:
                del self._waiting[number]

    def _refuse(self, push: _Push, reason: str) -> None:
        if push.is_stopped:
            return
        push.is_stopped = True
        self._failures.count("writing to a decode engine", reason)
        push.worker.tell_later(message(REFUSE, push.announced.push, reason))

    def _refuse_all(self, prompt: _Prompt, reason: str) -> None:
        for push in prompt.pushes.values():
            self._refuse(push, reason)
            self._on_done(prompt.opened, push.announced, GIVEN_BACK)
        prompt.pushes.clear()

    def _wait_for_writes(self, pushes: Sequence[_Push]) -> None:
        """Wait until none of these pushes reads pages; closes connections that do not let go."""
        patient_until = time.monotonic() + STOP_S
        while busy := [push for push in pushes if push.is_writing]:
            wait = patient_until - time.monotonic()
            if wait > 0:
                self._changed.wait(wait)
                continue
            # A write to a closed connection fails at once.
            for push in busy:
                push.worker.threads.disconnect()
            self._changed.wait(STOP_S)

    def _pump_all(self, prompt: _Prompt) -> None:
        for push in prompt.pushes.values():
            self._pump(prompt, push)

    def _pump(self, prompt: _Prompt, push: _Push) -> None:
        """Let a thread of the decode worker write what is ready, unless one does."""
        if not push.is_pumping:
            push.is_pumping = True
            if not push.worker.submit(lambda: self._write(prompt, push)):
                push.is_pumping = False

    def _take(self, prompt: _Prompt, push: _Push) -> tuple[int, int, int, int] | None:
        """Return part, layer and units to write next, or `None`, which ends the thread's turn."""
        if not push.is_stopped and push.target is not None:
            for part, layers in enumerate(prompt.ready):
                for layer, ready in enumerate(layers):
                    first, end = push.target.left(part, layer, ready)
                    if first < end:
                        push.is_writing = True
                        return part, layer, first, end
        return None

    # The writers' threads.

    def _write(self, prompt: _Prompt, push: _Push) -> None:
        """Write what is ready, until nothing more is."""
        try:
            if push.target is None:
                read = push.worker.read_target(push.announced, push.deadline)
                with self._lock:
                    push.target = read
            target, worker = push.target, push.worker
            while True:
                with self._lock:
                    taken = self._take(prompt, push)
                    if taken is None and not worker.has_unconfirmed(target):
                        # Under the lock: who makes more blocks ready now starts a thread again.
                        push.is_pumping = False
                        self._finish(prompt, push)
                        return
                    tables = prompt.tables
                if taken is None:
                    worker.confirm(target, 0, min(push.deadline, time.monotonic() + WRITE_S))
                    continue
                try:
                    deadline = min(push.deadline, time.monotonic() + WRITE_S)
                    worker.write(push.announced, target, taken, tables, deadline)
                finally:
                    with self._lock:
                        push.is_writing = False
                        self._changed.notify_all()
                worker.confirm(target, WINDOW, min(push.deadline, time.monotonic() + WRITE_S))
        except FAILURES as error:
            self._fail(prompt, push, error)
        except Exception as error:  # noqa: BLE001 # a bug here must not leave the push for ever
            _LOG.exception("Cascade: a push failed; the decode engine computes instead")
            self._fail(prompt, push, error)

    def _fail(self, prompt: _Prompt, push: _Push, error: Exception) -> None:
        with self._lock:
            push.is_pumping = False
            if prompt.pushes.pop(push.announced.push, None) is not None:
                self._refuse(push, str(error))
                self._on_done(prompt.opened, push.announced, GIVEN_BACK)

    def _finish(self, prompt: _Prompt, push: _Push) -> None:
        """End a push whose blocks have all been written. Under the lock."""
        if push.target is None or not push.target.is_complete or push.is_stopped:
            return
        announced = push.announced
        if prompt.pushes.pop(announced.push, None) is not None:
            self.completed += 1
            self._on_done(prompt.opened, announced, READ)


def _is_for(push: _Push, opened: Opened) -> bool:
    return push.announced.transfer == opened.transfer

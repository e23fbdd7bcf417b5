"""The requests without keys, because the workers have not said which adapters they have loaded."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cascadekv.connectors.vllm.adapters import ReportedAdapters

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["UnkeyedRequests"]

ANSWER_PLANS = 16
"""Plans after which a request does not wait for the workers' answer any more."""


@dataclass(slots=True)
class _Unkeyed:
    request: "Request"
    asked_after: int
    """The last plan before the workers were asked for their adapters."""
    first_plan: int = 0
    """The first plan that computed the request; 0: none has."""
    is_answered: bool = False
    """Whether the workers have answered, or do not in time."""


class UnkeyedRequests:
    """A request with an adapter waits until the workers have said what they have loaded.

    That takes a step or two. What they said before is not enough: an adapter may have been loaded
    again since the last step. An adapter that they have not loaded is loaded when the request is
    computed, and the request has keys from then on.
    """

    def __init__(self, adapters: ReportedAdapters) -> None:
        """Start without requests."""
        self._adapters = adapters
        self._requests: dict[str, _Unkeyed] = {}

    def add(self, request: "Request", last_plan: int) -> bool:
        """Add a request if it has an adapter; returns whether it was."""
        if request.lora_request is None:
            return False
        self._requests[request.request_id] = _Unkeyed(request, last_plan)
        return True

    def has_weights(self, request: "Request") -> bool:
        """Whether the weights of a request's adapter are known; true without an adapter."""
        adapter = request.lora_request
        return adapter is None or self._adapters.fingerprint(adapter) is not None

    def is_answered(self, request: "Request", last_plan: int, completed_plan: int) -> bool | None:
        """Whether the workers have just answered; `None` while a request waits for it."""
        unkeyed = self._requests.get(request.request_id)
        if unkeyed is None or unkeyed.is_answered:
            return False
        is_late = last_plan > unkeyed.asked_after + ANSWER_PLANS
        if completed_plan <= unkeyed.asked_after and not is_late:
            return None
        unkeyed.is_answered = True
        return True

    def note_plan(self, number: int, names: Iterable[str]) -> bool:
        """Note that a plan computes requests; returns whether the workers are asked with it."""
        for name in names if self._requests else ():
            unkeyed = self._requests.get(name)
            if unkeyed is not None and not unkeyed.first_plan:
                unkeyed.first_plan = number
        return any(not each.is_answered for each in self._requests.values())

    def take_computed(self) -> "list[tuple[Request, int]]":
        """Remove requests that are computed with known weights; returns them and their plans."""
        found = [
            (each.request, each.first_plan)
            for each in self._requests.values()
            if each.first_plan and self.has_weights(each.request)
        ]
        for request, _ in found:
            self.remove(request.request_id)
        return found

    def remove(self, name: str) -> None:
        """Remove a request that has ended or has keys."""
        self._requests.pop(name, None)

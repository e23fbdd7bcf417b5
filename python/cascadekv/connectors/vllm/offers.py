"""What a prefill engine offers to a decode engine: the `kv_transfer_params` of a finished request.

The fields are those of vLLM's NIXL connector, so that proxies and routers pass them on unchanged.
Cascade's own part, `cascade`, names the workers to read from, and the lease: while it lasts, the
pages hold the prompt's KV. Without this part, a decode engine waits until the prefill engine
writes.
"""

import hashlib
import hmac
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from cascadekv.connectors.vllm.adapters import AdapterUse

__all__ = [
    "OTHER_PROMPT",
    "WORKERS_MAX",
    "Computed",
    "Offer",
    "OfferError",
    "Opened",
    "OtherLengthError",
    "PullPlan",
    "PushPlan",
    "PushSource",
    "TransferPlan",
    "params_without_pages",
    "prompt_digest",
    "transfer_name",
    "wants_decode",
    "wants_prefill",
]

VERSION = 1
_LEASE_DIGITS = 16
"""Of a lease, as text: a proxy may turn numbers into floating point."""
_NAME_MAX = 256
"""Most characters of the name of a transfer."""
_GROUPS_MAX = 64
WORKERS_MAX = 1024
_TOKENS_MAX = 1 << 24
"""Most groups and workers of an offer: a request's parameters come from anyone."""


OTHER_PROMPT = (
    "it is for another prompt, which means that the engines got different requests, or one of the "
    "engines was reset"
)
"""Why engines do not exchange KV if their digests of a prompt differ."""


class OfferError(ValueError):
    """`kv_transfer_params` cannot be used, with the reason."""


class OtherLengthError(OfferError):
    """An offer is of a prompt with another number of tokens. Its pages are not needed."""

    def __init__(self, offer: "Offer", tokens: int) -> None:
        """`tokens` are those of the request."""
        super().__init__(f"an offer of {offer.tokens} tokens for a prompt of {tokens}")
        self.offer = offer


@dataclass(frozen=True)
class Offer:
    """Pages of a finished prefill, leased to a decode engine."""

    engine: str
    """The prefill engine."""
    request: str
    """Its request."""
    workers: list[tuple[str, str]]
    """Of each worker, by rank: its address, and the ID of its endpoint."""
    blocks: list[list[int]]
    """By group: the page of each block from the prompt's first on; 0 for a block not kept."""
    tokens: int
    """Tokens whose KV the pages hold."""
    slot: int
    """Number of the lease in each worker's table of leases."""
    lease: int
    """What the table holds there while the pages are the request's: a random number."""
    seconds: float
    """How long the lease lasts without being renewed."""
    prompt: str
    """Digest of the prompt and of everything else that its KV depends on."""

    def params(self, token: bytes | None) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the prefill's response, without the engine's sizes."""
        host, _, port = self.workers[0][0].rpartition(":")
        own: dict[str, Any] = {
            "version": VERSION,
            "workers": [list(each) for each in self.workers],
            "slot": self.slot,
            "lease": f"{self.lease:016x}",
            "seconds": self.seconds,
            "prompt": self.prompt,
        }
        if token is not None:
            own["seal"] = self._seal(token)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_request_id": self.request,
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
            "remote_block_ids": self.blocks,
            "remote_num_tokens": self.tokens,
            # llm-d's router sends later requests to both engines at once.
            "transfer_mode": "push",
            "cascade": own,
        }

    @classmethod
    def parse(cls, params: Mapping[str, Any], token: bytes | None, *, tokens: int) -> "Offer":
        """Read the parameters of a request with a prompt of this length. Raises `OfferError`."""
        own = params.get("cascade")
        if not isinstance(own, Mapping):
            raise OfferError("the prefill engine has no Cascade connector with cascade.transfer")
        own = cast("Mapping[str, Any]", own)
        if own.get("version") != VERSION:
            raise OfferError(f"version {own.get('version')!r} of an offer, this is {VERSION}")
        try:
            offered = min(int(params["remote_num_tokens"]), _TOKENS_MAX)
            _check_sizes(params["remote_block_ids"], own["workers"], max(tokens, offered))
            offer = cls(
                str(params["remote_engine_id"]),
                str(params["remote_request_id"]),
                [(str(address), str(endpoint)) for address, endpoint in own["workers"]],
                [[int(page) for page in group] for group in params["remote_block_ids"]],
                int(params["remote_num_tokens"]),
                int(own["slot"]),
                int(str(own["lease"])[:_LEASE_DIGITS], 16),
                float(own["seconds"]),
                str(own["prompt"]),
            )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise OfferError(f"an offer cannot be read: {error!r}") from error
        if token is not None:
            seal = own.get("seal")
            expected = offer._seal(token)
            if not isinstance(seal, str) or not hmac.compare_digest(seal, expected):
                raise OfferError("an offer is not sealed with this engine's transfer token")
        if offer.tokens != tokens:
            raise OtherLengthError(offer, tokens)
        return offer

    def _seal(self, token: bytes) -> str:
        """Return a proof that a holder of the token made exactly this offer."""
        return hmac.new(token, _canonical(asdict(self)), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class PushSource:
    """A prefill engine that writes a request's blocks, as a router names it beforehand."""

    workers: list[tuple[str, str]]
    """Of each worker, by rank: its address, and an empty text, because its ID is not known.

    As far as the router says: some pass on the tensor parallel size, but not the number of stages.
    """
    transfer: str
    """What the request of the prefill engine is known by."""

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> "PushSource | None":
        """Read the parameters of a request; `None` if they do not ask to wait for a push.

        Raises `OfferError`.
        """
        prefiller = _nested(params, "remote_prefiller")
        if prefiller is not None:
            # llm-d's form for vLLM's tier of peers.
            params = {**prefiller, "transfer_id": prefiller.get("kv_request_id")}
        is_push = params.get("transfer_mode", "push") == "push"
        if not is_push or params.get("cascade") is not None or params.get("remote_block_ids"):
            return None
        name = params.get("transfer_id") or params.get("remote_request_id")
        host, port = params.get("remote_host"), params.get("remote_port")
        if not isinstance(name, str) or not isinstance(host, str) or not host or port is None:
            return None
        try:
            first, size = int(port), int(params.get("tp_size") or 1)
            size *= int(params.get("pp_size") or 1)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise OfferError(f"the prefill engine cannot be read: {error!r}") from error
        is_valid = 1 <= size <= WORKERS_MAX and 1 <= first <= 65536 - size
        if not is_valid or not 0 < len(name) <= _NAME_MAX:
            raise OfferError(f"{size} prefill workers from port {first}, request {name[:300]!r}")
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return cls([(f"{shown}:{first + rank}", "") for rank in range(size)], name)


@dataclass(frozen=True, slots=True)
class Opened:
    """A request whose pages other engines may read, or get written."""

    request: str
    slot: int
    lease: int
    transfer: str = ""
    """What a decode engine that waits for a push knows it by; empty: none may."""
    prompt: str = ""
    """Digest of its prompt."""
    tokens: int = 0
    """Tokens of its prompt."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computes of an opened request."""

    request: str
    first_token: int
    end_token: int
    tables: dict[int, list[int]]
    """By group: the page of each of its blocks."""
    adapter: AdapterUse | None = None
    """The adapter that the prompt's digest has."""


@dataclass(slots=True)
class PullPlan:
    """For the workers: blocks of a load that are read from a prefill engine."""

    offer: Offer
    workers: int
    """Number of workers of this engine; each tells each of the prefill engine's when it is done."""


@dataclass(slots=True)
class PushPlan:
    """For the workers: blocks of a load that a prefill engine writes."""

    source: PushSource
    prompt: str
    tokens: int
    workers: int
    """Number of workers of this engine."""
    seconds: float
    """How long to wait."""


@dataclass(slots=True)
class TransferPlan:
    """For the workers: what a step changes in leases, given and taken."""

    is_reset: bool = False
    """Whether all leases from before are over, because the weights may have changed."""
    opened: list[Opened] = field(default_factory=list[Opened])
    """Requests whose pages may be offered."""
    computed: list[Computed] = field(default_factory=list[Computed])
    """What the step computes of them."""
    refused: list[str] = field(default_factory=list[str])
    """Names of transfers of requests whose pages no other engine gets."""
    stopped: list[str] = field(default_factory=list[str])
    """Requests that lose their pages, to get others later."""
    ended: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Finished requests whose pages were offered, and the seconds of their leases."""
    dropped: list[str] = field(default_factory=list[str])
    """Requests whose pages are not offered after all."""
    renewed: list[Offer] = field(default_factory=list[Offer])
    """Offers to other engines' requests that still wait here."""
    released: list[Offer] = field(default_factory=list[Offer])
    """Offers that are not needed any more."""
    declined: list[PushPlan] = field(default_factory=list[PushPlan])
    """Pushes to this engine that it does not want."""
    withdrawn: list[str] = field(default_factory=list[str])
    """Requests of this engine that do not wait for a push any more."""
    workers: int = 1
    """Number of workers of this engine."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        own = self.is_reset, self.opened, self.computed, self.stopped, self.ended, self.dropped
        other = self.refused, self.renewed, self.released, self.declined, self.withdrawn
        return any((*own, *other))


def params_without_pages(engine: str, request: str, *, way: str) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a prefill whose pages are not offered.

    `way` is `node` if the decode engine finds the KV in a node, `none` if it has to compute it.
    Some routers refuse a response without parameters.
    """
    return {
        "do_remote_prefill": way == "node",
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_host": None,
        "remote_port": None,
        "remote_block_ids": [],
        "cascade": {"version": VERSION, "way": way},
    }


def wants_decode(params: object) -> bool:
    """Whether a request is a prefill whose pages another engine will get."""
    if not isinstance(params, Mapping):
        return False
    given = cast("Mapping[str, Any]", params)
    return bool(given.get("do_remote_decode")) or _nested(given, "remote_decoder") is not None


def wants_prefill(params: object) -> bool:
    """Whether another engine computes a request's prompt, or has computed it."""
    if not isinstance(params, Mapping):
        return False
    given = cast("Mapping[str, Any]", params)
    return bool(given.get("do_remote_prefill")) or _nested(given, "remote_prefiller") is not None


def transfer_name(params: object, request: str) -> str:
    """Return what a decode engine that waits for a push knows a prefill's request by."""
    if not isinstance(params, Mapping):
        return request
    given = cast("Mapping[str, Any]", params)
    decoder = _nested(given, "remote_decoder")
    name = given.get("transfer_id") if decoder is None else decoder.get("kv_request_id")
    return name if isinstance(name, str) and 0 < len(name) <= _NAME_MAX else request


def _nested(params: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = params.get(name)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def prompt_digest(
    tokens: Sequence[int],
    origin: Mapping[str, str],
    features: Sequence[tuple[int, int, str]],
    generation: str,
) -> str:
    """Return the digest of a prompt and of what else its KV depends on.

    That is its adapter and salt (`origin`), its images and audio, and the generation of the
    engine's keys, which is another one after each reset of the engine's cache.
    """
    facts = {"origin": dict(origin), "features": sorted(features), "generation": generation}
    digest = hashlib.sha256(_canonical(facts))
    digest.update(array("I", tokens).tobytes())
    return digest.hexdigest()


def _check_sizes(blocks: Sequence[Any], workers: Sequence[Any], tokens: int) -> None:
    """Refuse lists that are longer than they can be, before each of their items is looked at."""
    if not 1 <= len(workers) <= WORKERS_MAX or not 1 <= len(blocks) <= _GROUPS_MAX:
        raise ValueError(f"{len(workers)} workers, {len(blocks)} groups")
    if any(len(group) > tokens for group in blocks):
        raise ValueError("more blocks than tokens")


def _canonical(facts: Mapping[str, object]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()

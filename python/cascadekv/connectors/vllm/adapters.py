"""The LoRA adapters that the workers have loaded, identified by the weights in their memory.

vLLM loads an adapter when a request or its API asks for it, drops it when there are too many, and
loads it again from files that may have changed. So the files do not say what was loaded. Workers
digest the tensors that vLLM keeps of each loaded adapter and report the digests. Large ones are
digested by a thread of their own. The KV of an adapter that was not reported is neither stored nor
looked up nor given to other engines.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from cascadekv._native import weights_fingerprint
from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.canonical import canonical_text, text_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

__all__ = ["AdapterUse", "LoadedAdapters", "ReportedAdapters", "fingerprint_of_adapter"]

_LOG = logging.getLogger("vllm.cascade")
AT_ONCE_BYTES = 1 << 20
"""Most bytes of an adapter that are digested within a step: 1.3 ms at 0.8 GB/s."""


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The weights of an adapter that the KV of a request depends on."""

    adapter: int
    """The engine's number of the adapter."""
    loaded: Mapping[int, str] = field(default_factory=dict[int, str])
    """By rank: the fingerprint of the weights."""
    first_plan: int = 0
    """The first plan that computed the request."""


# The workers' side.


@dataclass(slots=True)
class _Loaded:
    """An adapter that is loaded."""

    model: "weakref.ref[Any]"
    since: int
    """The first plan whose step could compute with these weights."""
    fingerprint: str = ""
    """Empty until it is known, and if its weights are of an unknown kind."""
    digest: "Future[str] | None" = None
    """Its fingerprint, until that was noted."""
    before: "_Loaded | None" = None
    """What was loaded under its number before, until the fingerprint was noted."""


class LoadedAdapters:
    """The adapters of one worker."""

    def __init__(self, config: "VllmConfig", rank: int) -> None:
        """Find what keeps the adapters of this engine; `rank` is the worker's."""
        self._rank = rank
        self._list: Callable[[], Mapping[int, Any]] | None = None
        self._loaded: dict[int, _Loaded] = {}
        self._is_reported = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cascade-adapters")
        if config.lora_config is not None:
            self._list = versions.adapter_list(config.lora_config)
            if self._list is None:
                _LOG.warning(
                    "Cascade: the KV of adapters is not stored, because this version of vLLM "
                    "keeps adapters in an unknown way"
                )

    def update(self, plan: int) -> None:
        """Notice adapters that were loaded or dropped before the kernels of a plan."""
        if self._list is None:
            return
        models = self._list()
        for number in [each for each in self._loaded if each not in models]:
            del self._loaded[number]
            self._is_reported = False
        for number, model in models.items():
            known = self._loaded.get(number)
            if known is None or known.model() is not model:
                self._loaded[number] = self._load(model, plan, known)
                self._is_reported = False
        for number, own in self._loaded.items():
            if own.digest is not None and own.digest.done():
                self._loaded[number] = _noted(own, own.digest.result())
                self._is_reported = False

    def _load(self, model: Any, plan: int, known: _Loaded | None) -> _Loaded:
        """Begin to digest an adapter whose weights a plan is the first one to use."""
        before = known if known is None or known.digest is None else known.before
        own = _Loaded(weakref.ref(model), plan, before=before)
        if _size_of(model) > AT_ONCE_BYTES:
            own.digest = self._thread.submit(fingerprint_of_adapter, model)
            return own
        return _noted(own, fingerprint_of_adapter(model))

    def close(self) -> None:
        """End the thread that digests, after the adapter that it reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def is_loaded(self, use: AdapterUse | None) -> bool:
        """Whether the adapter has the weights that some KV depends on; true without an adapter."""
        if use is None:
            return True
        own = self._loaded.get(use.adapter)
        return own is not None and own.fingerprint == use.loaded.get(self._rank)

    def has_computed(self, use: AdapterUse | None) -> bool:
        """Whether all steps that computed a request had the weights; true without an adapter."""
        if use is None:
            return True
        return self.is_loaded(use) and self._loaded[use.adapter].since <= use.first_plan

    def take_report(self, *, is_asked: bool) -> dict[int, dict[int, str]] | None:
        """Return fingerprints by rank and adapter if they have changed or are asked for."""
        if self._is_reported and not is_asked:
            return None
        self._is_reported = True
        known = {n: each.fingerprint for n, each in self._loaded.items() if each.fingerprint}
        return {self._rank: known}


def _noted(own: _Loaded, fingerprint: str) -> _Loaded:
    """Return an adapter with its fingerprint."""
    before = own.before
    # The same weights again: what was computed before is of them, too.
    is_equal = before is not None and before.fingerprint == fingerprint
    since = before.since if before is not None and is_equal else own.since
    return _Loaded(own.model, since, fingerprint)


def _size_of(model: Any) -> int:
    """Return the bytes of an adapter's tensors; 0 if their kind is unknown."""
    kept = getattr(model, "loras", {}), getattr(model, "modules_to_save", {})
    return _bytes_of(kept)


def _bytes_of(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_bytes_of(each) for each in cast("dict[str, Any]", value).values())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(each) for each in cast("list[Any]", value))
    if type(value).__module__.startswith("vllm.lora."):
        return _bytes_of(vars(value))
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def fingerprint_of_adapter(model: Any) -> str:
    """Return a fingerprint of the weights of a loaded adapter; empty if their kind is unknown."""
    try:
        parts = list(_parts({"loras": model.loras, "modules": model.modules_to_save}))
        return weights_fingerprint(*parts, str(bool(model.is_3d_lora_weight)).encode())
    except (AttributeError, TypeError, ValueError) as error:
        _LOG.warning("Cascade: the KV of an adapter is not stored: %s", error)
        return ""


def _parts(value: Any) -> Iterator[Any]:
    """Return the content of weights: names, numbers and the bytes of tensors."""
    import torch  # noqa: PLC0415 # only engines have it

    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if value.numel():
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield content.numpy()
    elif isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        yield f"{len(fields)} fields".encode()
        for name in sorted(fields):
            yield name.encode()
            yield from _parts(fields[name])
    elif isinstance(value, list | tuple):
        values = cast("list[Any]", value)
        yield f"{len(values)} values".encode()
        for each in values:
            yield from _parts(each)
    elif value is None or isinstance(value, str | int | float | bool):
        yield repr(value).encode()
    elif type(value).__module__.startswith("vllm.lora."):
        yield type(value).__name__.encode()
        yield from _parts(vars(value))
    else:
        raise TypeError(f"its weights contain a {type(value).__name__}")


# The scheduler's side.


class ReportedAdapters:
    """The adapters that all workers of an engine have reported."""

    def __init__(self, *, workers: int = 1, has_prefix_cache: bool = False) -> None:
        """`has_prefix_cache`: the engine reuses KV of requests whose adapter has the same name."""
        self._workers = workers
        self._has_prefix_cache = has_prefix_cache
        self._by_rank: dict[int, Mapping[int, str]] = {}
        self._names: dict[int, set[tuple[str, ...]]] = {}
        """By adapter: what the engine's prefix cache knows it by."""
        self._cached: dict[tuple[str, ...], str] = {}
        """The first weights whose KV the engine's prefix cache may have, by the same names."""

    def fingerprint(self, adapter: "LoRARequest") -> str | None:
        """Return the fingerprint of an adapter's weights; `None` if they are not known."""
        name = versions.prefix_cache_name(adapter)
        self._names.setdefault(adapter.lora_int_id, set()).add(name)
        own = self._fingerprint(adapter.lora_int_id)
        if own is None or not self._has_prefix_cache:
            return own
        # Earlier weights under this name: blocks of the engine's own cache may be of either.
        return own if self._cached.setdefault(name, own) == own else None

    def use(self, adapter: "LoRARequest | None", first_plan: int) -> AdapterUse | None:
        """Return the weights of a request's adapter, for the workers; `None` without an adapter."""
        if adapter is None:
            return None
        number = adapter.lora_int_id
        loaded = {rank: own[number] for rank, own in self._by_rank.items() if number in own}
        return AdapterUse(number, loaded, first_plan)

    def is_current(self, use: AdapterUse | None) -> bool:
        """Whether an adapter's weights are still those of a use; true without an adapter."""
        if use is None:
            return True
        own = {rank: known.get(use.adapter) for rank, known in self._by_rank.items()}
        return own == dict(use.loaded)

    def apply(self, report: Mapping[int, Mapping[int, str]]) -> None:
        """Apply a report of workers."""
        self._by_rank |= report
        for number in {number for own in report.values() for number in own}:
            own = self._fingerprint(number)
            for name in self._names.get(number, ()):
                if own is not None:
                    self._cached.setdefault(name, own)

    def _fingerprint(self, number: int) -> str | None:
        known = [own[number] for own in self._by_rank.values() if number in own]
        if len(known) < self._workers:
            return None
        # With expert and pipeline parallelism, each rank keeps other weights.
        several = sorted(set(known))
        return several[0] if len(several) == 1 else text_digest(canonical_text(several))

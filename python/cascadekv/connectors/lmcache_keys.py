"""The block keys of LMCache's objects: they name everything that LMCache says about the bytes.

LMCache says what an engine named itself, not how it computes. What it does not say, such as the
engine's settings, `cascade.weights` has to name.
"""

import dataclasses
import functools
import importlib.metadata
import logging
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cascadekv._native import BlockKey, Manifest, Namespace
from cascadekv.connectors.canonical import canonical_text
from cascadekv.connectors.file_changes import FileFacts, facts_of
from cascadekv.connectors.model_files import is_for_media, model_files_digest
from cascadekv.connectors.weight_digests import WeightDigests
from cascadekv.connectors.weights import NotDigestedError
from cascadekv.errors import RefusedError

__all__ = ["KeySpace", "Layout", "layout_of"]

logger = logging.getLogger(__name__)

CHECK_PAUSES = 10.0
"""Least time from one look at the files of a model to the next, as a multiple of what it took."""
CHECK_PAUSE_MAX_S = 1.0
"""The most of it."""
_IN_KEYS = frozenset(("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"))
"""Fields of LMCache's keys that block keys and manifests have by themselves."""


@dataclass(frozen=True)
class Layout:
    """Shapes and element types of an object, and its size."""

    text: str
    """Part of stored manifests: a change of this text changes all keys."""
    size_bytes: int


def layout_of(shapes: Any, dtypes: Any) -> Layout | None:
    """Return the layout of an object with these tensors; `None` without tensors."""
    return _layout(tuple(shapes), tuple(dtypes)) if shapes else None


@functools.lru_cache(maxsize=256)
def _layout(shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> Layout:
    tensors = list(zip(shapes, dtypes, strict=True))
    parts = [f"{dtype} {'x'.join(map(str, shape))}" for shape, dtype in tensors]
    size = sum(shape.numel() * dtype.itemsize for shape, dtype in tensors)
    return Layout(" + ".join(parts), size)


class _Model:
    """The weights of a model, as they were when this server first used it."""

    def __init__(self, name: str, weights: str, facts: FileFacts | None) -> None:
        """`facts` are those of its files when they were read; `None` if a name identifies it."""
        self.name = name
        self.weights = weights
        self._facts = facts
        self._change: str | None = None
        self._next_check = 0.0

    def check(self) -> None:
        """Raise `RefusedError` if the files were changed.

        An engine with the old weights may still run beside one with the new weights, and LMCache
        does not say which one computed an object. Looks take at most a tenth of the time, because
        a file system can take milliseconds for each file: local files are looked at again after
        milliseconds, which is before an engine can have loaded what replaced them.
        """
        now = time.monotonic()
        if self._change is None and self._facts is not None and now >= self._next_check:
            facts = _facts(self.name)
            took = time.monotonic() - now
            self._next_check = now + took + min(CHECK_PAUSES * took, CHECK_PAUSE_MAX_S)
            if facts != self._facts:
                self._change = f"the files of {self.name} were changed while this server runs"
                logger.error(
                    "Cascade: %s; nothing of it is stored or found until the engines and then "
                    "this server are restarted",
                    self._change,
                )
        if self._change is not None:
            raise RefusedError(self._change)


class KeySpace:
    """Makes the block keys of one LMCache server.

    The constructor of a plugin is told neither the models nor their layouts. Both come with the
    requests, so that objects of another model or layout are not found.
    """

    def __init__(self, weights: str | None, digests: WeightDigests) -> None:
        """`weights` identifies the weights of all models; `None` derives it from each name.

        `digests` has what is known of files of weights.
        """
        self._weights = weights
        self._digests = digests
        self._format = f"lmcache {importlib.metadata.version('lmcache')}"
        self._lock = threading.Lock()
        self._namespaces: dict[tuple[str, int, Layout], Namespace] = {}
        self._models: dict[str, _Model] = {}

    def check(self, keys: Iterable[Any]) -> None:
        """Raise `RefusedError` if the files of a model were changed while this server runs."""
        for name in {key.model_name for key in keys}:
            self._model(name).check()

    def namespace(self, key: Any, layout: Layout) -> Namespace:
        """Return the namespace of an object's model, object group and layout."""
        name = (key.model_name, key.object_group_id, layout)
        model = self._model(key.model_name)
        with self._lock:
            space = self._namespaces.get(name)
        if space is None:
            # Outside the lock: the first use of a model may read files.
            space = Namespace(Manifest(self._fields(model, *name[1:])))
            with self._lock:
                space = self._namespaces.setdefault(name, space)
        return space

    def block_key(self, key: Any, layout: Layout) -> BlockKey:
        """Return the key of an object. The rank contains the world size; a salt has no slash."""
        owner = f"{key.kv_rank:x}/{key.cache_salt}/{_others(key)}".encode()
        return self.namespace(key, layout).key_of_id(owner + key.chunk_hash)

    def known_layouts(self, key: Any) -> list[Layout]:
        """Return the layouts that were used so far for an object's model and object group."""
        name = (key.model_name, key.object_group_id)
        with self._lock:
            return [layout for *known, layout in self._namespaces if tuple(known) == name]

    def _model(self, name: str) -> "_Model":
        model = self._models.get(name)
        if model is None:
            # Two threads may read the same files; the first result counts.
            weights = self._weights
            own = _Model(name, weights, None) if weights else _model_of(name, self._digests)
            with self._lock:
                model = self._models.setdefault(name, own)
        return model

    def _fields(self, model: "_Model", group: int, layout: Layout) -> dict[str, str]:
        in_layout = "in the layout"
        return {
            "engine_format": self._format,
            "model": model.name,
            "weights": model.weights,
            "object_group": str(group),
            "layout": layout.text,
            "dtype": in_layout,
            "block_tokens": in_layout,
            "layers": in_layout,
            "kv_heads": in_layout,
            "head_dim": in_layout,
            "tensor_parallel": "in the id",
        }


def _others(key: Any) -> str:
    """Return the fields that a later version of LMCache adds to its keys; empty without any."""
    names = _other_fields(cast("Any", type(key)))
    return canonical_text({name: getattr(key, name) for name in names}) + "/" if names else ""


@functools.lru_cache(maxsize=16)
def _other_fields(kind: Any) -> tuple[str, ...]:
    known = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(field.name for field in known if field.name not in _IN_KEYS)


def _model_of(model: str, digests: WeightDigests) -> _Model:
    """Identify weights by content if the model's name is their directory, else by the name."""
    fingerprint, facts = None, None
    if Path(model).is_absolute():
        try:
            facts = facts_of(Path(model))
            fingerprint = _content_of(Path(model), digests)
        except OSError as error:
            logger.warning("Cascade: the weights of %s cannot be read: %s", model, error)
    if fingerprint is None:
        logger.warning(
            "Cascade: LMCache reports the model %s by name only, and the name identifies its "
            "weights; set cascade.weights to tell revisions and engine settings apart",
            model,
        )
    else:
        logger.warning(
            "Cascade: LMCache does not report how the engines of %s compute; if they differ in "
            "settings (quantization, overrides, LongRoPE and its longest sequence), give each "
            "server another cascade.weights",
            model,
        )
        # The facts are older than what was read: a change in between is found.
        return _Model(model, fingerprint, facts)
    return _Model(model, f"named:{model}", None)


def _facts(model: str) -> FileFacts | None:
    try:
        return facts_of(Path(model))
    except OSError:
        # It was removed, or renamed.
        return None


def _content_of(place: Path, digests: WeightDigests) -> str | None:
    """Return a fingerprint of a model's weights and of the other files that change KV."""
    try:
        fingerprint = digests.fingerprint(str(place))
    except NotDigestedError:
        digests.start([str(place)])
        logger.warning(
            "Cascade: the digest of the weights of %s is not known yet and is computed in the "
            "background; until this server is restarted after that, no other one finds its objects",
            place,
        )
        fingerprint = f"of this process {uuid.uuid4().hex}"
    if fingerprint is None or not place.is_dir():
        return fingerprint
    # LMCache does not say whether the engine runs the model's own code.
    files = model_files_digest(place, has_media=is_for_media(place), runs_code=True)
    return f"{fingerprint} {files}"

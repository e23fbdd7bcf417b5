"""The block keys of LMCache's objects: they name everything that the bytes depend on."""

import functools
import importlib.metadata
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascadekv._native import BlockKey, Manifest, Namespace
from cascadekv.connectors.weights import fingerprint_of_model

__all__ = ["KeySpace", "Layout", "layout_of"]

logger = logging.getLogger(__name__)


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


class KeySpace:
    """Makes the block keys of one LMCache server.

    The constructor of a plugin is told neither the models nor their layouts. Both come with the
    requests, so that objects of another model or layout are not found.
    """

    def __init__(self, weights: str | None) -> None:
        """`weights` identifies the weights of all models; `None` derives it from each name."""
        self._weights = weights
        self._format = f"lmcache {importlib.metadata.version('lmcache')}"
        self._lock = threading.Lock()
        self._namespaces: dict[tuple[str, int, Layout], Namespace] = {}

    def namespace(self, key: Any, layout: Layout) -> Namespace:
        """Return the namespace of an object's model, object group and layout."""
        name = (key.model_name, key.object_group_id, layout)
        with self._lock:
            space = self._namespaces.get(name)
        if space is None:
            # Outside the lock: the first use of a model may read files.
            space = Namespace(Manifest(self._fields(*name)))
            with self._lock:
                space = self._namespaces.setdefault(name, space)
        return space

    def block_key(self, key: Any, layout: Layout) -> BlockKey:
        """Return the key of an object. The rank contains the world size; a salt has no slash."""
        owner = f"{key.kv_rank:x}/{key.cache_salt}/".encode()
        return self.namespace(key, layout).key_of_id(owner + key.chunk_hash)

    def known_layouts(self, key: Any) -> list[Layout]:
        """Return the layouts that were used so far for an object's model and object group."""
        name = (key.model_name, key.object_group_id)
        with self._lock:
            return [layout for *known, layout in self._namespaces if tuple(known) == name]

    def _fields(self, model: str, group: int, layout: Layout) -> dict[str, str]:
        in_layout = "in the layout"
        return {
            "engine_format": self._format,
            "model": model,
            "weights": self._weights or _weights_of(model),
            "object_group": str(group),
            "layout": layout.text,
            "dtype": in_layout,
            "block_tokens": in_layout,
            "layers": in_layout,
            "kv_heads": in_layout,
            "head_dim": in_layout,
            "tensor_parallel": "in the id",
        }


def _weights_of(model: str) -> str:
    """Identify weights by content if the model's name is their directory, else by the name."""
    fingerprint = None
    if Path(model).is_absolute():
        try:
            fingerprint = fingerprint_of_model(model)
        except OSError as error:
            logger.warning("Cascade: the weights of %s cannot be read: %s", model, error)
    if fingerprint is None:
        logger.warning(
            "Cascade: LMCache reports the model %s by name only, and the name identifies its "
            "weights; set cascade.weights to tell revisions and KV precisions apart",
            model,
        )
    return fingerprint or f"named:{model}"

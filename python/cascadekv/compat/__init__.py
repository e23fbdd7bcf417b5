"""The interface of the founding design document, on one node.

Code with `from cascade_cpp import DistributedStore, CascadeConfig` runs after

    import cascadekv.compat
    cascadekv.compat.install()
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cascadekv._native import BlockKey, Manifest, Namespace, Store
from cascadekv.errors import ConfigError
from cascadekv.results import GetStatus, PutStatus

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from typing_extensions import Buffer

    from cascadekv.stats import Stats

__all__ = ["CascadeConfig", "DistributedStore", "install"]


@dataclass
class CascadeConfig:
    """The document's settings; assigning an unknown name raises `ConfigError`."""

    dedup_enabled: bool = True
    """Whether equal bytes under different ids are stored once (SHA-256 of the content)."""
    semantic_eviction: bool = True
    """Whether protected prefixes are evicted last (policy `prefix-cost`); otherwise LRU."""
    locality_aware: bool = True
    """Whether hot remote blocks are replicated. No effect on one node: every block is local."""
    promotion_threshold: int = 3
    """Remote reads before a block is replicated. No effect on one node: every block is local."""
    dram_capacity: int | str = "256MiB"
    """Size of the DRAM tier."""
    lustre_path: str | os.PathLike[str] | None = None
    """Directory of the file tier; no file tier if unset."""
    lustre_capacity: int | str = "4GiB"
    """Capacity of the file tier."""

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse unknown names."""
        known = [field.name for field in dataclasses.fields(type(self))]
        if name not in known:
            raise ConfigError(f"{name}: no such setting; known are {', '.join(known)}")
        object.__setattr__(self, name, value)


class DistributedStore:
    """Blocks under ids that the caller chooses, in the tiers of this node."""

    def __init__(self, config: CascadeConfig | None = None) -> None:
        config = CascadeConfig() if config is None else config
        self._namespace = Namespace(Manifest({"layout": "opaque bytes under a caller's id"}))
        self._protects_prefixes = config.semantic_eviction
        self._store = Store(
            dram=config.dram_capacity,
            files=config.lustre_path,
            files_capacity=config.lustre_capacity,
            policy="prefix-cost" if config.semantic_eviction else "lru",
            digest="sha256" if config.dedup_enabled else "off",
        )

    def put(self, block_id: str, data: Buffer, *, is_prefix: bool = False) -> bool:
        """Store a block; returns False if there is no room for it.

        Raises `ValueError` if other bytes are stored under the id; they are kept.
        """
        result = self._store.put(
            self._key(block_id),
            [data],
            chain=False,
            is_prefix=is_prefix and self._protects_prefixes,
        )[0]
        if result.error is not None:
            raise result.error
        if result.status is PutStatus.CONFLICT:
            raise ValueError(f"{block_id!r} has other bytes already; delete it first")
        return result.ok

    def get(self, block_id: str, out: Buffer) -> bool:
        """Copy a block into an array; returns False if the block is absent.

        Raises `ValueError`, and does not change the array, if the array is too short.
        """
        result = self._store.get(self._key(block_id), [out])[0]
        if result.error is not None:
            raise result.error
        if result.status is GetStatus.TOO_SHORT:
            raise ValueError(f"{block_id!r} needs an array of {result.needed_bytes} bytes")
        return result.ok

    def contains(self, block_id: str) -> bool:
        """Return whether a block is in any tier."""
        return self._store.contains(self._key(block_id))[0]

    def locate(self, block_id: str) -> list[str]:
        """Return the tiers that have a block, fastest first."""
        return self._store.locate(self._key(block_id))[0]

    def delete(self, block_id: str) -> bool:
        """Delete a block from every tier; returns whether it was present."""
        return self._store.delete(self._key(block_id))[0]

    def sync_metadata(self) -> None:
        """Publish this node's changes: on one node, the same as `flush`."""
        self._store.flush()

    def flush(self) -> None:
        """Wait until every tier has written all earlier puts."""
        self._store.flush()

    def clear(self) -> None:
        """Delete every block."""
        self._store.clear()

    def get_stats(self) -> Stats:
        """Return counters and contents of the store."""
        return self._store.stats()

    stats = get_stats

    def close(self) -> None:
        """Write back pending blocks and close the store."""
        self._store.close()

    def __enter__(self) -> Self:
        """Use as a context manager that closes the store."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the store."""
        self.close()

    def _key(self, block_id: str) -> BlockKey:
        return self._namespace.key_of_id(block_id)


def install(name: str = "cascade_cpp") -> None:
    """Make this module importable under the document's module name."""
    sys.modules[name] = sys.modules[__name__]

"""The interface of the founding design document, on one node.

Code that says `from cascade_cpp import DistributedStore, CascadeConfig` runs after

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
    """The document's settings; a name that it does not have is refused when it is assigned."""

    dedup_enabled: bool = True
    """Whether equal bytes under different ids are stored once (SHA-256 of the content)."""
    semantic_eviction: bool = True
    """Whether prefix blocks leave memory last; least recently used first otherwise."""
    locality_aware: bool = True
    """Whether hot remote blocks move nearer. On one node every block is local already."""
    promotion_threshold: int = 3
    """Remote reads after which a block moves nearer. On one node every block is local already."""
    dram_capacity: int | str = "256MiB"
    """Size of the DRAM tier."""
    lustre_path: str | os.PathLike[str] | None = None
    """Directory of the file tier; none without it."""
    lustre_capacity: int | str = "4GiB"
    """Bytes that the file tier may take."""

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse names that are no settings."""
        known = [field.name for field in dataclasses.fields(type(self))]
        if name not in known:
            raise ConfigError(f"{name}: no such setting; known are {', '.join(known)}")
        object.__setattr__(self, name, value)


class DistributedStore:
    """Blocks under ids of the caller's, in the tiers of this node."""

    def __init__(self, config: CascadeConfig | None = None) -> None:
        config = CascadeConfig() if config is None else config
        self._namespace = Namespace(Manifest({"layout": "opaque bytes under a caller's id"}))
        self._protects = config.semantic_eviction
        self._store = Store(
            dram=config.dram_capacity,
            files=config.lustre_path,
            files_capacity=config.lustre_capacity,
            policy="prefix-cost" if config.semantic_eviction else "lru",
            digest="sha256" if config.dedup_enabled else "off",
        )

    def put(self, block_id: str, data: Buffer, *, is_prefix: bool = False) -> bool:
        """Store a block. False when there is no room for it.

        Raises `ValueError` when the id names other bytes already, which stay.
        """
        result = self._store.put(
            self._key(block_id), [data], chain=False, is_prefix=is_prefix and self._protects
        )[0]
        if result.error is not None:
            raise result.error
        if result.status is PutStatus.CONFLICT:
            raise ValueError(f"{block_id!r} names other bytes already; delete it first")
        return result.ok

    def get(self, block_id: str, out: Buffer) -> bool:
        """Copy a block into an array. False when it is not here.

        Raises `ValueError` when the array is too short, and leaves it as it was.
        """
        result = self._store.get(self._key(block_id), [out])[0]
        if result.error is not None:
            raise result.error
        if result.status is GetStatus.TOO_SHORT:
            raise ValueError(f"{block_id!r} needs {result.needed_bytes} bytes")
        return result.ok

    def contains(self, block_id: str) -> bool:
        """Say whether a block is in any tier."""
        return self._store.contains(self._key(block_id))[0]

    def locate(self, block_id: str) -> list[str]:
        """Name the tiers that have a block, fast to slow."""
        return self._store.locate(self._key(block_id))[0]

    def delete(self, block_id: str) -> bool:
        """Forget a block in every tier. True if it was here."""
        return self._store.delete(self._key(block_id))[0]

    def sync_metadata(self) -> None:
        """Make this node's own changes known: on one node, wait until they are written down."""
        self._store.flush()

    def flush(self) -> None:
        """Wait until every tier has what was put."""
        self._store.flush()

    def clear(self) -> None:
        """Forget every block."""
        self._store.clear()

    def get_stats(self) -> Stats:
        """Say what the store holds and did."""
        return self._store.stats()

    stats = get_stats

    def close(self) -> None:
        """Write down what waits and stop."""
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
    """Let code import this module under the document's name."""
    sys.modules[name] = sys.modules[__name__]

"""The settings of a store: checked when created, convertible to and from a dictionary."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Self, TypedDict

from cascadekv._native import check_config
from cascadekv.errors import ConfigError
from cascadekv.messages import advice

__all__ = ["StoreConfig", "StoreSettings"]

Policy = Literal["prefix-cost", "lru", "s3fifo", "arc", "waterfall"]
DigestMode = Literal["off", "blake3", "sha256"]
WritePolicy = Literal["back", "through"]
IoEngine = Literal["auto", "uring", "psync"]


class StoreSettings(TypedDict, total=False):
    """The keywords of `Store` and `StoreConfig`."""

    pipeline: str | None
    dram: int | str
    dram_blocks: int | None
    huge_pages: bool
    files: str | os.PathLike[str] | None
    files_capacity: int | str
    segment_size: int | str
    direct_io: bool
    io_engine: IoEngine
    durable: bool
    policy: Policy
    digest: DigestMode
    write: WritePolicy
    dirty_max: int | str | None
    mover_rate: int | str | None
    protected_share: int | str
    admit_partial: bool
    changes_max: int
    timeout: float | str | timedelta


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The settings of a store. Raises `ConfigError` for an invalid setting.

    Sizes are bytes or text such as `"512MiB"` (powers of 1024) or `"100MB"` (powers of 1000).
    Durations are seconds, text such as `"5s"` or `"250ms"`, or a `timedelta`. The created
    configuration has them as bytes and seconds. `dataclasses.replace` creates a modified copy. The
    names are those of a node's configuration (docs/configuration.md).
    """

    pipeline: str | None = None
    """Tiers, fastest first. Default: `"Dram|Files"` with `files`, else `"Dram"`."""
    dram: int | str = "256MiB"
    """Size of the DRAM tier, allocated at start. Minimum: 4 MiB."""
    dram_blocks: int | None = None
    """Most blocks in DRAM, for simulations in blocks. Default: limited by `dram` alone."""
    huge_pages: bool = True
    """Whether to request huge pages."""
    files: str | os.PathLike[str] | None = None
    """Directory of the file tier; one store uses it at a time."""
    files_capacity: int | str = "4GiB"
    """Capacity of the file tier. Minimum: two segments."""
    segment_size: int | str = "256MiB"
    """Size of a segment. Minimum: 1 MiB."""
    direct_io: bool = True
    """Whether to bypass the page cache where the file system supports it."""
    io_engine: IoEngine = "auto"
    """I/O interface for files. `auto`: io_uring if the kernel allows it, else preadv/pwritev."""
    durable: bool = False
    """Whether a block counts as stored only once it is on stable storage."""
    policy: Policy = "prefix-cost"
    """Eviction policy of DRAM."""
    digest: DigestMode = "off"
    """Content hash for deduplication: equal bytes are stored once. `off`: no deduplication."""
    write: WritePolicy = "back"
    """`back`: a put returns once the first tier has the block; `through`: once every tier has."""
    dirty_max: int | str | None = None
    """Most bytes pending write-back before puts wait. Default: a quarter of DRAM."""
    mover_rate: int | str | None = None
    """Limit for write-back and prefetch, in bytes per second or text such as `"500MiB/s"`.

    Default: no limit.
    """
    protected_share: int | str = 90
    """Most of DRAM that protected prefixes may hold, in percent, or text such as `"90%"`."""
    admit_partial: bool = False
    """Whether to store a request's last block if it is not full."""
    changes_max: int = 1 << 20
    """Entries of the change log of `Store.changes`: 33 bytes each, allocated on use. 0: off."""
    timeout: float | str | timedelta = 30.0
    """Deadline of calls that set none."""

    def __post_init__(self) -> None:
        """Choose the default pipeline, check all settings and normalize their values."""
        if self.pipeline is None:
            object.__setattr__(self, "pipeline", "Dram" if self.files is None else "Dram|Files")
        for name, value in check_config(self).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Self:
        """Create a configuration from names and values; an unknown name is a `ConfigError`."""
        _check_mapping(settings)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                where = str(name)
                raise ConfigError(f"{where[:60]}: no such setting; {advice(where, known)}")
        return cls(**settings)  # type: ignore[arg-type] # checked by __post_init__

    def to_dict(self) -> dict[str, object]:
        """Return the settings as plain values for `from_dict` and JSON."""
        return dataclasses.asdict(self)


def _check_mapping(settings: object) -> None:
    if not isinstance(settings, Mapping):
        kind = type(settings).__name__
        raise ConfigError(f"settings: <{kind}> is not a mapping of names to values")

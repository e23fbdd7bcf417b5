"""A store's settings: checked when made, and dumpable."""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Self, TypedDict

from cascadekv._native import check_config
from cascadekv.errors import ConfigError

__all__ = ["StoreConfig", "StoreSettings"]

Policy = Literal["prefix-cost", "lru", "s3fifo", "arc", "waterfall"]
DigestMode = Literal["off", "blake3", "sha256"]
WritePolicy = Literal["back", "through"]
FilesLayout = Literal["segments", "file-per-block"]
IoEngine = Literal["auto", "uring", "psync"]


class StoreSettings(TypedDict, total=False):
    """The keywords of `Store` and `StoreConfig`."""

    pipeline: str | None
    dram: int | str
    dram_blocks: int | None
    huge_pages: bool
    files: str | os.PathLike[str] | None
    files_capacity: int | str
    files_layout: FilesLayout
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


_RENAMED = {
    "direct": "direct_io",
    "dirty_bytes_max": "dirty_max",
    "engine": "io_engine",
    "mover_bytes_per_second": "mover_rate",
    "protected_percent": "protected_share",
}
"""Names that settings had before."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Everything that a store needs to know. Raises `ConfigError` for what makes no sense.

    Sizes are bytes or text such as `"512MiB"` (powers of 1024) or `"100MB"` (powers of 1000).
    Durations are seconds, text such as `"5s"` or `"250ms"`, or a `timedelta`. Both are bytes and
    seconds once the configuration is made. `dataclasses.replace` makes a changed copy. Names are
    those of a node's configuration (docs/configuration.md).
    """

    pipeline: str | None = None
    """Tiers from fast to slow. Default: `"Dram|Files"` with `files`, else `"Dram"`."""
    dram: int | str = "256MiB"
    """Size of the DRAM tier, taken at once. Minimum: 4 MiB."""
    dram_blocks: int | None = None
    """Most blocks in DRAM, for studies in blocks. Default: no limit but the bytes."""
    huge_pages: bool = True
    """Whether to ask for huge pages."""
    files: str | os.PathLike[str] | None = None
    """Directory of the file tier, of this store alone."""
    files_capacity: int | str = "4GiB"
    """Bytes that the file tier may take. Minimum: two segments."""
    files_layout: FilesLayout = "segments"
    """Append-only segments of many blocks, or one file a block."""
    segment_size: int | str = "256MiB"
    """Size of a segment. Minimum: 1 MiB."""
    direct_io: bool = True
    """Whether to bypass the page cache, where the file system allows it."""
    io_engine: IoEngine = "auto"
    """What reads and writes files: io_uring where the kernel allows it, else preadv/pwritev."""
    durable: bool = False
    """Whether a block counts as stored only once it is on stable storage."""
    policy: Policy = "prefix-cost"
    """Which blocks leave DRAM first."""
    digest: DigestMode = "off"
    """Whether blocks are named by content too, so that equal bytes are stored once."""
    write: WritePolicy = "back"
    """Whether a put returns when the first tier has the block, or when every tier has it."""
    dirty_max: int | str | None = None
    """Bytes that may wait to be written down before puts wait too. Default: a quarter of DRAM."""
    mover_rate: int | str | None = None
    """Bytes a second, or text such as `"500MiB/s"`, that may be written down, or prefetched.

    Default: no limit.
    """
    protected_share: int | str = 90
    """Share of DRAM that protected prefixes may hold, in percent, or text such as `"90%"`."""
    admit_partial: bool = False
    """Whether a request's last, partly filled block is taken."""
    changes_max: int = 1 << 20
    """Changes kept for `Store.changes`, once somebody asks; 33 bytes each. 0: none."""
    timeout: float | str | timedelta = 30.0
    """How long a call may take unless it says otherwise."""

    def __post_init__(self) -> None:
        """Choose the pipeline, check the whole, and turn values into plain ones."""
        if self.pipeline is None:
            object.__setattr__(self, "pipeline", "Dram" if self.files is None else "Dram|Files")
        for name, value in check_config(self).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Self:
        """Make a configuration from names and values; an unknown name is a `ConfigError`."""
        _check_mapping(settings)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name in _RENAMED:
                raise ConfigError(f"{name}: is now called {_RENAMED[name]}")
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"{str(name)[:60]}: no such setting; {advice}")
        return cls(**settings)  # type: ignore[arg-type] # checked by __post_init__

    def to_dict(self) -> dict[str, object]:
        """Give the settings as plain values that `from_dict` and JSON take."""
        return dataclasses.asdict(self)


def _check_mapping(settings: object) -> None:
    if not isinstance(settings, Mapping):
        kind = type(settings).__name__
        raise ConfigError(f"settings: <{kind}> is not a mapping of names to values")

"""Reads UCM configuration files unchanged: every key is applied, or refused with a reason.

The file is the YAML file that UCM's `UCM_CONFIG_FILE` names. `docs/connectors.md` describes the
effect of each key.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cascadekv.errors import ConfigError
from cascadekv.messages import advice, shown

__all__ = ["UcmSettings", "parse_ucm", "read_ucm", "trace_limits"]

GIB = 1 << 30
"""UCM's "GB" is a power of 1024."""
CACHE_BUFFER_GB = 256
"""UCM's default for `cache_buffer_capacity_gb`."""
MEMORY_SHARE = 4
"""Without `cache_buffer_capacity_gb`, DRAM is at most the host's memory divided by this."""
STORE_NAME = "UcmPipelineStore"
PIPELINE = "Cache|Posix"
FILES_MIN = 1 << 20
"""Least capacity of the file tier."""
FILES_SHARE = 0.95
"""Share of the file system's available space that is used without `posix_capacity_gb`."""
STAT_BLOCK = 512
"""Unit of `st_blocks`, the same on every file system."""
DRAM_MIN = 4 << 20
"""Least size of the DRAM tier."""
TIMEOUT_MS_MAX = 3_600_000
QUEUE_MAX = 1 << 24
NUMBER_MAX = 1 << 30
TRACE_FILES = 3
TRACE_FILE_MIB = 64

_ENGINES = {"psync": "psync", "aio": "auto", "uring": "uring"}
"""Cascade's I/O engine for each of UCM's; `auto` is asynchronous if the kernel allows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UcmSettings:
    """The settings of a UCM file, as Cascade's settings."""

    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the store: keys of `kv_connector_extra_config` that begin with `cascade.`."""
    use_layerwise: bool = True
    """Whether blocks are loaded and saved layer by layer."""
    hit_ratio: float | None = None
    """Most tokens to load, as a share of the prompt; `None`: all that are found."""
    persist_token_threshold: int = 0
    """Requests with fewer tokens are neither loaded nor saved."""
    use_lite: bool = False
    """Whether hits are only counted, without loads and saves."""
    enable_record_traces: bool = False
    """Whether finished requests are recorded as a trace."""
    enable_event_sync: bool = True
    """Whether copies wait for the events of the device's own stream (no effect on CPUs)."""
    waiting_queue_depth: int = 8192
    """Most asynchronous loads at a time; requests beyond them are computed."""
    running_queue_depth: int = 524_288
    """Most blocks in flight; further blocks are computed."""
    metrics_config_path: str | None = None
    """The file with UCM's list of metrics. Cascade's metrics are always on."""
    consumed: tuple[str, ...] = ()
    """Every key of the file, dotted, in the order of the file."""
    notes: tuple[str, ...] = ()
    """How effects differ from UCM's, one sentence each, for the log."""


def read_ucm(path: str | os.PathLike[str]) -> UcmSettings:
    """Read a UCM file.

    Raises `ConfigError` that names the file and the key: for a file that is unreadable or not YAML,
    an unknown key, and an invalid or unsupported value.
    """
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"UCM_CONFIG_FILE: {name} cannot be read: {error}") from error
    try:
        return parse_ucm(_load_yaml(text))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def parse_ucm(
    document: object,
    *,
    memory_bytes: Callable[[], int] | None = None,
    available_bytes: Callable[[str], int] | None = None,
) -> UcmSettings:
    """Parse the YAML document of a UCM file; errors as for `read_ucm`, without the file's name.

    `memory_bytes` returns the size of the host's memory, `available_bytes` the space that a
    directory uses or can still use. Defaults: the operating system's values.
    """
    top = _Section(document, "")
    store_name, config = _store(top)
    notes: list[str] = []
    options = _store_options(
        config, notes, memory_bytes or _host_memory, available_bytes or _file_system_space
    )
    waiting = config.integer("waiting_queue_depth", 8192, 1, QUEUE_MAX)
    running = config.integer("running_queue_depth", 524_288, 1, QUEUE_MAX)
    if config.boolean("use_gdr", default=False):
        notes.append("use_gdr: GPUDirect is not supported; blocks are copied through host memory")
    use_lite = top.boolean("use_lite", default=False)
    traces = top.boolean("enable_record_traces", default=False)
    metrics = _metrics(top, notes)
    settings = UcmSettings(
        options=options,
        use_layerwise=top.boolean("use_layerwise", default=True),
        hit_ratio=top.share("hit_ratio"),
        persist_token_threshold=top.integer("persist_token_threshold", 0, 0, 1 << 40),
        use_lite=use_lite,
        enable_record_traces=traces,
        enable_event_sync=top.boolean("enable_event_sync", default=True),
        waiting_queue_depth=waiting,
        running_queue_depth=running,
        metrics_config_path=metrics,
        consumed=(*top.names(), *store_name, *config.names()),
        notes=tuple(notes),
    )
    top.refuse_unknown(_NOT_AT_TOP)
    config.refuse_unknown(_ONLY_AT_TOP)
    return settings


def trace_limits(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the size limit of a trace file in bytes, and the limit of files of a trace.

    They are UCM's `UCM_LOG_MAX_SIZE` (MiB) and `UCM_LOG_MAX_FILES`. Raises `ConfigError` that names
    the invalid variable.
    """
    limits: list[int] = []
    for name, default in (("UCM_LOG_MAX_SIZE", TRACE_FILE_MIB), ("UCM_LOG_MAX_FILES", TRACE_FILES)):
        text = environment.get(name, str(default))
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= QUEUE_MAX:
            raise ConfigError(f"{name}: {text!r} is not a number from 1 to {QUEUE_MAX}")
        limits.append(int(text))
    return limits[0] << 20, limits[1]


class _Section:
    """One mapping of the file. Records which keys were read, so that unknown ones are refused."""

    def __init__(self, value: object, prefix: str) -> None:
        where = prefix.removesuffix(".") or "the file"
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected names and values, found {shown(value)}")
        given = cast("Mapping[object, object]", value)
        for name in given:
            if not isinstance(name, str):
                raise ConfigError(f"{where}: {shown(name)} is not the name of a setting")
        self._given = cast("Mapping[str, object]", value)
        self._prefix = prefix
        self._known: list[str] = []

    def names(self) -> tuple[str, ...]:
        """Return the keys of this mapping, dotted."""
        return tuple(self._prefix + name for name in self._given)

    def take(self, name: str) -> object:
        """Return the key's value, or `None`, and mark the key as known."""
        self._known.append(name)
        return self._given.get(name)

    def error(self, name: str, reason: str) -> ConfigError:
        """Return an error that names the key."""
        return ConfigError(f"{self._prefix}{name}: {reason}")

    def boolean(self, name: str, *, default: bool) -> bool:
        """Read a boolean."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"{shown(value)} is neither true nor false")
        return value

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Read a whole number."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"{shown(value)} is not a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float | None:
        """Read a number that is not negative."""
        value = self.take(name)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= NUMBER_MAX
        ):
            raise self.error(name, f"{shown(value)} is not a number from 0 to {NUMBER_MAX}")
        return float(value)

    def share(self, name: str) -> float | None:
        """Read a number from 0 to 1."""
        value = self.number(name)
        if value is not None and value > 1:
            raise self.error(name, f"{shown(value)} is not a share from 0 to 1")
        return value

    def text(self, name: str) -> str | None:
        """Read non-empty text."""
        value = self.take(name)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise self.error(name, f"{shown(value)} is not text")
        return value

    def refuse_unknown(self, advice_by_name: Mapping[str, str]) -> None:
        """Refuse keys that were not read; `advice_by_name` says where some of them belong."""
        for name in self._given:
            if name in self._known:
                continue
            if name in advice_by_name:
                raise self.error(name, advice_by_name[name])
            raise self.error(name, f"no such setting; {advice(name, self._known)}")


_MOVE_INTO_CONFIG = "belongs to ucm_connectors, ucm_connector_config; move it there"
_MOVE_TO_TOP = "belongs to the top level of the file; move it there"
_NOT_AT_TOP: dict[str, str] = {
    **dict.fromkeys(
        (
            "store_pipeline",
            "storage_backends",
            "io_direct",
            "cache_buffer_capacity_gb",
            "posix_capacity_gb",
            "posix_io_engine",
            "use_gdr",
            "waiting_queue_depth",
            "running_queue_depth",
            "timeout_ms",
        ),
        _MOVE_INTO_CONFIG,
    ),
    "ucm_sparse_config": "sparse attention is not supported; remove it",
}
_ONLY_AT_TOP: dict[str, str] = dict.fromkeys(
    (
        "enable_event_sync",
        "use_layerwise",
        "hit_ratio",
        "enable_record_traces",
        "use_lite",
        "persist_token_threshold",
        "metrics_config_path",
    ),
    _MOVE_TO_TOP,
)


def _store(top: _Section) -> tuple[tuple[str, ...], _Section]:
    """Return the keys of the file's store entry, and its configuration."""
    connectors = top.take("ucm_connectors")
    if not isinstance(connectors, list) or not connectors:
        raise top.error("ucm_connectors", "expected a list with one store")
    entries = cast("list[object]", connectors)
    if len(entries) > 1:
        raise top.error(
            "ucm_connectors",
            f"{len(entries)} stores; only one store with several tiers is supported: remove others",
        )
    entry = _Section(entries[0], "ucm_connectors[0].")
    name = entry.text("ucm_connector_name")
    if name != STORE_NAME:
        raise entry.error(
            "ucm_connector_name", f"{shown(name)} is not supported; write {STORE_NAME}"
        )
    given = entry.take("ucm_connector_config")
    if given is None:
        raise entry.error("ucm_connector_config", "is missing; it names storage_backends at least")
    config = _Section(given, "ucm_connectors[0].ucm_connector_config.")
    entry.refuse_unknown(_NOT_AT_TOP)
    return entry.names(), config


def _store_options(
    config: _Section,
    notes: list[str],
    memory_bytes: Callable[[], int],
    available_bytes: Callable[[str], int],
) -> dict[str, object]:
    pipeline = config.text("store_pipeline")
    if pipeline is None:
        raise config.error("store_pipeline", f"is missing; write {PIPELINE!r}")
    if [stage.strip() for stage in pipeline.split("|")] != PIPELINE.split("|"):
        raise config.error(
            "store_pipeline",
            f"{shown(pipeline)} is not supported; write {PIPELINE!r}, or use cascade.pipeline "
            f"instead of a UCM file",
        )
    directory = _directory(config)
    engine = config.text("posix_io_engine")
    if engine is not None and engine not in _ENGINES:
        raise config.error(
            "posix_io_engine", f"{shown(engine)} is unknown; known are {', '.join(_ENGINES)}"
        )
    if engine == "aio":
        notes.append("posix_io_engine: aio selects io_uring, or psync if the kernel forbids it")
    timeout_ms = config.integer("timeout_ms", 30_000, 1, TIMEOUT_MS_MAX)
    return {
        "cascade.pipeline": PIPELINE,
        "cascade.dram": _dram(config, notes, memory_bytes),
        "cascade.files": directory,
        "cascade.files_capacity": _files_capacity(config, notes, directory, available_bytes),
        "cascade.direct_io": config.boolean("io_direct", default=False),
        "cascade.io_engine": _ENGINES[engine or "psync"],
        "cascade.timeout": timeout_ms / 1000,
    }


def _directory(config: _Section) -> str:
    """Read the directory of the file tier; there can be only one."""
    value = config.take("storage_backends")
    if value is None:
        raise config.error("storage_backends", "is missing; set the directory for blocks")
    listed: list[object] = cast("list[object]", value) if isinstance(value, list) else [value]
    paths: list[str] = []
    for path in listed:
        if not isinstance(path, str) or not path.strip():
            raise config.error("storage_backends", f"{shown(path)} is not a directory")
        paths += path.split(":")
    if len(paths) != 1 or not paths[0]:
        raise config.error(
            "storage_backends",
            f"{shown(':'.join(paths))} has {len(paths)} directories; the file tier uses one: "
            f"remove the others, or combine the disks (RAID, LVM)",
        )
    return paths[0]


def _dram(config: _Section, notes: list[str], memory_bytes: Callable[[], int]) -> int:
    capacity = config.number("cache_buffer_capacity_gb")
    if capacity is not None:
        dram = int(capacity * GIB)
        if dram < DRAM_MIN:
            raise config.error(
                "cache_buffer_capacity_gb", f"{capacity:g} is too small; the minimum is 4 MiB"
            )
        return dram
    most = max(memory_bytes() // MEMORY_SHARE, DRAM_MIN)
    if most >= CACHE_BUFFER_GB * GIB:
        return CACHE_BUFFER_GB * GIB
    notes.append(
        f"cache_buffer_capacity_gb: set to {most / GIB:.1f}, a quarter of this host's memory, "
        f"because the default of {CACHE_BUFFER_GB} is larger"
    )
    return most


def _files_capacity(
    config: _Section, notes: list[str], directory: str, available_bytes: Callable[[str], int]
) -> int:
    capacity = config.number("posix_capacity_gb")
    if capacity:
        files = int(capacity * GIB)
        if files < FILES_MIN:
            raise config.error(
                "posix_capacity_gb", f"{capacity:g} is too small; the minimum is 1 MiB"
            )
        return files
    space = max(available_bytes(directory), FILES_MIN)
    notes.append(
        f"posix_capacity_gb: not limited; set to {space / GIB:.1f}, 95 % of the file system's "
        f"available space"
    )
    return space


def _metrics(top: _Section, notes: list[str]) -> str | None:
    path = top.text("metrics_config_path")
    if path is None:
        return None
    if not Path(path).is_file():
        raise top.error(
            "metrics_config_path", f"{path} is not a file; remove the key or correct it"
        )
    notes.append(
        "metrics_config_path: the list in this file is not read; Cascade's metrics have other "
        "names (docs/connectors.md) and are always on"
    )
    return path


def _load_yaml(text: str) -> object:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            "UCM files are YAML, and PyYAML is not installed; pip install PyYAML"
        ) from error

    base: Any = yaml.SafeLoader

    class Loader(base):
        """Refuses duplicate keys of a mapping, which YAML's own loader accepts."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
            seen: set[object] = set()
            for key_node, _ in node.value:
                key = key_node.value
                if isinstance(key, str) and key in seen:
                    raise ConfigError(f"{key}: occurs twice; remove one")
                seen.add(str(key))
            return base.construct_mapping(self, node, deep=deep)

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from error


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _file_system_space(directory: str) -> int:
    """Return the bytes that a directory's files use or can still use."""
    existing = Path(directory)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        system = os.statvfs(existing)
    except OSError as error:
        raise ConfigError(f"storage_backends: {directory} cannot be read: {error}") from error
    used = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            # A file may be deleted during the walk.
            with contextlib.suppress(OSError):
                used += (Path(folder) / name).lstat().st_blocks * STAT_BLOCK
    return int((system.f_bavail * system.f_frsize + used) * FILES_SHARE)

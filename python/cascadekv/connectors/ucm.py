"""UCM's configuration file, as it is: every key is used, or refused with a reason.

The file is the YAML that UCM's `UCM_CONFIG_FILE` names. `docs/connectors.md` says for each key what
it does here.
"""

import contextlib
import difflib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cascadekv.errors import ConfigError

__all__ = ["UcmSettings", "parse_ucm", "read_ucm", "trace_limits"]

GIB = 1 << 30
"""UCM's "GB" are powers of 1024."""
CACHE_BUFFER_GB = 256
"""UCM's default for `cache_buffer_capacity_gb`."""
MEMORY_SHARE = 4
"""Without `cache_buffer_capacity_gb`, at most this part (a quarter) of the host's memory."""
STORE_NAME = "UcmPipelineStore"
PIPELINE = "Cache|Posix"
FILES_MIN = 1 << 20
"""The least that our file tier takes."""
FILES_SHARE = 0.95
"""Part of the file system's room that is used without `posix_capacity_gb`."""
STAT_BLOCK = 512
"""Unit of `st_blocks`, on every file system."""
DRAM_MIN = 4 << 20
"""The least that our DRAM tier takes."""
TIMEOUT_MS_MAX = 3_600_000
QUEUE_MAX = 1 << 24
NUMBER_MAX = 1 << 30
TRACE_FILES = 3
TRACE_FILE_MIB = 64

_ENGINES = {"psync": "psync", "aio": "auto", "uring": "uring"}
"""Ours for each of UCM's: `auto` is asynchronous where the kernel allows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UcmSettings:
    """What a UCM file asks for, in our terms."""

    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """The store: keys that begin with `cascade.`, as `kv_connector_extra_config` has them."""
    use_layerwise: bool = True
    """Whether blocks are loaded and saved layer by layer."""
    hit_ratio: float | None = None
    """Most tokens that may be loaded, as a share of the prompt's; `None`: all that are found."""
    persist_token_threshold: int = 0
    """Requests with fewer tokens are neither loaded nor saved."""
    use_lite: bool = False
    """Whether hits are only counted, and nothing is loaded or saved."""
    enable_record_traces: bool = False
    """Whether each finished request becomes a line of a trace."""
    enable_event_sync: bool = True
    """Whether copies wait for the events of the device's own stream (no use on CPUs)."""
    waiting_queue_depth: int = 8192
    """Most transfers that may wait; more are declined."""
    running_queue_depth: int = 524_288
    """Most blocks under transfer at a time; further ones wait."""
    metrics_config_path: str | None = None
    """UCM's list of metrics, where the file names one. Ours are on without it."""
    consumed: tuple[str, ...] = ()
    """Every key that the file has, dotted, in its order: all of them were read."""
    notes: tuple[str, ...] = ()
    """What a key asked for that is different here, a sentence each, to be logged."""


def read_ucm(path: str | os.PathLike[str]) -> UcmSettings:
    """Read a UCM file.

    Raises `ConfigError` that names the file and the key: for a file that cannot be read or is no
    YAML, an unknown key, and a value that makes no sense or asks for what is not here.
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
    room_bytes: Callable[[str], int] | None = None,
) -> UcmSettings:
    """Read what the YAML of a UCM file says; errors as `read_ucm`, without the file's name.

    `memory_bytes` gives the host's memory, `room_bytes` the bytes that a directory has or may
    still take; both are asked of the system unless given.
    """
    top = _Section(document, "")
    store_name, config = _store(top)
    notes: list[str] = []
    options = _store_options(
        config, notes, memory_bytes or _host_memory, room_bytes or _file_system_room
    )
    waiting = config.integer("waiting_queue_depth", 8192, 1, QUEUE_MAX)
    running = config.integer("running_queue_depth", 524_288, 1, QUEUE_MAX)
    if config.boolean("use_gdr", default=False):
        notes.append(
            "use_gdr: there is no GPUDirect path here; blocks are copied through host memory, "
            "with the same bytes"
        )
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
    top.refuse_rest(_ELSEWHERE)
    config.refuse_rest(_TOP_LEVEL)
    return settings


def trace_limits(environment: Mapping[str, str]) -> tuple[int, int]:
    """Give the most bytes of a trace file and the most files of a trace.

    They are UCM's `UCM_LOG_MAX_SIZE` (MiB) and `UCM_LOG_MAX_FILES`. Raises `ConfigError` that names
    the variable.
    """
    limits: list[int] = []
    for name, default in (("UCM_LOG_MAX_SIZE", TRACE_FILE_MIB), ("UCM_LOG_MAX_FILES", TRACE_FILES)):
        text = environment.get(name, str(default))
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= QUEUE_MAX:
            raise ConfigError(f"{name}: {text!r} is no number from 1 to {QUEUE_MAX}")
        limits.append(int(text))
    return limits[0] << 20, limits[1]


class _Section:
    """One mapping of the file: what was asked for, and what nobody asked for."""

    def __init__(self, value: object, prefix: str) -> None:
        where = prefix.removesuffix(".") or "the file"
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected names and values, found {_shown(value)}")
        given = cast("Mapping[object, object]", value)
        for name in given:
            if not isinstance(name, str):
                raise ConfigError(f"{where}: {_shown(name)} is no name of a setting")
        self._given = cast("Mapping[str, object]", value)
        self._prefix = prefix
        self._known: list[str] = []

    def names(self) -> tuple[str, ...]:
        """Give the keys that are there, dotted."""
        return tuple(self._prefix + name for name in self._given)

    def take(self, name: str) -> object:
        """Give the key's value, `None` without one."""
        self._known.append(name)
        return self._given.get(name)

    def wrong(self, name: str, reason: str) -> ConfigError:
        """Make the error that names the key."""
        return ConfigError(f"{self._prefix}{name}: {reason}")

    def boolean(self, name: str, *, default: bool) -> bool:
        """Read a switch."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"{_shown(value)} is neither true nor false")
        return value

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Read a whole number."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"{_shown(value)} is no whole number from {least} to {most}")
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
            raise self.wrong(name, f"{_shown(value)} is no number from 0 to {NUMBER_MAX}")
        return float(value)

    def share(self, name: str) -> float | None:
        """Read a number from 0 to 1."""
        value = self.number(name)
        if value is not None and value > 1:
            raise self.wrong(name, f"{_shown(value)} is no share from 0 to 1")
        return value

    def text(self, name: str) -> str | None:
        """Read a text that is not empty."""
        value = self.take(name)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise self.wrong(name, f"{_shown(value)} is no text")
        return value

    def refuse_rest(self, elsewhere: Mapping[str, str]) -> None:
        """Refuse the keys that nobody asked for; `elsewhere` says where some of them belong."""
        for name in self._given:
            if name in self._known:
                continue
            if name in elsewhere:
                raise self.wrong(name, elsewhere[name])
            near = difflib.get_close_matches(name, self._known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(self._known)}"
            raise self.wrong(name, f"no such setting; {advice}")


_IN_CONFIG = "belongs below ucm_connectors, ucm_connector_config; move it there"
_ON_TOP = "belongs to the top level of the file; move it there"
_ELSEWHERE: dict[str, str] = {
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
        _IN_CONFIG,
    ),
    "ucm_sparse_config": "sparse attention is not done here; remove it",
}
_TOP_LEVEL: dict[str, str] = dict.fromkeys(
    (
        "enable_event_sync",
        "use_layerwise",
        "hit_ratio",
        "enable_record_traces",
        "use_lite",
        "persist_token_threshold",
        "metrics_config_path",
    ),
    _ON_TOP,
)


def _store(top: _Section) -> tuple[tuple[str, ...], _Section]:
    """Find the one store of the file: the names of its keys, and its configuration."""
    connectors = top.take("ucm_connectors")
    if not isinstance(connectors, list) or not connectors:
        raise top.wrong("ucm_connectors", "expected a list with one store")
    entries = cast("list[object]", connectors)
    if len(entries) > 1:
        raise top.wrong(
            "ucm_connectors",
            f"{len(entries)} stores; there is one here, with the tiers of its pipeline: leave one",
        )
    entry = _Section(entries[0], "ucm_connectors[0].")
    name = entry.text("ucm_connector_name")
    if name != STORE_NAME:
        raise entry.wrong(
            "ucm_connector_name", f"{_shown(name)} is not supported; write {STORE_NAME}"
        )
    given = entry.take("ucm_connector_config")
    if given is None:
        raise entry.wrong("ucm_connector_config", "is missing; it names storage_backends at least")
    config = _Section(given, "ucm_connectors[0].ucm_connector_config.")
    entry.refuse_rest(_ELSEWHERE)
    return entry.names(), config


def _store_options(
    config: _Section,
    notes: list[str],
    memory_bytes: Callable[[], int],
    room_bytes: Callable[[str], int],
) -> dict[str, object]:
    pipeline = config.text("store_pipeline")
    if pipeline is None:
        raise config.wrong("store_pipeline", f"is missing; write {PIPELINE!r}")
    if [stage.strip() for stage in pipeline.split("|")] != PIPELINE.split("|"):
        raise config.wrong(
            "store_pipeline",
            f"{_shown(pipeline)} is none of UCM's pipelines here; write {PIPELINE!r}, or use "
            f"cascade.pipeline instead of a UCM file",
        )
    directory = _directory(config)
    engine = config.text("posix_io_engine")
    if engine is not None and engine not in _ENGINES:
        raise config.wrong(
            "posix_io_engine", f"{_shown(engine)} is unknown; known are {', '.join(_ENGINES)}"
        )
    if engine == "aio":
        notes.append("posix_io_engine: aio is io_uring here, psync where the kernel forbids it")
    timeout_ms = config.integer("timeout_ms", 30_000, 1, TIMEOUT_MS_MAX)
    return {
        "cascade.pipeline": PIPELINE,
        "cascade.dram": _dram(config, notes, memory_bytes),
        "cascade.files": directory,
        "cascade.files_capacity": _files_capacity(config, notes, directory, room_bytes),
        "cascade.direct_io": config.boolean("io_direct", default=False),
        "cascade.io_engine": _ENGINES[engine or "psync"],
        "cascade.timeout": timeout_ms / 1000,
    }


def _directory(config: _Section) -> str:
    """Read the one directory of the file tier."""
    value = config.take("storage_backends")
    if value is None:
        raise config.wrong("storage_backends", "is missing; name the directory for blocks")
    listed: list[object] = cast("list[object]", value) if isinstance(value, list) else [value]
    paths: list[str] = []
    for path in listed:
        if not isinstance(path, str) or not path.strip():
            raise config.wrong("storage_backends", f"{_shown(path)} is no directory")
        paths += path.split(":")
    if len(paths) != 1 or not paths[0]:
        raise config.wrong(
            "storage_backends",
            f"{_shown(':'.join(paths))} names {len(paths)} directories; the file tier has one: "
            f"leave one, or join the disks below it (RAID, LVM)",
        )
    return paths[0]


def _dram(config: _Section, notes: list[str], memory_bytes: Callable[[], int]) -> int:
    capacity = config.number("cache_buffer_capacity_gb")
    if capacity is not None:
        dram = int(capacity * GIB)
        if dram < DRAM_MIN:
            raise config.wrong(
                "cache_buffer_capacity_gb", f"{capacity:g} is too small; the least is 4 MiB"
            )
        return dram
    most = max(memory_bytes() // MEMORY_SHARE, DRAM_MIN)
    if most >= CACHE_BUFFER_GB * GIB:
        return CACHE_BUFFER_GB * GIB
    notes.append(
        f"cache_buffer_capacity_gb: {most / GIB:.1f}, a quarter of this host's memory; the default "
        f"of {CACHE_BUFFER_GB} is more"
    )
    return most


def _files_capacity(
    config: _Section, notes: list[str], directory: str, room_bytes: Callable[[str], int]
) -> int:
    capacity = config.number("posix_capacity_gb")
    if capacity:
        files = int(capacity * GIB)
        if files < FILES_MIN:
            raise config.wrong(
                "posix_capacity_gb", f"{capacity:g} is too small; the least is 1 MiB"
            )
        return files
    room = max(room_bytes(directory), FILES_MIN)
    notes.append(
        f"posix_capacity_gb: no limit is {room / GIB:.1f} here, 95 % of the room that the file "
        f"system has now"
    )
    return room


def _metrics(top: _Section, notes: list[str]) -> str | None:
    path = top.text("metrics_config_path")
    if path is None:
        return None
    if not Path(path).is_file():
        raise top.wrong("metrics_config_path", f"{path} is no file; remove the key or correct it")
    notes.append(
        "metrics_config_path: our metrics are always on and have names of their own "
        "(docs/connectors.md); the list in that file is not read"
    )
    return path


def _load_yaml(text: str) -> object:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            "a UCM file is YAML, and PyYAML is missing; pip install PyYAML"
        ) from error

    base: Any = yaml.SafeLoader

    class Loader(base):
        """Refuses a key that stands in a mapping twice, which YAML's own loader lets pass."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
            seen: set[object] = set()
            for key_node, _ in node.value:
                key = key_node.value
                if isinstance(key, str) and key in seen:
                    raise ConfigError(f"{key}: stands twice; leave one")
                seen.add(str(key))
            return base.construct_mapping(self, node, deep=deep)

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"no YAML: {error}") from error


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _file_system_room(directory: str) -> int:
    """Bytes that a directory's files have, and those that they may still take."""
    existing = Path(directory)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        system = os.statvfs(existing)
    except OSError as error:
        raise ConfigError(f"storage_backends: {directory} cannot be looked at: {error}") from error
    used = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            # A file that has just gone takes no room.
            with contextlib.suppress(OSError):
                used += (Path(folder) / name).lstat().st_blocks * STAT_BLOCK
    return int((system.f_bavail * system.f_frsize + used) * FILES_SHARE)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or too deep
        text = f"a {type(value).__name__}"
    longest = 60
    return text if len(text) <= longest else text[:longest] + "..."

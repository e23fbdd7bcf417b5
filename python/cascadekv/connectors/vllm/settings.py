"""What `kv_connector_extra_config` says: the store's keys, and those of this connector."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascadekv.connectors.settings import KEYS as STORE_KEYS
from cascadekv.connectors.settings import StoreAddress, read_settings
from cascadekv.errors import ConfigError

if TYPE_CHECKING:
    from cascadekv.connectors.ucm import UcmSettings

__all__ = ["ConnectorSettings", "read_connector_settings"]

UCM_KEY = "UCM_CONFIG_FILE"
SECONDS_MIN, SECONDS_MAX = 0.001, 3600.0
LOADS = ("auto", "sync", "async")
_LOAD = "auto, sync or async"
_SWITCH = "true or false"
_SHARE = "a share from 0 to 1"
_TOKENS = "a number of tokens"
_SHARDS = "a number of shares of the KV heads"
_COUNT = "a number from 1 on"
_SECONDS = f"a number of seconds from {SECONDS_MIN} to {SECONDS_MAX:g}"
_LOOKAHEAD = f"a number of seconds from 0 to {SECONDS_MAX:g}"
_FILE = "a file that is there"
_PLACE = "a directory or a file for traces"
_WEIGHTS = "sampled, full, or a name of your own for the weights"
_OWN = {
    "cascade.load": _LOAD,
    "cascade.layerwise": _SWITCH,
    "cascade.hit_ratio": _SHARE,
    "cascade.min_tokens": _TOKENS,
    "cascade.lite": _SWITCH,
    "cascade.record": _PLACE,
    "cascade.shards": _SHARDS,
    "cascade.weights": _WEIGHTS,
    "cascade.secret_file": _FILE,
    "cascade.load_or_compute": _SWITCH,
    "cascade.lookup_timeout": _SECONDS,
    "cascade.load_timeout": _SECONDS,
    "cascade.save_timeout": _SECONDS,
    "cascade.lookahead": _LOOKAHEAD,
    "cascade.loads_max": _COUNT,
    "cascade.blocks_max": _COUNT,
}
"""Keys of this connector, and what each takes."""


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings:
    """How one engine keeps its blocks."""

    address: StoreAddress
    """Where they are kept."""
    store_options: Mapping[str, object] = field(default_factory=dict[str, object])
    """The store's keys as they were given."""
    load: str = "auto"
    """Whether loads hold the step up (`sync`), or the request waits while others compute (`async`).

    `auto` waits for what is in memory and lets slower tiers take their time.
    """
    layerwise: bool = False
    """Whether a load that holds the step up arrives layer by layer, while the step computes."""
    hit_ratio: float = 1.0
    """Largest share of a prompt that is loaded."""
    min_tokens: int = 0
    """Shortest prompt whose blocks are kept and loaded."""
    lite: bool = False
    """Whether only names are kept, to say what would have been hits."""
    record: str | None = None
    """Where a line is written for each finished request, for `cascade replay`."""
    shards: int | None = None
    """Into how many shares the KV heads are cut; each worker's heads are one by default."""
    weights: str = "sampled"
    """How weights are named: by samples of their files, by all bytes, or as the operator says."""
    secret_file: str | None = None
    """File with the secret that keeps this tenant's keys from being guessed."""
    load_or_compute: bool = True
    """Whether blocks are computed where that is faster than loading them."""
    lookup_timeout: float = 0.1
    """Seconds that a lookup may take; a miss after that."""
    load_timeout: float = 10.0
    """Seconds that a load may take; the rest is computed after that."""
    save_timeout: float = 0.2
    """Seconds of a step that saving may take; what is left is not saved."""
    lookahead: float = 30.0
    """Seconds that blocks of a waiting request are kept in memory, and fetched there; 0 is off."""
    loads_max: int = 8192
    """Most asynchronous loads at a time; a request beyond them is computed."""
    blocks_max: int = 524_288
    """Most blocks of asynchronous loads at a time; the rest is computed."""
    notes: tuple[str, ...] = ()
    """What the operator should know of how the settings were read."""


def read_connector_settings(extra: Mapping[str, object]) -> ConnectorSettings:
    """Read the connector's extra configuration. Raises `ConfigError` that names the key."""
    options, notes = dict(extra), ()
    if UCM_KEY in options:
        from cascadekv.connectors.ucm import read_ucm  # noqa: PLC0415 # needs PyYAML

        ucm = read_ucm(_text(UCM_KEY, options.pop(UCM_KEY)))
        theirs = _of_ucm(ucm)
        both = sorted(set(theirs) & set(options))
        if both:
            raise ConfigError(f"{both[0]}: is given here and by {UCM_KEY}; give it once")
        options |= theirs
        notes = ucm.notes
    known = (*STORE_KEYS, *_OWN)
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, (*known, UCM_KEY), n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{key}: no such setting; {advice}")
    store = {key: value for key, value in options.items() if key in STORE_KEYS}
    own = {key.removeprefix("cascade."): v for key, v in options.items() if key in _OWN}
    checked: dict[str, Any] = {name: _check(name, value) for name, value in own.items()}
    return ConnectorSettings(
        address=read_settings(store), store_options=store, notes=notes, **checked
    )


def _of_ucm(ucm: "UcmSettings") -> dict[str, object]:
    """Give what a UCM file says by our keys."""
    options = dict(ucm.options) | {
        "cascade.layerwise": ucm.use_layerwise,
        "cascade.lite": ucm.use_lite,
        "cascade.min_tokens": ucm.persist_token_threshold,
        "cascade.loads_max": ucm.waiting_queue_depth,
        "cascade.blocks_max": ucm.running_queue_depth,
        "cascade.load_timeout": ucm.options.get("cascade.timeout", ConnectorSettings.load_timeout),
    }
    if ucm.hit_ratio is not None:
        options["cascade.hit_ratio"] = ucm.hit_ratio
    if ucm.enable_record_traces:
        options["cascade.record"] = str(Path.cwd())
    return options


def _check(name: str, value: object) -> object:
    kind = _OWN[f"cascade.{name}"]
    if not _KINDS[kind](value):
        raise ConfigError(f"cascade.{name}: {value!r} is not {kind}")
    return value


def _is_number(value: object, least: float, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= most


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


_KINDS: Mapping[str, Callable[[object], bool]] = {
    _LOAD: lambda value: value in LOADS,
    _SWITCH: lambda value: isinstance(value, bool),
    _SHARE: lambda value: _is_number(value, 0, 1),
    _TOKENS: lambda value: _is_count(value, 0),
    _SHARDS: lambda value: _is_count(value, 1),
    _COUNT: lambda value: _is_count(value, 1),
    _SECONDS: lambda value: _is_number(value, SECONDS_MIN, SECONDS_MAX),
    _LOOKAHEAD: lambda value: _is_number(value, 0, SECONDS_MAX),
    _FILE: lambda value: _is_name(value) and Path(str(value)).is_file(),
    _PLACE: _is_name,
    _WEIGHTS: _is_name,
}


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: {value!r} is no text")
    return value

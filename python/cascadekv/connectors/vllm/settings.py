"""What `kv_connector_extra_config` says: the store's keys, and those of this connector."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cascadekv.connectors.settings import KEYS as STORE_KEYS
from cascadekv.connectors.settings import StoreAddress, read_settings
from cascadekv.errors import ConfigError

if TYPE_CHECKING:
    from cascadekv.connectors.ucm import UcmSettings

__all__ = ["ConnectorSettings", "read_connector_settings"]

UCM_KEY = "UCM_CONFIG_FILE"
_OWN = {
    "cascade.load": "auto, sync or async",
    "cascade.layerwise": "true or false",
    "cascade.hit_ratio": "a share from 0 to 1",
    "cascade.min_tokens": "a number of tokens",
    "cascade.lite": "true or false",
    "cascade.record": "a file for traces",
    "cascade.shards": "a number of shares of KV heads",
    "cascade.weights": "sampled, full, or a name of your own for the weights",
    "cascade.secret_file": "a file with the tenant's secret",
    "cascade.load_or_compute": "true or false",
    "cascade.lookup_timeout": "seconds",
    "cascade.load_timeout": "seconds",
    "cascade.save_timeout": "seconds",
}
"""Keys of this connector, and what each takes."""
TIMEOUT_MAX_S = 3600.0
LOADS = ("auto", "sync", "async")


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
    """Into how many shares the KV heads are cut; each worker's heads are one when it is left out."""
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
    checked = {name: _check(name, value) for name, value in own.items()}
    return ConnectorSettings(
        address=read_settings(store), store_options=store, notes=notes, **checked
    )


def _of_ucm(ucm: "UcmSettings") -> dict[str, object]:
    """Give what a UCM file says by our keys."""
    options = dict(ucm.options) | {
        "cascade.layerwise": ucm.use_layerwise,
        "cascade.lite": ucm.use_lite,
        "cascade.min_tokens": ucm.persist_token_threshold,
        "cascade.load_timeout": ucm.options.get("cascade.timeout", ConnectorSettings.load_timeout),
    }
    if ucm.hit_ratio is not None:
        options["cascade.hit_ratio"] = ucm.hit_ratio
    if ucm.enable_record_traces:
        options["cascade.record"] = str(Path.cwd())
    return options


def _check(name: str, value: object) -> object:
    key = f"cascade.{name}"

    def refuse() -> ConfigError:
        return ConfigError(f"{key}: {value!r} is not {_OWN[key]}")

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in ("layerwise", "lite", "load_or_compute"):
        if not isinstance(value, bool):
            raise refuse()
    elif name == "load":
        if value not in LOADS:
            raise refuse()
    elif name == "hit_ratio":
        if not is_number or not 0 <= float(value) <= 1:  # type: ignore[arg-type] # a number
            raise refuse()
    elif name in ("min_tokens", "shards"):
        least = 1 if name == "shards" else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise refuse()
    elif name.endswith("_timeout"):
        if not is_number or not 0 < float(value) <= TIMEOUT_MAX_S:  # type: ignore[arg-type]
            raise refuse()
    elif name in ("record", "secret_file"):
        path = Path(_text(key, value))
        if name == "secret_file" and not path.is_file():
            raise ConfigError(f"{key}: {path} is no file")
    else:
        _text(key, value)
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: {value!r} is no text")
    return value

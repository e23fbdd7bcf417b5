"""Parses `kv_connector_extra_config`: the store's keys and the connector's own keys."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cascadekv._native import user_token
from cascadekv.connectors.settings import KEYS as STORE_KEYS
from cascadekv.connectors.settings import StoreAddress, read_settings
from cascadekv.connectors.ucm import UcmSettings, read_ucm, trace_limits
from cascadekv.connectors.vllm.layout import PAGE_CONTIGUOUS
from cascadekv.connectors.vllm.listen_address import ListenAddress
from cascadekv.errors import ConfigError
from cascadekv.messages import advice
from cascadekv.transfer import Tls

__all__ = ["ConnectorSettings", "SchedulerSettings", "read_connector_settings"]

UCM_KEY = "UCM_CONFIG_FILE"
_LABEL_MAX = 64
SECONDS_MIN, SECONDS_MAX = 0.001, 3600.0
LOADS = ("auto", "sync", "async")
TRANSFERS = ("off", "direct", "node")
RDMA_USES = ("off", "prefer", "require")
_LOAD = "auto, sync or async"
_BOOLEAN = "true or false"
_TRANSFER = "off, direct or node"
_RDMA = "off, prefer or require"
_LISTEN = "ADDRESS:PORT with an IP address ([...] for IPv6), where port 0 takes a free one"
_LEASE = "a number of seconds from 4 to 3600"
_SHARE = "a share from 0 to 1"
_TOKENS = "a number of tokens"
_SHARDS = "a number of shares of the KV heads"
_COUNT = "a whole number from 1 up"
_SECONDS = f"a number of seconds from {SECONDS_MIN} to {SECONDS_MAX:g}"
_LOOKAHEAD = f"a number of seconds from 0 to {SECONDS_MAX:g}"
_FILE = "an existing file"
_NAME = "a host name or an IP address"
_LABEL = "a name of 1 to 64 characters"
_TRACE_PATH = "a directory or a file for traces"
_SOCKET = "false, or the path of the socket of a node in the memory of a GPU"
_LAYOUT = f"one of vLLM's KV layouts {', '.join(PAGE_CONTIGUOUS)}"
_WEIGHTS = "digest, full, sampled, or a name for the weights"
_OWN = {
    "cascade.name": _LABEL,
    "cascade.load": _LOAD,
    "cascade.layerwise": _BOOLEAN,
    "cascade.hbm": _SOCKET,
    "cascade.kv_layout": _LAYOUT,
    "cascade.transfer": _TRANSFER,
    "cascade.transfer_listen": _LISTEN,
    "cascade.transfer_advertise": _NAME,
    "cascade.transfer_token_file": _FILE,
    "cascade.transfer_tls_certificate": _FILE,
    "cascade.transfer_tls_key": _FILE,
    "cascade.transfer_tls_authority": _FILE,
    "cascade.transfer_tls_name": _NAME,
    "cascade.transfer_lease": _LEASE,
    "cascade.transfer_rdma": _RDMA,
    "cascade.hit_ratio": _SHARE,
    "cascade.min_tokens": _TOKENS,
    "cascade.lite": _BOOLEAN,
    "cascade.record": _TRACE_PATH,
    "cascade.shards": _SHARDS,
    "cascade.weights": _WEIGHTS,
    "cascade.secret_file": _FILE,
    "cascade.load_or_compute": _BOOLEAN,
    "cascade.lookup_timeout": _SECONDS,
    "cascade.load_timeout": _SECONDS,
    "cascade.save_timeout": _SECONDS,
    "cascade.lookahead": _LOOKAHEAD,
    "cascade.loads_max": _COUNT,
    "cascade.blocks_max": _COUNT,
}
"""The connector's own keys, and the valid values of each."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The operator's settings for the scheduler's side."""

    load: str = "auto"
    hit_ratio: float = 1.0
    min_tokens: int = 0
    is_lite: bool = False
    loads_max: int = 8192
    blocks_max: int = 524_288
    lookahead_s: float = 30.0
    lookup_s: float = 0.1
    """Deadline of a lookup in a background thread; a miss after that."""


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings:
    """The settings of the connector in one engine."""

    address: StoreAddress
    """Where blocks are stored."""
    store_options: Mapping[str, object] = field(default_factory=dict[str, object])
    """The store's keys, unparsed, for a private node."""
    name: str | None = None
    """Name of this connector in metrics, beside others of a `MultiConnector`."""
    load: str = "auto"
    """`sync`: loads block the step. `async`: the request waits while other requests are computed.

    `auto`: synchronous for blocks in DRAM, asynchronous for slower tiers and whole prompts.
    """
    layerwise: bool = False
    """Whether a synchronous load arrives layer by layer, while the step computes."""
    hbm: str | bool | None = None
    """Socket of a node in the memory of a GPU, the tier above the store; false for none.

    Default: the store's socket with `.hbm` behind it, if a node is there.
    """
    kv_layout: str | None = None
    """The KV layout that vLLM is asked for. Default: vLLM's choice."""
    transfer: str = "off"
    """How a prefill engine's KV reaches a decode engine.

    `direct`: the decode engine reads its pages. `node`: both use one node's store.
    """
    transfer_listen: str = "127.0.0.1:0"
    """Where the first worker lets peers read its pages; others use the following ports."""
    transfer_advertise: str | None = None
    """Name or IP address under which other engines reach this host. Default: that of the above."""
    transfer_token_file: str | None = None
    """File with the secret of both engines, of 16 characters or more; for peers on other hosts."""
    transfer_tls_certificate: str | None = None
    """File with the certificate chain of this engine, for TLS between engines."""
    transfer_tls_key: str | None = None
    """File with its private key."""
    transfer_tls_authority: str | None = None
    """File with the CA certificates that the certificates of all engines are signed by."""
    transfer_tls_name: str | None = None
    """Name that a prefill engine's certificate must have. Default: the host it is reached by."""
    transfer_lease: float = 30.0
    """Seconds that a finished prefill's pages are kept for a decode engine that is silent."""
    transfer_rdma: str = "off"
    """Whether pages are read by RDMA: `prefer` uses TCP where there is none, `require` fails."""
    hit_ratio: float = 1.0
    """Largest share of a prompt that is loaded."""
    min_tokens: int = 0
    """Shortest prompt that is saved and loaded."""
    lite: bool = False
    """Whether only keys are stored, in order to count hits without loading."""
    record: str | None = None
    """Directory or file of a trace of finished requests, for `cascade replay`."""
    record_limits: tuple[int, int] = (0, 0)
    """Size limit of a trace file in bytes, and the limit of files, when a trace is recorded."""
    shards: int | None = None
    """Number of shares that the KV heads are split into. Default: one share per worker."""
    weights: str = "digest"
    """How weights are identified: by all bytes of their files, or by this name.

    `digest`: all bytes are read once, of large files in the background. `full`: at every start.
    `sampled`: only 64 places of each file are read, so that edits are not seen.
    """
    secret_file: str | None = None
    """File with the tenant's secret, which makes keys unguessable for others."""
    load_or_compute: bool = True
    """Whether blocks are computed if that is faster than loading them."""
    lookup_timeout: float = 0.1
    """Seconds that a lookup may take; a miss after that."""
    load_timeout: float = 10.0
    """Seconds that a load may take; remaining blocks are computed."""
    save_timeout: float = 0.2
    """Seconds of a step that saving may take; remaining blocks are not saved."""
    lookahead: float = 30.0
    """Seconds that blocks of a waiting request are prefetched and kept in memory; 0: off."""
    loads_max: int = 8192
    """Most asynchronous loads in flight; requests beyond them are computed."""
    blocks_max: int = 524_288
    """Most blocks of asynchronous loads in flight; blocks beyond them are computed."""
    notes: tuple[str, ...] = ()
    """Notes about the settings for the log."""

    def read_transfer_token(self) -> bytes | None:
        """Read the secret that prefill and decode engines share; `None` without one."""
        path = self.transfer_token_file
        return None if path is None else Path(path).read_bytes().strip()

    def seal_key(self) -> Callable[[], bytes | None]:
        """Return what gives the secret with which offers are sealed; `None` with TLS alone."""
        token = self.read_transfer_token()
        if token is None and self.transfer_tls_authority is None:
            return user_token
        return lambda: token

    def transfer_tls(self) -> Tls | None:
        """Return TLS between engines; `None` without it. Raises `ConfigError`."""
        files = {
            name: getattr(self, f"transfer_tls_{name}")
            for name in ("certificate", "key", "authority")
        }
        missing = [name for name, path in files.items() if path is None]
        if len(missing) == len(files):
            if self.transfer_tls_name is not None:
                raise ConfigError("cascade.transfer_tls_name: needs cascade.transfer_tls_authority")
            return None
        if missing:
            raise ConfigError(f"cascade.transfer_tls_{missing[0]}: is missing; TLS needs all three")
        return Tls(**files, server_name=self.transfer_tls_name)

    def read_secret(self) -> bytes | None:
        """Read the tenant's secret; `None` without one."""
        return None if self.secret_file is None else Path(self.secret_file).read_bytes().strip()

    def for_scheduler(self, load: str) -> SchedulerSettings:
        """Return the settings for the scheduler's side; `load` says when it loads."""
        return SchedulerSettings(
            load,
            self.hit_ratio,
            self.min_tokens,
            self.lite,
            self.loads_max,
            self.blocks_max,
            self.lookahead,
            self.lookup_timeout,
        )


def read_connector_settings(extra: Mapping[str, object]) -> ConnectorSettings:
    """Parse the connector's extra configuration. Raises `ConfigError` that names the key."""
    options, notes = dict(extra), ()
    if UCM_KEY in options:
        ucm = read_ucm(_text(UCM_KEY, options.pop(UCM_KEY)))
        ucm_options = _options_of_ucm(ucm)
        duplicates = sorted(set(ucm_options) & set(options))
        if duplicates:
            raise ConfigError(f"{duplicates[0]}: is set here and by {UCM_KEY}; remove one")
        options |= ucm_options
        notes = ucm.notes
    known = (*STORE_KEYS, *_OWN, UCM_KEY)
    for key in options:
        if key not in known:
            raise ConfigError(f"{key}: no such setting; {advice(key, known)}")
    store = {key: value for key, value in options.items() if key in STORE_KEYS}
    own = {key.removeprefix("cascade."): v for key, v in options.items() if key in _OWN}
    checked: dict[str, Any] = {name: _check(name, value) for name, value in own.items()}
    listen = ListenAddress.parse(checked.get("transfer_listen", ConnectorSettings.transfer_listen))
    if listen.is_everywhere and "transfer_advertise" not in checked:
        raise ConfigError(
            f"cascade.transfer_listen: other engines cannot connect to {listen.host}; set the "
            "address of one interface, or cascade.transfer_advertise to the name of this host"
        )
    if "record" in checked:
        checked["record_limits"] = trace_limits(os.environ)
    return ConnectorSettings(
        address=read_settings(store), store_options=store, notes=notes, **checked
    )


def _options_of_ucm(ucm: UcmSettings) -> dict[str, object]:
    """Return the settings of a UCM file under Cascade's keys."""
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
    expected = _OWN[f"cascade.{name}"]
    if not _CHECKS[expected](value):
        raise ConfigError(f"cascade.{name}: {value!r} is not {expected}")
    return value


def _is_number(value: object, least: float, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= most


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_listen(value: object) -> bool:
    try:
        ListenAddress.parse(str(value))
    except ValueError:
        return False
    return isinstance(value, str)


_CHECKS: Mapping[str, Callable[[object], bool]] = {
    _LOAD: lambda value: value in LOADS,
    _BOOLEAN: lambda value: isinstance(value, bool),
    _TRANSFER: lambda value: value in TRANSFERS,
    _RDMA: lambda value: value in RDMA_USES,
    _LISTEN: _is_listen,
    _LEASE: lambda value: _is_number(value, 4, SECONDS_MAX),
    _SHARE: lambda value: _is_number(value, 0, 1),
    _TOKENS: lambda value: _is_count(value, 0),
    _SHARDS: lambda value: _is_count(value, 1),
    _COUNT: lambda value: _is_count(value, 1),
    _SECONDS: lambda value: _is_number(value, SECONDS_MIN, SECONDS_MAX),
    _LOOKAHEAD: lambda value: _is_number(value, 0, SECONDS_MAX),
    _FILE: lambda value: _is_text(value) and Path(str(value)).is_file(),
    _NAME: _is_text,
    _LABEL: lambda value: _is_text(value) and len(str(value)) <= _LABEL_MAX,
    _TRACE_PATH: _is_text,
    _WEIGHTS: _is_text,
    _SOCKET: lambda value: value is False or _is_text(value),
    _LAYOUT: lambda value: value in PAGE_CONTIGUOUS,
}


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: {value!r} is not text")
    return value

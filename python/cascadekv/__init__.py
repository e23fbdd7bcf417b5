"""Cascade: a tiered, shared KV cache for LLM inference.

>>> import cascadekv
>>> manifest = cascadekv.Manifest({
...     "weights": "sha256:9f86", "dtype": "bf16", "block_tokens": "512", "layers": "32",
...     "kv_heads": "8", "head_dim": "128", "layout": "opaque", "tensor_parallel": "0/1",
... })
>>> space = cascadekv.Namespace(manifest)
>>> keys = cascadekv.chain_keys(space, tokens=range(1024), block_tokens=512)
>>> with cascadekv.Store(dram="16MiB") as store:
...     results = store.put(keys, [b"first block", b"second block"])
...     views = store.view(keys)
...     [bytes(view) for view in views]
[b'first block', b'second block']
"""

from cascadekv import keys
from cascadekv._native import (
    BlockKey,
    BlockKeys,
    Changes,
    GetResult,
    Gpu,
    GpuEvent,
    GpuLoad,
    GpuMemory,
    GpuSave,
    Manifest,
    Namespace,
    PagedMemory,
    PrefixMatch,
    PreparedPut,
    PutResult,
    Reservation,
    Store,
    View,
    Views,
    __version__,
    chain_keys,
    connect,
)
from cascadekv.config import StoreConfig
from cascadekv.errors import (
    AwayError,
    BusyError,
    CascadeError,
    ClosedError,
    ConfigError,
    ConflictError,
    DeadlineError,
    ForkError,
    GpuError,
    PipelineError,
    PoolError,
    RefusedError,
    TierError,
)
from cascadekv.hints import Hints, Priority, StopReason
from cascadekv.results import ChangeKind, DeclineReason, GetStatus, PutStatus
from cascadekv.stats import Stats
from cascadekv.traces import part_of_trace

__all__ = [
    "AwayError",
    "BlockKey",
    "BlockKeys",
    "BusyError",
    "CascadeError",
    "ChangeKind",
    "Changes",
    "ClosedError",
    "ConfigError",
    "ConflictError",
    "DeadlineError",
    "DeclineReason",
    "ForkError",
    "GetResult",
    "GetStatus",
    "Gpu",
    "GpuError",
    "GpuEvent",
    "GpuLoad",
    "GpuMemory",
    "GpuSave",
    "Hints",
    "Manifest",
    "Namespace",
    "PagedMemory",
    "PipelineError",
    "PoolError",
    "PrefixMatch",
    "PreparedPut",
    "Priority",
    "PutResult",
    "PutStatus",
    "RefusedError",
    "Reservation",
    "Stats",
    "StopReason",
    "Store",
    "StoreConfig",
    "TierError",
    "View",
    "Views",
    "__version__",
    "chain_keys",
    "connect",
    "keys",
    "part_of_trace",
]

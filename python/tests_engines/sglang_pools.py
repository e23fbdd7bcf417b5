"""SGLang's own host pools on a machine without a GPU, filled with verifiable bytes."""

import hashlib
import warnings

import torch
from cascadekv.connectors.effects import Setting
from cascadekv.connectors.sglang_effects import SGLANG_OPTIONS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about what needs a GPU
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
    from sglang.srt.mem_cache.pool_host.mha import (
        AsymmetricMHATokenToKVPoolHost,
        MHATokenToKVPoolHost,
    )
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage import StorageBackendFactory

__all__ = [
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "LogicalHostPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "StorageBackendFactory",
    "config",
    "content",
    "fill",
    "hashes",
    "mha",
    "mla",
    "read",
]

PAGE = 4
"""Tokens of a page."""
PAGES = 64
"""Pages of a pool."""
CPU = torch.device("cpu")


def mha(
    layout,
    *,
    heads=2,
    dim=8,
    v_dim=None,
    layers=3,
    dtype=torch.bfloat16,
    start=0,
    page=PAGE,
    pin_memory=False,
):
    """Create a pool of K and V; SGLang's default is to pin it, which needs a driver."""
    v_dim = dim if v_dim is None else v_dim
    k = tuple(torch.zeros(page, heads, dim, dtype=dtype) for _ in range(layers))
    v = tuple(torch.zeros(page, heads, v_dim, dtype=dtype) for _ in range(layers))
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=_addresses(k), v_data_ptrs=_addresses(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
        device=CPU,
    )
    kind = MHATokenToKVPoolHost if dim == v_dim else AsymmetricMHATokenToKVPoolHost
    capacity = _capacity(page, start, layers) | {"pin_memory": pin_memory}
    return kind(info, 1.0, 0, page, layout, **capacity)


def mla(layout, *, rank=12, rope=4, layers=3, dtype=torch.bfloat16, start=0, page=PAGE):
    """Create a pool of compressed KV."""
    rows = tuple(torch.zeros(page, 1, rank + rope, dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_addresses(rows),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=dtype,
        device=CPU,
    )
    capacity = _capacity(page, start, layers)
    return MLATokenToKVPoolHost(info, 1.0, 0, page, layout, target_layer_num=layers, **capacity)


def config(extra=None, **changes):
    """Create SGLang's configuration of a backend: a single rank unless changed."""
    facts = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "test-model",
        "extra_config": {
            "backend_name": "cascade",
            "module_path": "cascadekv.connectors.sglang",
            "class_name": "CascadeHiCacheStorage",
            "interface_v1": 1,
            **(extra or {}),
        },
    }
    return HiCacheStorageConfig(**(facts | changes))


def hashes(count, salt=""):
    """Return page hashes as SGLang's: 64 hexadecimal digits."""
    return [hashlib.sha256(f"{salt}{n}".encode()).hexdigest() for n in range(count)]


def content(pool, salt):
    """Return the bytes of one flat page, a function of the salt."""
    page = pool.get_data_page(0, flat=True)
    size = page.numel() * page.element_size()
    made = torch.frombuffer(
        bytearray(hashlib.shake_128(salt.encode()).digest(size)), dtype=torch.uint8
    )
    return made.view(page.dtype)


def fill(pool, names, salt=""):
    """Allocate pages and fill each with the bytes of its name; returns their indices."""
    indices = pool.alloc(len(names) * pool.page_size)
    assert indices is not None
    for start, name in zip(indices[:: pool.page_size], names, strict=True):
        pool.set_from_flat_data_page(int(start), content(pool, salt + name))
    return indices


def read(pool, indices):
    """Return the bytes of pages of the pool."""
    return [_bytes(pool.get_data_page(int(at), flat=True)) for at in indices[:: pool.page_size]]


def right(pool, names, salt=""):
    """Return the right bytes of pages."""
    return [_bytes(content(pool, salt + name)) for name in names]


def published(**changes):
    """Create the engine's published options; each is in the namespace that the table has it in."""
    given = {"model_path": "/nowhere", "revision": None, "dtype": "bfloat16"} | changes
    options = {path: {} for path in SGLANG_OPTIONS}
    for name, value in given.items():
        paths = [path for path, table in SGLANG_OPTIONS.items() if name in table]
        (path,) = paths or ["model"]
        options[path][name] = Setting(name, value, None)
    return options


def _bytes(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def _addresses(tensors):
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _capacity(page, start, layers):
    return {
        "pin_memory": False,
        "device_capacity_tokens": page,
        "start_layer": start,
        "end_layer": start + layers,
        "host_token_capacity": PAGES * page,
    }

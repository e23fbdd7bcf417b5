"""LMCache's keys, objects, loader and storage manager for the tests of the L2 adapter.

The bytes of an object are a function of its key, so any reader can tell right from wrong.
"""

import argparse
import hashlib
import json
import select
import time

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

__all__ = [
    "DESC",
    "LIMIT_S",
    "MODEL",
    "clear",
    "configs",
    "create",
    "desc",
    "filled",
    "is_right",
    "keys_of",
    "load",
    "look_up",
    "manager",
    "object_for",
    "prefetch",
    "store",
    "write",
]

MODEL = "org/model"
LIMIT_S = 60
"""No wait of a test ends by it; it only turns a hang into a failure."""


def desc(*shape, dtype=torch.bfloat16):
    """Return a layout: K and V, layers, tokens of a chunk, width."""
    return MemoryLayoutDesc([torch.Size(shape or (2, 4, 256, 32))], [dtype])


DESC = desc()


def keys_of(numbers, model=MODEL, *, rank=0, ranks=1, group=0, salt=""):
    """Return the keys of numbered chunks, hashed as LMCache's server hashes them: 32 bytes."""
    kv_rank = ObjectKey.ComputeKVRank(ranks, rank, ranks, rank)
    return [
        ObjectKey(hashlib.sha256(f"chunk {n}".encode()).digest(), model, kv_rank, group, salt)
        for n in numbers
    ]


def content(key, size):
    """Return the right bytes of an object."""
    return hashlib.shake_128(repr(key).encode()).digest(size)


def object_for(layout=DESC):
    """Return an empty object with a few bytes of padding, as LMCache's allocator makes them."""
    size = sum(s.numel() * d.itemsize for s, d in zip(layout.shapes, layout.dtypes, strict=True))
    raw = torch.zeros(size + 64, dtype=torch.uint8)
    meta = MemoryObjMetadata(
        shape=layout.shapes[0],
        dtype=layout.dtypes[0],
        address=0,
        phy_size=len(raw),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=list(layout.shapes),
        dtypes=list(layout.dtypes),
    )
    return TensorMemoryObj(raw, meta, None)


def fill(item, key):
    item.byte_array.cast("B")[:] = content(key, item.get_size())


def filled(keys, layout=DESC):
    """Return objects with the right bytes."""
    items = [object_for(layout) for _ in keys]
    for item, key in zip(items, keys, strict=True):
        fill(item, key)
    return items


def is_right(item, key):
    """Return whether an object has its right bytes."""
    return bytes(item.byte_array) == content(key, item.get_size())


def configs(parameters, **outer):
    """Parse the plugin's command line as LMCache's server does."""
    spec = {
        "type": "plugin",
        "module_path": "cascadekv.connectors.lmcache",
        "class_name": "CascadeL2Adapter",
        "adapter_params": parameters,
        **outer,
    }
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    return parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", json.dumps(spec)]))


def create(parameters):
    """Create the adapter by LMCache's own parser and loader."""
    return create_l2_adapter(configs(parameters).adapters[0])


def _wait(descriptor, result):
    """Wait for the signal of a task as LMCache's controllers do, then return its result."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    end = time.monotonic() + LIMIT_S
    while True:
        assert poller.poll(max(0, end - time.monotonic()) * 1000), "the task was not signalled"
        consume_fd(descriptor)
        found = result()
        if found is not None:
            return found


def store(adapter, keys, objects=None):
    """Store objects, by default the right ones; returns LMCache's result."""
    done = {}
    task = adapter.submit_store_task(keys, filled(keys) if objects is None else objects)

    def result():
        done.update(adapter.pop_completed_store_tasks())
        return done.get(task)

    return _wait(adapter.get_store_event_fd(), result)


def bits(bitmap, count):
    return [bitmap.test(at) for at in range(count)]


def look_up(adapter, keys, layout=DESC):
    """Look up and lock objects; returns for each whether it was found."""
    descs = {key.object_group_id: layout for key in keys}
    task = adapter.submit_lookup_and_lock_task(keys, descs)
    descriptor = adapter.get_lookup_and_lock_event_fd()
    found = _wait(descriptor, lambda: adapter.query_lookup_and_lock_result(task))
    return bits(found, len(keys))


def load(adapter, keys, layout=DESC):
    """Load objects; returns for each whether LMCache may use it, after a check of its bytes."""
    items = [object_for(layout) for _ in keys]
    task = adapter.submit_load_task(keys, items)
    loaded = _wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    states = bits(loaded, len(keys))
    for is_loaded, item, key in zip(states, items, keys, strict=True):
        assert not is_loaded or is_right(item, key), "wrong bytes were reported as loaded"
    return states


def manager(parameters, l1_bytes=64 << 20, **outer):
    """Start LMCache's storage manager, with its controllers, over the plugin."""
    memory = L1MemoryManagerConfig(size_in_bytes=l1_bytes, use_lazy=False, shm_name="")
    config = StorageManagerConfig(
        l1_manager_config=L1ManagerConfig(memory),
        eviction_config=EvictionConfig(eviction_policy="LRU"),
        l2_adapter_config=L2AdaptersConfig(configs(parameters, **outer).adapters),
    )
    return StorageManager(config)


def write(managed, keys, layout=DESC):
    """Write objects into LMCache's L1 as an engine's store does; LMCache passes them on to L2."""
    reserved = managed.reserve_write(keys, layout)
    assert len(reserved) == len(keys), "LMCache's L1 is full"
    for key, item in reserved.items():
        fill(item, key)
    managed.finish_write(keys)


def clear(managed):
    """Clear LMCache's L1, and return once it is empty: it keeps objects that are still stored."""
    end = time.monotonic() + LIMIT_S
    while managed.clear() or managed.report_status()["l1_manager"]["total_object_count"]:
        assert time.monotonic() < end, "LMCache does not release its objects"
        time.sleep(0.002)


def prefetch(managed, keys, layout=DESC):
    """Prefetch a request's chunks; returns the numbers of hits in L1 and L2, bytes checked."""
    group = GroupedObjectKeys(keys, keys[0].object_group_id, layout)
    handle = managed.submit_prefetch_task(PrefetchTaskSpec([group]))
    end = time.monotonic() + LIMIT_S
    while (result := managed.query_prefetch_status(handle)) is None:
        assert time.monotonic() < end, "the prefetch did not end"
        time.sleep(0.002)
    hits = [key for at, key in enumerate(keys) if result.hit_cells[0].test(at)]
    if hits:
        with managed.read_prefetched_results(hits) as items:
            assert items is not None
            for key, item in zip(hits, items, strict=True):
                assert is_right(item, key), "wrong bytes were served"
        managed.finish_read_prefetched(hits)
    return result.l1_hit_count, result.l2_hit_count

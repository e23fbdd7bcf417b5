"""Who pins SGLang's host pools, and when: SGLang's own pools and allocation over the fake driver.

torch does not run over the fake driver. Here its three functions about pinned memory call that
driver instead; everything else is SGLang's and ours. Decision 0034 is based on these facts.
"""

import ctypes
import json
import logging

import pytest
import torch
from cascadekv.connectors.host_pages import HostPages
from fake_gpu import DriverError, FakeGpu
from sglang_pools import PAGE, PAGES, StorageBackendFactory, config, fill, hashes, mha, read, right

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
"""Errors of the driver: about memory that it does not know, and of a refused registration."""


class PinnedMemory:
    """The fake driver's registrations, as torch's bindings of the CUDA runtime show them."""

    def __init__(self, gpu):
        self._gpu, self._probe, self._stream = gpu, gpu.array(1), gpu.stream()
        self.registered = {}
        self.refuses = False

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 # CUDA's name
        """Pin memory; returns an error code."""
        if self.refuses:
            return OUT_OF_MEMORY
        self._gpu.in_context(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), flags
        )
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802 # CUDA's name
        """Unpin memory; returns an error code."""
        del self.registered[address]
        self._gpu.in_context("cuMemHostUnregister", ctypes.c_void_p(address))
        return 0

    def cudaGetErrorString(self, code):  # noqa: N802 # CUDA's name
        """Describe an error."""
        return f"fake error {code}"

    def is_pinned(self, tensor):
        """Return whether the driver copies from this memory; it refuses what is not pinned."""
        target, source = ctypes.c_uint64(self._probe.address), ctypes.c_void_p(tensor.data_ptr())
        try:
            self._gpu.in_context(
                "cuMemcpyHtoDAsync_v2",
                target,
                source,
                ctypes.c_size_t(1),
                ctypes.c_void_p(self._stream),
            )
            self._gpu.finish(self._stream)
        except DriverError as error:
            if error.args[1] != INVALID_VALUE:
                raise
            return False
        return True


@pytest.fixture(scope="module")
def gpu():
    return FakeGpu()


@pytest.fixture
def pinned(gpu, monkeypatch):
    """Let torch's functions about pinned memory call the fake driver; unpins all in the end."""
    memory = PinnedMemory(gpu)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: memory)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: memory.is_pinned(tensor))
    yield memory
    for address in list(memory.registered):
        memory.cudaHostUnregister(address)


@pytest.fixture
def attach():
    """Return a function that attaches backends as SGLang's controller does; closes them later."""
    opened = []

    def load(pool):
        storage_config = config({"cascade.dram": "16MiB"})
        backend = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
        opened.append(backend)
        backend.register_mem_pool_host(pool)
        return backend

    yield load
    for backend in opened:
        backend.close()


def pinned_pool(layout):
    """Create a pool as SGLang does on a GPU: its constructor pins the memory."""
    return mha(layout, pin_memory=True)


def warnings(caplog):
    """Return the warnings of the backend itself; the test's engine publishes no facts."""
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name == "cascadekv.connectors.sglang"
    ]


def test_sglang_pins_its_pool_before_the_backend_sees_it(pinned, attach, caplog):
    pool = pinned_pool("page_first")
    assert sum(pinned.registered.values()) == pool.kv_buffer.nbytes
    before = dict(pinned.registered)
    with caplog.at_level(logging.INFO, "cascadekv"):
        backend = attach(pool)
    assert pinned.registered == before, "the backend pins nothing again"
    assert HostPages(pool).unpinned_bytes == 0
    assert warnings(caplog) == []
    names = hashes(PAGES)
    kept = fill(pool, names)
    assert backend.batch_set_v1(names, kept) == [True] * PAGES
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(names, kept) == [True] * PAGES
    assert read(pool, kept) == right(pool, names)


def test_a_pool_that_is_not_pinned_is_named_in_a_warning(pinned, attach, caplog):
    pool = mha("page_first")
    assert pinned.registered == {}
    with caplog.at_level(logging.INFO, "cascadekv"):
        attach(pool)
    (warning,) = warnings(caplog)
    assert "pool kv (MHATokenToKVPoolHost)" in warning
    assert f"{pool.kv_buffer.nbytes} bytes are not pinned" in warning


def test_engines_without_cuda_get_no_warning(attach, caplog):
    with caplog.at_level(logging.INFO, "cascadekv"):
        attach(mha("page_first"))
    assert warnings(caplog) == []


def test_a_refused_registration_ends_sglangs_start(pinned):
    """A backend is created after the pool, so it cannot offer other memory instead."""
    pinned.refuses = True
    with pytest.raises(RuntimeError, match="cudaHostRegister failed"):
        pinned_pool("page_first")


@pytest.mark.parametrize(
    ("layout", "is_split"),
    [
        ("page_first", True),
        ("page_first_direct", True),
        ("layer_first", False),
        ("page_head", False),
    ],
)
def test_large_pools_are_pinned_in_chunks_of_whole_pages_in_two_layouts(
    pinned, monkeypatch, layout, is_split
):
    """The other layouts are pinned by one call, and drivers refuse calls of 512 GiB and more."""
    from sglang.srt.mem_cache.pool_host import common  # noqa: PLC0415 # imports late

    name, granularities = "_cuda_host_register", []
    pin = getattr(common, name)

    def record(buffer, granularity=None):
        granularities.append(granularity)
        pin(buffer, granularity)

    monkeypatch.setattr(common, name, record)
    pool = pinned_pool(layout)
    assert granularities == [PAGE * pool.layout_dim if is_split else None]
    assert list(pinned.registered.values()) == [pool.kv_buffer.nbytes]


@pytest.mark.parametrize("extra", [{}, {"allocator": "cascade"}, {"allocator": "shm"}])
def test_a_dynamic_backend_cannot_bring_an_allocator(monkeypatch, extra):
    """If this fails, SGLang has a hook for allocators, and decision 0034 can be made again."""
    from sglang.srt.mem_cache.pool_host import common  # noqa: PLC0415 # imports late

    class Memory:
        hicache_storage_backend = "dynamic"
        hicache_storage_backend_extra_config = json.dumps(extra)

    monkeypatch.setattr(common, "get_memory", Memory)
    allocator = common.get_allocator_from_storage(common.get_allocator_type())
    assert type(allocator) in (common.HostTensorAllocator, common.ShmHostTensorAllocator)

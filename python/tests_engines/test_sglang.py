"""The storage backend with SGLang's own class, loader and host pools, on a CPU.

Uses SGLang's installed package. Only its GPU kernels do not run; they are on the other side of the
host pools.
"""

import ctypes
import threading
import time

import cascadekv
import pytest
import torch
from cascadekv.connectors.host_pages import HostPages, HostPoolError
from cascadekv.errors import ConfigError, RefusedError
from sglang_pools import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    LogicalHostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StorageBackendFactory,
    config,
    content,
    fill,
    hashes,
    mha,
    mla,
    published,
    read,
    right,
)

MHA_IN_PLACE = ["page_first", "page_first_direct", "page_head"]
MLA_IN_PLACE = ["page_first", "page_first_direct"]
POOLS = [
    *((mha, layout) for layout in ["layer_first", *MHA_IN_PLACE]),
    *((mla, layout) for layout in ["layer_first", *MLA_IN_PLACE]),
]
NAMED = [f"{make.__name__}-{layout}" for make, layout in POOLS]
EMBEDDED = {"cascade.dram": "16MiB"}


@pytest.fixture(scope="session", autouse=True)
def _tested():
    import sglang  # noqa: PLC0415 # already imported

    print(f"\nSGLang {sglang.__version__}: its own class, loader and host pools; no mocks")


@pytest.fixture
def attach():
    """Return a function that attaches backends as SGLang's controller does; closes them later."""
    opened = []

    def load(pool, extra=None, **changes):
        storage_config = config(EMBEDDED if extra is None else extra, **changes)
        backend = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
        opened.append(backend)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        return backend

    yield load
    for backend in opened:
        backend.close()


@pytest.fixture
def node(serve):
    return serve("--dram", "32MiB")


def at(node, **more):
    return {"cascade.node": f"unix:{node.socket}", **more}


def test_the_loader_creates_the_backend(attach):
    backend = attach(mha("page_first"))
    assert isinstance(backend, HiCacheStorage)
    assert type(backend).__name__ == "CascadeHiCacheStorage"
    assert not type(backend).__abstractmethods__


@pytest.mark.parametrize(("make", "layout"), POOLS, ids=NAMED)
def test_pages_come_back_byte_for_byte(attach, make, layout):
    pool = make(layout)
    backend = attach(pool, is_mla_model=make is mla)
    names = hashes(10)
    kept = fill(pool, names)
    assert backend.batch_set_v1(names, kept) == [True] * 10
    assert backend.batch_exists(names) == 10
    fresh = pool.alloc(10 * pool.page_size)
    assert backend.batch_get_v1(names, fresh) == [True] * 10
    assert read(pool, fresh) == right(pool, names)
    assert backend.failures() == {}


@pytest.mark.parametrize(("make", "layout"), POOLS, ids=NAMED)
def test_generic_and_zero_copy_calls_share_pages(attach, make, layout):
    pool = make(layout)
    backend = attach(pool, is_mla_model=make is mla)
    names = hashes(6)
    assert backend.batch_set(names[:3], [content(pool, name) for name in names[:3]])
    assert backend.set(names[3], content(pool, names[3]))
    assert backend.batch_set_v1(names[4:], fill(pool, names[4:])) == [True] * 2
    assert backend.batch_exists(names) == 6
    assert backend.exists(names[5])
    fresh = pool.alloc(6 * pool.page_size)
    assert backend.batch_get_v1(names, fresh) == [True] * 6
    assert read(pool, fresh) == right(pool, names)
    pages = backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
    assert [bytes(page.view(torch.uint8).numpy()) for page in pages] == right(pool, names)
    assert backend.get("f" * 64, pool.get_dummy_flat_data_page()) is None


@pytest.mark.parametrize(
    ("pool", "pieces", "in_place"),
    [
        (mha("layer_first"), 1, False),
        *((mha(layout), 2, True) for layout in MHA_IN_PLACE),
        (mha("page_first", v_dim=4), 2, True),
        (mla("layer_first"), 1, False),
        *((mla(layout), 1, True) for layout in MLA_IN_PLACE),
    ],
    ids=lambda value: getattr(value, "layout", None),
)
def test_page_first_layouts_are_accessed_in_place(pool, pieces, in_place):
    pages = HostPages(pool)
    assert (pages.pieces, pages.in_place) == (pieces, in_place)
    if in_place:
        indices = pool.alloc(2 * pool.page_size)
        addresses, _ = pool.get_page_buffer_meta(indices)
        memory = pages.memory(indices, 2)
        where = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in memory]
        assert where == addresses


def test_keys_and_values_of_different_width(attach):
    pool = mha("page_first", v_dim=4)
    backend = attach(pool)
    indices = pool.alloc(2 * pool.page_size)
    pool.k_buffer.copy_(torch.randn(pool.k_buffer.shape))
    pool.v_buffer.copy_(torch.randn(pool.v_buffer.shape))
    names = hashes(2)
    before = pool.k_buffer[:8].clone(), pool.v_buffer[:8].clone()
    assert backend.batch_set_v1(names, indices) == [True, True]
    pool.k_buffer.zero_()
    pool.v_buffer.zero_()
    assert backend.batch_get_v1(names, indices) == [True, True]
    assert torch.equal(pool.k_buffer[:8], before[0])
    assert torch.equal(pool.v_buffer[:8], before[1])


def test_lookups_count_leading_pages(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(6)
    kept = [0, 1, 3, 4]
    backend.batch_set_v1([names[n] for n in kept], fill(pool, [names[n] for n in kept]))
    assert backend.batch_exists(names) == 2
    assert backend.batch_exists(names[3:]) == 2
    assert backend.batch_exists([]) == 0
    untouched = fill(pool, names, salt="other")
    assert backend.batch_get_v1(names, untouched) == [n in kept for n in range(6)]
    now = read(pool, untouched)
    for n in range(6):
        salt = "" if n in kept else "other"
        assert [now[n]] == right(pool, [names[n]], salt)


def test_an_incomplete_page_is_a_miss(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(3)
    assert backend.batch_set_v1(names, fill(pool, names)) == [True] * 3
    keys = backend._pools["kv"].keys(names)  # noqa: SLF001 # as an eviction
    assert backend._link.store().delete(keys[3:4]) == [True]  # noqa: SLF001
    assert backend.batch_exists(names) == 1
    assert backend.batch_get_v1(names, pool.alloc(12)) == [True, False, True]
    # The recomputed values differ from the kept piece. Both are valid, and the page is complete.
    assert backend.batch_set_v1(names, fill(pool, names, salt="again")) == [True] * 3
    assert backend.batch_exists(names) == 3


def test_a_page_computed_twice_keeps_its_first_bytes(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(2)
    assert backend.batch_set_v1(names, fill(pool, names)) == [True, True]
    assert backend.batch_set_v1(names, fill(pool, names, salt="recomputed")) == [True, True]
    fresh = pool.alloc(8)
    assert backend.batch_get_v1(names, fresh) == [True, True]
    assert read(pool, fresh) == right(pool, names)


def test_wrong_sizes_are_misses_and_counted(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(2)
    indices = fill(pool, names)
    assert backend.batch_set_v1(names, indices[:5]) == [False, False]
    assert backend.batch_get_v1(names, indices[:4]) == [False, False]
    assert not backend.batch_set(names, [torch.zeros(3), torch.zeros(3)])
    assert not backend.set(names[0], None)
    assert not backend.batch_set(names, [content(pool, "one")])
    assert backend.batch_get(names, None) == [None, None]
    assert backend.batch_get(names, [torch.zeros(3), torch.zeros(3)]) == [None, None]
    outside = torch.arange(pool.size, pool.size + 8)
    assert backend.batch_get_v1(names, outside) == [False, False]
    assert backend.batch_set_v1(names, outside) == [False, False]
    assert backend.failures() == {"writing": 5, "reading": 4}
    assert backend.batch_exists(names) == 0


def test_memory_outside_of_the_pool_is_never_accessed():
    class Wild:
        """A pool that returns addresses outside of its memory."""

        def __init__(self, pool):
            self._pool = pool

        def __getattr__(self, name):
            return getattr(self._pool, name)

        def get_page_buffer_meta(self, indices):
            addresses, sizes = self._pool.get_page_buffer_meta(indices)
            return [address + self.off for address in addresses], sizes

    wild = Wild(mha("page_first"))
    wild.off = 0
    pages = HostPages(wild)
    for off in (-1, -(1 << 40), 1 << 40, pages.pool.size_per_token * pages.pool.size):
        wild.off = off
        with pytest.raises(HostPoolError, match="not in the registered pool"):
            pages.memory(torch.arange(4), 1)


def test_a_block_of_another_length_is_a_miss(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(1)
    keys = backend._pools["kv"].keys(names)  # noqa: SLF001 # as a faulty store
    backend._link.store().put(keys, [b"short", b"shorter"])  # noqa: SLF001
    assert backend.batch_get_v1(names, pool.alloc(4)) == [False]


def test_concurrent_threads_read_right_pages(attach, node):
    pool = mha("page_first_direct")
    backend = attach(pool, at(node))
    names = [hashes(6, salt=f"{n} ") for n in range(4)]
    places = [(fill(pool, own), pool.alloc(24)) for own in names]
    wrong = []

    def work(n):
        kept, fresh = places[n]
        for _ in range(20):
            backend.batch_set_v1(names[n], kept)
            found = backend.batch_exists(names[n])
            got = backend.batch_get_v1(names[n], fresh)
            if found != 6 or not all(got) or read(pool, fresh) != right(pool, names[n]):
                wrong.append((n, found, got))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_two_engines_share_a_node(attach, node):
    first, second = mha("page_first"), mha("page_first")
    names = hashes(8)
    assert all(attach(first, at(node)).batch_set_v1(names, fill(first, names)))
    other = attach(second, at(node))
    assert other.batch_exists(names) == 8
    fresh = second.alloc(32)
    assert other.batch_get_v1(names, fresh) == [True] * 8
    assert read(second, fresh) == right(second, names)


def test_ranks_keep_their_own_heads(attach, node):
    names = hashes(3)
    pools = [mha("page_first"), mha("page_first")]
    ranks = [attach(pool, at(node), tp_rank=n, tp_size=2) for n, pool in enumerate(pools)]
    assert all(ranks[0].batch_set_v1(names, fill(pools[0], names, salt="rank 0")))
    assert ranks[1].batch_exists(names) == 0
    assert all(ranks[1].batch_set_v1(names, fill(pools[1], names, salt="rank 1")))
    for n, (rank, pool) in enumerate(zip(ranks, pools, strict=True)):
        fresh = pool.alloc(12)
        assert rank.batch_get_v1(names, fresh) == [True] * 3
        assert read(pool, fresh) == right(pool, names, salt=f"rank {n}")


def test_ranks_with_compressed_kv_share_what_one_wrote(attach, node):
    names = hashes(3)
    pools = [mla("page_first"), mla("page_first")]
    mla_ranks = {"tp_size": 2, "is_mla_model": True}
    ranks = [attach(pool, at(node), tp_rank=n, **mla_ranks) for n, pool in enumerate(pools)]
    writers = [config(tp_rank=n, **mla_ranks).is_storage_writer for n in range(2)]
    assert writers == [True, False]  # rank 0 writes for all
    assert all(ranks[0].batch_set_v1(names, fill(pools[0], names)))
    fresh = pools[1].alloc(12)
    assert ranks[1].batch_get_v1(names, fresh) == [True] * 3
    assert read(pools[1], fresh) == right(pools[1], names)


@pytest.mark.parametrize(("writers", "readers"), [(4, 1), (4, 2), (1, 4), (2, 4)])
def test_heads_are_shared_between_different_numbers_of_ranks(attach, node, writers, readers):
    """Pages written with one number of ranks are read with another, with equal bytes per head."""
    names = hashes(3)
    heads, storage_config = 4, {"tp_lcm_size": 4}
    whole = mha("page_head", heads=heads)
    fill(whole, names)
    expected = whole.kv_buffer[:, :3].clone()

    def rank(n, size):
        share = heads // size
        pool = mha("page_head", heads=share)
        splits = {"should_split_heads": size < 4, "tp_rank": n, "tp_size": size}
        return (
            pool,
            attach(pool, at(node), **storage_config, **splits),
            slice(n * share, (n + 1) * share),
        )

    for n in range(writers):
        pool, backend, mine = rank(n, writers)
        indices = pool.alloc(3 * pool.page_size)
        pool.kv_buffer[:, :3] = expected[:, :, mine]
        assert backend.batch_set_v1(names, indices) == [True] * 3
    for n in range(readers):
        pool, backend, mine = rank(n, readers)
        assert backend.batch_exists(names) == 3
        assert backend.batch_get_v1(names, pool.alloc(3 * pool.page_size)) == [True] * 3
        got, wanted = pool.kv_buffer[:, :3], expected[:, :, mine]
        assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_pages_survive_a_restart_from_files(attach, tmp_path):
    place = {"cascade.dram": "8MiB", "cascade.files": str(tmp_path / "files")}
    place |= {"cascade.files_capacity": "1GiB", "cascade.pipeline": "Dram|Files"}
    pool = mha("page_first")
    names = hashes(12)
    first = attach(pool, place)
    assert all(first.batch_set_v1(names, fill(pool, names)))
    first.close()
    assert first.batch_exists(names) == 0
    again = mha("page_first")
    second = attach(again, place)
    assert second.batch_exists(names) == 12
    fresh = again.alloc(48)
    assert second.batch_get_v1(names, fresh) == [True] * 12
    assert read(again, fresh) == right(again, names)


def test_a_killed_node_causes_misses_until_it_restarts(attach, node, eventually):
    pool = mha("page_first")
    backend = attach(pool, at(node))
    names = hashes(4)
    kept, fresh = fill(pool, names), pool.alloc(16)
    assert backend.batch_set_v1(names, kept) == [True] * 4
    stop = threading.Event()
    raised = []

    def work():
        while not stop.is_set():
            try:
                backend.batch_set_v1(names, kept)
                backend.batch_exists(names)
                backend.batch_get_v1(names, fresh)
            except BaseException as error:  # noqa: BLE001 # no exception may reach the engine
                raised.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    node.kill()
    eventually(lambda: backend.batch_exists(names) == 0)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert raised == []
    started = time.monotonic()
    assert backend.batch_get_v1(names, fresh) == [False] * 4
    assert backend.batch_set_v1(names, kept) == [False] * 4
    assert not backend.batch_set(names, [content(pool, name) for name in names])
    assert not backend.exists(names[0])
    assert time.monotonic() - started < 30  # no hang, even on a loaded machine
    assert backend.failures()["writing"] >= 2
    node.start()
    eventually(lambda: backend.batch_set_v1(names, kept) == [True] * 4)
    assert backend.batch_get_v1(names, fresh) == [True] * 4
    assert read(pool, fresh) == right(pool, names)


def test_an_engine_starts_while_the_node_is_unavailable(attach, serve, monkeypatch, eventually):
    monkeypatch.setattr("cascadekv.connectors.settings.RETRY_S", 0.1)
    node = serve("--dram", "16MiB")
    node.stop()
    pool = mha("page_first")
    backend = attach(pool, at(node))
    names = hashes(2)
    kept = fill(pool, names)
    assert backend.batch_set_v1(names, kept) == [False, False]
    assert backend.batch_exists(names) == 0
    assert backend.failures()["connecting"] == 1
    node.start()
    eventually(lambda: backend.batch_set_v1(names, kept) == [True, True])
    assert backend.batch_exists(names) == 2


def test_a_refused_token_fails_the_start(attach, node, tmp_path):
    token = tmp_path / "token"
    token.write_text("wrong\n")
    token.chmod(0o600)
    with pytest.raises(RefusedError):
        attach(mha("page_first"), at(node, **{"cascade.token_file": str(token)}))


def test_unsupported_configurations_are_refused_by_name(attach, node):
    pool = mha("page_first")
    with pytest.raises(ConfigError, match=r"cascade\.drma: no such setting.*cascade\.dram"):
        attach(pool, {"cascade.drma": "1GiB"})
    with pytest.raises(ConfigError, match=r"cascade\.node: 4 ranks"):
        attach(pool, tp_size=2, pp_size=2)
    with pytest.raises(ConfigError, match="served-model-name"):
        attach(pool, model_name=None)
    split = {"should_split_heads": True, "tp_lcm_size": 2}
    with pytest.raises(ConfigError, match="interface_v1"):
        attach(mha("page_head"), at(node, interface_v1=0), **split)
    with pytest.raises(ConfigError, match="a share of the heads is not contiguous"):
        attach(mha("layer_first"), at(node), **split)


def test_clear_deletes_everything(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(2)
    backend.batch_set_v1(names, fill(pool, names))
    assert backend.clear()
    assert backend.batch_exists(names) == 0


def test_calls_after_close_are_misses(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(2)
    kept = fill(pool, names)
    backend.batch_set_v1(names, kept)
    backend.close()
    backend.close()
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, kept) == [False, False]
    assert backend.batch_set_v1(names, kept) == [False, False]
    assert not backend.clear()


def test_transfers_are_reported_to_the_engines_metrics(attach):
    pool = mha("page_first")
    backend = attach(pool, enable_storage_metrics=True)
    names = hashes(5)
    backend.batch_set_v1(names, fill(pool, names))
    backend.batch_get_v1(names[:2], pool.alloc(8))
    taken = backend.get_stats()
    assert (taken.backup_pgs, taken.prefetch_pgs) == ([5], [2])
    assert len(taken.backup_bandwidth) == len(taken.prefetch_bandwidth) == 1
    assert backend.get_stats().prefetch_pgs == []
    assert attach(mha("page_first")).get_stats() is None


def test_the_last_prefix_page_is_the_parent(attach):
    pool = mha("page_first")
    backend = attach(pool)
    names = hashes(6)
    assert all(backend.batch_set_v1(names[:3], fill(pool, names[:3])))
    before = HiCacheStorageExtraInfo(prefix_keys=names[:3])
    assert all(backend.batch_set_v1(names[3:], fill(pool, names[3:]), before))
    assert backend.batch_exists(names) == 6
    assert backend.batch_exists(names[3:], before) == 3


def test_additional_pools_are_stored_and_limit_prefixes(attach):
    pool, beside = mha("page_first"), mha("page_first", layers=1)
    backend = attach(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.register_mem_host_pool_v2(beside, PoolName.SWA)
    names = hashes(6)
    backend.batch_set_v1(names, fill(pool, names))
    written = [1, 2, 4]
    some = [names[n] for n in written]
    put = PoolTransfer(PoolName.SWA, host_indices=fill(beside, some, "swa"), keys=some)
    assert backend.batch_set_v2([put]) == {PoolName.SWA: [True] * 3}

    last = PoolTransfer(PoolName.SWA, keys=names[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(names, [last])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 3, 5])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 5}
    two = PoolTransfer(PoolName.SWA, keys=names[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(names, [two]).restorable_prefix_pages == [3]
    every = PoolTransfer(PoolName.SWA, keys=names)
    assert backend.batch_exists_v2(names, [every]).kv_hit_pages == 0

    fresh = beside.alloc(24)
    got = backend.batch_get_v2([PoolTransfer(PoolName.SWA, host_indices=fresh, keys=names)])
    assert got == {PoolName.SWA: [n in written for n in range(6)]}
    assert [read(beside, fresh)[n] for n in written] == right(beside, some, "swa")
    unknown = PoolTransfer(PoolName.MAMBA, host_indices=fresh, keys=names)
    assert backend.batch_get_v2([unknown]) == {PoolName.MAMBA: [False] * 6}


def test_a_logical_main_pool_stores_nothing_itself(attach):
    backend = attach(LogicalHostPool(64, 4))
    beside = mha("page_first")
    backend.register_mem_host_pool_v2(beside, PoolName.SWA)
    names = hashes(2)
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, torch.arange(8)) == [True, True]
    every = PoolTransfer(PoolName.SWA, host_indices=fill(beside, names), keys=names)
    assert backend.batch_exists_v2(names, [every]).kv_hit_pages == 0
    backend.batch_set_v2([every])
    assert backend.batch_exists_v2(names, [every]).kv_hit_pages == 2


def test_published_weights_identify_the_kv(attach, node, tmp_path, monkeypatch):
    """Other weights under the same served name miss; equal weights in another directory hit."""
    names = hashes(2)

    def hits(directory, weights):
        place = tmp_path / directory
        place.mkdir()
        (place / "model.safetensors").write_bytes(weights)
        options = published(model_path=str(place))
        monkeypatch.setattr("cascadekv.connectors.sglang_identity._published", lambda: options)
        # The files are younger than this process.
        monkeypatch.setattr(
            "cascadekv.connectors.sglang_weights.changed_since_start", lambda _: None
        )
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        pool = mha("page_first")
        backend = attach(pool, at(node))
        found = backend.batch_exists(names)
        backend.batch_set_v1(names, fill(pool, names))
        return found

    assert hits("a", b"weights") == 0
    assert hits("b", b"finetuned") == 0
    assert hits("c", b"weights") == 2


def test_pages_are_stored_in_the_node(attach, node):
    pool = mha("page_first")
    backend = attach(pool, at(node))
    names = hashes(4)
    backend.batch_set_v1(names, fill(pool, names))
    with cascadekv.connect(node.socket, access="read") as reader:
        assert reader.stats()["puts"] == 8  # K and V of four pages

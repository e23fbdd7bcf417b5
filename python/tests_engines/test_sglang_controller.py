"""SGLang's own cache controller and its threads with Cascade: backup and prefetch, on a CPU."""

import threading
from queue import Queue

import pytest
import torch
from sglang_pools import PAGE, config, content, fill, mha, read, right

TOKENS = list(range(160))
WAIT_S = 60


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Initialize this process as the only rank, as the engine's launcher does."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 # imports late

    place = tmp_path_factory.mktemp("ranks") / "rendezvous"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}", rank=0, world_size=1
    )
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    get_parallel().override_permanently(**alone, attn_dcp_size=1, attn_dcp_rank=0)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def control(one_rank):
    """Return a function that creates SGLang's controller with the storage backend attached."""
    from sglang.srt.managers import cache_controller  # noqa: PLC0415 # late, as above
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: PLC0415
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415

    running = []

    def make(pool, extra):
        device = MHATokenToKVPool(
            size=64,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=8,
            layer_num=3,
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        allocator = PagedTokenToKVPoolAllocator(
            64, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
        )
        controller = cache_controller.HiCacheController(
            allocator,
            pool,
            PAGE,
            one_rank,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="test-model",
            storage_backend_extra_config=config(extra).extra_config,
        )
        running.append(controller)
        return controller

    yield make
    for controller in running:
        controller.detach_storage_backend()


def names():
    from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: PLC0415 # late, as above

    return get_storage_hash_str(TOKENS, None, page_size=PAGE)


def back_up(controller, pool):
    """Back up all pages by the controller's thread; returns the tokens counted as stored."""
    controller.write_storage(fill(pool, names()), TOKENS, names())
    return controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens


def prefetch(controller, pool):
    """Prefetch by the controller's threads; returns tokens found, tokens read, and their pages."""
    operation = controller.prefetch("request", TOKENS)
    assert controller.prefetch_hit_queue.get(timeout=WAIT_S) is operation
    found = operation.storage_hit_count
    operation.host_indices = pool.alloc(found)
    controller.prefetch_buffer.put(operation)
    done = 0
    while not (ack := controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
        done = max(done, ack.completed_tokens or 0)
    return found, done, operation.host_indices


@pytest.mark.parametrize("v1", [0, 1], ids=["generic", "zero-copy"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_the_controller_stores_and_prefetches(control, layout, v1):
    pool = mha(layout)
    controller = control(pool, {"cascade.dram": "16MiB", "interface_v1": v1})
    zero_copy = controller.page_get_func == controller._page_get_zero_copy  # noqa: SLF001
    assert zero_copy == bool(v1)
    assert prefetch(controller, pool)[:2] == (0, 0)
    assert back_up(controller, pool) == len(TOKENS)
    pool.clear()
    found, done, indices = prefetch(controller, pool)
    assert (found, done) == (len(TOKENS), len(TOKENS))
    assert read(pool, indices) == right(pool, names())


def test_a_killed_node_costs_the_controller_only_hits(control, serve, eventually):
    node = serve("--dram", "32MiB")
    pool = mha("page_first")
    controller = control(pool, {"cascade.node": f"unix:{node.socket}"})
    assert back_up(controller, pool) == len(TOKENS)
    node.kill()
    eventually(lambda: prefetch(controller, pool)[:2] == (0, 0))
    pool.clear()
    assert back_up(controller, pool) == 0
    threads = (
        controller.backup_thread,
        controller.prefetch_thread,
        controller.prefetch_io_aux_thread,
    )
    assert all(thread.is_alive() for thread in threads)
    node.start()

    def again():
        pool.clear()
        return back_up(controller, pool) == len(TOKENS)

    eventually(again)
    pool.clear()
    found, done, indices = prefetch(controller, pool)
    assert (found, done) == (len(TOKENS), len(TOKENS))
    assert read(pool, indices) == right(pool, names())


def test_pages_deleted_between_lookup_and_read_are_not_counted(control):
    pool = mha("page_first")
    controller = control(pool, {"cascade.dram": "16MiB"})
    back_up(controller, pool)
    backend, kept = controller.storage_backend, Queue()

    def lose(keys, host_indices, extra_info=None):
        kv = backend._pools["kv"]  # noqa: SLF001 # as an eviction
        backend._link.store().delete(kv.keys(keys[7:8])[:1])  # noqa: SLF001
        answer = type(backend).batch_get_v1(backend, keys, host_indices, extra_info)
        kept.put(answer)
        return answer

    backend.batch_get_v1 = lose
    pool.clear()
    found, done, indices = prefetch(controller, pool)
    assert (found, done) == (len(TOKENS), 7 * PAGE)
    assert kept.get() == [n != 7 for n in range(len(names()))]
    assert read(pool, indices)[:7] == right(pool, names()[:7])
    assert bytes(content(pool, "x").view(torch.uint8).numpy()) != read(pool, indices)[7]

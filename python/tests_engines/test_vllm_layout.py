"""Parts of vLLM ranks are stored so that ranks of engines of other sizes can read them."""

import itertools

import cascadekv
import numpy as np
import pytest
import torch
from cascadekv.connectors.vllm.layout import HEAD_CONTIGUOUS, LayoutError, Rank, describe
from cascadekv.connectors.vllm.memory import DeviceMemory, HostMemory
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm_caches import BLOCK_TOKENS, PAGES, Model, Worker, config_of, keys_of, workers_of

SIZES = [1, 2, 4, 8]
PAIRS = list(itertools.product(SIZES, SIZES))
SAVED = [7, 3, 11, 1]
LOADED = [2, 9, 4, 10]
EIGHT_HEADS = Model(heads=8)
TWO_HEADS = Model(heads=2)
LATENT = Model(heads=1, is_mla=True)
PADDED = Model(heads=8, padding=96)


@pytest.fixture
def store():
    with cascadekv.Store(dram="16MiB", huge_pages=False) as opened:
        yield opened


def assert_read_elsewhere(store, model, written, read, shards, *, layouts=("LBHNC", "LBHNC")):
    """Write with one tensor parallel size and read with another, byte by byte."""
    for worker in workers_of(model, written, layout=layouts[0], shards=shards):
        worker.save(store, SAVED)
    for worker in workers_of(model, read, layout=layouts[1], shards=shards, is_filled=False):
        assert worker.load(store, LOADED) == [True] * len(LOADED)
        for layer in range(len(model.layers)):
            for source, target in zip(SAVED, LOADED, strict=True):
                wanted = worker.share[layer, source]
                assert np.array_equal(worker.page(layer, target), wanted), (written, read, target)
            for page in set(range(PAGES)) - set(LOADED):
                assert not worker.page(layer, page).any(), "a page outside of the load was written"


@pytest.mark.parametrize(("written", "read"), PAIRS)
@pytest.mark.parametrize(
    ("model", "shards"),
    [(EIGHT_HEADS, 8), (TWO_HEADS, 2), (TWO_HEADS, 8), (LATENT, None), (PADDED, 8)],
    ids=["8 heads", "2 heads", "2 heads, more shards than heads", "latent", "padded pages"],
)
def test_every_tensor_parallel_size_reads_blocks_of_every_other(
    store, model, shards, written, read
):
    assert_read_elsewhere(store, model, written, read, shards)


@pytest.mark.parametrize(("written", "read"), [pair for pair in PAIRS if 8 not in pair])
def test_shares_can_have_several_heads(store, written, read):
    assert_read_elsewhere(store, EIGHT_HEADS, written, read, 4)


@pytest.mark.parametrize(
    ("written", "read"), list(itertools.product(HEAD_CONTIGUOUS, HEAD_CONTIGUOUS))
)
def test_layouts_with_contiguous_heads_have_equal_shares(store, written, read):
    # Such layouts differ in the position of pages, not in their content. The manifest separates
    # them anyway, because only the engine knows the content of a page.
    assert_read_elsewhere(store, EIGHT_HEADS, 4, 2, 8, layouts=(written, read))


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "LBNHC", "BLNHC"])
def test_equal_sizes_work_with_every_layout_of_contiguous_pages(store, layout):
    assert_read_elsewhere(store, EIGHT_HEADS, 4, 4, None, layouts=(layout, layout))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", [EIGHT_HEADS, TWO_HEADS, LATENT], ids=["8", "2", "latent"])
@pytest.mark.parametrize("shards", [None, 8])
def test_every_part_has_one_writer(model, size, shards):
    held = [each for worker in workers_of(model, size, shards=shards) for each in worker.held]
    writers = [each.part.name for each in held if each.is_writer]
    assert sorted(writers) == sorted({each.part.name for each in held})


def test_sizes_share_nothing_without_shards():
    names = [
        {each.part.name for worker in workers_of(EIGHT_HEADS, size) for each in worker.held}
        for size in SIZES
    ]
    assert [len(each) for each in names] == SIZES
    assert not any(one & other for one, other in itertools.combinations(names, 2))


def test_stages_of_a_pipeline_never_share_parts():
    first = Model(layers=("layers.0", "layers.1"))
    second = Model(layers=("layers.2", "layers.3"))
    names = [
        {each.part.name for worker in workers_of(stage, 2, shards=8) for each in worker.held}
        for stage in (first, second, EIGHT_HEADS)
    ]
    assert not any(one & other for one, other in itertools.combinations(names, 2))


def test_a_stage_may_lack_the_layers_of_a_group():
    model = Model(heads=8)
    config = config_of(model.layers, model.spec(8), "LBHNC")
    config.kv_cache_groups.insert(0, KVCacheGroupSpec([], model.spec(8)))
    (held,) = describe(config, Rank(kv_heads=8))
    assert (held.part.group, held.layers) == (1, model.layers)


@pytest.mark.parametrize(("heads", "size", "context"), [(2, 4, 2), (2, 8, 4), (1, 4, 4), (1, 4, 2)])
def test_context_parallel_ranks_hold_other_tokens(heads, size, context):
    config = config_of(("layers.0",), Model(heads=heads, is_mla=heads == 1).spec(1), "LBHNC")
    held = [
        each
        for tensor in range(size)
        for each in describe(config, Rank(tensor, size, tensor % context, context, heads))
    ]
    names = {each.part.name for each in held}
    assert len(names) == heads * context
    assert all(any(f"context {at}/{context}" in name for name in names) for at in range(context))
    assert sorted(each.part.name for each in held if each.is_writer) == sorted(names)


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_heads_that_are_not_contiguous_are_not_split(layout):
    with pytest.raises(LayoutError, match=r"cascade\.shards: in the KV layout .*LBHNC, BLHNC"):
        workers_of(EIGHT_HEADS, 2, layout=layout, shards=8)


def test_blocks_in_pieces_are_not_split():
    # With smaller blocks in the attention backend than in the engine, a head is not contiguous.
    config = config_of(("layers.0",), EIGHT_HEADS.spec(8), "LBHNC")
    with pytest.raises(LayoutError, match=r"cascade\.shards: .* 2 pieces"):
        describe(config, Rank(kv_heads=8), 8, pieces=2)
    assert describe(config, Rank(kv_heads=8), pieces=2) == describe(config, Rank(kv_heads=8))


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_pages_that_are_not_contiguous_are_refused(layout):
    config = config_of(("layers.0",), EIGHT_HEADS.spec(8), layout)
    with pytest.raises(LayoutError, match=f"in the KV layout {layout} a page is not contiguous"):
        describe(config, Rank(kv_heads=8))


@pytest.mark.parametrize(("size", "shards"), [(4, 2), (1, 3), (8, 4)])
def test_shards_that_do_not_divide_the_heads_are_refused(size, shards):
    with pytest.raises(LayoutError, match=rf"cascade\.shards: 8 KV heads .* {shards} equal"):
        workers_of(EIGHT_HEADS, size, shards=shards)


def test_recurrent_state_is_refused():
    spec = MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    config = config_of(("layers.0",), spec, "LBHNC")
    with pytest.raises(LayoutError, match="MambaSpec"):
        describe(config, Rank(kv_heads=8))


def test_an_unexpected_number_of_heads_is_refused():
    config = config_of(("layers.0",), EIGHT_HEADS.spec(3), "LBHNC")
    with pytest.raises(LayoutError, match="3 KV heads; expected 4, because 2 ranks share 8"):
        describe(config, Rank(tensor_size=2, kv_heads=8))


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("shards", [None, 8])
def test_device_memory_copies_the_same_bytes_as_host_memory(store, layout, shards):
    # A CPU tensor stands in for a device's: the same calls of torch, without a device.
    (worker,) = workers_of(EIGHT_HEADS, 1, layout=layout, shards=shards)
    (target,) = workers_of(EIGHT_HEADS, 1, layout=layout, shards=shards, is_filled=False)
    for number, each in enumerate(worker.held):
        keys = keys_of([f"host {number}", f"device {number}"], len(SAVED))
        kinds = {"host": HostMemory, "device": DeviceMemory}
        blocks = {}
        for name, kind in kinds.items():
            memory = kind(worker.buffer, each.regions, PAGES)
            part = keys.keys(f"{name} {number}", 0, len(SAVED))
            with store.prepare(part, memory.block_bytes) as prepared:
                memory.save(prepared, SAVED)
                assert all(result.ok for result in prepared.seal())
            with store.view(part) as views:
                blocks[name] = [bytes(view) for view in views]
        assert blocks["host"] == blocks["device"]
        part = keys.keys(f"host {number}", 0, len(SAVED))
        store.delete(part[2:3])
        loading = DeviceMemory(target.buffer, each.regions, PAGES)
        with store.view(part) as views:
            assert loading.load(views, LOADED) == [True, True, False, True]
    for layer in range(3):
        for at, (source, page) in enumerate(zip(SAVED, LOADED, strict=True)):
            loaded = target.page(layer, page)
            assert np.array_equal(loaded, worker.share[layer, source]) == (at != 2)
            assert loaded.any() == (at != 2)


def test_a_load_without_hits_does_not_write_the_device(store):
    (target,) = workers_of(EIGHT_HEADS, 1, is_filled=False)
    memory = DeviceMemory(target.buffer, target.held[0].regions, PAGES)
    with store.view(keys_of(["none"], 4).keys("none", 0, 4)) as views:
        assert memory.load(views, LOADED) == [False] * 4
    assert not target.buffer.any()


def test_a_worker_has_the_heads_of_its_rank():
    worker = Worker(EIGHT_HEADS, Rank(1, 2, kv_heads=8))
    assert np.array_equal(worker.page(2, 5), EIGHT_HEADS.kv[2, 5, 4:])

"""Pages of an engine are gathered into blocks, also layer by layer, and scattered from views."""

import gc
import json
import pickle
import random
import subprocess
import sys
import threading

import cascadekv
import numpy as np
import pytest
from cascadekv import PagedMemory, PutStatus

LAYERS, PAGES = 3, 12
SHAPE = (PAGES, 2, 16, 2 * 8)
"""A layer of vLLM's cache on a CPU: blocks, heads, tokens, keys and values of a head."""
PAGE_BYTES = 2 * 16 * 2 * 8 * 2


def noise(shape, seed=1):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << 16, shape, dtype=np.uint16)


def one_array_a_layer(seed):
    """Create an array for each layer, and its regions."""
    layers = [noise(SHAPE, seed + layer) for layer in range(LAYERS)]
    regions = [(layer, 0, PAGE_BYTES, PAGE_BYTES) for layer in layers]
    return layers, regions


def layers_in_one_storage(seed):
    """Create one allocation, layer after layer; the regions are offsets into it."""
    storage = noise((LAYERS, *SHAPE), seed)
    layer_bytes = PAGES * PAGE_BYTES
    regions = [(storage, layer * layer_bytes, PAGE_BYTES, PAGE_BYTES) for layer in range(LAYERS)]
    return list(storage), regions


def blocks_in_one_storage(seed):
    """Create one allocation, block after block; the stride of a layer is a block."""
    storage = noise((PAGES, LAYERS, *SHAPE[1:]), seed)
    block_bytes = LAYERS * PAGE_BYTES
    regions = [(storage, layer * PAGE_BYTES, block_bytes, PAGE_BYTES) for layer in range(LAYERS)]
    return [storage[:, layer] for layer in range(LAYERS)], regions


def keys_and_values_apart(seed):
    """Create two regions per layer: one for keys and one for values."""
    layers = [noise((2, *SHAPE), seed + layer) for layer in range(LAYERS)]
    half = PAGES * PAGE_BYTES
    regions = [(layer, part * half, PAGE_BYTES, PAGE_BYTES) for layer in layers for part in (0, 1)]
    return [layer[part] for layer in layers for part in (0, 1)], regions


@pytest.fixture(
    params=[
        one_array_a_layer,
        layers_in_one_storage,
        blocks_in_one_storage,
        keys_and_values_apart,
    ]
)
def engine(request):
    """Return a function that creates an engine's cache: its layers, and their `PagedMemory`."""

    def make(seed=1):
        layers, regions = request.param(seed)
        return layers, PagedMemory(regions, PAGES)

    return make


def block_of(layers, page):
    return b"".join(layer[page].tobytes() for layer in layers)


def save(store, keys, memory, pages):
    with store.prepare(keys, memory.block_bytes) as prepared:
        prepared.gather(memory, pages)
        return prepared.seal()


def test_pages_are_saved_as_blocks_and_loaded_into_other_pages(store, keys_of, engine):
    keys = keys_of(range(5))
    layers, memory = engine()
    assert memory.pages == PAGES
    assert memory.regions == len(layers)
    assert memory.block_bytes == len(layers) * PAGE_BYTES
    saved = [7, 0, 11, 3, 4]
    results = save(store, keys, memory, saved)
    assert [result.status for result in results] == [PutStatus.STORED] * 5
    for view, page in zip(store.view(keys), saved, strict=True):
        assert bytes(view) == block_of(layers, page)
    others, target = engine(100)
    loaded = [1, 2, 9, 0, 10]
    wanted = [block_of(others, page) for page in range(PAGES)]
    for page, source in zip(loaded, saved, strict=True):
        wanted[page] = block_of(layers, source)
    with store.view(keys) as views:
        assert views.scatter(target, np.array(loaded)) == [True] * 5
    assert [block_of(others, page) for page in range(PAGES)] == wanted


def test_layers_are_saved_and_loaded_one_by_one(store, keys_of, engine):
    keys = keys_of(range(4))
    layers, memory = engine()
    pages = np.arange(4, dtype=np.int32)
    prepared = store.prepare(keys, memory.block_bytes)
    for layer in reversed(range(len(layers))):
        with pytest.raises(ValueError, match="not gathered"):
            prepared.seal()
        assert store.contains(keys) == [False] * 4
        prepared.gather(memory, pages, first=layer, count=1)
    assert all(result.ok for result in prepared.seal())
    others, target = engine(100)
    views = store.view(keys)
    for layer in range(len(layers)):
        before = [block_of(others[layer + 1 :], page) for page in range(4)]
        assert views.scatter(target, pages, first=layer, count=1) == [True] * 4
        assert [block_of(others[layer + 1 :], page) for page in range(4)] == before
        assert np.array_equal(others[layer][:4], layers[layer][:4])


def test_present_blocks_are_not_gathered_again(store, keys_of, engine):
    keys = keys_of(range(6))
    layers, memory = engine()
    save(store, keys[:3], memory, [0, 1, 2])
    before = store.stats()
    with store.prepare(keys, memory.block_bytes) as prepared:
        assert prepared.needed == [3, 4, 5]
        # The pages of present blocks are not read, so they may be any.
        prepared.gather(memory, [5, 5, 5, 3, 4, 5])
        results = prepared.seal()
    assert [result.status for result in results] == [PutStatus.PRESENT] * 3 + [PutStatus.STORED] * 3
    for page, view in enumerate(store.view(keys)):
        assert bytes(view) == block_of(layers, page)
    after = store.stats()
    assert [after[name] - before[name] for name in ("puts", "present", "stored")] == [6, 3, 3]
    with store.prepare(keys, memory.block_bytes) as prepared:
        assert prepared.needed == []
        assert all(result.ok for result in prepared.seal())


def test_a_miss_or_a_block_of_another_length_changes_no_byte(store, keys_of, engine):
    keys = keys_of(range(4))
    layers, memory = engine()
    save(store, keys[:1], memory, [0])
    store.put(keys[1], [b"x" * (memory.block_bytes - 1)])
    store.put(keys[2], [b"x" * (memory.block_bytes + 1)])
    others, target = engine(100)
    before = [block_of(others, page) for page in range(PAGES)]
    assert store.view(keys).scatter(target, [4, 5, 6, 7]) == [True, False, False, False]
    before[4] = block_of(layers, 0)
    assert [block_of(others, page) for page in range(PAGES)] == before


def test_unsealed_memory_is_returned(store, keys_of, engine, eventually):
    keys = keys_of(range(8))
    memory = engine()[1]
    held = lambda: store.stats()["pool"]["requested_bytes"]  # noqa: E731
    eventually(lambda: held() == 0)
    prepared = store.prepare(keys, memory.block_bytes)
    prepared.gather(memory, range(8))
    assert held() == 8 * memory.block_bytes
    prepared.release()
    eventually(lambda: held() == 0)
    with pytest.raises(RuntimeError), store.prepare(keys, memory.block_bytes):
        raise RuntimeError
    eventually(lambda: held() == 0)
    store.prepare(keys, memory.block_bytes)
    gc.collect()
    eventually(lambda: held() == 0)
    assert store.contains(keys) == [False] * 8


def test_a_prepared_put_is_used_once(store, keys_of, engine):
    memory = engine()[1]
    sealed = store.prepare(keys_of(range(1)), memory.block_bytes)
    sealed.gather(memory, [0])
    sealed.seal()
    released = store.prepare(keys_of(range(1, 2)), memory.block_bytes)
    released.release()
    for used in (sealed, released):
        with pytest.raises(ValueError, match="already"):
            used.gather(memory, [0])
        with pytest.raises(ValueError, match="already"):
            used.seal()
        used.release()
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(sealed)


def test_sealing_on_a_closed_store_raises(store, keys_of, engine):
    memory = engine()[1]
    prepared = store.prepare(keys_of(range(1)), memory.block_bytes)
    prepared.gather(memory, [0])
    store.close()
    with pytest.raises(cascadekv.ClosedError):
        prepared.seal()
    prepared.release()


def test_declined_blocks_need_no_bytes(store, keys_of, engine):
    memory = engine()[1]
    with store.prepare(keys_of(range(2)), memory.block_bytes, last_is_partial=True) as prepared:
        assert prepared.needed == [0]
        prepared.gather(memory, [0, 1])
        stored, declined = prepared.seal()
    assert stored.ok
    assert declined.reason is cascadekv.DeclineReason.PARTIAL
    with store.prepare(keys_of(range(9, 10)), 17 << 20) as prepared:
        assert prepared.needed == []
        assert prepared.seal()[0].reason is cascadekv.DeclineReason.TOO_LARGE


def test_invalid_pages_and_counts_are_refused(store, keys_of, engine):
    keys = keys_of(range(2))
    layers, memory = engine()
    save(store, keys, memory, [0, 1])
    views = store.view(keys)
    before = [block_of(layers, page) for page in range(PAGES)]
    other = PagedMemory([(bytearray(64), 0, 16, 16)], 4)
    with store.prepare(keys_of(range(2, 4)), memory.block_bytes) as prepared:
        for call in (prepared.gather, views.scatter):
            with pytest.raises(ValueError, match="pages: 2 blocks but more than 2 pages"):
                call(memory, [0, 1, 2])
            with pytest.raises(ValueError, match=r"pages\[1\]: 12; pages are from 0 to 11"):
                call(memory, [0, PAGES])
            with pytest.raises(ValueError, match=r"pages\[0\]: -1"):
                call(memory, np.array([-1, 0]))
            with pytest.raises(TypeError):
                call(memory, ["a", "b"])
            for first, count in ((len(layers) + 1, None), (0, len(layers) + 1), (2, 2**64 - 1)):
                with pytest.raises(ValueError, match="regions from"):
                    call(memory, [0, 1], first=first, count=count)
        with pytest.raises(ValueError, match="its blocks have 16 bytes"):
            prepared.gather(other, [0, 1])
        with pytest.raises(ValueError, match="not gathered"):
            prepared.seal()
    with pytest.raises(ValueError, match="pages: 3 occurs twice"):
        views.scatter(memory, [3, 3])
    assert views.scatter(other, [0, 1]) == [False, False]
    assert [block_of(layers, page) for page in range(PAGES)] == before


def test_invalid_regions_are_refused():
    buffer = bytearray(1000)
    refused = [
        ([], 1, "empty"),
        ([(buffer, 0, 100, 100)], 0, "pages: 0"),
        ([(buffer, 0, 100, 100)], 11, "does not fit"),
        ([(buffer, 1, 100, 100)], 10, "does not fit"),
        ([(buffer, 901, 100, 100)], 1, "does not fit"),
        ([(buffer, 0, 2**63, 100)], 3, "does not fit"),
        ([(buffer, 2**64 - 50, 100, 100)], 1, "does not fit"),
        ([(buffer, 0, 99, 100)], 10, "stride"),
        ([(buffer, 0, 0, 0)], 10, "at least one byte"),
        ([(buffer, 0, 100, 60), (buffer, 50, 100, 50)], 10, r"regions\[0\] and regions\[1\]"),
        ([(buffer, 0, 100, 50), (memoryview(buffer)[49:], 0, 60, 50)], 2, "share memory"),
        ([(buffer, 0, 8, 8), (bytearray(8), 0, 8, 8), (buffer, 0, 8, 8)], 1, r"\[0\].*\[2\]"),
    ]
    for regions, pages, reason in refused:
        with pytest.raises(ValueError, match=reason):
            PagedMemory(regions, pages)
    with pytest.raises(BufferError, match="read-only"):
        PagedMemory([(bytes(100), 0, 10, 10)], 10)
    with pytest.raises(BufferError, match="contiguous"):
        PagedMemory([(np.zeros((4, 4))[:, :2], 0, 8, 8)], 4)
    for invalid in ([(buffer, 0, 10)], [(buffer, -1, 10, 10)], [(buffer, 0.5, 10, 10)], [buffer]):
        with pytest.raises(TypeError, match=r"regions\[0\]"):
            PagedMemory(invalid, 1)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(PagedMemory([(buffer, 0, 10, 10)], 10))


def test_overlapping_pages_are_always_refused():
    chance = random.Random(4)
    refused = 0
    for _ in range(500):
        buffer, pages = bytearray(400), chance.randint(1, 8)
        regions = []
        for _ in range(chance.randint(1, 3)):
            page_bytes = chance.randint(1, 6)
            regions.append(
                (buffer, chance.randint(0, 40), page_bytes + chance.randint(0, 20), page_bytes)
            )
        used = [
            offset + page * stride + byte
            for _, offset, stride, page_bytes in regions
            for page in range(pages)
            for byte in range(page_bytes)
        ]
        if len(set(used)) == len(used):
            assert PagedMemory(regions, pages).regions == len(regions)
        else:
            refused += 1
            with pytest.raises(ValueError, match="share memory"):
                PagedMemory(regions, pages)
    assert 50 < refused < 450


def test_buffers_stay_exported_while_the_memory_exists():
    buffer = bytearray(100)
    memory = PagedMemory([(buffer, 0, 10, 10)], 10)
    with pytest.raises(BufferError):
        buffer.append(1)
    del memory
    buffer.append(1)


def test_threads_save_and_load_concurrently(store, keys_of):
    pages, page_bytes, threads = 64, 20_000, 4
    source, target = (
        np.random.default_rng(seed).integers(0, 256, (2, pages, page_bytes), dtype=np.uint8)
        for seed in (1, 2)
    )
    regions = lambda array: [(layer, 0, page_bytes, page_bytes) for layer in array]  # noqa: E731
    saved, loaded = PagedMemory(regions(source), pages), PagedMemory(regions(target), pages)
    problems = []

    def work(thread):
        try:
            for round_number in range(4):
                own = range(thread, pages, threads)
                keys = keys_of(range(pages * round_number, pages * (round_number + 1)))
                keys = cascadekv.BlockKeys([keys[page] for page in own])
                results = save(store, keys, saved, own)
                assert all(result.ok for result in results), results
                assert all(store.view(keys).scatter(loaded, own))
        except BaseException as problem:  # noqa: BLE001 # asserted in the test's thread
            problems.append(problem)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert problems == []
    assert np.array_equal(source, target)


def test_concurrent_gathers_into_one_put_are_serialized(store, keys_of, engine):
    keys = keys_of(range(8))
    layers, memory = engine()
    prepared = store.prepare(keys, memory.block_bytes)
    gather = lambda layer: prepared.gather(memory, range(8), first=layer, count=1)  # noqa: E731
    workers = [threading.Thread(target=gather, args=(n,)) for n in range(len(layers))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(result.ok for result in prepared.seal())
    for page, view in enumerate(store.view(keys)):
        assert bytes(view) == block_of(layers, page)


def test_blocks_are_loaded_from_files(two_tiers, keys_of, engine):
    keys = keys_of(range(4))
    layers, memory = engine()
    save(two_tiers, keys, memory, range(4))
    two_tiers.flush()
    flood = keys_of(range(100, 120))
    for key in flood:
        two_tiers.put(key, [bytes(1 << 20)])
    with two_tiers.prepare(keys, memory.block_bytes) as prepared:
        assert prepared.needed == []
    others, target = engine(100)
    assert two_tiers.view(keys).scatter(target, range(4)) == [True] * 4
    for page in range(4):
        assert block_of(others, page) == block_of(layers, page)


def test_a_registered_manifest_names_the_field_that_differs(serve, tmp_path):
    files = tmp_path / "files"
    node = serve("--dram", "8MiB", "--files", str(files), "--files-capacity", "64MiB")
    fields = {"weights": "sha256:one", "dtype": "bf16"}
    space = cascadekv.Namespace(cascadekv.Manifest(fields))
    other = cascadekv.Manifest(fields | {"dtype": "fp8"})
    request = cascadekv.chain_keys(cascadekv.Namespace(other), range(16), 16)[0]
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(other.fields))
    with cascadekv.connect(node.socket) as store:
        store.register(space)
        store.put(cascadekv.chain_keys(space, range(16), 16), [b"KV"], namespace=space)
        store.flush()
        command = [sys.executable, "-m", "cascadekv", "explain", request.hex()]
        command += ["--manifest", str(manifest), "--socket", str(node.socket)]
        run = subprocess.run(  # noqa: S603 # our own command
            command, capture_output=True, text=True, timeout=100, check=False
        )
    assert run.returncode == 0, run.stderr
    assert "dtype" in run.stdout, run.stdout
    assert "weights" not in run.stdout, run.stdout


def test_a_closed_store_registers_nothing(store, space):
    store.register(space, timeout=5)
    store.close()
    with pytest.raises(cascadekv.ClosedError):
        store.register(space)

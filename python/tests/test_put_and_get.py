"""Blocks are put and read in batches, with one result for each block."""

import cascadekv
import numpy as np
import pytest
from cascadekv import DeclineReason, GetStatus, PutStatus, Store

MIB = 1 << 20


def test_put_blocks_are_read_back(store, keys_of, bytes_of):
    keys = keys_of(range(100))
    blocks = [bytes_of(key) for key in keys]
    assert [result.status for result in store.put(keys, blocks)] == [PutStatus.STORED] * 100
    buffers = [bytearray(10_000) for _ in keys]
    results = store.get(keys, buffers)
    assert all(result.ok and result.tier == "dram" for result in results)
    assert [bytes(buffer) for buffer in buffers] == blocks


def test_one_buffer_holds_a_whole_batch(store, keys_of):
    keys = keys_of(range(8))
    blocks = np.arange(8 * 512, dtype=np.float32).reshape(8, 512)
    assert all(result.ok for result in store.put(keys, blocks))
    copy = np.zeros_like(blocks)
    assert [result.bytes for result in store.get(keys, copy)] == [2048] * 8
    assert (copy == blocks).all()


@pytest.mark.parametrize("form", ["BlockKeys", "list of keys", "list of bytes", "bytes", "array"])
def test_keys_are_accepted_in_any_form(store, keys_of, form):
    keys = keys_of(range(3))
    joined = bytes(keys)
    given = {
        "BlockKeys": keys,
        "list of keys": list(keys),
        "list of bytes": [bytes(key) for key in keys],
        "bytes": joined,
        "array": np.frombuffer(joined, dtype=np.uint8).reshape(3, 32),
    }[form]
    store.put(given, [b"a", b"bb", b"ccc"])
    assert [bytes(view) for view in store.view(given)] == [b"a", b"bb", b"ccc"]


def test_one_key_is_a_batch_of_one(store, space):
    key = space.key_of_id("alone")
    assert store.put(key, [b"block"])[0].ok
    assert store.contains(key) == [True]


def test_absent_blocks_are_misses_at_their_positions(store, keys_of, bytes_of):
    keys = keys_of(range(1000))
    absent = set(range(5, 1000, 100))
    present = [key for n, key in enumerate(keys) if n not in absent]
    store.put(present, [bytes_of(key, 1000) for key in present], chain=False)
    buffers = [bytearray(1000) for _ in keys]
    results = store.get(keys, buffers)
    assert {n for n, result in enumerate(results) if result.status is GetStatus.MISS} == absent
    for n, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
        assert bytes(buffer) == (bytes(1000) if n in absent else bytes_of(key, 1000))


def test_a_short_buffer_is_not_written_and_the_result_has_the_length(store, keys_of, bytes_of):
    keys = keys_of(range(2))
    store.put(keys, [bytes_of(key, 5000) for key in keys])
    short, exact = bytearray(b"\xaa" * 4999), bytearray(5000)
    results = store.get(keys, [short, exact])
    assert results[0].status is GetStatus.TOO_SHORT
    assert results[0].needed_bytes == 5000
    assert results[0].bytes == 0
    assert short == b"\xaa" * 4999
    assert exact == bytes_of(keys[1], 5000)


def test_a_long_buffer_keeps_its_tail(store, keys_of, bytes_of):
    keys = keys_of(range(1))
    store.put(keys, [bytes_of(keys[0], 5000)])
    buffer = bytearray(b"\xaa" * 6000)
    assert store.get(keys, [buffer])[0].bytes == 5000
    assert buffer == bytes_of(keys[0], 5000) + b"\xaa" * 1000


def conflict(store, keys) -> None:
    store.put(keys, [b"old bytes"])
    assert store.put(keys, [b"old bytes"])[0].status is PutStatus.PRESENT
    assert store.put(keys, [b"new bytes"])[0].status is PutStatus.CONFLICT
    assert store.put(keys, [b"new and longer bytes"])[0].status is PutStatus.CONFLICT
    assert bytes(store.view(keys)[0]) == b"old bytes"


def test_other_bytes_under_a_known_key_are_a_conflict_and_change_nothing(store, keys_of):
    conflict(store, keys_of(range(1)))


@pytest.mark.parametrize("digest", ["blake3", "sha256"])
def test_conflicts_are_detected_with_digests(keys_of, serve, digest):
    with Store(dram="8MiB", digest=digest) as store:
        conflict(store, keys_of(range(1)))
    with cascadekv.connect(serve("--dram", "8MiB", "--digest", digest).socket) as store:
        conflict(store, keys_of(range(1)))


def test_a_partial_block_is_declined_unless_admitted(store, keys_of):
    keys = keys_of(range(2))
    results = store.put(keys, [b"full", b"part"], last_is_partial=True)
    assert results[0].status is PutStatus.STORED
    assert results[1].status is PutStatus.DECLINED
    assert results[1].reason is DeclineReason.PARTIAL
    with Store(dram="8MiB", admit_partial=True) as admitting:
        assert admitting.put(keys, [b"full", b"part"], last_is_partial=True)[1].ok


def test_a_block_larger_than_the_pool_is_declined(store, keys_of):
    result = store.put(keys_of(range(1)), [bytes(17 * MIB)])[0]
    assert result.reason is DeclineReason.TOO_LARGE
    assert result.error is None


def test_an_empty_pipeline_declines_everything(keys_of):
    with Store(pipeline="Empty") as store:
        assert store.put(keys_of(range(1)), [b"block"])[0].reason is DeclineReason.EMPTY
        assert store.view(keys_of(range(1)))[0] is None


def test_a_block_expires(store, keys_of):
    keys = keys_of(range(2))
    store.put(keys[:1], [b"gone at once"], ttl=0)
    store.put(keys[1:], [b"here for an hour"], ttl=3600)
    assert store.contains(keys) == [False, True]


def test_a_prefix_ends_at_the_first_missing_block(store, keys_of):
    keys = keys_of(range(10))
    store.put(keys, [b"block"] * 10)
    store.delete(keys[6:7])
    found = store.lookup_prefix(keys)
    assert found.blocks == 6
    assert found.tiers == ["dram"] * 6


def test_acquire_views_only_the_leading_blocks(store, keys_of):
    keys = keys_of(range(10))
    store.put(keys, [bytes([n]) * 100 for n in range(10)])
    store.delete(keys[6:7])
    hints = cascadekv.Hints(priority=cascadekv.Priority.HIGH)
    with store.acquire(keys, hints=hints, timeout=5) as views:
        assert [bytes(view) for view in views if view] == [bytes([n]) * 100 for n in range(6)]
        assert views.hits == 6


def test_deleted_and_cleared_blocks_are_gone(store, keys_of):
    keys = keys_of(range(3))
    store.put(keys, [b"block"] * 3)
    assert store.delete(keys[:1]) == [True]
    assert store.delete(keys[:1]) == [False]
    assert store.locate(keys) == [[], ["dram"], ["dram"]]
    store.clear()
    assert store.contains(keys) == [False, False, False]


def test_a_pinned_block_is_not_evicted(store, keys_of, bytes_of):
    keys = keys_of(range(40))
    store.put(keys[:1], [bytes_of(keys[0], MIB)])
    assert store.pin(keys[:1]) == [True]
    store.put(keys[1:], [bytes_of(key, MIB) for key in keys[1:]], chain=False)
    assert store.contains(keys[:1]) == [True]
    assert store.contains(keys).count(True) < 40
    assert store.unpin(keys[:1]) == [True]
    assert store.unpin(keys[:1]) == [False]

"""Blocks in the file tier survive a restart, and damaged ones are misses."""

import cascadekv
import pytest
from cascadekv import Store

MIB = 1 << 20


def settings(directory):
    return {
        "dram": "8MiB",
        "huge_pages": False,
        "files": directory,
        "files_capacity": "256MiB",
        "segment_size": "8MiB",
    }


def test_blocks_survive_a_restart(tmp_path, keys_of, bytes_of):
    keys = keys_of(range(40))
    with Store(**settings(tmp_path / "files")) as store:
        for key in keys:
            store.put(key, [bytes_of(key, MIB)])
        store.flush()
    with Store(**settings(tmp_path / "files")) as store:
        assert store.locate(keys) == [["files"]] * 40
        for key in keys:
            view = store.view(key)[0]
            assert view is not None
            assert view.tier == "files"
            assert bytes(view) == bytes_of(key, MIB)


def test_blocks_that_left_memory_are_read_from_files(two_tiers, keys_of, bytes_of):
    keys = keys_of(range(40))
    for key in keys:
        two_tiers.put(key, [bytes_of(key, MIB)])
    buffers = bytearray(MIB)
    for key in keys:
        assert two_tiers.get(key, buffers)[0].ok
        assert buffers == bytes_of(key, MIB)
    stats = two_tiers.stats()
    assert stats["misses"] == 0
    assert stats["hits_by_tier"]["files"]["blocks"] > 0
    assert stats["stages"]["files"]["used_bytes"] >= 30 * MIB


def test_a_prefetched_block_is_read_from_memory(two_tiers, keys_of, bytes_of, eventually):
    keys = keys_of(range(40))
    for key in keys:
        two_tiers.put(key, [bytes_of(key, MIB)])
    two_tiers.flush()
    below = [
        key for key, tiers in zip(keys, two_tiers.locate(keys), strict=True) if tiers == ["files"]
    ][:2]
    assert two_tiers.prefetch(below) == 2
    eventually(lambda: all("dram" in tiers for tiers in two_tiers.locate(below)))
    views = two_tiers.view(below)
    assert [view.tier for view in views] == ["dram", "dram"]


def test_a_damaged_file_is_a_miss_and_counted(tmp_path, keys_of, bytes_of):
    keys = keys_of(range(4))
    with Store(**settings(tmp_path / "files")) as store:
        store.put(keys, [bytes_of(key, MIB) for key in keys])
    segment = max((tmp_path / "files").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    at = content.find(bytes_of(keys[1], MIB)[:64])
    assert at > 0
    content[at + 1000] ^= 1
    segment.write_bytes(content)
    with Store(**settings(tmp_path / "files")) as store:
        views = store.view(keys)
        assert [view is None for view in views] == [False, True, False, False]
        assert [bytes(views[n]) == bytes_of(keys[n], MIB) for n in (0, 2, 3)] == [True] * 3
        assert store.stats()["damaged_blocks"] == 1


def test_one_directory_has_one_writer(tmp_path):
    first = Store(**settings(tmp_path / "files"))
    with pytest.raises(cascadekv.TierError, match=str(tmp_path)):
        Store(**settings(tmp_path / "files"))
    first.close()
    Store(**settings(tmp_path / "files")).close()

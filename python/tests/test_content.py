"""Equal bytes are stored once, and protected prefixes are evicted last."""

import pytest
from cascadekv import PutStatus, Store

KIB, MIB = 1 << 10, 1 << 20


def test_a_hundred_sessions_store_their_shared_prefix_once(space, bytes_of):
    """100 sessions of 1,280 KiB shared and 64 KiB own content are 131.25 MiB, stored as 7.5."""
    shared = [bytes_of(space.key_of_id(f"shared {part}"), 64 * KIB) for part in range(20)]
    with Store(dram="64MiB", digest="blake3", huge_pages=False) as store:
        for session in range(100):
            keys = [space.key_of_id(f"session {session} block {n}") for n in range(21)]
            own = bytes_of(keys[20], 64 * KIB)
            statuses = [result.status for result in store.put(keys, [*shared, own])]
            first = PutStatus.STORED if session == 0 else PutStatus.DEDUPLICATED
            assert statuses == [first] * 20 + [PutStatus.STORED]
        stats = store.stats()
        assert stats["puts"] * 64 * KIB == 131.25 * MIB
        assert stats["content_bytes"] == stats["dram_bytes"] == 7.5 * MIB
        assert stats["bytes_written"] == 7.5 * MIB
        assert stats["pool"]["requested_bytes"] == 7.5 * MIB
        for session in (0, 99):
            keys = [space.key_of_id(f"session {session} block {n}") for n in range(21)]
            views = [bytes(view) for view in store.view(keys)]
            assert views == [*shared, bytes_of(keys[20], 64 * KIB)]


def test_shared_bytes_stay_until_their_last_key_is_deleted(space):
    keys = [space.key_of_id(name) for name in ("a", "b")]
    with Store(dram="8MiB", digest="sha256") as store:
        store.put(keys, [b"same bytes"] * 2, chain=False)
        store.delete(keys[0])
        assert bytes(store.view(keys[1])[0]) == b"same bytes"
        assert store.stats()["contents"] == 1
        store.delete(keys[1])
        assert store.stats()["contents"] == 0


@pytest.mark.parametrize(("policy", "kept"), [("prefix-cost", 10), ("lru", 0)])
def test_protected_prefixes_outlast_the_fillers(tmp_path, space, bytes_of, policy, kept):
    """10 prefix and 40 filler blocks of 2 MB in 25 MB: ours keeps 10 of 10, LRU none."""
    size = 2_000_000
    prefixes = [space.key_of_id(f"prefix {n}") for n in range(10)]
    fillers = [space.key_of_id(f"filler {n}") for n in range(40)]
    with Store(
        dram=25_000_000,
        policy=policy,
        huge_pages=False,
        files=tmp_path / "files",
        files_capacity="256MiB",
        segment_size="16MiB",
    ) as store:
        for key in prefixes:
            store.put(key, [bytes_of(key, size)], is_prefix=policy != "lru")
        for key in fillers:
            store.put(key, [bytes_of(key, size)])
        tiers = store.locate(prefixes)
        assert sum("dram" in places for places in tiers) == kept
        for key in [*prefixes, *fillers]:
            view = store.view(key)[0]
            assert view is not None
            assert bytes(view) == bytes_of(key, size)

"""Whoever follows a store knows the exact set of its blocks."""

import pickle

import pytest
from cascadekv import BlockKey, ChangeKind, ClosedError, ConfigError, Store


class Follower:
    """A set of keys that is kept like a store's, `limit` changes at a time."""

    def __init__(self, limit: int) -> None:
        """Begin with nothing."""
        self.here: set[BlockKey] = set()
        self.cursor: bytes | None = None
        self.lost = 0
        self._limit = limit

    def follow(self, store: Store) -> list[tuple[ChangeKind, BlockKey | None]]:
        """Return what was told until the set is the store's."""
        everything = []
        while True:
            told = store.changes(self.cursor, limit=self._limit)
            if told.is_lost:
                self.lost += 1
                self.here.clear()
            assert len(told) == len(told.kinds) == len(told.keys) <= self._limit
            for at, (kind, key) in enumerate(told):
                assert told.kinds[at] == kind
                if kind is ChangeKind.STORED:
                    self.here.add(key)
                elif kind is ChangeKind.GONE:
                    self.here.discard(key)
                else:
                    assert (kind, key) == (ChangeKind.CLEARED, None)
                    self.here.clear()
            everything += told
            self.cursor = told.next
            if told.is_current:
                return everything


@pytest.mark.parametrize("limit", [1, 7, 100_000])
def test_a_follower_has_exactly_the_stores_blocks(two_tiers, keys_of, limit):
    keys = keys_of(range(50))
    two_tiers.put(keys[:20], [b"early"] * 20)
    follower = Follower(limit)
    follower.follow(two_tiers)
    assert follower.here == set(keys[:20])
    two_tiers.delete(keys[:2])
    two_tiers.put(keys[20:], [b"late"] * 30)
    assert len(follower.follow(two_tiers)) == 32
    assert follower.here == set(keys[2:])
    two_tiers.clear()
    two_tiers.put(keys[7], [b"last"])
    follower.cursor = pickle.loads(pickle.dumps(follower.cursor))
    expected = [(ChangeKind.CLEARED, None), (ChangeKind.STORED, keys[7])]
    assert follower.follow(two_tiers) == expected
    assert follower.follow(two_tiers) == []
    assert (follower.here, follower.lost) == ({keys[7]}, 0)


def test_evicted_blocks_are_reported_as_gone(store, keys_of):
    keys = keys_of(range(40))
    follower = Follower(1000)
    store.put(keys, [bytes(1 << 20)] * 40, chain=False)
    follower.follow(store)
    here = {key for key, is_here in zip(keys, store.contains(keys), strict=True) if is_here}
    assert follower.here == here
    assert 0 < len(here) < 40


def test_a_lost_cursor_starts_over(keys_of):
    keys = keys_of(range(100))
    with Store(dram="8MiB", changes_max=10) as store:
        follower = Follower(1000)
        follower.follow(store)
        store.put(keys, [b"block"] * 100)
        follower.follow(store)
        assert (follower.here, follower.lost) == (set(keys), 1)
    with Store(dram="8MiB") as other:
        follower.follow(other)
        assert (follower.here, follower.lost) == (set(), 2)
    with pytest.raises(ClosedError):
        other.changes()


def test_an_invalid_cursor_and_a_disabled_log_are_refused():
    with Store(dram="8MiB", changes_max=0) as store:
        with pytest.raises(ConfigError, match="changes_max"):
            store.changes()
        with pytest.raises(ValueError, match="20 bytes; got 3"):
            store.changes(b"odd")

"""A follower of `Store.changes` has the exact set of a store's blocks."""

import pickle

import pytest
from cascadekv import BlockKey, ChangeKind, ClosedError, ConfigError, Store


class Follower:
    """A set of keys that follows a store, at most `limit` changes per call."""

    def __init__(self, limit: int) -> None:
        """Start with an empty set."""
        self.present: set[BlockKey] = set()
        self.cursor: bytes | None = None
        self.lost = 0
        self._limit = limit

    def follow(self, store: Store) -> list[tuple[ChangeKind, BlockKey | None]]:
        """Apply changes until the set is current; returns all of them."""
        applied = []
        while True:
            changes = store.changes(self.cursor, limit=self._limit)
            if changes.is_lost:
                self.lost += 1
                self.present.clear()
            assert len(changes) == len(changes.kinds) == len(changes.keys) <= self._limit
            for at, (kind, key) in enumerate(changes):
                assert changes.kinds[at] == kind
                if kind is ChangeKind.STORED:
                    self.present.add(key)
                elif kind is ChangeKind.GONE:
                    self.present.discard(key)
                else:
                    assert (kind, key) == (ChangeKind.CLEARED, None)
                    self.present.clear()
            applied += changes
            self.cursor = changes.next
            if changes.is_current:
                return applied


@pytest.mark.parametrize("limit", [1, 7, 100_000])
def test_a_follower_has_exactly_the_stores_blocks(two_tiers, keys_of, limit):
    keys = keys_of(range(50))
    two_tiers.put(keys[:20], [b"early"] * 20)
    follower = Follower(limit)
    follower.follow(two_tiers)
    assert follower.present == set(keys[:20])
    two_tiers.delete(keys[:2])
    two_tiers.put(keys[20:], [b"late"] * 30)
    assert len(follower.follow(two_tiers)) == 32
    assert follower.present == set(keys[2:])
    two_tiers.clear()
    two_tiers.put(keys[7], [b"last"])
    follower.cursor = pickle.loads(pickle.dumps(follower.cursor))
    expected = [(ChangeKind.CLEARED, None), (ChangeKind.STORED, keys[7])]
    assert follower.follow(two_tiers) == expected
    assert follower.follow(two_tiers) == []
    assert (follower.present, follower.lost) == ({keys[7]}, 0)


def test_evicted_blocks_are_reported_as_gone(store, keys_of):
    keys = keys_of(range(40))
    follower = Follower(1000)
    store.put(keys, [bytes(1 << 20)] * 40, chain=False)
    follower.follow(store)
    present = {key for key, is_here in zip(keys, store.contains(keys), strict=True) if is_here}
    assert follower.present == present
    assert 0 < len(present) < 40


def test_a_lost_cursor_starts_over(keys_of):
    keys = keys_of(range(100))
    with Store(dram="8MiB", changes_max=10) as store:
        follower = Follower(1000)
        follower.follow(store)
        store.put(keys, [b"block"] * 100)
        follower.follow(store)
        assert (follower.present, follower.lost) == (set(keys), 1)
    with Store(dram="8MiB") as other:
        follower.follow(other)
        assert (follower.present, follower.lost) == (set(), 2)
    with pytest.raises(ClosedError):
        other.changes()


def test_an_invalid_cursor_and_a_disabled_log_are_refused():
    with Store(dram="8MiB", changes_max=0) as store:
        with pytest.raises(ConfigError, match="changes_max"):
            store.changes()
        with pytest.raises(ValueError, match="20 bytes; got 3"):
            store.changes(b"odd")

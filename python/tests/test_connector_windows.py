"""A prefix is usable for a group of layers if its last blocks are present."""

import random

import pytest
from cascadekv.connectors.windows import complete_windows


@pytest.mark.parametrize("window", [0, 1, 2, 3, 7, 30, 1000])
def test_complete_windows_match_their_definition(window):
    chance = random.Random(window)
    for _ in range(50):
        share = chance.choice([0.3, 0.9, 1.0])
        present = [chance.random() < share for _ in range(chance.randrange(30))]
        expected = [all(present[max(0, end - window) : end]) for end in range(1, len(present) + 1)]
        assert complete_windows(present, window) == expected


class CountedReads(list):
    """A list that counts how often an item is read, also by a slice."""

    reads = 0

    def __getitem__(self, at):
        """Count the items that are read."""
        self.reads += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return super().__getitem__(at)

    def __iter__(self):
        """Count the items that are read."""
        for item in super().__iter__():
            self.reads += 1
            yield item


def test_complete_windows_read_each_block_once():
    # Regression: a prompt of 100,000 pages took minutes, because every prefix was read again.
    present = CountedReads([True] * 1000)
    assert complete_windows(present, 1000) == [True] * 1000
    assert present.reads == 1000

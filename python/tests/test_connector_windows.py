"""A prefix is usable for a group of layers if the blocks that its window sees are present."""

import random

import pytest
from cascadekv.connectors.windows import (
    complete_windows,
    first_needed_block,
    next_computed_token,
)


def needed_by_definition(prefix, request, window, block):
    """Return the blocks of a prefix that the tokens after it see, token by token.

    They see themselves, too: the rest of their own block is shared later as a whole.
    """
    computed = [token for token in range(request + 3 * block) if token >= min(prefix, request - 1)]
    seen = {at for token in computed for at in range(max(0, token - window + 1), token + 1)}
    first = computed[0]
    return {at // block for at in seen if at // block * block < first}


@pytest.mark.parametrize("block", [1, 2, 3, 16])
def test_the_needed_blocks_are_those_that_the_next_tokens_see(block):
    # Regression: a whole prompt lacked the token that is `window - 1` before its last one, where
    # that is the last one of a block.
    for window in range(1, 3 * block + 1):
        for request in range(1, 6 * block + 1):
            for prefix in {*range(block, request + 1, block), request}:
                following = next_computed_token(prefix, request)
                first = first_needed_block(following, window, block)
                due = needed_by_definition(prefix, request, window, block)
                assert set(range(first, -(-following // block))) == due, (window, request, prefix)


def test_without_a_window_all_blocks_are_needed():
    assert {first_needed_block(at, None, 16) for at in (0, 1, 15, 16, 1000)} == {0}


def test_the_last_token_of_a_request_is_computed():
    assert next_computed_token(32, 33) == 32
    assert next_computed_token(32, 32) == 31


@pytest.mark.parametrize("window", [0, 1, 2, 3, 7, 30, 1000])
def test_complete_windows_match_their_definition(window):
    chance = random.Random(window)
    for _ in range(50):
        share = chance.choice([0.3, 0.9, 1.0])
        present = [chance.random() < share for _ in range(chance.randrange(30))]
        expected = [all(present[max(0, end - window) : end]) for end in range(1, len(present) + 1)]
        assert complete_windows(present, lambda end: end - window) == expected


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
    assert complete_windows(present, lambda _: 0) == [True] * 1000
    assert present.reads == 1000

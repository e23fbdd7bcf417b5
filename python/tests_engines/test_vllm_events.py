"""A subscriber of the events has exactly the known blocks that are stored."""

import random
import threading
from collections import deque
from concurrent.futures import wait
from types import SimpleNamespace

import msgspec
import pytest
from cascadekv import AwayError, BlockKey, ConfigError, Store
from cascadekv.connectors.vllm import events
from cascadekv.connectors.vllm.background import BackgroundThread
from cascadekv.connectors.vllm.events import EventSource
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

TOKENS = 4
STORED, GONE, CLEARED = range(3)
LOG = 200
"""Length of the change log."""
LIMIT_S = 60
"""Time-out of a call in the background."""


@pytest.fixture(autouse=True)
def _whole_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class LoggedStore:
    """A store of keys with a change log as documented for `Store.changes`, which loses cursors."""

    def __init__(self):
        self.here, self.log, self.first, self.epoch = {}, deque(), 0, 0
        self.is_away = False

    def put(self, keys):  # noqa: D102
        for key in keys:
            if key not in self.here:
                self.here[key] = None
                self._note(STORED, key)

    def delete(self, keys):  # noqa: D102
        for key in keys:
            if self.here.pop(key, self) is None:
                self._note(GONE, key)

    def clear(self):  # noqa: D102
        self.here.clear()
        self._note(CLEARED, bytes(32))

    def lose(self):  # noqa: D102
        self.epoch += 1

    def contains(self, keys):  # noqa: D102
        self._answer()
        return [bytes(key) in self.here for key in keys]

    def changes(self, since=None, *, limit):  # noqa: D102
        self._answer()
        end = self.first + len(self.log)
        epoch, at, walk = (self.epoch, end, list(self.here)) if since is None else since
        is_lost = since is not None and (epoch != self.epoch or at < self.first)
        if is_lost:
            epoch, at, walk = self.epoch, end, list(self.here)
        changes = list(self.log)[at - self.first :][:limit]
        at += len(changes)
        if at == end:
            room = limit - len(changes)
            changes += [(STORED, key) for key in walk[:room] if key in self.here]
            walk = walk[room:]
        return SimpleNamespace(
            next=(epoch, at, walk),
            is_lost=is_lost,
            is_current=at == end and not walk,
            kinds=bytes(kind for kind, _ in changes),
            keys=b"".join(key for _, key in changes),
        )

    def _answer(self):
        if self.is_away:
            raise AwayError("the node is away")

    def _note(self, kind, key):
        self.log.append((kind, key))
        if len(self.log) > LOG:
            self.log.popleft()
            self.first += 1


class RealStore:
    """The same interface over a real store with a short change log."""

    def __init__(self):
        self.store = Store(dram="16MiB", changes_max=LOG)
        self.contains = self.store.contains
        self.changes = self.store.changes

    def put(self, keys):  # noqa: D102
        self.store.put([BlockKey(key) for key in keys], [b"x"] * len(keys), chain=False)

    def delete(self, keys):  # noqa: D102
        self.store.delete([BlockKey(key) for key in keys])

    def clear(self):  # noqa: D102
        self.store.clear()

    def lose(self):
        """Overflow the change log, so that cursors are lost."""
        keys = [bytes([255]) + number.to_bytes(31) for number in range(LOG + 1)]
        self.put(keys)
        self.delete(keys)

    @property
    def here(self):  # noqa: D102
        return Here(self.store)


class Here:
    """The contents of the real store."""

    def __init__(self, store):
        self.store = store

    def __contains__(self, key):  # noqa: D105
        return self.store.contains(BlockKey(key))[0]


class Subscriber:
    """A router's state, from the bytes that vLLM publishes."""

    def __init__(self):
        self.blocks = {}
        self.named = 0

    def apply(self, news):  # noqa: D102
        batch = KVEventBatch(ts=0.0, events=news)
        batch = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
        for event in batch.events:
            assert event.medium == "CPU"
            self.named += len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert event.block_size == TOKENS
                assert len(event.token_ids) == TOKENS * len(event.block_hashes)
                parent = event.parent_block_hash
                for at, key in enumerate(event.block_hashes):
                    assert key not in self.blocks
                    tokens = event.token_ids[at * TOKENS : (at + 1) * TOKENS]
                    self.blocks[key] = (parent, tokens, event.lora_name)
                    parent = key
            else:
                assert isinstance(event, BlockRemoved)
                for key in event.block_hashes:
                    del self.blocks[key]


class Chains:
    """Requests' chains, each with keys, tokens, and an adapter of its own or none."""

    def __init__(self, chance, parts):
        self.runs = []
        for number in range(8):
            length = chance.randint(1, 9)
            keys = [
                [bytes([number, part, at]) + bytes(29) for at in range(length)]
                for part in range(parts)
            ]
            tokens = [chance.randrange(1000) for _ in range(length * TOKENS)]
            self.runs.append((keys, tokens, chance.choice([None, "adapter"])))

    def expected(self, known, store):
        """Return the blocks that a subscriber must have, for the known length of each run."""
        blocks = {}
        for run, length in known.items():
            keys, tokens, lora = self.runs[run]
            for at in range(length):
                if all(part[at] in store.here for part in keys):
                    parent = keys[0][at - 1] if at else None
                    blocks[keys[0][at]] = (parent, tokens[at * TOKENS : (at + 1) * TOKENS], lora)
        return blocks


@pytest.fixture
def background():
    thread = BackgroundThread("events")
    yield thread
    thread.close()


def take(source):
    """Return the events, and wait for the call that this starts: its answer is applied later."""
    news = source.take()
    if source._call is not None:  # noqa: SLF001 # without a node, it has ended
        assert not wait([source._call], LIMIT_S).not_done  # noqa: SLF001
    return news


def settle(source, subscriber):
    # The first call may have an answer from before the last change.
    for _ in range(3):
        subscriber.apply(take(source))
        while not source.is_current:
            subscriber.apply(take(source))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("make", "is_node"), [(LoggedStore, False), (LoggedStore, True), (RealStore, False)]
)
def test_a_subscriber_has_exactly_the_known_blocks_of_the_store(
    make, is_node, parts, background, monkeypatch
):
    for seed in range(25):
        chance = random.Random(seed)
        piece = chance.choice([1, 3, 50])
        monkeypatch.setattr(events, "CHANGES_MAX", piece)
        store, subscriber, known = make(), Subscriber(), {}
        chains = Chains(chance, parts)
        source = EventSource(
            store,
            block_tokens=TOKENS,
            medium="CPU",
            max_blocks=1000,
            background=background if is_node else None,
        )
        for _ in range(chance.randint(5, 80)):
            run = chance.randrange(len(chains.runs))
            keys, tokens, lora = chains.runs[run]
            length = chance.randint(1, len(keys[0]))
            action = chance.choice(
                ["put", "put", "save", "save", "delete", "clear", "lose", *["take"] * 4]
            )
            if action == "put":
                for part in keys[: chance.randint(1, parts)]:
                    store.put(part[:length])
            elif action == "save":
                source.saved(
                    keys[0][:length],
                    None,
                    tokens[: length * TOKENS],
                    lora_name=lora,
                    other_parts=keys[1:],
                )
                known[run] = max(length, known.get(run, 0))
            elif action == "delete":
                store.delete(chance.choice(keys)[length - 1 :])
            elif action in ("clear", "lose"):
                if chance.random() < 0.3:
                    getattr(store, action)()
            else:
                named = subscriber.named
                subscriber.apply(take(source))
                assert subscriber.named - named <= piece
            if chance.random() < 0.1:
                settle(source, subscriber)
                assert subscriber.blocks == chains.expected(known, store), seed
        settle(source, subscriber)
        assert subscriber.blocks == chains.expected(known, store), seed


def test_known_blocks_are_bounded_and_forgotten_ones_are_withdrawn():
    store, subscriber = LoggedStore(), Subscriber()
    source = EventSource(store, block_tokens=TOKENS, medium="CPU", max_blocks=10)
    keys = [bytes([at]) + bytes(31) for at in range(50)]
    store.put(keys)
    for at in range(50):
        source.saved(keys[at : at + 1], keys[at - 1] if at else None, [at] * TOKENS)
        if at % 7 == 0:
            settle(source, subscriber)
    settle(source, subscriber)
    assert set(subscriber.blocks) == set(keys[40:])
    assert source.known_blocks == 10


def test_an_unavailable_store_is_retried_after_a_delay(caplog):
    now = [0.0]
    store, subscriber = LoggedStore(), Subscriber()
    source = EventSource(store, block_tokens=TOKENS, medium="CPU", clock=lambda: now[0])
    key = bytes(32)
    source.saved([key], None, [1] * TOKENS)
    settle(source, subscriber)
    store.put([key])
    store.is_away = True
    assert [source.take() for _ in range(5)] == [[]] * 5
    assert len(caplog.records) == 1
    store.is_away = False
    assert source.take() == []
    now[0] += events.RETRY_S
    settle(source, subscriber)
    assert set(subscriber.blocks) == {key}


class UnansweringNode(LoggedStore):
    """A node that answers once its gate is open, and the threads that waited for it."""

    def __init__(self):
        super().__init__()
        self.gate, self.callers = threading.Event(), []

    def _answer(self):
        self.callers.append(threading.current_thread())
        assert self.gate.wait(LIMIT_S)


def test_a_node_that_does_not_answer_does_not_delay_a_step(background, eventually):
    # Regression: the scheduler's thread waited for the node in every step.
    store, subscriber = UnansweringNode(), Subscriber()
    source = EventSource(store, block_tokens=TOKENS, medium="CPU", background=background)
    key = bytes(32)
    source.saved([key], None, [1] * TOKENS)
    store.put([key])
    assert [source.take() for _ in range(5)] == [[]] * 5
    store.gate.set()

    def is_announced():
        subscriber.apply(source.take())
        return set(subscriber.blocks) == {key}

    eventually(is_announced)
    assert threading.current_thread() not in store.callers


def test_blocks_whose_check_failed_are_checked_again(background, caplog):
    now = [0.0]
    store, subscriber = LoggedStore(), Subscriber()
    source = EventSource(
        store, block_tokens=TOKENS, medium="CPU", background=background, clock=lambda: now[0]
    )
    settle(source, subscriber)
    key = bytes(32)
    store.put([key])
    settle(source, subscriber)
    # The log has reported the block already, so only a check finds it.
    source.saved([key], None, [1] * TOKENS)
    store.is_away = True
    for _ in range(3):
        assert take(source) == []
    assert len(caplog.records) == 1
    assert not source.is_current
    store.is_away = False
    now[0] += events.RETRY_S
    settle(source, subscriber)
    assert set(subscriber.blocks) == {key}


def test_repeated_clears_visit_only_blocks_that_were_stored():
    # Regression: each clear visited every known block in the scheduler's thread, so a client that
    # cleared an empty store a thousand times delayed a step by seconds.
    store, subscriber = LoggedStore(), Subscriber()
    source = EventSource(store, block_tokens=TOKENS, medium="CPU")
    keys = [bytes([at]) + bytes(31) for at in range(9)]
    source.saved(keys, None, [1] * TOKENS * 9)
    store.put(keys[:4])
    settle(source, subscriber)
    assert set(subscriber.blocks) == set(keys[:4])
    visited = []
    withdraw = source._withdraw  # noqa: SLF001 # the work of a clear
    source._withdraw = lambda block: visited.append(block.parts[0]) or withdraw(block)  # noqa: SLF001
    for _ in range(50):
        store.clear()
    settle(source, subscriber)
    assert visited == keys[:4]
    assert not subscriber.blocks


def test_chains_are_announced_in_runs():
    store = LoggedStore()
    source = EventSource(store, block_tokens=TOKENS, medium="CPU")
    keys = [bytes([at]) + bytes(31) for at in range(6)]
    source.saved(keys[:4], None, list(range(16)), 7, "a")
    source.saved(keys[4:], keys[3], list(range(8)), 8, "b")
    store.put(keys)
    first, second = source.take()
    assert (first.block_hashes, first.parent_block_hash) == (keys[:4], None)
    assert (first.token_ids, first.lora_id, first.lora_name) == (list(range(16)), 7, "a")
    assert (second.block_hashes, second.parent_block_hash) == (keys[4:], keys[3])
    store.delete(keys[1:4])
    (gone,) = source.take() + source.take()
    assert gone.block_hashes == keys[1:4]
    assert not source.take()


def test_hashes_are_shortened_by_the_engines_setting(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    store = LoggedStore()
    source = EventSource(store, block_tokens=TOKENS, medium="CPU")
    parent, key = bytes([1] * 31 + [7]), bytes([2] * 31 + [8])
    source.saved([key], parent, [1] * TOKENS)
    store.put([key])
    (event,) = source.take()
    low = (1 << 64) - 1
    assert event.block_hashes == [int.from_bytes(key) & low]
    assert event.parent_block_hash == int.from_bytes(parent) & low


def test_a_store_without_a_log_and_wrong_tokens_are_refused():
    with pytest.raises(ConfigError, match="change log"):
        EventSource(object(), block_tokens=4, medium="CPU")
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        EventSource(LoggedStore(), block_tokens=0, medium="CPU")
    source = EventSource(LoggedStore(), block_tokens=4, medium="CPU")
    with pytest.raises(ValueError, match="1 blocks of 4 tokens, but 3"):
        source.saved([bytes(32)], None, [1, 2, 3])

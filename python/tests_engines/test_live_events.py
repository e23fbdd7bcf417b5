"""A router that subscribes to a running engine over ZMQ has the exact set of stored blocks."""

import time

import engine_calls
import msgspec
import pytest
import zmq
from cascadekv import BlockKeys
from cascadekv.bench.prompts import prompt, with_prefix
from forked_engines import BLOCK
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

pytest_plugins = ["forked_engines"]

ALWAYS = {
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}
ROOM = {"cascade.dram": "16MiB"}
"""Half of what the test below saves."""
SETTLE_S = 60


class Router:
    """A subscriber whose state comes from the socket only."""

    def __init__(self, endpoint):
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._next = 0
        self.blocks = {}

    def read(self, wait_s):
        """Apply batches until none arrives for `wait_s` seconds."""
        while self._socket.poll(wait_s * 1000):
            _topic, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number) == self._next, "a batch is missing"
            self._next += 1
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                self._apply(event)

    def _apply(self, event):
        assert not isinstance(event, AllBlocksCleared)
        if isinstance(event, BlockRemoved):
            for key in event.block_hashes:
                del self.blocks[key]
            return
        assert isinstance(event, BlockStored)
        assert (event.medium, event.block_size) == ("CPU", BLOCK)
        parent = event.parent_block_hash
        for at, key in enumerate(event.block_hashes):
            assert key not in self.blocks
            self.blocks[key] = (parent, tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK]))
            parent = key

    def close(self):  # noqa: D102
        self._socket.close(0)


@pytest.fixture
def router(tmp_path):
    listening = Router(f"ipc://{tmp_path}/events")
    yield listening
    listening.close()


def events_to(tmp_path):
    return {
        "kv_events_config": KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{tmp_path}/events"
        ),
        "environment": {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    }


def expected(engine, prompts):
    """Return the stored blocks of these prompts, with parent and tokens."""
    blocks = {}
    for tokens in prompts:
        keys = engine.call(engine_calls.keys_of_prompt, tokens)
        here = engine.call(engine_calls.present, keys)
        names = [bytes(key) for key in BlockKeys(keys)]
        for at, (name, is_here) in enumerate(zip(names, here, strict=True)):
            if is_here:
                parent = names[at - 1] if at else None
                blocks[name] = (parent, tuple(tokens[at * BLOCK : (at + 1) * BLOCK]))
    return blocks


def settled(engine, router, prompts):
    """Step until the router has the stored blocks: events are sent by the engine's steps."""
    end = time.monotonic() + SETTLE_S
    while router.blocks != (there := expected(engine, prompts)):
        assert time.monotonic() < end, (len(router.blocks), len(there))
        engine.one(prompt(20, "step"))
        router.read(0.2)
    return there


@pytest.mark.parametrize("place", ["embedded", "served"])
def test_a_subscriber_has_exactly_the_stored_blocks(start, serve_module, router, tmp_path, place):
    if place == "embedded":
        store = {**ROOM, **ALWAYS}
    else:
        store = {"cascade.node": f"unix:{serve_module('--dram', '16MiB').socket}", **ALWAYS}
    engine = start(store, **events_to(tmp_path))
    first = prompt(4 * BLOCK + 20, "events", place)
    prompts = [first, with_prefix(first, 2 * BLOCK, "branch", place)]
    for request in prompts:
        engine.one(request)
    there = settled(engine, router, prompts)
    assert len(there) == 6
    # More than the store has room for: some blocks are evicted, with events.
    more = [prompt(4 * BLOCK + 5, "more", place, number) for number in range(14)]
    for request in more:
        engine.one(request)
    prompts += more
    there = settled(engine, router, prompts)
    assert 0 < len(there) < 6 + 4 * len(more)
    engine.close()

"""Blocks of paged KV between processes: TCP, Unix socket, ranks, arrivals, lost peers."""

import multiprocessing
import os
import random
import signal
import socket
import threading
from pathlib import Path

import cascadekv
import numpy as np
import pytest
from cascadekv import transfer
from cascadekv.errors import AwayError, ConfigError, DeadlineError, RefusedError
from cascadekv.transfer import Blocks

BLOCKS = 12
SHAPE = {"layers": 3, "block_tokens": 4, "heads": 8, "head_bytes": 16}
ONE = Blocks([0], [0])
S = 30.0
"""A limit for what is expected to succeed."""


def engine(seed=0, *, values=True, scale_bytes=0, token=None, blocks=BLOCKS, **shape):
    """Make paged KV with random bytes, and an endpoint over it."""
    form = transfer.Shape(**{**SHAPE, **shape})
    random_bytes = np.random.default_rng(seed)

    def array(block_bytes):
        return random_bytes.integers(0, 256, (blocks, block_bytes), "uint8")

    layers = [
        transfer.Layer(
            keys=array(form.region_block_bytes),
            values=array(form.region_block_bytes) if values else None,
            scales=array(scale_bytes) if scale_bytes else None,
            scale_bytes=scale_bytes,
        )
        for _ in range(form.layers)
    ]
    return layers, transfer.Endpoint(layers, shape=form, block_count=blocks, token=token)


@pytest.fixture(params=["tcp", "unix"])
def listen(request, tmp_path):
    """Make an endpoint listen; return the address."""
    numbers = iter(range(100))

    def start(endpoint):
        path = f"unix:{tmp_path}/{next(numbers)}"
        return endpoint.listen("127.0.0.1:0" if request.param == "tcp" else path)

    return start


def arrays(layer):
    return [it for it in (layer.keys, layer.values, layer.scales) if it is not None]


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("extra", [{}, {"values": False}, {"scale_bytes": 24}])
def test_blocks_arrive_whole_and_nothing_else_changes(listen, direction, extra):
    here, local = engine(1, **extra)
    there, remote = engine(2, **extra)
    local_blocks = random.Random(3).sample(range(BLOCKS), 5)
    remote_blocks = random.Random(4).sample(range(BLOCKS), 5)
    before = [[array.copy() for layer in side for array in arrays(layer)] for side in (here, there)]
    with local, remote:
        peer = local.connect(listen(remote), timeout=S)
        moved = getattr(peer, direction)("r", Blocks(local_blocks, remote_blocks), timeout=S)
        moved.wait(timeout=S)
    for (own, other), originals in zip(
        zip(*[[a for layer in side for a in arrays(layer)] for side in (here, there)], strict=True),
        zip(*before, strict=True),
        strict=True,
    ):
        expected_own, expected_other = originals[0].copy(), originals[1].copy()
        if direction == "write":
            expected_other[remote_blocks] = originals[0][local_blocks]
        else:
            expected_own[local_blocks] = originals[1][remote_blocks]
        assert (own == expected_own).all()
        assert (other == expected_other).all()


def test_the_receiver_is_told_of_each_layer_after_its_bytes(listen):
    here, local = engine(1)
    there, remote = engine(2)
    with local, remote:
        peer = local.connect(listen(remote), timeout=S)
        moved = peer.write("request 9", Blocks([1, 2], [3, 4], 1, 40), layers=[2, 0], timeout=S)
        for layer in (2, 0):
            arrival = remote.next_arrival(timeout=S)
            assert arrival == transfer.Arrival("request 9", layer, [3, 4], 1, 40)
            assert (there[layer].keys[[3, 4]] == here[layer].keys[[1, 2]]).all()
            moved.wait_for_layer(layer, timeout=S)
        peer.write("silent", ONE, tell=False, timeout=S).wait(timeout=S)
        assert remote.next_arrival(timeout=0.1) is None
        with pytest.raises(ConfigError, match="layer 1 is not part"):
            moved.wait_for_layer(1, timeout=S)


def sharded(full, shape):
    """Give a rank its heads of arrays of all heads: (blocks, tokens, heads, bytes)."""
    own = full[:, :, shape.own_heads.start : shape.own_heads.stop]
    if shape.heads_first:
        own = own.transpose(0, 2, 1, 3)
    return np.ascontiguousarray(own)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks"), [(2, 1), (4, 2), (1, 2), (2, 4), (1, 1), (16, 4), (4, 16)]
)
def test_any_ratio_of_ranks_gives_each_rank_its_heads(prefill_ranks, decode_ranks, heads_first):
    full = np.random.default_rng(5).integers(0, 256, (BLOCKS, 4, 8, 16), "uint8")

    def ranks(count, make):
        for rank in range(count):
            shape = transfer.Shape(
                layers=1, block_tokens=4, heads=8, head_bytes=16,
                heads_first=heads_first, rank=rank, ranks=count,
            )  # fmt: skip
            keys = make(shape)
            layers = [transfer.Layer(keys=keys)]
            yield keys, shape, transfer.Endpoint(layers, shape=shape, block_count=BLOCKS)

    sources = list(ranks(prefill_ranks, lambda shape: sharded(full, shape)))
    targets = list(ranks(decode_ranks, lambda shape: np.zeros_like(sharded(full, shape))))
    order = random.Random(6).sample(range(BLOCKS), BLOCKS)
    for keys, shape, target in targets:
        address = target.listen("127.0.0.1:0")
        for _, _, source in sources:
            with_peer = source.connect(address, timeout=S)
            with_peer.write("r", Blocks(range(BLOCKS), order), timeout=S).wait(timeout=S)
            with_peer.close()
        assert (keys[order] == sharded(full, shape)).all()
        target.close()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"layers": 4}, "layers"),
        ({"block_tokens": 8}, "block_tokens"),
        ({"heads": 4}, "heads"),
        ({"head_bytes": 8}, "head_bytes"),
        ({"heads_first": True}, "heads_first"),
        ({"dtype": "float16"}, "dtype"),
        ({"model": "b"}, "model"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(listen, eventually, other, reason):
    _, local = engine(dtype="bfloat16", model="a")
    _, remote = engine(**{"dtype": "bfloat16", "model": "a", **other})
    with local, remote:
        with pytest.raises(RefusedError, match=f"refused the connection: {reason}: the peer has"):
            local.connect(listen(remote), timeout=S)
        eventually(lambda: remote.peer_count == 0)


@pytest.mark.parametrize("tokens", [("a" * 16, "b" * 16), ("a" * 16, None), (None, "a" * 16)])
def test_a_wrong_or_missing_token_is_refused(listen, tokens):
    _, local = engine(token=tokens[0])
    _, remote = engine(token=tokens[1])
    with local, remote, pytest.raises(RefusedError, match="token"):
        local.connect(listen(remote), timeout=S)


def test_the_right_token_is_accepted(listen):
    _, local = engine(token="a" * 16)
    _, remote = engine(token="a" * 16)
    with local, remote:
        assert local.connect(listen(remote), timeout=S).is_connected


def test_other_hosts_need_a_token():
    _, endpoint = engine()
    with endpoint, pytest.raises(ConfigError, match="configure a token"):
        endpoint.listen("0.0.0.0:0")


def test_invalid_arguments_say_what_is_wrong(listen):
    _, local = engine()
    _, remote = engine()
    with local, remote:
        peer = local.connect(listen(remote), timeout=S)
        for blocks, reason in (
            (([BLOCKS], [0]), "local: there is no block 12 of 12"),
            (([0], [-1]), "remote: there is no block -1"),
            (([0, 1], [0]), "2 local blocks and 1 remote"),
        ):
            with pytest.raises(ConfigError, match=reason):
                peer.write("r", Blocks(*blocks), timeout=S)
        with pytest.raises(ConfigError, match="no layer 3"):
            peer.write("r", ONE, layers=[3], timeout=S)
        with pytest.raises(ConfigError, match="too long"):
            peer.write("r" * 5000, ONE, timeout=S)
    shape = transfer.Shape(**{**SHAPE, "layers": 1})
    layers = [transfer.Layer(keys=bytearray(100))]
    with pytest.raises(ConfigError, match="100 bytes are given"):
        transfer.Endpoint(layers, shape=shape, block_count=BLOCKS)


def serve(pipe, path):
    """Run a process with an endpoint that others write to."""
    _, endpoint = engine(2)
    pipe.send(endpoint.listen(path))
    pipe.poll(None)


@pytest.fixture
def other_process():
    """Start a process that listens; return it and its address."""
    started = []

    def start(path):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, path))
        process.start()
        started.append((process, ours))
        assert ours.poll(S)
        return process, ours.recv()

    yield start
    for process, _ in started:
        process.kill()
        process.join()


def stop(process, eventually):
    """Stop all threads of a process."""
    os.kill(process.pid, signal.SIGSTOP)
    states = f"/proc/{process.pid}/task"

    def are_stopped():
        tasks = [(task / "stat").read_text() for task in Path(states).iterdir()]
        return all(task.rpartition(") ")[2][0] == "T" for task in tasks)

    eventually(are_stopped)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_killed_peer_is_an_error_and_reconnecting_works(other_process, tmp_path, kind):
    path = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/s"
    process, address = other_process(path)
    _, local = engine(1)
    peer = local.connect(address, timeout=S)
    peer.write("r", ONE, timeout=S).wait(timeout=S)
    process.kill()
    process.join()
    with pytest.raises(AwayError):
        peer.write("r", ONE, timeout=S).wait(timeout=S)
    assert not peer.is_connected
    with pytest.raises(AwayError):
        peer.reconnect(timeout=S)
    # A new process replaces the socket that the killed one left.
    other_process(path if kind == "unix" else address)
    peer.reconnect(timeout=S)
    peer.write("r", ONE, timeout=S).wait(timeout=S)


def test_a_stopped_peer_ends_at_the_deadline_and_goes_on_later(other_process, eventually):
    process, address = other_process("127.0.0.1:0")
    _, local = engine(1)
    peer = local.connect(address, timeout=S)
    stop(process, eventually)
    try:
        moved = peer.write("r", ONE, timeout=S)
        with pytest.raises(DeadlineError):
            moved.wait(timeout=0.2)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    moved.wait(timeout=S)


def test_a_cancelled_read_does_not_touch_memory_afterwards(other_process, eventually):
    process, address = other_process("127.0.0.1:0")
    here, local = engine(1)
    peer = local.connect(address, timeout=S)
    stop(process, eventually)
    moved = peer.read("r", Blocks(range(BLOCKS), range(BLOCKS)), timeout=S)
    moved.cancel(timeout=0.1)
    for layer in here:
        layer.keys[:] = 0
    os.kill(process.pid, signal.SIGCONT)
    assert not peer.is_connected
    with pytest.raises(AwayError):
        peer.read("r", ONE, timeout=S).wait(timeout=S)
    peer.reconnect(timeout=S)
    assert all((layer.keys == 0).all() for layer in here)


def test_many_threads_write_through_one_peer(listen):
    here, local = engine(1, blocks=64)
    there, remote = engine(2, blocks=64)
    with local, remote:
        peer = local.connect(listen(remote), timeout=S)

        def write(first):
            for block in range(first, 64, 4):
                peer.write("r", Blocks([block], [63 - block]), tell=False, timeout=S).wait(
                    timeout=S
                )

        threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for own, other in zip(here, there, strict=True):
        assert (other.keys == own.keys[::-1]).all()
        assert (other.values == own.values[::-1]).all()


def test_a_stranger_on_the_port_disturbs_nobody():
    _, local = engine(1)
    _, remote = engine(2)
    with local, remote:
        address = remote.listen("127.0.0.1:0")
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 10)
            peer = local.connect(address, timeout=S)
            peer.write("r", ONE, timeout=S).wait(timeout=S)
            # It is refused with a reason, and closed.
            stranger.settimeout(S)
            answer = b""
            while part := stranger.recv(4096):
                answer += part
            assert b"not bytes of Cascade" in answer


def test_a_list_of_blocks_that_does_not_fit_the_notice_is_left_out(listen):
    _, local = engine(1, blocks=2000)
    _, remote = engine(2, blocks=2000)
    with local, remote:
        peer = local.connect(listen(remote), timeout=S)
        blocks = list(range(2000))
        peer.write("r", Blocks(blocks, blocks, 2, 7), layers=[1], timeout=S).wait(timeout=S)
        assert remote.next_arrival(timeout=S) == transfer.Arrival("r", 1, [], 2, 7)


def test_the_package_exports_the_errors_of_transfers():
    assert issubclass(DeadlineError, cascadekv.CascadeError)

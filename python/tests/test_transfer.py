"""Blocks of paged KV between processes: TCP, Unix socket, RDMA, ranks, arrivals, lost peers.

RDMA is tested where there is a device: `make test-rdma` runs these tests in a virtual machine.
"""

import dataclasses
import multiprocessing
import os
import random
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from cascadekv import transfer
from cascadekv.errors import (
    AwayError,
    ConfigError,
    DeadlineError,
    RefusedError,
)
from cascadekv.transfer import Blocks
from stopping import stop
from transfer_endpoints import BLOCKS, ONE, START_S, Defaults, S, engine, serve

HAS_RDMA = any(Path("/dev/infiniband").glob("uverbs*"))
needs_rdma = pytest.mark.skipif(not HAS_RDMA, reason="needs an RDMA device: make test-rdma")
RDMA_PARAM = pytest.param("rdma", marks=needs_rdma)


@pytest.fixture(params=["tcp", "unix", RDMA_PARAM])
def listen(request, tmp_path, monkeypatch):
    """Make an endpoint listen; return the address."""
    numbers = iter(range(100))
    if request.param == "rdma":
        monkeypatch.setattr(Defaults, "rdma", transfer.Rdma())

    def start(endpoint):
        path = f"unix:{tmp_path}/{next(numbers)}"
        return endpoint.listen(path if request.param == "unix" else "127.0.0.1:0")

    start.transport = request.param
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
        assert peer.transport == listen.transport
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
            peer = source.connect(address, timeout=S)
            if peer.shares_heads:
                peer.write("r", Blocks(range(BLOCKS), order), timeout=S).wait(timeout=S)
            else:
                with pytest.raises(ConfigError, match="have no heads in common"):
                    peer.write("r", ONE, timeout=S)
            peer.close()
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


def tls_of(directory, **others):
    names = ("authority", "certificate", "key")
    return transfer.Tls(**{name: directory / f"{name}.pem" for name in names}, **others)


def test_blocks_move_over_tls_between_holders_of_certificates(authority):
    tls = tls_of(authority("ours"))
    source, local = engine(seed=1, tls=tls)
    target, remote = engine(seed=2, tls=tls)
    with local, remote:
        # Other hosts may connect: they need a certificate.
        port = remote.listen("0.0.0.0:0").rpartition(":")[2]
        peer = local.connect(f"localhost:{port}", timeout=S)
        assert peer.tls in {"kernel", "userspace"}
        peer.write("r", Blocks([3, 4], [7, 1]), timeout=S).wait(timeout=S)
        for here, there in zip(source, target, strict=True):
            assert (here.keys[[3, 4]] == there.keys[[7, 1]]).all()
            assert (here.values[[3, 4]] == there.values[[7, 1]]).all()
        peer.reconnect(timeout=S)
        path = f"unix:{authority('other')}/socket"
        assert local.connect(remote.listen(path), timeout=S).tls is None


def test_without_the_right_certificate_nobody_connects(authority):
    ours, theirs = (tls_of(authority(name)) for name in ("ours", "theirs"))
    anonymous = transfer.Tls(authority=ours.authority)
    _, remote = engine(tls=ours)
    with remote:
        address = remote.listen("127.0.0.1:0")
        for tls, reason in (
            (None, "this endpoint uses TLS, and the client does not"),
            (theirs, "its certificate is not accepted"),
            (anonymous, "this side presented none"),
            (dataclasses.replace(ours, server_name="decode.example"), "not valid for name"),
        ):
            _, local = engine(tls=tls)
            with local, pytest.raises(RefusedError, match=reason):
                local.connect(address, timeout=S)
    _, plain = engine()
    _, local = engine(tls=ours)
    with plain, local, pytest.raises(RefusedError, match="does not use TLS, and this side does"):
        local.connect(plain.listen("127.0.0.1:0"), timeout=S)


def test_certificates_that_cannot_be_used_are_named(authority):
    tls = tls_of(authority("ours"))
    with pytest.raises(ConfigError, match="give certificate and key, or neither"):
        engine(tls=dataclasses.replace(tls, key=None))
    with pytest.raises(ConfigError, match=r"none\.pem: cannot be read"):
        engine(tls=dataclasses.replace(tls, authority="none.pem"))
    _, endpoint = engine(tls=dataclasses.replace(tls, client_certificates=False))
    with endpoint, pytest.raises(ConfigError, match="a token or client certificates"):
        endpoint.listen("0.0.0.0:0")


@pytest.fixture
def other_process():
    """Start a process that listens; return it and its address."""
    started = []

    def with_pipe(path, rdma=None):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, path, rdma))
        process.start()
        theirs.close()
        started.append((process, ours))
        assert ours.poll(START_S)
        return process, ours.recv(), ours

    def start(path, rdma=None):
        return with_pipe(path, rdma)[:2]

    start.with_pipe = with_pipe
    yield start
    for process, ours in started:
        process.kill()
        process.join()
        ours.close()


@pytest.mark.parametrize("kind", ["tcp", "unix", RDMA_PARAM])
def test_a_killed_peer_is_an_error_and_reconnecting_works(other_process, tmp_path, kind):
    path = f"unix:{tmp_path}/s" if kind == "unix" else "127.0.0.1:0"
    rdma = transfer.Rdma() if kind == "rdma" else None
    process, address = other_process(path, rdma)
    _, local = engine(1, rdma=rdma)
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
    other_process(path if kind == "unix" else address, rdma)
    peer.reconnect(timeout=S)
    assert peer.transport == kind
    peer.write("r", ONE, timeout=S).wait(timeout=S)


def test_a_stopped_peer_ends_at_the_deadline_and_goes_on_later(other_process):
    process, address = other_process("127.0.0.1:0")
    _, local = engine(1)
    peer = local.connect(address, timeout=S)
    stop(process.pid)
    try:
        moved = peer.write("r", ONE, timeout=S)
        with pytest.raises(DeadlineError):
            moved.wait(timeout=0.2)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    moved.wait(timeout=S)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("end", ["frozen", "killed", "killed-after-fork"])
def test_a_peer_that_stops_is_noticed_without_a_call(
    other_process, tmp_path, eventually, kind, end
):
    path = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/s"
    process, address, pipe = other_process.with_pipe(path)
    _, local = engine(1, heartbeat=transfer.Heartbeat(interval=0.05, limit=2.0))
    peer = local.connect(address, timeout=S)
    peer.write("r", ONE, timeout=S).wait(timeout=S)
    assert peer.is_connected
    if end == "frozen":
        stop(process.pid)
    if end == "killed-after-fork":
        # The child has the sockets, which therefore stay open.
        os.kill(process.pid, signal.SIGUSR1)
        assert pipe.poll(S)
        assert pipe.recv() == "forked"
    if end != "frozen":
        process.kill()
    eventually(lambda: not peer.is_connected)
    reason = None if end == "killed" else "answered nothing for 2 s"
    with pytest.raises(AwayError, match=reason):
        peer.write("r", ONE, timeout=S)
    if end == "frozen":
        os.kill(process.pid, signal.SIGCONT)
        peer.reconnect(timeout=S)
        peer.write("r", ONE, timeout=S).wait(timeout=S)


def test_a_cancelled_read_does_not_touch_memory_afterwards(other_process):
    process, address = other_process("127.0.0.1:0")
    here, local = engine(1)
    peer = local.connect(address, timeout=S)
    stop(process.pid)
    moved = peer.read("r", Blocks(range(BLOCKS), range(BLOCKS)), timeout=S)
    moved.cancel(timeout=0.1)
    for layer in here:
        layer.keys[:] = 0
    os.kill(process.pid, signal.SIGCONT)
    # Its answer comes after those of the cancelled transfer.
    peer.read("r", ONE, timeout=S).wait(timeout=S)
    assert all((layer.keys[1:] == 0).all() for layer in here)


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


@needs_rdma
def test_rdma_is_used_only_where_both_sides_have_it(caplog):
    _, local = engine(1, rdma=transfer.Rdma(use="prefer"))
    _, strict = engine(1, rdma=transfer.Rdma())
    _, remote = engine(2, rdma=transfer.Rdma(use="prefer", devices=["absent0"]))
    with local, strict, remote:
        assert remote.rdma_device is None
        assert "there is no RDMA device absent0" in caplog.text
        address = remote.listen("127.0.0.1:0")
        peer = local.connect(address, timeout=S)
        assert peer.transport == "tcp"
        assert "uses no device" in caplog.text
        peer.write("r", ONE, timeout=S).wait(timeout=S)
        with pytest.raises(ConfigError, match="has no RDMA"):
            strict.connect(address, timeout=S)


def test_rdma_that_is_only_preferred_falls_back_to_tcp(caplog):
    settings = transfer.Rdma(use="prefer", devices=["absent0"])
    _, local = engine(1, rdma=settings)
    _, remote = engine(2)
    with local, remote:
        assert local.rdma_device is None
        assert "blocks move by TCP: rdma: " in caplog.text
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        assert peer.transport == "tcp"
        peer.write("r", ONE, timeout=S).wait(timeout=S)

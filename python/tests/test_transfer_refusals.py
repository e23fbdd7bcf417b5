"""What transfers refuse: shapes, arguments, settings, notices, addresses."""

import cascadekv
import numpy as np
import pytest
from cascadekv import transfer
from cascadekv.errors import (
    AwayError,
    CascadeError,
    ConfigError,
    DeadlineError,
    RefusedError,
)
from cascadekv.transfer import Blocks
from transfer_endpoints import BLOCKS, ONE, SHAPE, S, engine


def test_other_hosts_need_a_token():
    _, endpoint = engine()
    with endpoint, pytest.raises(ConfigError, match="configure a token or client certificates"):
        endpoint.listen("0.0.0.0:0")


def test_invalid_arguments_say_what_is_wrong():
    _, local = engine()
    _, remote = engine()
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
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


def test_a_heartbeat_needs_times():
    for wrong in ({"interval": 0.0}, {"limit": 0.0}, {"limit": -1.0}):
        with pytest.raises(ConfigError, match="heartbeat"):
            engine(heartbeat=transfer.Heartbeat(**wrong))


def test_a_device_that_is_not_there_is_named():
    settings = transfer.Rdma(devices=["absent0"])
    # Without the library, or without any device, the error names that.
    with pytest.raises(ConfigError, match=r"absent0|libibverbs|no RDMA device"):
        engine(rdma=settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"queue_pairs": 9}, "queue_pairs: 9 is not between 0 and 8"),
        ({"gid_index": -1}, "gid_index"),
        ({"devices": "mlx5_0"}, "not a list of names"),
    ],
)
def test_settings_of_rdma_are_checked(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        transfer.Rdma(**settings)


def test_memory_of_a_gpu_is_refused_without_rdma():
    shape = transfer.Shape(**{**SHAPE, "layers": 1})
    size = BLOCKS * shape.region_block_bytes
    memory = transfer.Memory(address=1 << 40, bytes=size, owner=None, gpu=0)
    with pytest.raises(CascadeError, match=r"only RDMA|CUDA"):
        transfer.Endpoint([transfer.Layer(keys=memory)], shape=shape, block_count=BLOCKS)


def test_the_package_exports_the_errors_of_transfers():
    assert issubclass(DeadlineError, cascadekv.CascadeError)


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ({"scale_bytes": 16}, {"scale_bytes": 32}, "scales: the peer has (16|32) bytes"),
        ({"values": False}, {}, "has no values"),
        ({}, {"values": False}, "has no values"),
        ({"scale_bytes": 16}, {}, "has no scales"),
    ],
)
def test_peers_whose_layers_have_other_arrays_are_refused(here, there, reason):
    _, local = engine(1, **here)
    _, remote = engine(2, **there)
    with local, remote, pytest.raises(RefusedError, match=reason):
        local.connect(remote.listen("127.0.0.1:0"), timeout=S)


@pytest.mark.parametrize(
    ("layers", "error"),
    [([0, 99], ConfigError), ([0, 0], ConfigError), ([0, 1.5], TypeError), ([0, "1"], TypeError)],
)
def test_nothing_is_moved_if_a_layer_is_wrong(layers, error):
    _, local = engine(1)
    there, remote = engine(2)
    before = there[0].keys.copy()
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        with pytest.raises(error):
            peer.write("r", ONE, layers=layers, timeout=S)
        assert remote.next_arrival(timeout=0.2) is None
        assert (there[0].keys == before).all()


def test_blocks_are_any_integers_that_can_be_listed_once():
    here, local = engine(1)
    there, remote = engine(2)
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        for blocks in (
            Blocks(np.array([1, 2]), np.array([3, 4])),
            Blocks((it for it in [1, 2]), (it for it in [3, 4])),
        ):
            peer.write("r", blocks, layers=[1], timeout=S).wait(timeout=S)
            assert remote.next_arrival(timeout=S).blocks == [3, 4]
            assert (there[1].keys[[3, 4]] == here[1].keys[[1, 2]]).all()
        with pytest.raises(TypeError):
            peer.write("r", Blocks([1.5], [2]), timeout=S)


def test_numbers_of_numpy_are_numbers():
    number = np.int64
    here, local = engine(1, scale_bytes=number(24), blocks=number(BLOCKS), block_tokens=number(4))
    there, remote = engine(2, scale_bytes=24)
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        blocks = Blocks([1], [3], group=number(2), start=number(7))
        peer.write("r", blocks, layers=[number(1)], timeout=S).wait(timeout=S)
        assert remote.next_arrival(timeout=S) == ("r", 1, [3], 2, 7)
        assert (there[1].scales[3] == here[1].scales[1]).all()


@pytest.mark.parametrize(
    ("request_name", "place", "reason"),
    [
        (None, {}, "request: None is no text"),
        (7, {}, "request: 7 is no text"),
        (b"r", {}, "request: b'r' is no text"),
        ("r", {"start": "3"}, "start: '3' is not a whole number"),
        ("r", {"start": 1.5}, "start: 1.5 is not a whole number"),
        ("r", {"group": None}, "group: None is not a whole number"),
        ("r", {"group": True}, "group: True is not a whole number"),
    ],
)
def test_blocks_whose_arrival_could_not_be_told_are_not_moved(request_name, place, reason):
    """The write succeeded, and the receiver got an error or nothing in the place of an arrival."""
    _, local = engine(1)
    there, remote = engine(2)
    before = there[0].keys.copy()
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        with pytest.raises(ConfigError, match=reason):
            peer.write(request_name, Blocks([0], [0], **place), timeout=S)
        assert remote.next_arrival(timeout=0.2) is None
        assert (there[0].keys == before).all()


@pytest.mark.parametrize(
    "notice",
    [
        b"[" * 4000,
        b'[2,"r",Infinity,[],0,0]',
        b'[2,"r",1e999,[],0,0]',
        b'[2,"r",0,"123",0,0]',
        b'[2,"r",99,[1],0,0]',
        b'[2,"r",0,[500],0,0]',
        b'[2,"r",0,[-1],0,0]',
        b'[2,"r",true,[1],0,0]',
        b'[2,{"a":1},0,[1],0,0]',
        b"\xff\xff",
    ],
)
def test_a_notice_that_names_what_is_not_here_is_refused(notice):
    _, local = engine(1)
    _, remote = engine(2)
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        post = peer._connection.write  # noqa: SLF001 # a peer that lies
        post([], ([], []), notice=notice, timeout=S).wait(timeout=S)
        with pytest.raises(AwayError, match="a peer sent a notice"):
            remote.next_arrival(timeout=S)
        peer.write("r", ONE, layers=[0], timeout=S).wait(timeout=S)
        assert remote.next_arrival(timeout=S).blocks == list(ONE.remote)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_block_that_is_written_twice_is_refused(direction):
    _, local = engine(1)
    _, remote = engine(2)
    blocks = Blocks([1, 2], [3, 3]) if direction == "write" else Blocks([3, 3], [1, 2])
    with local, remote:
        peer = local.connect(remote.listen("127.0.0.1:0"), timeout=S)
        with pytest.raises(ConfigError, match="block 3 is given twice"):
            getattr(peer, direction)("r", blocks, timeout=S)


@pytest.mark.parametrize("address", ["", "host", "127.0.0.1", "host:", "host:http", "host:70000"])
def test_an_address_without_a_port_is_a_wrong_setting(address):
    _, local = engine()
    with local, pytest.raises(ConfigError, match="HOST:PORT"):
        local.connect(address, timeout=S)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"streams": -1}, "streams: -1 is not"),
        ({"streams": 1.5}, "streams: 1.5 is not"),
        ({"heartbeat": (1, 2)}, "heartbeat: .* is neither a Heartbeat nor None"),
        ({"blocks": 0}, "block_count: 0 is not a whole number from 1 on"),
        ({"layers": 1.0}, "layers: 1.0 is not a whole number from 1 on"),
        ({"heads": True}, "heads: True is not a whole number"),
        ({"rank": 0.0}, "rank: 0.0 is not a whole number"),
    ],
)
def test_a_wrong_setting_is_named(wrong, reason):
    with pytest.raises((ConfigError, ValueError), match=reason):
        engine(**wrong)


@pytest.mark.parametrize("wrong", [0, -1, 24.0, "24", np.array([24, 24])])
def test_wrong_bytes_of_scales_are_named(wrong):
    shape = transfer.Shape(**{**SHAPE, "layers": 1})
    pages = bytearray(BLOCKS * shape.region_block_bytes)
    layer = transfer.Layer(keys=pages, scales=bytearray(BLOCKS * 24), scale_bytes=wrong)
    with pytest.raises(ConfigError, match=r"scale_bytes: .* is not a whole number from 1 on"):
        transfer.Endpoint([layer], shape=shape, block_count=BLOCKS)


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (object(), "layer 1: values: neither a buffer nor `Memory`"),
        (b"read-only", "layer 1: values: the buffer is read-only"),
        (np.zeros((12, 1024), "uint8")[:, ::2], "layer 1: values: .* has gaps"),
        (bytearray(100), "layer 1: values: 100 bytes are given"),
    ],
)
def test_memory_that_cannot_be_used_is_named(memory, reason):
    shape = transfer.Shape(**{**SHAPE, "layers": 2})
    pages = [bytearray(BLOCKS * shape.region_block_bytes) for _ in range(3)]
    layers = [transfer.Layer(keys=pages[0], values=pages[1])]
    layers.append(transfer.Layer(keys=pages[2], values=memory))
    with pytest.raises(ConfigError, match=reason):
        transfer.Endpoint(layers, shape=shape, block_count=BLOCKS)

"""The benchmark of other transports, with its limits, which need no packages but NumPy."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from cascadekv.bench.transport_peers.blocks import Region, Shape, contents, order
from cascadekv.bench.transport_peers.movers import make_mover
from cascadekv.bench.transport_peers.side import Target
from cascadekv.bench.transport_peers.system_calls import total

SIZE = 4096
LIMITS = ["limit/tcp", "limit/shm"]


def measure(**options):
    """Run the short form; returns its exit status, samples and what it prints for people."""
    given = {"is_short": True, "region_bytes_max": 16 << 20} | options
    command = [sys.executable, "-m", "cascadekv.bench.transport_peers", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 # our own command
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def make_shape(**fields):
    return Shape(**({"block_bytes": SIZE, "batch": 8, "threads": 2, "slots": 64} | fields))


def test_a_batch_is_as_large_as_wanted_if_the_region_has_room():
    shape = Shape.fit(1024, 1538, 4, region_bytes=(1 << 20, 64 << 20))
    assert (shape.batch, shape.slots) == (1538, 4 * 1538)
    shape = Shape.fit(16 << 20, 1538, 4, region_bytes=(1 << 20, 1 << 30))
    assert (shape.batch, shape.region_bytes) == (16, 1 << 30)
    assert shape.batches(20) == 1, "no block moves twice in a round"
    assert make_shape().batches(20) == 4


def test_each_block_of_each_round_has_other_bytes():
    rounds = [contents(np.arange(10_000), number) for number in range(3)]
    assert len(np.unique(np.concatenate(rounds))) == 30_000


def test_a_round_moves_each_block_once_in_an_order_of_its_own():
    shape = make_shape()
    first, second = order(shape, 1, 4), order(shape, 2, 4)
    assert sorted(first.source.ravel()) == sorted(first.target.ravel()) == list(range(64))
    assert not np.array_equal(first.source, first.target)
    assert not np.array_equal(first.source, second.source)
    source, target = first.moved([4, 1])
    assert len(set(source)) == len(set(target)) == 4 * 8 + 1 * 8


@pytest.mark.parametrize("damage", ["byte", "swap", "stale"])
def test_damage_is_found_and_counted(damage):
    shape = make_shape()
    region, wanted = Region(shape), contents(np.arange(64), 7)
    region.fill(wanted)
    assert region.differing(wanted) == 0
    blocks = region.bytes.reshape(64, SIZE)
    if damage == "byte":
        blocks[63, SIZE - 1] ^= 1
        assert region.differing(wanted) == 1
    elif damage == "swap":
        blocks[[3, 40]] = blocks[[40, 3]]
        assert region.differing(wanted) == 2
    else:
        assert region.differing(contents(np.arange(64), 8)) == 64


def test_a_write_to_a_block_that_did_not_move_is_found():
    shape = make_shape()
    target = Target(shape, make_mover("limit/shm", "memcpy", shape, "target"), "")
    blocks = target.region.bytes.view(np.uint64).reshape(64, -1)
    number = {"round": 1, "batches": 2}
    moved = order(shape, 1, 2)
    source = Region(shape)
    source.fill(contents(np.arange(64), 1))
    sent = source.bytes.view(np.uint64).reshape(64, -1)
    # The second thread made one batch only.
    for slots in [(0, 0), (1, 0), (0, 1)]:
        blocks[moved.target[slots]] = sent[moved.source[slots]]
    assert target.verify(number | {"counts": [2, 1]}) == {"differing_blocks": 0}
    blocks[moved.target[1, 1, 0]] = sent[moved.source[1, 1, 0]]
    assert target.verify(number | {"counts": [2, 1]}) == {"differing_blocks": 1}


def test_the_number_of_system_calls_is_in_the_last_line():
    table = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000060           3        20         4 recvmsg
------ ----------- ----------- --------- --------- ----------------
100.00    0.000100           3        31         4 total
"""
    assert total(table) == 31
    assert total("") == 0


@pytest.mark.parametrize("peer", LIMITS)
def test_every_sample_is_verified_and_says_what_it_cost(peer):
    status, samples, text = measure(peers=[peer], rounds=3)
    assert status == 0, text
    assert [sample["verified"] for sample in samples] == [True] * 3
    assert [sample["round"] for sample in samples] == [2, 3, 4]
    for sample in samples:
        assert f"{sample['peer']}/{sample['transport']}" == peer
        assert (sample["block_bytes"], sample["batch"], sample["batch_wanted"]) == (1 << 20, 16, 64)
        assert sample["bytes"] == sample["blocks"] * sample["block_bytes"] == 16 << 20
        assert sample["seconds"] > 0
        assert sample["source_cpu_s"] > 0
        assert sample["target_cpu_s"] >= 0
    assert "GB/s" in text


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_system_calls_are_counted_in_a_round_of_their_own_without_a_time():
    _, samples, text = measure(peers=["limit/tcp"], count_system_calls=True)
    timed, counted = samples
    if counted["error"] == "strace may not attach to processes here":
        pytest.skip(counted["error"])
    assert "system_calls" not in timed
    assert counted["verified"], text
    assert counted["seconds"] is None
    # Each of the 16 blocks is sent and received.
    assert counted["system_calls"] >= 2 * 16
    assert "system calls a block" in text


@pytest.mark.parametrize(("fault", "differing"), [("corrupt", 1), ("stale", 16)])
@pytest.mark.parametrize("peer", LIMITS)
def test_wrong_bytes_are_a_sample_that_is_not_verified(peer, fault, differing):
    status, samples, text = measure(peers=[peer], fault=fault, warm_up=0)
    assert status == 1
    assert [sample["verified"] for sample in samples] == [False]
    assert samples[0]["differing_blocks"] == differing
    assert "WRONG BYTES" in text


def test_a_peer_that_hangs_is_a_sample_with_an_error():
    status, samples, text = measure(peers=["limit/tcp"], fault="hang", cell_s=2, warm_up=0)
    assert status == 1
    (sample,) = samples
    assert sample["error"] == "the source did not end its run by the deadline", text
    assert (sample["verified"], sample["seconds"], sample["blocks"]) == (False, None, 0)


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    status, samples, _ = measure(peers=["mooncake/tcp"])
    assert status == 1
    for sample in samples:
        assert sample["error"] == (
            "not installed: mooncake-transfer-engine-non-cuda "
            "(make bench-transport-peers installs it)"
        )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"peers": ["rdma"]}, "unknown peer 'rdma'; known: mooncake/tcp, nixl/tcp"),
        ({"setting": "fast"}, "unknown setting 'fast' of mooncake/tcp; known: best, first"),
        ({"block_bytes": [1001]}, "1001 is not a size of blocks"),
        ({"rounds": 0}, "at least 1"),
        ({"sizes": [1]}, "unknown option 'sizes'; known: is_short, peers"),
    ],
)
def test_wrong_options_are_refused_with_what_is_known(options, part):
    status, samples, text = measure(**options)
    assert (status, samples) == (2, [])
    assert part in text

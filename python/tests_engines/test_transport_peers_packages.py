"""The benchmark of other transports with the real Mooncake and NIXL, in a network of its own."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "transport-peers" / "bin" / "python"
PEERS = ["mooncake/tcp", "nixl/tcp", "nixl/same-host"]
OWN_NETWORK = [
    *("unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])),
    *("bash", "-c", 'ip link set lo up && exec "$@"', "bash"),
]


def reason_to_skip() -> str:
    """Return why the packages cannot be run here; empty if they can."""
    if not (PYTHON.parents[1] / "wheel").exists():
        return "Mooncake and NIXL are not installed: make transport-peers"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare or ip is missing (Debian: apt-get install util-linux iproute2)"
    tried = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False)  # noqa: S603 # our own command
    return "" if tried.returncode == 0 else f"no network of its own: {tried.stderr.decode()}"


SKIP = reason_to_skip()
pytestmark = [
    pytest.mark.skipif(bool(SKIP), reason=SKIP),
    pytest.mark.parametrize("peer", PEERS),
]


def measure(peer, **options):
    """Run the short form; returns its exit status, samples and what it prints for people."""
    given = json.dumps({"is_short": True, "peers": [peer]} | options)
    program = [str(PYTHON), "-m", "cascadekv.bench.transport_peers", given]
    done = subprocess.run(  # noqa: S603 # our own command
        [*OWN_NETWORK, *program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("threads", [1, 4])
def test_blocks_arrive(peer, threads):
    status, samples, text = measure(peer, threads=[threads], region_bytes_min=64 << 20)
    assert status == 0, text
    assert [sample["block_bytes"] for sample in samples] == [4096, 65536]
    for sample in samples:
        assert sample["verified"], text
        assert sample["blocks"] == sum(sample["batches"]) * sample["batch"]
        assert sample["blocks"] == 2 * 64 * threads
        assert sample["version"] in {"0.3.13.post1", "1.5.1"}


@pytest.mark.parametrize(("fault", "differing"), [("corrupt", 1), ("stale", 2 * 64)])
def test_wrong_bytes_are_a_sample_that_is_not_verified(peer, fault, differing):
    status, samples, text = measure(peer, fault=fault, warm_up=0, block_bytes=[4096])
    assert status == 1, text
    assert [(s["verified"], s["differing_blocks"]) for s in samples] == [(False, differing)]


def test_a_target_that_hangs_is_a_sample_with_an_error(peer):
    options = {"fault": "hang", "warm_up": 0, "cell_s": 3, "block_bytes": [16 << 20], "batch": 16}
    status, samples, text = measure(peer, **options)
    assert status == 1, text
    (sample,) = samples
    # On the same host, the source may write into the memory of a stopped target by itself.
    late = ["the source did not end its run by the deadline"]
    late += ["the target did not end its usage by the deadline"] * (peer == "nixl/same-host")
    assert sample["error"] in late
    assert (sample["verified"], sample["seconds"]) == (False, None)

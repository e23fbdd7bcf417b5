"""Engines whose nodes read each other's memory."""

import os
import threading

import pytest
from cascadekv.bench.prompts import prompt, with_prefix
from forked_engines import BLOCK

pytest_plugins = ["forked_engines"]

ALWAYS = {
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}


@pytest.fixture
def cluster(serve, tmp_path):
    """Return two nodes that know each other."""
    # Addresses of loopback that no other test process has.
    high, low = divmod(os.getpid() % 65536, 256)
    hosts, token = tmp_path / "hosts", tmp_path / "token"
    hosts.write_text("".join(f"node{at} 127.{1 + at}.{high}.{low}:9500\n" for at in range(2)))
    token.write_text("a token that all nodes know")
    token.chmod(0o600)
    flags = ["--dram", "64MiB", "--cluster", f"hosts:{hosts}", "--peer-token-file", str(token)]
    return [serve(*flags, "--node-name", f"node{at}") for at in range(2)]


def test_a_prompt_that_one_host_has_seen_is_a_hit_on_the_other(
    start, reference, cluster, eventually
):
    first, second = cluster
    one, two = (
        start({"cascade.node": f"unix:{node.socket}", **ALWAYS, "cascade.load": load})
        for node, load in zip(cluster, ("async", "sync"), strict=True)
    )
    request = prompt(4 * BLOCK + 1, "cluster")
    assert reference.check_one(one, request) == 0
    eventually(lambda: reference.check_one(two, request) == 4 * BLOCK, 60)
    longer = [*request, *prompt(2 * BLOCK, "cluster longer")]
    assert reference.check_one(two, longer) == 4 * BLOCK
    assert reference.check_one(one, longer) == 6 * BLOCK
    os.kill(first.process.pid, 9)
    # The blocks that were fetched are those of the second node.
    assert reference.check_one(two, with_prefix(request, 3 * BLOCK, "tail")) == 3 * BLOCK
    assert second.process.poll() is None


def test_answers_stay_right_while_the_other_node_is_killed(start, reference, cluster):
    first, second = cluster
    one, two = (start({"cascade.node": f"unix:{each.socket}", **ALWAYS}) for each in cluster)
    requests = [prompt(3 * BLOCK + 1, "killed", number) for number in range(12)]
    for request in requests:
        assert reference.check_one(one, request) == 0
    killer = threading.Timer(0.5, os.kill, (first.process.pid, 9))
    killer.start()
    for _ in range(3):
        for request in requests:
            assert reference.check_one(two, request) in {0, BLOCK, 2 * BLOCK, 3 * BLOCK}
    killer.join()
    assert second.process.poll() is None

"""Where workers listen for other engines, and what those are told."""

import pytest
from cascadekv.connectors.vllm.listen_address import ListenAddress
from cascadekv.connectors.vllm.transfer_setup import NoTransfersError
from push_engines import transfers
from scheduled_engine import BLOCK
from transfer_engines import decode, end_leases, prefill, prompt, pulled

pytest_plugins = ["transfer_engines"]


def test_an_engine_whose_port_is_taken_does_not_start(start_scheduled):
    """It ran without a store and without transfers, with one line in its log."""
    first = start_scheduled()
    with pytest.raises(NoTransfersError, match=r"worker 0 of .*cannot listen"):
        start_scheduled({"cascade.transfer_listen": transfers(first).address})


def test_each_worker_of_each_replica_has_a_port():
    listen = ListenAddress.parse("[::1]:7400")
    assert [listen.of_worker(number) for number in (0, 3)] == ["[::1]:7400", "[::1]:7403"]
    assert ListenAddress.parse("127.0.0.1:0").of_worker(3) == "127.0.0.1:0"
    with pytest.raises(ValueError, match="no port behind 65535"):
        ListenAddress.parse("127.0.0.1:65535").of_worker(1)


def test_other_engines_are_told_of_the_advertised_host(start_scheduled, transfer_token):
    """They were told of 0.0.0.0, connected to their own host, and computed every prompt."""
    _, token = transfer_token
    everywhere = {"cascade.transfer_listen": "0.0.0.0:0", "cascade.transfer_advertise": "localhost"}
    source, target = start_scheduled(token | everywhere), start_scheduled(token)
    asked = prompt(3 * BLOCK, "advertised")
    params = prefill(source, asked)
    assert params["remote_host"] == "localhost"
    decode(target, asked, params)
    assert pulled(target) == 3
    end_leases(source)

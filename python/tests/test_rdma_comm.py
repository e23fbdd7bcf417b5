"""The interface of KVTransferManager: its example, its variables, its return values."""

import logging

import numpy as np
import pytest
from cascadekv import transfer
from cascadekv.compat import rdma_comm
from cascadekv.errors import ConfigError
from cascadekv.transfer import Rdma

BLOCKS, BYTES, LAYERS = 64, 4096, 2


@pytest.fixture(autouse=True)
def clean_log():
    yield
    for handler in list(rdma_comm.log.handlers):
        for logger in (rdma_comm.log, transfer.log):
            logger.removeHandler(handler)
        handler.close()
    rdma_comm.log.setLevel(logging.NOTSET)


class Side:
    """Caches of one process and its communicator."""

    def __init__(self, role, *, has_values=True):
        make = np.random.default_rng(len(role)).integers
        self.keys = [make(0, 256, (BLOCKS, BYTES), "uint8") for _ in range(LAYERS)]
        self.values = [make(0, 256, (BLOCKS, BYTES), "uint8") for _ in range(LAYERS * has_values)]
        self.comm = rdma_comm.RDMACommunicator(
            role=role,
            gpu_idx=0,
            port="0",
            local_key_cache=[array.ctypes.data for array in self.keys],
            local_value_cache=[array.ctypes.data for array in self.values],
            block_number=BLOCKS,
            block_bytes=BYTES,
        )


def test_the_example_of_the_document_runs(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "rdma_comm", raising=False)
    rdma_comm.install()
    from rdma_comm import RDMACommunicator  # noqa: PLC0415 - as in the document

    assert RDMACommunicator is rdma_comm.RDMACommunicator
    prefill, decode = Side("prefill"), Side("decode")
    assert prefill.comm.address is None
    ip, port = decode.comm.address.split(":")
    assert not prefill.comm.is_connected(ip, port)
    if prefill.comm.connect(ip, port):
        written = prefill.comm.write_cache(
            ip=ip, port=port, local_block_ids=[0, 1, 2], remote_block_ids=[3, 4, 5], layer_idx=1
        )
    assert written == 0
    assert prefill.comm.is_connected(ip, port)
    assert (decode.keys[1][3:6] == prefill.keys[1][0:3]).all()
    assert (decode.values[1][3:6] == prefill.values[1][0:3]).all()
    assert not (decode.keys[0][3:6] == prefill.keys[0][0:3]).all()
    decode.comm.close()
    # The write finds out that the connection has ended.
    assert prefill.comm.write_cache(ip, port, [0], [0], 0) == -1
    assert not prefill.comm.is_connected(ip, port)


def test_keys_alone_are_written_for_mla():
    prefill, decode = Side("prefill", has_values=False), Side("decode", has_values=False)
    ip, port = decode.comm.address.split(":")
    assert prefill.comm.connect(ip, port)
    assert prefill.comm.write_cache(ip, port, [7], [8], 0) == 0
    assert (decode.keys[0][8] == prefill.keys[0][7]).all()


def test_block_ids_that_can_be_listed_once():
    """All bytes had moved, and the call raised because a generator has no length."""
    prefill, decode = Side("prefill"), Side("decode")
    ip, port = decode.comm.address.split(":")
    assert prefill.comm.connect(ip, port)
    assert prefill.comm.write_cache(ip, port, iter([1, 2]), iter([3, 4]), 0) == 0
    assert (decode.keys[0][3:5] == prefill.keys[0][1:3]).all()
    assert prefill.comm.write_cache(ip, port, np.array([5]), np.array([6]), np.int64(0)) == 0
    assert (decode.keys[0][6] == prefill.keys[0][5]).all()


def test_addresses_in_an_array():
    pages = [np.zeros((BLOCKS, 64), "uint8") for _ in range(2)]
    addresses = np.array([page.ctypes.data for page in pages])
    comm = rdma_comm.RDMACommunicator("decode", 0, 0, addresses, addresses[:0], BLOCKS, 64)
    comm.close()


def test_failures_are_return_values_with_a_logged_reason(caplog):
    prefill, decode = Side("prefill"), Side("decode")
    ip, port = decode.comm.address.split(":")
    assert prefill.comm.write_cache(ip, port, [0], [0], 0) == -1
    assert "call connect first" in caplog.text
    assert prefill.comm.connect(ip, port)
    for blocks in (([BLOCKS], [0]), ([0], [BLOCKS]), ([0, 1], [0])):
        assert prefill.comm.write_cache(ip, port, *blocks, 0) == -1
    assert prefill.comm.write_cache(ip, port, [0], [0], LAYERS) == -1
    assert prefill.comm.connect(ip, "1") is False
    assert "cannot connect" in caplog.text


def test_unknown_variables_are_warned_about(monkeypatch):
    monkeypatch.setenv("KVCACHE_RDMA_NICZ", "mlx5_0")
    with pytest.warns(UserWarning, match="KVCACHE_RDMA_NICZ is not known"):
        Side("prefill")


# The machine of `make test-rdma` has these devices' first one.
@pytest.mark.filterwarnings("error")
def test_each_variable_of_the_document_is_known(monkeypatch, tmp_path):
    values = {
        "KVCACHE_RDMA_GID_INDEX": "1",
        "KVCACHE_RDMA_NICS": "rxe0,rxe1",
        "KVCACHE_IB_TIMEOUT": "18",
        "KVCACHE_RELAX_ORDERING": "true",
        "KVCACHE_GDRCOPY_FLUSH_ENABLE": "1",
        "KVCACHE_SOCKET_IFNAME": "lo",
        "KVCACHE_DEBUG": "1",
        "KVCACHE_DEBUG_FILE": str(tmp_path / "debug"),
        "KVCACHE_ERROR_FILE": str(tmp_path / "errors"),
    }
    assert set(values) == set(rdma_comm.KNOWN)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    prefill, decode = Side("prefill"), Side("decode")
    ip, port = decode.comm.address.split(":")
    assert ip == "127.0.0.1"
    assert prefill.comm.connect(ip, port)
    assert prefill.comm.write_cache(ip, port, [0], [0], 9) == -1
    assert "no layer 9" in (tmp_path / "errors").read_text()
    assert "connected to" in (tmp_path / "debug").read_text()
    assert "connected to" not in (tmp_path / "errors").read_text()


def test_the_variables_of_rdma_are_read():
    values = {
        "KVCACHE_RDMA_GID_INDEX": "3",
        "KVCACHE_RDMA_NICS": "mlx5_0, mlx5_1,mlx5_2",
        "KVCACHE_IB_TIMEOUT": "20",
        "KVCACHE_RELAX_ORDERING": "true",
        "KVCACHE_GDRCOPY_FLUSH_ENABLE": "1",
    }
    expected = Rdma(
        use="prefer",
        devices=["mlx5_1"],
        gid_index=3,
        timeout=20,
        relaxed_ordering=True,
        flush="always",
    )
    assert rdma_comm.rdma_of(values, 4) == expected
    assert rdma_comm.rdma_of({}, 4) == Rdma(use="prefer", devices=[])
    assert rdma_comm.rdma_of({**values, "CASCADE_TRANSFER_RDMA": "off"}, 4) is None
    required = rdma_comm.rdma_of({"CASCADE_TRANSFER_RDMA": "require"}, 0)
    assert required is not None
    assert required.use == "require"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CASCADE_TRANSFER_RDMA", "yes", "'yes' is not prefer, require or off"),
        ("KVCACHE_RDMA_GID_INDEX", "three", "KVCACHE_RDMA_GID_INDEX: 'three' is not a whole"),
        ("KVCACHE_IB_TIMEOUT", "99", "timeout: 99 is not between 0 and 31"),
    ],
)
def test_wrong_values_of_the_variables_of_rdma_are_errors(variable, value, reason):
    with pytest.raises(ConfigError, match=reason):
        rdma_comm.rdma_of({variable: value}, 0)


def test_a_device_that_is_not_there_means_tcp_with_one_logged_line(monkeypatch, caplog):
    monkeypatch.setenv("KVCACHE_RDMA_NICS", "absent0")
    prefill, decode = Side("prefill"), Side("decode")
    ip, port = decode.comm.address.split(":")
    caplog.set_level(logging.INFO, rdma_comm.log.name)
    assert prefill.comm.connect(ip, port)
    assert "blocks move by tcp" in caplog.text
    assert prefill.comm.write_cache(ip, port, [7], [8], 0) == 0
    lines = [record for record in caplog.records if "blocks move by TCP" in record.message]
    assert len(lines) == 2, "one for each process"


def test_a_device_that_is_required_and_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("KVCACHE_RDMA_NICS", "absent0")
    monkeypatch.setenv("CASCADE_TRANSFER_RDMA", "require")
    with pytest.raises(ConfigError, match="rdma: "):
        Side("prefill")


def test_an_interface_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("KVCACHE_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(ConfigError, match="KVCACHE_SOCKET_IFNAME: 'nowhere0' has no IPv4"):
        Side("decode")


def test_an_unknown_role_is_an_error():
    with pytest.raises(ConfigError, match="neither"):
        Side("router")

"""The founding document's interface runs as written."""

import dataclasses
import importlib
import sys

import cascadekv
import numpy as np
import pytest
from cascadekv import compat

# The document's example, verbatim; the caller provides the tensor.
EXAMPLE = """
from cascade_cpp import DistributedStore, CascadeConfig

# 1. Initialize with V6 Features Enabled
cfg = CascadeConfig()
cfg.dedup_enabled = True
cfg.semantic_eviction = True
cfg.locality_aware = True
store = DistributedStore(cfg)

# 2. Put Data (Auto-Tiering + Dedup)
# 'is_prefix=True' marks this as a protected block
store.put("sys_prompt_v1", data_tensor.numpy(), is_prefix=True)

# 3. Get Data (Transparent Retrieval from any Tier)
result = np.empty_like(data_tensor)
store.get("sys_prompt_v1", result)
"""


class Tensor(np.ndarray):
    """The members of a tensor that the example uses."""

    def numpy(self):
        """Return the array itself."""
        return np.asarray(self)


@pytest.fixture
def cascade_cpp(monkeypatch):
    monkeypatch.delitem(sys.modules, "cascade_cpp", raising=False)
    compat.install()
    yield importlib.import_module("cascade_cpp")
    del sys.modules["cascade_cpp"]


@pytest.mark.usefixtures("cascade_cpp")
def test_the_documents_example_runs_as_written():
    tensor = np.random.default_rng(7).random((4, 8, 64), dtype=np.float32).view(Tensor)
    names = {"np": np, "data_tensor": tensor}
    exec(EXAMPLE, names)  # noqa: S102 # the example is a constant above
    assert (names["result"] == tensor).all()
    assert names["store"].locate("sys_prompt_v1") == ["dram"]
    names["store"].close()


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("dedup_enabled", True),
        ("semantic_eviction", True),
        ("locality_aware", True),
        ("promotion_threshold", 3),
        ("dram_capacity", "256MiB"),
        ("lustre_path", None),
        ("lustre_capacity", "4GiB"),
    ],
)
def test_defaults_are_the_documented_ones(field, default):
    assert getattr(compat.CascadeConfig(), field) == default


def test_every_default_is_in_the_table():
    assert len(dataclasses.fields(compat.CascadeConfig)) == 7


def test_an_unknown_setting_is_refused_by_name():
    config = compat.CascadeConfig()
    with pytest.raises(cascadekv.ConfigError, match="dedup_enable:"):
        config.dedup_enable = True


def test_each_flag_reaches_the_store():
    config = compat.CascadeConfig(dedup_enabled=True, dram_capacity="8MiB")
    with compat.DistributedStore(config) as store:
        store.put("a", b"same bytes")
        store.put("b", b"same bytes")
        assert store.stats()["contents"] == 1
    config = compat.CascadeConfig(
        dedup_enabled=False, semantic_eviction=False, dram_capacity="8MiB"
    )
    with compat.DistributedStore(config) as store:
        store.put("a", b"same bytes", is_prefix=True)
        store.put("b", b"same bytes")
        assert store.stats()["contents"] == 2


def test_failures_raise_or_return_false():
    with compat.DistributedStore(compat.CascadeConfig(dram_capacity="8MiB")) as store:
        assert store.put("a", b"block")
        with pytest.raises(ValueError, match="other bytes"):
            store.put("a", b"other")
        with pytest.raises(ValueError, match="needs an array of 5 bytes"):
            store.get("a", bytearray(4))
        assert not store.get("b", bytearray(4))
        assert not store.put("c", bytes(9 << 20))
        assert store.delete("a")
        assert not store.contains("a")

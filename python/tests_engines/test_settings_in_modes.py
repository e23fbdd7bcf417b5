"""Each setting works in each mode of an engine, or is refused, or the log says that it does not.

A setting without effect was dropped without a word. A new one needs a decision here.
"""

from types import SimpleNamespace

import pytest
from cascadekv.connectors.settings import KEYS
from cascadekv.connectors.vllm import settings as module
from cascadekv.connectors.vllm.engine_config import load_mode, log_at_start
from cascadekv.connectors.vllm.hbm import open_hbm
from cascadekv.connectors.vllm.settings import read_connector_settings
from cascadekv.connectors.vllm.transfer_setup import open_transfers
from cascadekv.errors import ConfigError

FILE = object()
"""A file with mode 0600."""
VALUES = {
    "cascade.pipeline": "Dram",
    "cascade.dram": "16MiB",
    "cascade.files": "files",
    "cascade.files_capacity": "64MiB",
    "cascade.direct_io": False,
    "cascade.io_engine": "psync",
    "cascade.node": "unix:/run/other.sock",
    "cascade.token_file": FILE,
    "cascade.timeout": 3,
    "cascade.name": "a name",
    "cascade.load": "sync",
    "cascade.layerwise": True,
    "cascade.hbm": "/run/hbm.sock",
    "cascade.kv_layout": "BLHNC",
    "cascade.transfer": "direct",
    "cascade.transfer_listen": "127.0.0.1:0",
    "cascade.transfer_advertise": "localhost",
    "cascade.transfer_token_file": FILE,
    "cascade.transfer_tls_certificate": FILE,
    "cascade.transfer_tls_key": FILE,
    "cascade.transfer_tls_authority": FILE,
    "cascade.transfer_tls_name": "a name",
    "cascade.transfer_lease": 60,
    "cascade.transfer_rdma": "prefer",
    "cascade.hit_ratio": 0.5,
    "cascade.min_tokens": 7,
    "cascade.lite": True,
    "cascade.record": "traces",
    "cascade.shards": 2,
    "cascade.weights": "a name",
    "cascade.secret_file": FILE,
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 1,
    "cascade.load_timeout": 1,
    "cascade.save_timeout": 1,
    "cascade.lookahead": 1,
    "cascade.loads_max": 7,
    "cascade.blocks_max": 7,
}
STORE = {"cascade.dram": "16MiB"}
NODE = {"cascade.node": "unix:/run/cascade.sock"}
DIRECT = {"cascade.transfer": "direct"}
EMBEDDED = ("pipeline", "dram", "files", "files_capacity", "direct_io", "io_engine")
MODES = {
    # Settings beside the one that is looked at; the engine.
    "one process": (STORE, {}),
    "tensor parallel": (STORE | DIRECT, {"tensor": 2}),
    "pipeline parallel": (STORE | DIRECT, {"pipeline": 2}),
    "node": (NODE | DIRECT, {}),
    "layerwise": (STORE | DIRECT | {"cascade.layerwise": True}, {}),
    "asynchronous loads": (STORE | DIRECT | {"cascade.load": "async"}, {}),
    "gpu": (STORE | DIRECT, {"device": "cuda"}),
    "prefix cache": (STORE | DIRECT, {"has_prefix_cache": True}),
    "windows": (STORE | DIRECT, {"window": 64}),
}
TRANSFERS = [key for key in VALUES if key.startswith("cascade.transfer_")]
LOGGED = {
    "one process": {*TRANSFERS, "cascade.hbm", "cascade.lookup_timeout"},
    "tensor parallel": {"cascade.timeout", "cascade.hbm"},
    "pipeline parallel": {
        "cascade.timeout",
        "cascade.hbm",
        "cascade.load",
        "cascade.layerwise",
    },
    "node": {"cascade.timeout", "cascade.hbm"},
    "layerwise": {"cascade.lookup_timeout", "cascade.hbm"},
    "asynchronous loads": {"cascade.lookup_timeout", "cascade.hbm", "cascade.layerwise"},
    "gpu": {*TRANSFERS, "cascade.transfer", "cascade.lookup_timeout"},
    "prefix cache": {
        "cascade.lookup_timeout",
        "cascade.hbm",
        "cascade.load",
        "cascade.layerwise",
    },
    "windows": {"cascade.lookup_timeout", "cascade.hbm", "cascade.load", "cascade.layerwise"},
}
"""By mode: the settings whose line in the log says that they have no effect. Others work."""
REFUSED = {mode: {"cascade.token_file"} for mode in MODES} | {
    "node": {f"cascade.{name}" for name in EMBEDDED}
}
"""By mode: the settings that are refused, with their name."""
TLS = {f"cascade.transfer_tls_{name}": FILE for name in ("certificate", "key", "authority")}


def config_of(tensor=1, pipeline=1, device="cpu", *, has_prefix_cache=False, window=None):
    """Return the parts of vLLM's configuration that settings depend on."""
    size = tensor * pipeline
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=size,
            pipeline_parallel_size=pipeline,
            distributed_executor_backend="uni" if size == 1 else "mp",
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_cache),
        device_config=SimpleNamespace(device_type=device),
        window=window,
    )


def log_of(extra, config, caplog):
    """Start as an engine does, with these settings; returns the lines of its log."""
    settings = read_connector_settings(extra)
    caplog.clear()
    transfer = SimpleNamespace(kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
    log_at_start(config, transfer, settings)
    load_mode(config, settings, [SimpleNamespace(window=config.window)])
    device = config.device_config.device_type
    if device == "cpu":
        assert open_hbm(settings, []) is None
    else:
        memory = SimpleNamespace(device=SimpleNamespace(type=device))
        assert open_transfers(None, settings, (), memory, 1) is None
    return [line for line in caplog.messages if "ignored" in line or "no effect" in line]


@pytest.fixture
def value(tmp_path):
    """Return a function that returns a valid value of a setting."""
    file = tmp_path / "file"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    return lambda key, given=VALUES: str(file) if given[key] is FILE else given[key]


def test_every_setting_has_a_decision():
    assert set(VALUES) == {*KEYS, *module._OWN}  # noqa: SLF001 # the table under test
    assert set(LOGGED) == set(MODES) == set(REFUSED)


@pytest.mark.parametrize("key", VALUES)
@pytest.mark.parametrize("mode", MODES)
def test_a_setting_works_or_the_start_says_that_it_does_not(mode, key, value, caplog):
    given, engine = MODES[mode]
    extra = {**given, key: value(key)}
    if key == "cascade.node":
        extra = {name: it for name, it in extra.items() if name not in STORE}
    if key.startswith("cascade.transfer_tls_"):
        extra |= {name: value(name) for name in TLS}
    if key in REFUSED[mode]:
        with pytest.raises(ConfigError, match=f"^{key}: "):
            read_connector_settings(extra)
        return
    lines = log_of(extra, config_of(**engine), caplog)
    named = [line for line in lines if key in line.replace(",", " ").replace(":", " ").split()]
    assert bool(named) == (key in LOGGED[mode]), lines


def test_a_ucm_file_reaches_the_private_node(tmp_path):
    """`io_direct` and `posix_io_engine` of a UCM file were dropped with several workers."""
    file = tmp_path / "ucm.yaml"
    file.write_text(
        "ucm_connectors:\n"
        "  - ucm_connector_name: UcmPipelineStore\n"
        "    ucm_connector_config:\n"
        f"      storage_backends: {tmp_path}\n"
        "      store_pipeline: Cache|Posix\n"
        "      io_direct: true\n"
        "      posix_io_engine: psync\n"
        "      cache_buffer_capacity_gb: 1\n"
        "      posix_capacity_gb: 1\n"
    )
    options = read_connector_settings({"UCM_CONFIG_FILE": str(file)}).store_options
    assert options["cascade.direct_io"] is True
    assert options["cascade.io_engine"] == "psync"

"""The connector's keys are parsed strictly, with suggestions for unknown keys."""

import pytest
from cascadekv.connectors.vllm.settings import read_connector_settings
from cascadekv.errors import ConfigError

STORE = {"cascade.dram": "16MiB"}
VALID = {
    "transfer_listen": ["127.0.0.1:0", "10.1.2.3:7400", "[::1]:65535", "[fe80::7]:0"],
    "transfer_advertise": ["prefill-0.example", "10.1.2.3", "fd00::7"],
    "name": ["fast", "n" * 64],
    "load": ["auto", "sync", "async"],
    "layerwise": [True, False],
    "hit_ratio": [0, 0.25, 1, 1.0],
    "min_tokens": [0, 4096],
    "lite": [True, False],
    "record": ["traces/trace.jsonl"],
    "shards": [1, 8],
    "weights": ["digest", "sampled", "full", "model of november"],
    "load_or_compute": [True, False],
    "lookup_timeout": [0.001, 1, 3600],
    "load_timeout": [0.5, 30],
    "save_timeout": [0.05, 2],
    "lookahead": [0, 0.5, 3600],
    "hbm": [False, "/run/cascade/hbm.sock"],
    "kv_layout": ["LBHNC", "BLHNC"],
    "transfer_rdma": ["off", "prefer", "require"],
}
NEVER_VALID = [None, [], {}, object(), float("nan"), float("inf")]
INVALID = {
    "name": ["", 7, "n" * 65],
    "load": ["lazy", "", True, 1],
    "layerwise": ["true", 1, 0],
    "hit_ratio": [-0.1, 1.1, "1", True],
    "min_tokens": [-1, 1.5, "4096", True],
    "lite": ["false", 1],
    "record": ["", 7],
    "shards": [0, -8, 2.0, "8", True],
    "weights": ["", 7, True],
    "load_or_compute": ["yes", 1],
    "lookup_timeout": [0, -1, 3601, "1", True],
    "load_timeout": [0, -1, 3601, "1", True],
    "save_timeout": [0, -1, 3601, "1", True],
    "lookahead": [-1, 3601, "1", True],
    "hbm": [True, "", 7],
    "transfer_listen": [
        "localhost:7400",
        "::1:7400",
        "127.0.0.1:99999",
        "127.0.0.1",
        "127.0.0.1:",
        ":7400",
        "[127.0.0.1]:7400",
        "[::1:7400",
        "host.example:7400",
        "0.0.0.0:7400",
        "[::]:0",
        7400,
    ],
    "transfer_advertise": ["", 7],
    "kv_layout": ["", "HND", "BHLNC", True],
    "transfer_rdma": ["", "always", True],
    "secret_file": ["", "/no/such/secret", 7],
    "transfer_tls_certificate": ["", "/no/such/file", 7],
    "transfer_tls_key": ["", "/no/such/file", 7],
    "transfer_tls_authority": ["", "/no/such/file", 7],
    "transfer_tls_name": ["", 7, True],
}
SUGGESTIONS = {
    "cascade.layerwize": "cascade.layerwise",
    "cascade.hitratio": "cascade.hit_ratio",
    "cascade.min_token": "cascade.min_tokens",
    "cascade.shard": "cascade.shards",
    "cascade.drams": "cascade.dram",
    "layerwise": "cascade.layerwise",
    "UCM_CONFIG": "UCM_CONFIG_FILE",
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, every in VALID.items() for v in every])
def test_valid_values_are_accepted(name, value):
    assert getattr(read_connector_settings(STORE | {f"cascade.{name}": value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, every in INVALID.items() for v in (*every, *NEVER_VALID)]
)
def test_invalid_values_are_refused_by_their_key(name, value):
    with pytest.raises(ConfigError, match=rf"^cascade\.{name}: "):
        read_connector_settings(STORE | {f"cascade.{name}": value})


@pytest.mark.parametrize("listen", ["0.0.0.0:7400", "[::]:7400"])
def test_all_interfaces_need_a_name_that_others_can_use(listen):
    given = STORE | {"cascade.transfer_listen": listen}
    with pytest.raises(ConfigError, match=r"cascade\.transfer_advertise"):
        read_connector_settings(given)
    name = {"cascade.transfer_advertise": "prefill-0"}
    assert read_connector_settings(given | name).transfer_listen == listen


@pytest.mark.parametrize("given", SUGGESTIONS)
def test_an_unknown_key_gets_a_suggestion(given):
    with pytest.raises(
        ConfigError, match=f"^{given}: no such setting; did you mean {SUGGESTIONS[given]}"
    ):
        read_connector_settings(STORE | {given: 1})


def test_an_unknown_key_without_a_similar_one_lists_all_keys():
    with pytest.raises(ConfigError, match=r"known are cascade\.pipeline, .*cascade\.save_timeout"):
        read_connector_settings(STORE | {"zzz": 1})


def test_the_empty_configuration_is_valid():
    settings = read_connector_settings({})
    assert settings.address.node is None
    assert settings.load == "auto"
    assert settings.shards is None


def test_the_stores_keys_are_kept_for_a_private_node():
    settings = read_connector_settings({**STORE, "cascade.lite": True})
    assert settings.store_options == STORE


def test_keys_of_a_node_and_of_an_embedded_store_cannot_be_combined():
    with pytest.raises(ConfigError, match=r"cascade\.dram: .*the node"):
        read_connector_settings(STORE | {"cascade.node": "unix:/run/cascade/node.sock"})


def test_a_secret_is_read_from_a_file(tmp_path):
    place = tmp_path / "secret"
    place.write_text("of this tenant\n")
    place.chmod(0o600)
    settings = read_connector_settings(STORE | {"cascade.secret_file": str(place)})
    assert settings.secret_file == str(place)


def test_tls_between_engines_needs_all_three_files(tmp_path):
    names = ("certificate", "key", "authority")
    for name in names:
        (tmp_path / name).touch()
    every = {f"cascade.transfer_tls_{name}": str(tmp_path / name) for name in names}
    assert read_connector_settings(STORE).transfer_tls() is None
    named = read_connector_settings(STORE | every | {"cascade.transfer_tls_name": "prefill"})
    tls = named.transfer_tls()
    assert tls is not None
    assert (tls.key, tls.server_name) == (str(tmp_path / "key"), "prefill")
    assert tls.client_certificates
    for missing in every:
        rest = {key: value for key, value in every.items() if key != missing}
        with pytest.raises(ConfigError, match=f"^{missing}: is missing"):
            read_connector_settings(STORE | rest).transfer_tls()
    alone = read_connector_settings(STORE | {"cascade.transfer_tls_name": "prefill"})
    with pytest.raises(ConfigError, match="transfer_tls_authority"):
        alone.transfer_tls()


def test_limits_of_recorded_traces_come_from_the_documented_variables(monkeypatch):
    recording = STORE | {"cascade.record": "traces"}
    assert read_connector_settings(recording).record_limits == (64 << 20, 3)
    monkeypatch.setenv("UCM_LOG_MAX_SIZE", "5")
    monkeypatch.setenv("UCM_LOG_MAX_FILES", "7")
    assert read_connector_settings(recording).record_limits == (5 << 20, 7)
    monkeypatch.setenv("UCM_LOG_MAX_FILES", "many")
    with pytest.raises(ConfigError, match="UCM_LOG_MAX_FILES"):
        read_connector_settings(recording)

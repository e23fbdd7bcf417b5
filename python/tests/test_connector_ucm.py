"""UCM configuration files are read unchanged: every key is applied, or refused with a reason."""

import textwrap
from pathlib import Path

import pytest
from cascadekv import Manifest, Namespace, Store, StoreConfig
from cascadekv.connectors.ucm import parse_ucm, read_ucm, trace_limits
from cascadekv.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "testdata" / "ucm").glob("*.yaml"))
GIB = 1 << 30


def document(top=None, **config):
    base = {"store_pipeline": "Cache|Posix", "storage_backends": "/mnt/test"}
    entry = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": {**base, **config}}
    return {"ucm_connectors": [entry], **(top or {})}


def parse(top=None, *, memory=64 * GIB, space=900 * GIB, **config):
    return parse_ucm(
        document(top, **config), memory_bytes=lambda: memory, available_bytes=lambda _: space
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_documents_examples_load_and_every_key_is_read(example):
    yaml = pytest.importorskip("yaml")
    settings = read_ucm(example)

    def keys(value, prefix=""):
        if isinstance(value, list):
            return [
                key for n, item in enumerate(value) for key in keys(item, f"{prefix[:-1]}[{n}].")
            ]
        if not isinstance(value, dict):
            return []
        return [
            key
            for name, item in value.items()
            for key in [prefix + name, *keys(item, f"{prefix}{name}.")]
        ]

    there = keys(yaml.safe_load(example.read_text()))
    assert sorted(settings.consumed) == sorted(there)
    assert settings.options["cascade.pipeline"] == "Cache|Posix"
    assert settings.options["cascade.files"] == "/mnt/test"


def test_all_examples_exist():
    assert [path.stem for path in EXAMPLES] == ["every-option", "layerwise", "minimal"]


def test_every_option_of_the_document_has_its_effect():
    pytest.importorskip("yaml")
    settings = read_ucm(EXAMPLES[0])
    assert settings.options == {
        "cascade.pipeline": "Cache|Posix",
        "cascade.dram": 2 * GIB,
        "cascade.files": "/mnt/test",
        "cascade.files_capacity": 1024 * GIB,
        "cascade.direct_io": True,
        "cascade.io_engine": "auto",
        "cascade.timeout": 5.0,
    }
    assert settings.hit_ratio == 0.75
    assert settings.persist_token_threshold == 256
    assert (settings.use_lite, settings.enable_record_traces) == (True, True)
    assert (settings.use_layerwise, settings.enable_event_sync) == (False, False)
    assert (settings.waiting_queue_depth, settings.running_queue_depth) == (16, 32)
    assert any(note.startswith("posix_io_engine") for note in settings.notes)


def test_defaults_are_the_documented_ones():
    settings = parse(memory=2048 * GIB)
    assert settings.options["cascade.dram"] == 256 * GIB
    assert settings.options["cascade.timeout"] == 30.0
    assert settings.options["cascade.io_engine"] == "psync"
    assert settings.options["cascade.direct_io"] is False
    assert settings.use_layerwise
    assert settings.enable_event_sync
    assert settings.hit_ratio is None
    assert settings.persist_token_threshold == 0
    assert (settings.waiting_queue_depth, settings.running_queue_depth) == (8192, 524_288)


def test_a_smaller_host_gets_a_smaller_buffer_and_a_note():
    settings = parse(memory=64 * GIB)
    assert settings.options["cascade.dram"] == 16 * GIB
    assert any("cache_buffer_capacity_gb: set to 16.0" in note for note in settings.notes)


def test_unlimited_files_use_the_available_space():
    for given in ({}, {"posix_capacity_gb": 0}):
        settings = parse(space=900 * GIB, **given)
        assert settings.options["cascade.files_capacity"] == 900 * GIB
        assert any(note.startswith("posix_capacity_gb") for note in settings.notes)


def test_gpudirect_is_replaced_with_a_note():
    assert any(note.startswith("use_gdr") for note in parse(use_gdr=True).notes)
    assert not any(note.startswith("use_gdr") for note in parse(use_gdr=False).notes)


def test_a_metrics_file_must_exist(tmp_path):
    there = tmp_path / "metrics.yaml"
    there.write_text("log_interval: 5\n")
    settings = parse({"metrics_config_path": str(there)})
    assert settings.metrics_config_path == str(there)
    with pytest.raises(ConfigError, match=r"metrics_config_path.*is not a file"):
        parse({"metrics_config_path": str(tmp_path / "none.yaml")})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"store_pipeline": "Cache|Nfs"}, "store_pipeline.*Cache|Posix"),
        ({"store_pipeline": None}, "store_pipeline: is missing"),
        ({"storage_backends": None}, "storage_backends: is missing"),
        ({"storage_backends": "/a:/b"}, "storage_backends: '/a:/b' has 2 directories"),
        ({"storage_backends": ["/a", "/b"]}, "has 2 directories"),
        ({"storage_backends": 7}, "storage_backends: 7 is not a directory"),
        ({"storage_backends": ""}, "storage_backends: '' is not a directory"),
        ({"io_direct": "yes"}, "io_direct: 'yes' is neither true nor false"),
        ({"cache_buffer_capacity_gb": -1}, "cache_buffer_capacity_gb: -1"),
        ({"cache_buffer_capacity_gb": 0}, "cache_buffer_capacity_gb: 0 is too small"),
        ({"cache_buffer_capacity_gb": True}, "cache_buffer_capacity_gb: True is not a number"),
        ({"cache_buffer_capacity_gb": float("nan")}, "cache_buffer_capacity_gb: nan"),
        ({"posix_capacity_gb": 1e-9}, "posix_capacity_gb: 1e-09 is too small"),
        ({"posix_io_engine": "spdk"}, "posix_io_engine: 'spdk'.*psync, aio, uring"),
        ({"use_gdr": 1}, "use_gdr: 1 is neither"),
        ({"waiting_queue_depth": 0}, "waiting_queue_depth: 0 is not a whole number from 1"),
        ({"running_queue_depth": 1.5}, "running_queue_depth: 1.5 is not a whole number"),
        ({"timeout_ms": 0}, "timeout_ms: 0 is not a whole number"),
        ({"timeout_ms": 3_600_001}, "timeout_ms"),
        ({"io_directs": True}, "io_directs: no such setting; did you mean io_direct"),
        ({"use_lite": True}, "use_lite: belongs to the top level"),
    ],
)
def test_an_invalid_store_setting_is_refused_by_name(config, words):
    with pytest.raises(ConfigError, match=words):
        parse(**config)


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ({"hit_ratio": 1.1}, "hit_ratio: 1.1 is not a share"),
        ({"hit_ratio": -0.1}, "hit_ratio: -0.1"),
        ({"persist_token_threshold": -1}, "persist_token_threshold: -1"),
        ({"use_layerwise": "true"}, "use_layerwise: 'true'"),
        ({"enable_record_traces": 1}, "enable_record_traces: 1"),
        ({"enable_event_sync": 0}, "enable_event_sync: 0"),
        ({"use_lite": []}, "use_lite"),
        ({"use_litee": True}, "use_litee: no such setting; did you mean use_lite"),
        ({"timeout_ms": 5}, "timeout_ms: belongs to ucm_connectors"),
        ({"ucm_sparse_config": {}}, "ucm_sparse_config: sparse attention"),
        ({7: True}, "7 is not the name"),
        ({"ucm_connectors": []}, "expected a list with one store"),
        ({"ucm_connectors": [{}, {}]}, "2 stores"),
        ({"ucm_connectors": [{"ucm_connector_name": "UcmNfsStore"}]}, "UcmNfsStore.*write"),
        ({"ucm_connectors": [{"ucm_connector_name": "UcmPipelineStore"}]}, "config: is missing"),
    ],
)
def test_an_invalid_top_level_setting_is_refused_by_name(top, words):
    with pytest.raises(ConfigError, match=words):
        parse(top)


@pytest.mark.parametrize("text", ["", "[]", "7", "a: [", "use_lite: true\nuse_lite: false\n"])
def test_an_invalid_file_is_named(tmp_path, text):
    pytest.importorskip("yaml")
    path = tmp_path / "ucm.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ucm\.yaml: "):
        read_ucm(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ucm(tmp_path / "none.yaml")


def test_available_space_includes_existing_files(tmp_path):
    (tmp_path / "block").write_bytes(b"x" * 100_000)
    deep = tmp_path / "not" / "made" / "yet"
    for directory in (tmp_path, deep):
        settings = parse_ucm(document(storage_backends=str(directory)))
        assert settings.options["cascade.files_capacity"] > 0
    assert not deep.exists()


def test_without_pyyaml_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "ucm.yaml"
    path.write_text(textwrap.dedent("a: 1"))
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install PyYAML"):
        read_ucm(path)


def test_trace_limits_come_from_the_documented_variables():
    assert trace_limits({}) == (64 << 20, 3)
    assert trace_limits({"UCM_LOG_MAX_FILES": "7", "UCM_LOG_MAX_SIZE": "5"}) == (5 << 20, 7)
    for text in ("0", "-1", "x", "²", ""):
        with pytest.raises(ConfigError, match="UCM_LOG_MAX_SIZE"):
            trace_limits({"UCM_LOG_MAX_SIZE": text})


def test_a_store_opens_with_the_settings_of_the_file(tmp_path):
    settings = parse_ucm(
        document(
            storage_backends=str(tmp_path / "blocks"),
            cache_buffer_capacity_gb=1 / 64,
            posix_capacity_gb=1 / 16,
            io_direct=True,
            posix_io_engine="aio",
            timeout_ms=7000,
        )
    )
    options = {name.removeprefix("cascade."): value for name, value in settings.options.items()}
    config = StoreConfig.from_dict(options)
    assert (config.dram, config.files_capacity, config.timeout) == (GIB // 64, GIB // 16, 7.0)
    key = Namespace(Manifest({"layout": "test"})).key_of_id("a block")
    with Store(config) as store:
        assert store.put(key, [b"bytes"])[0].ok
        store.flush()
        assert store.locate(key)[0] == ["dram", "files"]

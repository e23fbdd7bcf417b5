"""Settings have documented defaults, are checked by name, and survive a conversion to JSON."""

import dataclasses
import json
from datetime import timedelta

import pytest
from cascadekv import ConfigError, PipelineError, Store, StoreConfig

MIB = 1 << 20


def test_defaults_are_the_documented_ones():
    assert StoreConfig().to_dict() == {
        "pipeline": "Dram",
        "dram": 256 * MIB,
        "dram_blocks": None,
        "huge_pages": True,
        "files": None,
        "files_capacity": 4096 * MIB,
        "segment_size": 256 * MIB,
        "direct_io": True,
        "io_engine": "auto",
        "durable": False,
        "policy": "prefix-cost",
        "digest": "off",
        "write": "back",
        "dirty_max": None,
        "mover_rate": None,
        "protected_share": 90,
        "admit_partial": False,
        "changes_max": 1 << 20,
        "timeout": 30.0,
    }


def test_sizes_durations_and_shares_are_accepted_in_every_form():
    for timeout in (2.5, "2.5s", "2500ms", timedelta(seconds=2.5)):
        assert StoreConfig(timeout=timeout).timeout == 2.5
    assert StoreConfig(timeout=3).timeout == 3.0
    assert StoreConfig(timeout="30").timeout == 30.0
    for size in (8 * MIB, "8MiB", "8388608", "8388608B"):
        assert StoreConfig(dram=size).dram == 8 * MIB
    for rate in (MIB, "1MiB", "1MiB/s"):
        assert StoreConfig(mover_rate=rate).mover_rate == MIB
    for share in (40, "40", "40%"):
        assert StoreConfig(protected_share=share).protected_share == 40


def test_a_file_instead_of_a_directory_is_refused(tmp_path):
    path = tmp_path / "passwd"
    path.write_text("root")
    with pytest.raises(ConfigError, match=f"files: {path} is not a directory"):
        Store(files=path)


def test_stages_for_tests_are_not_listed_in_errors():
    with pytest.raises(PipelineError) as caught:
        Store(pipeline="Dram|Tape")
    assert "files" in str(caught.value)
    assert "fake" not in str(caught.value)
    assert "empty" not in str(caught.value)


def test_a_files_directory_adds_a_tier_to_the_pipeline(tmp_path):
    assert StoreConfig(files=tmp_path).pipeline == "Dram|Files"
    assert StoreConfig(files=tmp_path, pipeline="Files").pipeline == "Files"


def test_a_dumped_configuration_reads_back(tmp_path):
    config = StoreConfig(dram="64MB", files=tmp_path, digest="blake3", timeout=1.5)
    assert config.dram == 64_000_000
    assert StoreConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_store_returns_its_configuration():
    config = StoreConfig(dram="8MiB", policy="lru")
    with Store(config) as store:
        assert store.config == config
    with Store(dram="8MiB", policy="lru") as store:
        assert store.config == config
    with pytest.raises(TypeError, match="not both"):
        Store(config, dram="8MiB")
    with pytest.raises(TypeError, match=r"config: <dict> is not a StoreConfig; .*\*\*settings"):
        Store({"dram": "8MiB"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dramm": "8MiB"}, "dramm: no such setting; did you mean dram?"),
        ({"zzz": 1}, "zzz: no such setting; known are pipeline, dram"),
        ({"dram": "8 buckets"}, "dram: .*buckets"),
        ({"dram": "1MiB"}, "dram: .*4 MiB"),
        ({"dram": -1}, "dram: -1 is not a size: .*512MiB"),
        ({"dram": None}, "dram: None is not a size: .*512MiB"),
        ({"dram": 1.5}, "dram: 1.5 is not a size"),
        ({"dram": True}, "dram: True is not a size"),
        ({"dram": 1 << 70}, "dram: 1180591620717411303424 is not a size"),
        ({"files": 5}, "files: 5 is not a path"),
        ({"files": ""}, 'files: "" is not a path'),
        ({"huge_pages": "yes"}, 'huge_pages: "yes" is not True or False'),
        ({"dram_blocks": 0}, "dram_blocks"),
        ({"policy": "random"}, "policy: .*prefix-cost, lru, s3fifo, arc, waterfall"),
        ({"digest": "md5"}, "digest: .*off, blake3, sha256"),
        ({"write": "never"}, "write: .*back, through"),
        ({"protected_share": 101}, "protected_share"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "soon"}, 'timeout: "soon" is not a duration.*5s'),
        ({"timeout": None}, "timeout: None is not a duration"),
        ({"mover_rate": 0}, "mover_rate"),
        ({"files": "/nonexistent", "io_engine": "magic"}, "io_engine: .*auto, uring, psync"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        StoreConfig.from_dict(settings)
    with pytest.raises(ConfigError, match=message):
        Store(**settings)


@pytest.mark.parametrize("pipeline", ["", "Dram|Tape", "Dram|Dram", "Files|Dram|Files"])
def test_an_invalid_pipeline_is_refused(tmp_path, pipeline):
    with pytest.raises(PipelineError, match="pipeline"):
        Store(pipeline=pipeline, files=tmp_path)


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ConfigError, match="timeout"):
        dataclasses.replace(StoreConfig(), timeout=-1)

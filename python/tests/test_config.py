"""Settings have documented defaults, are checked by name, and can be dumped and read back."""

import dataclasses
import json

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
        "files_layout": "segments",
        "segment_size": 256 * MIB,
        "direct": True,
        "engine": "auto",
        "durable": False,
        "policy": "prefix-cost",
        "digest": "off",
        "write": "back",
        "dirty_bytes_max": None,
        "mover_bytes_per_second": None,
        "protected_percent": 90,
        "admit_partial": False,
        "changes_max": 1 << 20,
        "timeout": 30.0,
    }


def test_files_extend_the_pipeline(tmp_path):
    assert StoreConfig(files=tmp_path).pipeline == "Dram|Files"
    assert StoreConfig(files=tmp_path, pipeline="Files").pipeline == "Files"


def test_a_dumped_configuration_reads_back(tmp_path):
    config = StoreConfig(dram="64MB", files=tmp_path, digest="blake3", timeout=1.5)
    assert config.dram == 64_000_000
    assert StoreConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_store_says_what_it_runs_with():
    config = StoreConfig(dram="8MiB", policy="lru")
    with Store(config) as store:
        assert store.config == config
    with Store(dram="8MiB", policy="lru") as store:
        assert store.config == config
    with pytest.raises(TypeError, match="not both"):
        Store(config, dram="8MiB")
    with pytest.raises(TypeError, match="StoreConfig"):
        Store({"dram": "8MiB"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dramm": "8MiB"}, "dramm: no such setting; did you mean dram?"),
        ({"zzz": 1}, "zzz: no such setting; known are pipeline, dram"),
        ({"dram": "8 buckets"}, "dram: .*buckets"),
        ({"dram": "1MiB"}, "dram: .*4 MiB"),
        ({"dram": -1}, "dram"),
        ({"dram": None}, "dram"),
        ({"dram_blocks": 0}, "dram_blocks"),
        ({"policy": "random"}, "policy: .*prefix-cost, lru, s3fifo, arc, waterfall"),
        ({"digest": "md5"}, "digest: .*off, blake3, sha256"),
        ({"write": "never"}, "write: .*back, through"),
        ({"protected_percent": 101}, "protected_percent"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"mover_bytes_per_second": 0}, "mover_bytes_per_second"),
        ({"files": "/nonexistent", "engine": "magic"}, "engine: .*auto, uring, psync"),
        ({"files": "/nonexistent", "files_layout": "heap"}, "files_layout: .*segments"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        StoreConfig.from_dict(settings)
    with pytest.raises(ConfigError, match=message):
        Store(**settings)


@pytest.mark.parametrize("pipeline", ["", "Dram|Tape", "Dram|Dram", "Files|Dram|Files"])
def test_a_pipeline_that_makes_no_sense_names_itself(tmp_path, pipeline):
    with pytest.raises(PipelineError, match="pipeline"):
        Store(pipeline=pipeline, files=tmp_path)


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ConfigError, match="timeout"):
        dataclasses.replace(StoreConfig(), timeout=-1)

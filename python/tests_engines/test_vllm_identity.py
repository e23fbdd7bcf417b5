"""The manifest of a real vLLM configuration: everything that changes KV changes every key."""

import itertools
import json

import pytest
import small_llama
import torch
from cascadekv import Manifest, Namespace
from cascadekv.connectors.vllm.identity import manifest_of
from cascadekv.connectors.vllm.keys import RequestKeys
from safetensors.torch import save
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

MODEL = small_llama.LLAMA
COMMON = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


@pytest.fixture(scope="module")
def fields_of(tmp_path_factory):
    """Return a function that creates the manifest of an engine with changed settings."""
    numbers = itertools.count()

    def make(*, layout="LBHNC", weights=1.0, spec=FullAttentionSpec, pieces=1, **changes):
        settings = {name: changes.pop(name) for name in list(changes) if name in MODEL}
        home = tmp_path_factory.mktemp(f"model-{next(numbers)}")
        (home / "config.json").write_text(json.dumps(MODEL | settings))
        content = save({"weight": torch.full((4, 4), weights)})
        (home / "model.safetensors").write_bytes(content)
        given = {"dtype": "float32", "max_model_len": 1024, "block_size": 32} | changes
        arguments = EngineArgs(model=str(home), skip_tokenizer_init=True, **given)
        config = arguments.create_engine_config()
        own = {"sliding_window": 64} if spec is SlidingWindowSpec else {}
        group = KVCacheGroupSpec(["layer 0"], spec(block_size=32, **own, **COMMON))
        cache = KVCacheConfig(8, [], [group], kv_cache_layout=layout)
        return manifest_of(config, cache, "sampled", pieces)

    return make


CHANGES = {
    "weights": {"weights": 2.0},
    "dtype": {"dtype": "bfloat16"},
    "block size": {"block_size": 64},
    "layout": {"layout": "BLHNC"},
    "pieces": {"pieces": 2},
    "groups": {"spec": SlidingWindowSpec},
    "layers": {"num_hidden_layers": 3},
    "heads": {"num_key_value_heads": 4},
    "rope": {"rope_theta": 500000.0},
    "overrides": {"hf_overrides": {"rms_norm_eps": 0.1}},
}


def keys_under(fields):
    keys = RequestKeys(Namespace(Manifest(fields), b"secret"), ["part"], 16, {})
    keys.extend(range(64))
    return set(map(bytes, keys.keys("part", 0, 4)))


def test_every_change_of_kv_changes_every_key(fields_of):
    plain = fields_of()
    # The path and the time of reading have no effect.
    assert fields_of() == plain
    assert not Manifest(plain).missing()
    for name, change in CHANGES.items():
        changed = fields_of(**change)
        assert changed != plain, name
        assert not keys_under(changed) & keys_under(plain), name


def test_every_field_changes_every_key(fields_of):
    plain = fields_of()
    for name in plain:
        assert not keys_under(plain) & keys_under(plain | {name: plain[name] + "x"}), name


def test_settings_without_effect_on_kv_are_no_fields(fields_of):
    for change in ({"max_num_seqs": 3}, {"max_model_len": 512}, {"seed": 7}):
        assert fields_of(**change) == fields_of(), change

"""KV of different LoRA adapters is separated: real adapters in a real engine."""

import json

import pytest
import torch
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK
from safetensors.torch import save_file

pytest_plugins = ["forked_engines"]

STORE = {
    "cascade.dram": "64MiB",
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
LAYERS, HIDDEN, QUERIES, VALUES, RANK = 4, 256, 256, 128, 8
"""The shape of the smallest model, and the adapters' rank."""


def write_adapter(directory, seed):
    """Write an adapter of queries and values as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, width in (("q_proj", QUERIES), ("v_proj", VALUES)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) / 4
            weights[f"{name}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) / 4
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="module")
def bare(start):
    engine = start(**LORA)
    yield engine
    engine.close()


def test_blocks_of_an_adapter_are_hit_by_equal_weights_only(start, bare, tmp_path):
    one = ("one", 1, write_adapter(tmp_path / "one", 1))
    other = ("other", 2, write_adapter(tmp_path / "other", 2))
    # The same weights under another name and path, as in another engine.
    copy = ("copy", 3, write_adapter(tmp_path / "copy", 1))
    request = prompt(3 * BLOCK + 20, "adapters")
    right = {each: bare.run([request], 8, adapter=each)[0].tokens for each in (None, one, other)}
    assert len(set(right.values())) == len(right), "the adapters have no effect"
    right[copy] = right[one]
    engine = start(STORE, **LORA)
    due = [
        (one, 0),
        (other, 0),
        (None, 0),
        (one, 3 * BLOCK),
        (None, 3 * BLOCK),
        (copy, 3 * BLOCK),
        (other, 3 * BLOCK),
    ]
    for adapter, hit in due:
        answer = engine.run([request], 8, adapter=adapter)[0]
        assert (answer.tokens, answer.cached) == (right[adapter], hit), adapter
    engine.close()


def test_a_retrained_adapter_misses_its_old_blocks(start, bare, tmp_path):
    directory = tmp_path / "trained"
    request = prompt(2 * BLOCK + 20, "trained")
    engine = start(STORE, **LORA)
    for number, seed in enumerate((1, 2), 1):
        adapter = (f"trained-{number}", number, write_adapter(directory, seed))
        right = bare.run([request], 8, adapter=adapter)[0].tokens
        for hit in (0, 2 * BLOCK):
            answer = engine.run([request], 8, adapter=adapter)[0]
            assert (answer.tokens, answer.cached) == (right, hit), adapter
    engine.close()

"""KV of different LoRA adapters is separated: real adapters in a real engine."""

import json

import engine_calls
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
        # What an adapter's files have loaded is known after its first step.
        (copy, 0),
        (copy, 3 * BLOCK),
        # Dropped for the copy, and loaded again.
        (other, 0),
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


def test_replaced_files_do_not_change_the_keys_of_the_loaded_weights(start, bare, tmp_path):
    """The fingerprint was that of the files at each request, not of what vLLM had loaded.

    KV of the old weights got the key of the new ones, and the reloaded adapter used it.
    """
    directory = tmp_path / "replaced"
    right = {}
    request, other = (prompt(3 * BLOCK + 20, name) for name in ("replaced", "loads"))
    for seed in (1, 2):
        known = (f"right-{seed}", 10 + seed, write_adapter(tmp_path / f"right-{seed}", seed))
        right[seed] = bare.run([request], 8, adapter=known)[0].tokens
    engine = start(STORE, **LORA)
    adapter = ("replaced", 3, write_adapter(directory, 1))
    engine.run([other], 8, adapter=adapter)
    write_adapter(directory, 2)
    for hit in (0, 3 * BLOCK):
        answer = engine.run([request], 8, adapter=adapter)[0]
        assert (answer.tokens, answer.cached) == (right[1], hit)
    engine.call(engine_calls.load_adapter, adapter)
    for hit in (0, 3 * BLOCK):
        answer = engine.run([request], 8, adapter=adapter)[0]
        assert (answer.tokens, answer.cached) == (right[2], hit)
    # The first weights again, under another name and from another directory.
    again = ("again", 4, write_adapter(tmp_path / "again", 1))
    engine.call(engine_calls.load_adapter, again)
    answer = engine.run([request], 8, adapter=again)[0]
    assert (answer.tokens, answer.cached) == (right[1], 3 * BLOCK), "loaded before the request"
    engine.close()


def test_an_adapter_that_is_replaced_while_a_prompt_is_computed_is_not_stored(
    start, bare, tmp_path
):
    # Longer than a step, so that the first blocks are of other weights than the last ones.
    request = prompt(6 * BLOCK + 20, "in the middle")
    known = ("right", 21, write_adapter(tmp_path / "right", 2))
    right = bare.run([request], 8, adapter=known)[0].tokens
    directory = tmp_path / "swapped"
    engine = start(STORE, **LORA)
    adapter = ("swapped", 5, write_adapter(directory, 1))
    engine.run([prompt(BLOCK + 20, "loads it")], 8, adapter=adapter)
    write_adapter(directory, 2)
    engine.call(engine_calls.reload_while_computing, request, adapter)
    for hit in (0, 6 * BLOCK):
        answer = engine.run([request], 8, adapter=adapter)[0]
        assert (answer.tokens, answer.cached) == (right, hit)
    engine.close()


def test_the_engines_own_cache_of_replaced_weights_is_not_stored(start, bare, tmp_path):
    """The prefix cache knows an adapter by name and path, so it returns blocks of old weights.

    The answer is vLLM's, but such blocks must not get the key of the new weights.
    """
    request = prompt(3 * BLOCK + 20, "own cache")
    known = ("right", 22, write_adapter(tmp_path / "right", 2))
    right = bare.run([request], 8, adapter=known)[0].tokens
    directory = tmp_path / "cached"
    engine = start(STORE, enable_prefix_caching=True, **LORA)
    adapter = ("cached", 6, write_adapter(directory, 1))
    for _ in range(2):
        engine.run([request], 8, adapter=adapter)
    write_adapter(directory, 2)
    engine.call(engine_calls.load_adapter, adapter)
    engine.run([request], 8, adapter=adapter)
    other = ("other name", 7, write_adapter(tmp_path / "copy", 2))
    engine.call(engine_calls.load_adapter, other)
    answer = engine.run([request], 8, adapter=other)[0]
    assert (answer.tokens, answer.cached) == (right, 0)
    engine.close()

"""Engines with a sliding window: log probabilities are those of an engine that computes everything.

Attention of the model is sharp, so that one token that is missing in a window shows. Regression:
log probabilities were off by up to 6.5 where the token `window - 1` before a prompt's last one is
the last one of its block, because the page of that token was neither loaded nor read.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import engine_calls
import pytest
import torch
import transformers
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK, Engine, engines
from vllm_compat import needs_groups

pytestmark = needs_groups

CLOSE = 1e-3
SETTINGS = {
    "cascade.dram": "64MiB",
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
    "cascade.transfer": "direct",
}
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LAYERS = {
    "hybrid": ["sliding_attention", "full_attention"],
    "windows only": ["sliding_attention", "sliding_attention"],
}
CASES = {
    # The last of a window's tokens in another block ends this block: `(n - window + 1) % 128 == 0`.
    ("hybrid", BLOCK + 1): (2 * BLOCK, 3 * BLOCK),
    ("hybrid", 200): (2 * BLOCK + 71, 2 * BLOCK + 72),
    ("windows only", BLOCK + 1): (2 * BLOCK,),
}


def make_windowed_model(directory: Path, layers: list[str], window: int) -> Path:
    """Save a small model with sharp attention, whose layers are of these types."""
    config = transformers.Gemma3TextConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        sliding_window=window,
        layer_types=layers,
        query_pre_attn_scalar=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    model = transformers.Gemma3ForCausalLM(config).float()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            sharpness = 2 if "q_proj" in name or "k_proj" in name else 1
            scale = 1.0 if "embed" in name else sharpness * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=chance) * scale)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]} tokens")
def case(request, tmp_path) -> Iterator[tuple[Callable[..., Engine], tuple[int, ...]]]:
    """Return a starter of engines on a model with a window, and the lengths of prompts to ask."""
    kind, window = request.param
    model = make_windowed_model(tmp_path / "model", LAYERS[kind], window)
    with engines(model) as start:
        yield start, CASES[request.param]


def difference(right, got):
    """Return the largest difference of two lists of log probabilities."""
    return max(abs(right[token] - got.get(token, -99.0)) for token in list(right)[:10])


def test_a_window_is_complete_wherever_its_pages_come_from(case):
    start, lengths = case
    alone, source, target = start(None), start(SETTINGS), start(SETTINGS)
    host, _, port = source.call(engine_calls.transfer_address).rpartition(":")
    place = {"remote_host": host, "remote_port": int(port), "tp_size": 1}

    def ask(engine, asked, params=None):
        """Return how many tokens were not computed, and the response's parameters."""
        right, _, _ = alone.call(engine_calls.log_probabilities, asked)
        got, cached, offer = engine.call(engine_calls.log_probabilities, asked, params)
        assert difference(right, got) < CLOSE, (len(asked), cached, params)
        return cached, offer

    for tokens in lengths:
        asked = prompt(tokens, "pulled")
        _, offer = ask(source, asked, TO_PREFILL)
        # With it, vLLM reports what the prefill engine did not compute.
        offer.pop("remote_prefill_cached_tokens", None)
        assert ask(target, asked, offer)[0] == tokens - 1
        stored = min(tokens // BLOCK * BLOCK, tokens - 1)
        assert ask(source, asked)[0] == stored
        # A shorter prefix than the prompt may need pages that the decode engine has not read.
        assert ask(target, asked)[0] == stored or tokens % BLOCK
        # The prefill engine writes after it has computed another prompt.
        asked, named = prompt(tokens, "pushed"), {"transfer_id": f"push of {tokens}"}
        ask(source, asked, {**TO_PREFILL, **named})
        ask(source, prompt(3 * BLOCK, "others", tokens))
        assert ask(target, asked, {"do_remote_prefill": True, **place, **named})[0] == tokens - 1
    assert source.call(engine_calls.pushes)[0] == len(lengths)
    assert target.call(engine_calls.reads_from_prefill_engines) == len(lengths)

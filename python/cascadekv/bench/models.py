"""Generates small language models, so that tests and measurements download nothing.

A model is a Llama with random weights and a byte-level BPE tokenizer trained on generated words.
The same size, dtype and seed give the same weights with the same versions of torch and
transformers.

The weights differ from the usual initialization. With its small deviation, the next token would
depend on the last token only, and wrong KV would go unnoticed. Queries and keys are scaled up, so
that attention is sharp. Other weights are scaled by fan-in, so that attention reaches the output.
As a result, one wrong cached block changes the generated tokens.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Not installed where types are checked.
    torch: Any
    tokenizers: Any
    transformers: Any
else:
    import tokenizers
    import torch
    import transformers

__all__ = ["DTYPES", "FACTS_FILE", "SIZES", "Size", "make_model"]

FACTS_FILE = "cascade_model.json"
"""The file in a model's directory with the parameters of its generation."""
DTYPES = ("float32", "bfloat16")
"""Types of weights and KV."""
POSITIONS = 32768
"""Context length."""
BOS, EOS = "<s>", "</s>"
CORPUS_LINES = 4000
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RECIPE = 1
"""Version of the generation; increase it when the same size and seed give another model."""


@dataclass(frozen=True)
class Size:
    """The shape of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    vocabulary: int = 1024


SIZES: dict[str, Size] = {
    "tiny": Size(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=640),
    "22m": Size(hidden=512, layers=8, heads=8, kv_heads=2, intermediate=1280),
    "91m": Size(hidden=1024, layers=8, heads=16, kv_heads=4, intermediate=2752),
}
"""Models with 3, 22 and 91 million parameters: the first for tests, the others for measurements."""


def make_model(root: Path, size: str, dtype: str = "float32", *, seed: int = 0) -> Path:
    """Return the directory of a model below `root`; generates the model if it does not exist.

    Safe for concurrent processes: the directory appears atomically. Raises `KeyError` for an
    unknown size or dtype, and `OSError` if the directory cannot be written.
    """
    recipe: dict[str, object] = {
        "recipe": RECIPE,
        "size": size,
        "dtype": dtype,
        "seed": seed,
        "positions": POSITIONS,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "tokenizers": version("tokenizers"),
        **asdict(SIZES[size]),
    }
    if dtype not in DTYPES:
        raise KeyError(dtype)
    canonical = json.dumps(recipe, sort_keys=True).encode()
    directory = root / f"{size}-{dtype}-{hashlib.sha256(canonical).hexdigest()[:12]}"
    if not (directory / FACTS_FILE).exists():
        root.mkdir(parents=True, exist_ok=True)
        _write(directory, recipe)
    return directory


def _write(directory: Path, recipe: dict[str, object]) -> None:
    """Write the model to a temporary directory and rename that."""
    size, dtype, seed = str(recipe["size"]), str(recipe["dtype"]), int(str(recipe["seed"]))
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        model = _draw(SIZES[size], getattr(torch, dtype), seed)
        model.save_pretrained(scratch)
        _train_tokenizer(SIZES[size].vocabulary, seed).save_pretrained(scratch)
        weights = (scratch / "model.safetensors").read_bytes()
        facts = recipe | {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "sha256": hashlib.sha256(weights).hexdigest(),
        }
        (scratch / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        try:
            scratch.rename(directory)
        except OSError:
            if not (directory / FACTS_FILE).exists():
                raise  # otherwise another process has created the same model meanwhile
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _draw(size: Size, dtype: object, seed: int) -> Any:  # noqa: ANN401 # a model of transformers
    """Generate the weights from `seed`, in float32, in the order of their names."""
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.intermediate,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype=dtype,
    )
    model = transformers.LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            deviation = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            if "q_proj" in name or "k_proj" in name:
                deviation *= 2.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    return model.to(dtype)


def _train_tokenizer(entries: int, seed: int) -> Any:  # noqa: ANN401 # a tokenizer of transformers
    """Train a byte-level BPE tokenizer with exactly that many entries."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[BOS, EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer=trainer)
    if tokenizer.get_vocab_size() != entries:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} entries, not {entries}")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _corpus(seed: int) -> Iterator[str]:
    """Generate lines of words to train a small tokenizer on."""
    chance = random.Random(seed)  # noqa: S311 # no secret
    vowels = ("a", "e", "i", "o", "u", "ar", "en")
    syllables = [consonant + vowel for consonant in "bcdfghklmnprstvwz" for vowel in vowels]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(1200)]
    for _ in range(CORPUS_LINES):
        line = chance.choices(words, k=chance.randint(6, 14))
        yield " ".join(line).capitalize() + "."


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate a model and print its directory, for scripts and examples."""
    parser = argparse.ArgumentParser(prog="python -m cascadekv.bench.models", description=__doc__)
    parser.add_argument("root", type=Path, help="directory for models")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    directory = make_model(args.root, args.size, args.dtype, seed=args.seed)
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

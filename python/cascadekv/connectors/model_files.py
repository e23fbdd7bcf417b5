"""The files of a model's directory beside its weights: which of them change KV.

Every file counts by its content unless it is known to have no effect on the KV of given tokens.
"""

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["NO_EFFECT", "is_for_media", "model_files_digest"]

NO_EFFECT = {
    # Weights and what the engine reads as the model's settings.
    "config.json": "read by the engine, and part of the fingerprint of the weights",
    "*.safetensors": "weights",
    "*.bin": "weights",
    "*.pt": "weights",
    "*.pth": "weights",
    "*.gguf": "weights",
    "*.npz": "weights",
    "*.onnx*": "weights for other programs",
    "*.msgpack": "weights for other programs",
    "*.h5": "weights for other programs",
    "*.index.json": "where the files of weights have which tensor",
    # What chooses tokens.
    "generation_config.json": "defaults for sampling",
    "chat_template*": "makes a prompt, whose tokens are in the keys",
    "*.jinja": "makes a prompt, whose tokens are in the keys",
    # What people and training read.
    ".*": "of git and of the hub",
    "README*": "text",
    "LICENSE*": "text",
    "NOTICE*": "text",
    "*.md": "text",
    "*.pdf": "text",
    "*.png": "pictures",
    "*.jpg": "pictures",
    "*.jpeg": "pictures",
    "*.gif": "pictures",
    "*.svg": "pictures",
    "*.webp": "pictures",
    "trainer_state.json": "of training",
    "*results.json": "of training",
    "*.log": "of training",
}
"""Files without effect, and why."""
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "tekken.json",
)
"""Files of a tokenizer. Keys are made of token ids, so how a text becomes tokens has no effect.

They count for models with images and audio: processors use them, and Mistral keeps the settings of
its processor in them.
"""
MEDIA = ("*processor_config.json", "feature_extractor*", "tekken.json")
"""Files that a model for images or audio has."""
LARGE_BYTES = 64 << 20
"""Larger files are identified by their size and their first bytes."""
JSON_BYTES = 1 << 20
"""The formatting of JSON files up to this size does not count."""


def is_for_media(place: Path) -> bool:
    """Whether a directory has a model for images or audio."""
    return any(_matches(file.name, MEDIA) for file in place.iterdir() if file.is_file())


def model_files_digest(place: Path, *, has_media: bool, runs_code: bool) -> str:
    """Return a digest of the files that change KV, equal for equal files in any directory.

    `has_media`: the model takes images or audio. `runs_code`: the engine runs the model's own code
    (`trust_remote_code`).
    """
    digest = hashlib.sha256()
    for name, content in _counted(place, has_media=has_media, runs_code=runs_code):
        digest.update(hashlib.sha256(name.encode()).digest())
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]


def _counted(place: Path, *, has_media: bool, runs_code: bool) -> Iterator[tuple[str, bytes]]:
    for file in sorted(place.iterdir()):
        if not file.is_file() or _matches(file.name, NO_EFFECT):
            continue
        if _matches(file.name, TOKENIZER) and not has_media:
            continue
        # An engine without `trust_remote_code` does not run it.
        if file.suffix == ".py" and not runs_code:
            continue
        yield file.name, _content(file)
    if not has_media and not runs_code:
        return
    # A model's code may be a package, and a processor may have a directory of its own.
    for file in sorted(place.glob("*/**/*")):
        inner = file.relative_to(place)
        is_hidden = any(part.startswith((".", "__")) for part in inner.parts)
        if is_hidden or not file.is_file():
            continue
        if (file.suffix == ".py" and runs_code) or (
            file.suffix == ".json" and has_media and not _matches(file.name, NO_EFFECT)
        ):
            yield inner.as_posix(), _content(file)


def _content(file: Path) -> bytes:
    size = file.stat().st_size
    if size > LARGE_BYTES:
        with file.open("rb") as opened:
            return size.to_bytes(8, "little") + opened.read(JSON_BYTES)
    content = file.read_bytes()
    if file.suffix == ".json" and size <= JSON_BYTES:
        try:
            return json.dumps(json.loads(content), sort_keys=True).encode()
        except ValueError:
            pass
    return content


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

"""Fingerprints of a model's weights: by content, independent of path and served name."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cascadekv._native import weights_fingerprint

__all__ = ["fingerprint_of_model"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SETTINGS = ("config.json", "hf_quant_config.json", "quantize_config.json")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of files in a hub cache: the hash of their content."""
SAMPLES = 64
"""Number of samples of a large file."""
SAMPLE_BYTES = 4096
"""Size of a sample. A file no larger than all samples together is read completely."""


def fingerprint_of_model(path: str | os.PathLike[str], *, is_full: bool = False) -> str | None:
    """Return a fingerprint of the weights at a path; `None` if there are none.

    For files of a hub cache, the hash in their name is used. Of any other file, the size and evenly
    spaced samples are read, 256 KiB in total, because training changes weights everywhere.
    `is_full` reads every byte. Settings next to the weights (`config.json`) are included.
    """
    place = Path(path)
    if place.is_file():
        return weights_fingerprint(*_parts(place, is_full=is_full))
    if not place.is_dir():
        return None
    files = sorted(entry for entry in place.iterdir() if entry.suffix in _WEIGHTS)
    if not files:
        return None
    settings = [place / name for name in _SETTINGS if (place / name).is_file()]
    parts = [part for file in files for part in _parts(file, is_full=is_full)]
    return weights_fingerprint(*parts, *(_settings(file) for file in settings))


def _parts(file: Path, *, is_full: bool) -> Iterator[bytes]:
    yield file.name.encode()
    if file.is_symlink() and _BLOB.fullmatch(file.readlink().name):
        yield file.readlink().name.encode()
        return
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        yield size.to_bytes(8, "little")
        if is_full:
            yield hashlib.file_digest(opened, "sha256").digest()
            return
        if size <= SAMPLES * SAMPLE_BYTES:
            yield opened.read()
            return
        for sample in range(SAMPLES):
            opened.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)


def _settings(file: Path) -> bytes:
    """Return the settings in a canonical form, so that formatting does not count."""
    content = file.read_bytes()
    try:
        return json.dumps(json.loads(content), sort_keys=True).encode()
    except ValueError:
        return content

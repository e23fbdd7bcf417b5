"""What names a model's weights: their content, whatever the path and the served name."""

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
"""How a hub's cache names a file by its content."""
SAMPLES = 64
"""Places of a large file that are read."""
SAMPLE_BYTES = 4096
"""Bytes read at each place; a file of no more than all of them is read whole."""


def fingerprint_of_model(path: str | os.PathLike[str]) -> str | None:
    """Name the weights at a path by content; `None` where there are none to read.

    Files in a hub's cache are named by their hash there, and that is taken. Of any other file the
    size, the head and evenly spaced samples are read, a quarter of a megabyte at most: different
    training changes weights everywhere. The settings beside them (`config.json`) belong to it.
    """
    place = Path(path)
    if place.is_file():
        return weights_fingerprint(*_parts(place))
    if not place.is_dir():
        return None
    files = sorted(entry for entry in place.iterdir() if entry.suffix in _WEIGHTS)
    if not files:
        return None
    settings = [place / name for name in _SETTINGS if (place / name).is_file()]
    parts = [part for file in files for part in _parts(file)]
    return weights_fingerprint(*parts, *(_settings(file) for file in settings))


def _parts(file: Path) -> Iterator[bytes]:
    yield file.name.encode()
    if file.is_symlink() and _BLOB.fullmatch(file.readlink().name):
        yield file.readlink().name.encode()
        return
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        yield size.to_bytes(8, "little")
        if size <= SAMPLES * SAMPLE_BYTES:
            yield opened.read()
            return
        for sample in range(SAMPLES):
            opened.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)


def _settings(file: Path) -> bytes:
    """Give the settings in one spelling, so that a reformatted file counts as the same."""
    content = file.read_bytes()
    try:
        return json.dumps(json.loads(content), sort_keys=True).encode()
    except ValueError:
        return content

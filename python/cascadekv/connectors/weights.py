"""Fingerprints of a model's weights: by content, independent of path and served name."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from cascadekv._native import weights_fingerprint

__all__ = ["NotDigestedError", "fingerprint_of_model"]

DigestOf = Callable[[Path], bytes]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SETTINGS = ("config.json", "hf_quant_config.json", "quantize_config.json")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of files in a hub cache: the hash of their content."""
SAMPLES = 64
"""Number of samples of a large file."""
SAMPLE_BYTES = 4096
"""Size of a sample. A file no larger than all samples together is read completely."""


class NotDigestedError(Exception):
    """The digest of a file is not known."""


def fingerprint_of_model(
    path: str | os.PathLike[str], *, is_full: bool = False, digest_of: DigestOf | None = None
) -> str | None:
    """Return a fingerprint of the weights at a path; `None` if there are none.

    For files of a hub cache, the hash in their name is used. Of any other file, the size and evenly
    spaced samples are read, 256 KiB in total: training changes weights everywhere, but an edit of a
    few tensors is not seen.
    `is_full` reads every byte; `digest_of` returns the SHA-256 of a file, and its exceptions are
    raised. Settings next to the weights (`config.json`) are included.
    """
    place = Path(path)
    digest_of = _sha256 if is_full else digest_of
    if place.is_file():
        return weights_fingerprint(*_parts(place, digest_of))
    if not place.is_dir():
        return None
    files = sorted(entry for entry in place.iterdir() if entry.suffix in _WEIGHTS)
    if not files:
        return None
    settings = [place / name for name in _SETTINGS if (place / name).is_file()]
    parts = [part for file in files for part in _parts(file, digest_of)]
    return weights_fingerprint(*parts, *(_settings(file) for file in settings))


def _parts(file: Path, digest_of: DigestOf | None) -> Iterator[bytes]:
    yield file.name.encode()
    if file.is_symlink() and _BLOB.fullmatch(file.readlink().name):
        yield file.readlink().name.encode()
        return
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        yield size.to_bytes(8, "little")
        if digest_of is not None:
            yield digest_of(file)
            return
        if size <= SAMPLES * SAMPLE_BYTES:
            yield opened.read()
            return
        for sample in range(SAMPLES):
            opened.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)


def _sha256(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _settings(file: Path) -> bytes:
    """Return the settings in a canonical form, so that formatting does not count."""
    content = file.read_bytes()
    try:
        return json.dumps(json.loads(content), sort_keys=True).encode()
    except ValueError:
        return content

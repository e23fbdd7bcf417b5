"""The canonical text of settings: equal ones have equal text in every process and on every host.

Values without a stable text, such as functions, are refused: their address differs between
processes, and their name says nothing about what they do.
"""

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["NoCanonicalTextError", "canonical_text", "shown", "text_digest"]

SHOWN_CHARACTERS = 200
"""Longer texts are shown as digests."""


class NoCanonicalTextError(ValueError):
    """A value has no text that is equal in every process, with its type."""


def canonical_text(value: object, *, is_strict: bool = True) -> str:
    """Return the canonical text of a value.

    Raises `NoCanonicalTextError` for a value without one, unless `is_strict` is false: then the
    value's type stands for it.
    """
    return json.dumps(_plain(value, is_strict=is_strict), sort_keys=True, separators=(",", ":"))


def text_digest(text: str) -> str:
    """Return a short digest of a text, as it is used in manifests."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def shown(value: object, *, is_strict: bool = True) -> str:
    """Return a value as a manifest shows it: its text, or the digest of a long text.

    Mappings are shown as digests, too, because they may contain credentials.
    """
    text = canonical_text(value, is_strict=is_strict)
    if len(text) > SHOWN_CHARACTERS or isinstance(value, Mapping):
        return f"digest {text_digest(text)}"
    return text


def _plain(value: Any, *, is_strict: bool) -> object:  # noqa: PLR0911 # one case a line
    """Return a value as JSON's types, without anything that differs between processes."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(cast("bytes", value)).hex()
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return _mapping(cast("Mapping[object, object]", value), is_strict=is_strict)
    if isinstance(value, set | frozenset):
        members = [_plain(each, is_strict=is_strict) for each in cast("set[object]", value)]
        return sorted(members, key=lambda each: json.dumps(each, sort_keys=True))
    if isinstance(value, list | tuple):
        return [_plain(each, is_strict=is_strict) for each in cast("list[object]", value)]
    if type(value).__module__ == "torch":  # dtypes, devices and shapes
        return str(value)
    return _plain_object(value, is_strict=is_strict)


def _mapping(value: Mapping[object, object], *, is_strict: bool) -> object:
    if all(isinstance(name, str) for name in value):
        return {str(name): _plain(each, is_strict=is_strict) for name, each in value.items()}
    # Other names than strings could be equal to one as JSON.
    return [
        [canonical_text(name, is_strict=is_strict), canonical_text(each, is_strict=is_strict)]
        for name, each in sorted(value.items(), key=lambda item: canonical_text(item[0]))
    ]


def _plain_object(value: Any, *, is_strict: bool) -> object:
    """Return an object by its fields. Its type is part of the text: types may share names."""
    own = cast("Any", type(value))
    kind = f"{own.__module__}.{own.__qualname__}"
    if callable(getattr(value, "to_dict", None)):  # of transformers
        return [kind, _plain(value.to_dict(), is_strict=is_strict)]
    names: list[str] | None = None
    if dataclasses.is_dataclass(own):
        names = [field.name for field in dataclasses.fields(own)]
    elif hasattr(own, "__struct_fields__"):  # of msgspec
        names = list(own.__struct_fields__)
    elif hasattr(own, "model_fields"):  # of pydantic
        names = list(own.model_fields)
    if names is not None:
        fields = {name: getattr(value, name, None) for name in names}
        return [kind, _plain(fields, is_strict=is_strict)]
    if callable(getattr(value, "compute_hash", None)):  # of vLLM
        return [kind, str(value.compute_hash())]
    if is_strict:
        raise NoCanonicalTextError(f"a value of type {kind} has no text that is always the same")
    return [kind]

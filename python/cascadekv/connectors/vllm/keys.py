"""The block keys of a request: they cover its tokens and everything else that changes its KV.

Each part has one chain of keys. The root of a chain covers the part, the adapter and the caller's
cache salt as separate fields, so that the value of one cannot be taken for another. A block that
overlaps an image or audio also covers all of it, and so do all later blocks.
"""

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cascadekv._native import BlockKey, BlockKeys, Namespace, chain_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["KEY_BYTES", "RequestKeys", "UnkeyableRequest", "features_of", "origin_of"]

KEY_BYTES = 32


class UnkeyableRequest(Exception):  # noqa: N818 # a result, not an error
    """The request has no keys, with the reason: its KV depends on something without an identity."""


def origin_of(request: "Request", adapter: Callable[[Any], str | None]) -> dict[str, str]:
    """Return what all KV of a request depends on; `adapter` returns an adapter's fingerprint."""
    if request.prompt_embeds is not None:
        raise UnkeyableRequest("its prompt consists of embeddings, not tokens")
    if request.pooling_params is not None:
        raise UnkeyableRequest("it is a pooling request, not a generation request")
    origin: dict[str, str] = {}
    if request.lora_request is not None:
        fingerprint = adapter(request.lora_request)
        if fingerprint is None:
            name = request.lora_request.lora_name
            raise UnkeyableRequest(f"the weights of its adapter {name} are not known")
        origin["adapter"] = fingerprint
    if request.cache_salt:
        origin["salt"] = request.cache_salt
    return origin


def features_of(request: "Request") -> list[tuple[int, int, str]]:
    """Return offset, length and identifier of a prompt's images and audio."""
    return [
        (feature.mm_position.offset, feature.mm_position.length, feature.identifier)
        for feature in request.mm_features or ()
    ]


class RequestKeys:
    """The keys of one request's full blocks, for every part; extended as the request grows."""

    def __init__(
        self,
        namespace: Namespace,
        parts: Sequence[str],
        block_tokens: int,
        origin: dict[str, str],
        features: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        """Start the chains; `features` are (offset, length, identifier) of multimodal inputs."""
        self._block_tokens = block_tokens
        self._features = sorted(features)
        self._offsets = [offset for offset, _, _ in self._features]
        self._longest = max((length for _, length, _ in self._features), default=0)
        self._roots = {
            part: namespace.key_of_id(_canonical({"part": part, "origin": origin}))
            for part in parts
        }
        self._namespace = namespace
        self._keys = {part: bytearray() for part in parts}
        self.blocks = 0
        """Number of full blocks that have keys."""

    def extend(self, tokens: Sequence[int]) -> int:
        """Add keys for the request's tokens so far; returns how many full blocks have keys."""
        blocks = len(tokens) // self._block_tokens
        at = self.blocks
        # A run of blocks of text alone is keyed in one call; a block with features, by itself.
        while at < blocks:
            text_end = at if self._features else blocks
            while text_end < blocks and not self._overlapping(text_end):
                text_end += 1
            if text_end > at:
                self._chain(tokens, at, text_end)
            if text_end < blocks:
                self._mix_features(text_end)
                self._chain(tokens, text_end, text_end + 1)
                text_end += 1
            at = text_end
        self.blocks = max(self.blocks, blocks)
        return self.blocks

    def keys(self, part: str, first: int, last: int) -> BlockKeys:
        """Return the keys of blocks `first` to `last`, the latter excluded."""
        return BlockKeys(self.raw(part, first, last))

    def raw(self, part: str, first: int, last: int) -> bytes:
        """Return the keys of blocks `first` to `last` as bytes."""
        return bytes(self._keys[part][first * KEY_BYTES : last * KEY_BYTES])

    def prompt(self, tokens: int) -> list[bytes]:
        """Return the keys of the full blocks of a prompt, for the first part."""
        part = next(iter(self._keys))
        return self.split(part, 0, min(tokens // self._block_tokens, self.blocks))

    def split(self, part: str, first: int, last: int) -> list[bytes]:
        """Return the keys of blocks `first` to `last` as a list."""
        joined = self.raw(part, first, last)
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]

    def parent(self, part: str, first: int) -> bytes | None:
        """Return the key of the block before block `first`; `None` for the first block."""
        return self.raw(part, first - 1, first) if first else None

    def _overlapping(self, block: int) -> list[tuple[int, int, str]]:
        start = block * self._block_tokens
        # A request may have thousands of features: only those that can reach the block are read.
        first = bisect_right(self._offsets, start - self._longest)
        last = bisect_left(self._offsets, start + self._block_tokens)
        return [
            (offset - start, length, identifier)
            for offset, length, identifier in self._features[first:last]
            if offset + length > start
        ]

    def _mix_features(self, block: int) -> None:
        """Start new roots at a block; they cover the features that overlap it."""
        for part, keys in self._keys.items():
            before = bytes(keys[-KEY_BYTES:]) or bytes(self._roots[part])
            facts = {"after": before.hex(), "features": self._overlapping(block)}
            self._roots[part] = self._namespace.key_of_id(_canonical(facts))

    def _chain(self, tokens: Sequence[int], first: int, last: int) -> None:
        span = array("I", tokens[first * self._block_tokens : last * self._block_tokens])
        mixed = bool(self._overlapping(first))
        for part, keys in self._keys.items():
            parent = BlockKey(bytes(keys[-KEY_BYTES:])) if keys and not mixed else self._roots[part]
            keys.extend(bytes(chain_keys(parent, span, self._block_tokens)))


def _canonical(facts: Mapping[str, object]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()

"""Names of a request's blocks: its tokens and everything else that changes their KV.

One chain of keys for each part. A chain's root says the part, the adapter and the caller's cache
salt, each under a word of its own, so that no value of one can pass for another; a block that a
picture or a sound overlaps is named by that too, whole, and so is everything behind it.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cascadekv._native import BlockKey, BlockKeys, Namespace, chain_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["KEY_BYTES", "RequestKeys", "Unkeyed", "origin_of"]

KEY_BYTES = 32


class Unkeyed(Exception):  # noqa: N818 # an answer, not a fault
    """Why a request's blocks are not kept: something changes its KV that has no sure name."""


def origin_of(request: "Request", adapter: Callable[[Any], str | None]) -> dict[str, str]:
    """Say what sets a whole request's KV apart; `adapter` names an adapter by its content."""
    if request.prompt_embeds is not None:
        raise Unkeyed("its prompt is embeddings, not tokens")
    if request.pooling_params is not None:
        raise Unkeyed("it is pooled, not generated from")
    origin: dict[str, str] = {}
    if request.lora_request is not None:
        fingerprint = adapter(request.lora_request)
        if fingerprint is None:
            raise Unkeyed(f"adapter {request.lora_request.lora_name} cannot be read")
        origin["adapter"] = fingerprint
    if request.cache_salt:
        origin["salt"] = request.cache_salt
    return origin


class RequestKeys:
    """The keys of one request's full blocks, for every part; grows with its tokens."""

    def __init__(
        self,
        namespace: Namespace,
        parts: Sequence[str],
        block_tokens: int,
        origin: dict[str, str],
        features: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        """Begin chains; `features` are (offset, length, identifier) of what is not text."""
        self._block_tokens = block_tokens
        self._features = sorted(features)
        self._roots = {
            part: namespace.key_of_id(_canonical({"part": part, "origin": origin}))
            for part in parts
        }
        self._namespace = namespace
        self._keys = {part: bytearray() for part in parts}
        self.blocks = 0
        """Full blocks that have keys."""

    def extend(self, tokens: Sequence[int]) -> int:
        """Take the request's tokens up to now; returns how many full blocks have keys."""
        blocks = len(tokens) // self._block_tokens
        at = self.blocks
        while at < blocks:
            plain = at if self._features else blocks
            while plain < blocks and not self._overlapping(plain):
                plain += 1
            if plain > at:
                self._chain(tokens, at, plain)
            if plain < blocks:
                self._mix(plain)
                self._chain(tokens, plain, plain + 1)
                plain += 1
            at = plain
        self.blocks = max(self.blocks, blocks)
        return self.blocks

    def keys(self, part: str, first: int, last: int) -> BlockKeys:
        """Give keys of blocks `first` to `last`, the latter not included."""
        return BlockKeys(self.raw(part, first, last))

    def raw(self, part: str, first: int, last: int) -> bytes:
        """Give the same as bytes."""
        return bytes(self._keys[part][first * KEY_BYTES : last * KEY_BYTES])

    def prompt(self, tokens: int) -> list[bytes]:
        """Give the keys of a prompt's whole blocks, of the first part."""
        part = next(iter(self._keys))
        return self.split(part, 0, min(tokens // self._block_tokens, self.blocks))

    def split(self, part: str, first: int, last: int) -> list[bytes]:
        """Give keys one by one."""
        whole = self.raw(part, first, last)
        return [whole[at : at + KEY_BYTES] for at in range(0, len(whole), KEY_BYTES)]

    def parent(self, part: str, first: int) -> bytes | None:
        """Give the key before block `first`; none before the first."""
        return self.raw(part, first - 1, first) if first else None

    def _overlapping(self, block: int) -> list[tuple[int, int, str]]:
        start = block * self._block_tokens
        end = start + self._block_tokens
        return [
            (offset - start, length, identifier)
            for offset, length, identifier in self._features
            if offset < end and offset + length > start
        ]

    def _mix(self, block: int) -> None:
        """Make what overlaps a block part of the root of everything from that block on."""
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

"""Block keys: chains over token ids, keys of a caller's ids and texts, and digests of bytes."""

from cascadekv._native import (
    BlockKey,
    BlockKeys,
    Manifest,
    Namespace,
    chain_keys,
    checksum,
    digest,
    text_key,
    weights_fingerprint,
)

__all__ = [
    "BlockKey",
    "BlockKeys",
    "Manifest",
    "Namespace",
    "chain_keys",
    "checksum",
    "digest",
    "text_key",
    "weights_fingerprint",
]

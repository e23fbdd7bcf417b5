"""Block keys: chains of keys over token ids, keys of a caller's ids, and digests of bytes."""

from cascadekv._native import (
    BlockKey,
    BlockKeys,
    Manifest,
    Namespace,
    chain_keys,
    checksum,
    digest,
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
    "weights_fingerprint",
]

"""Cascade in ten seconds, without an inference engine: keys, put, lookup, view, restart.

Run it in an environment with `cascadekv`: `python examples/quickstart.py`.
"""

import tempfile

import cascadekv

BLOCK_TOKENS = 128
BLOCK_BYTES = 256 * 1024


def compute(key: cascadekv.BlockKey) -> bytes:
    """Simulate an engine: the KV of a block is a function of the tokens up to its end."""
    return (bytes(key) * (BLOCK_BYTES // len(bytes(key)) + 1))[:BLOCK_BYTES]


def serve(store: cascadekv.Store, space: cascadekv.Namespace, prompt: list[int]) -> int:
    """Serve a prompt: load the leading blocks that are stored, compute and put the others."""
    keys = cascadekv.chain_keys(space, prompt, block_tokens=BLOCK_TOKENS)
    matched = store.lookup_prefix(keys).blocks
    with store.view(keys[:matched]) as views:
        # An engine would copy the views into its pages. A view reads the block in place.
        for key, view in zip(keys[:matched], views, strict=True):
            if view is None or bytes(view) != compute(key):
                raise SystemExit(f"{key} is missing or wrong")
    # The first new block follows the last matched one.
    parent = keys[matched - 1] if matched else None
    new = keys[matched:]
    if len(new):
        results = store.put(new, [compute(key) for key in new], parent=parent)
        if not all(result.ok for result in results):
            raise SystemExit(f"not stored: {results}")
    print(f"{len(keys):3} blocks: {matched:3} loaded, {len(new):3} computed")
    return matched


def main() -> None:
    """Serve three prompts, restart the store, and serve a prompt again."""
    # Everything that must match before KV may be shared; the secret separates tenants.
    manifest = cascadekv.Manifest(
        {
            "weights": cascadekv.keys.weights_fingerprint(b"the bytes of the weights' files"),
            "dtype": "bf16",
            "block_tokens": str(BLOCK_TOKENS),
            "layers": "32",
            "kv_heads": "8",
            "head_dim": "128",
            "layout": "layer-kv-token-head",
            "tensor_parallel": "0/1",
        }
    )
    space = cascadekv.Namespace(manifest, secret=b"this tenant's secret")
    system = list(range(2048))  # a common prefix of 16 blocks
    with tempfile.TemporaryDirectory() as directory:
        settings: cascadekv.config.StoreSettings = {
            "dram": "64MiB",
            "files": f"{directory}/files",
            "files_capacity": "256MiB",
            "segment_size": "8MiB",
        }
        with cascadekv.Store(**settings) as store:
            first = serve(store, space, [*system, *range(10_000, 11_024)])
            second = serve(store, space, [*system, *range(20_000, 21_024)])
            again = serve(store, space, [*system, *range(10_000, 11_024)])
            store.flush(timeout="30s")
        with cascadekv.Store(**settings) as store:
            print("after a restart:")
            restarted = serve(store, space, [*system, *range(20_000, 21_024)])
            tiers = store.stats()["hits_by_tier"]
            print("hits by tier:", {name: hits["blocks"] for name, hits in tiers.items()})
    if (first, second, again, restarted) != (0, 16, 24, 24):
        raise SystemExit("some blocks were not found")


if __name__ == "__main__":
    main()

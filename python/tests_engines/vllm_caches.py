"""KV caches as vLLM allocates them on each rank, filled with shares of one model's KV.

The bytes of a head of a block are the same in every engine that serves the model. The rank and the
position of the bytes depend on the parallel sizes and the layout, by vLLM's own allocator.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from cascadekv import Manifest, Namespace, Store
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.layout import HeldPart, Rank, describe
from cascadekv.connectors.vllm.memory import memory_of
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

BLOCK_TOKENS = 16
HEAD_SIZE = 8
PAGES = 12
SPACE = Namespace(Manifest({"weights": "sha256:test"}), b"secret")


@dataclass
class Model:
    """A model's shape, and the KV of its whole cache: layer, page, head, token, content."""

    heads: int = 8
    is_mla: bool = False
    layers: tuple[str, ...] = ("layers.0", "layers.1", "layers.2")
    padding: int = 0
    """Padding at the end of each page."""
    seed: int = 1
    kv: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Fill the cache with random bytes."""
        content = HEAD_SIZE if self.is_mla else 2 * HEAD_SIZE
        shape = (len(self.layers), PAGES, self.heads, BLOCK_TOKENS, content)
        noise = np.random.default_rng(self.seed).integers(0, 1 << 16, shape, dtype=np.uint16)
        self.kv = noise.view(np.int16)

    def spec(self, heads: int) -> FullAttentionSpec:
        """Describe a layer of a rank with that many heads."""
        common = {
            "block_size": BLOCK_TOKENS,
            "num_kv_heads": heads,
            "head_size": HEAD_SIZE,
            "dtype": torch.float16,
        }
        kind = MLAAttentionSpec if self.is_mla else FullAttentionSpec
        plain = kind(**common)
        if not self.padding:
            return plain
        return kind(**common, page_size_padded=plain.page_size_bytes + self.padding)


def config_of(
    layers: tuple[str, ...], spec: FullAttentionSpec, layout: str, pages: int = PAGES
) -> KVCacheConfig:
    """Describe one rank's cache: a single allocation that the layers share."""
    page = spec.page_size_bytes
    is_block_first = KVCacheLayout[layout].is_block_outermost
    layer_stride = page if is_block_first else page * pages
    block_stride = page * len(layers) if is_block_first else page
    size = page * pages * len(layers)
    tensor = KVCacheTensor(size, list(layers), layer_stride, block_stride)
    group = KVCacheGroupSpec(list(layers), spec)
    return KVCacheConfig(pages, [tensor], [group], kv_cache_layout=layout)


class Worker:
    """One rank: its cache, and its parts of the model."""

    def __init__(
        self,
        model: Model,
        rank: Rank,
        *,
        layout: str = "LBHNC",
        shards: int | None = None,
        is_filled: bool = True,
        layers: slice = slice(None),
    ) -> None:
        """Allocate the cache, and fill it with this rank's share of the model's KV if requested.

        `layers` are those of its stage of the pipeline.
        """
        self.rank = rank
        count = 1 if model.is_mla else max(1, model.heads // rank.tensor_size)
        at = 0 if model.is_mla else rank.tensor * model.heads // rank.tensor_size
        self.share = model.kv[layers, :, at : at + count]
        self.config = config_of(model.layers[layers], model.spec(count), layout)
        self.caches = allocate_kv_cache(self.config, torch.device("cpu"), KVCacheLayout[layout])
        if is_filled:
            for layer, own in zip(self.caches.values(), self.share, strict=True):
                layer.view(torch.int16).copy_(torch.from_numpy(own))
        storage = next(iter(self.caches.values())).untyped_storage()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.buffer.set_(storage, 0, (storage.nbytes(),))
        self.held: list[HeldPart] = describe(self.config, rank, shards)

    def page(self, layer: int, page: int) -> np.ndarray:
        """Return a page as the engine's attention reads it: heads, tokens, content."""
        return list(self.caches.values())[layer][page].view(torch.int16).numpy()

    def keys(self, blocks: int) -> RequestKeys:
        """Return the keys of a request's blocks, for each part of this rank."""
        return keys_of([each.part.name for each in self.held], blocks)

    def save(self, store: Store, pages: list[int]) -> None:
        """Save a request in these pages, the parts that this rank writes."""
        keys = self.keys(len(pages))
        for each in self.held:
            if not each.is_writer:
                continue
            memory = memory_of(self.buffer, each.regions, PAGES)
            assert memory.block_bytes == each.part.block_bytes
            part = keys.keys(each.part.name, 0, len(pages))
            with store.prepare(part, memory.block_bytes) as prepared:
                memory.save(prepared, pages)
                assert all(result.ok for result in prepared.seal())

    def load(self, store: Store, pages: list[int]) -> list[bool]:
        """Load a request into these pages; returns whether each block was complete."""
        keys = self.keys(len(pages))
        loaded = [True] * len(pages)
        for each in self.held:
            memory = memory_of(self.buffer, each.regions, PAGES)
            with store.view(keys.keys(each.part.name, 0, len(pages))) as views:
                copied = memory.load(views, pages)
            loaded = [before and now for before, now in zip(loaded, copied, strict=True)]
        return loaded


def keys_of(parts: list[str], blocks: int) -> RequestKeys:
    """Return the keys of a request with the tokens 0, 1, 2, ..."""
    keys = RequestKeys(SPACE, parts, BLOCK_TOKENS, {})
    keys.extend(range(blocks * BLOCK_TOKENS))
    return keys


def workers_of(model: Model, size: int, *, stages: int = 1, **options: object) -> list[Worker]:
    """Create the ranks of one engine, stage by stage."""
    heads = 1 if model.is_mla else model.heads
    ranks = [Rank(tensor, size, kv_heads=heads) for tensor in range(size)]
    ends = [len(model.layers) * stage // stages for stage in range(stages + 1)]
    return [
        Worker(model, rank, layers=slice(first, end), **options)
        for first, end in itertools.pairwise(ends)
        for rank in ranks
    ]

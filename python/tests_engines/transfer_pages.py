"""Pages of workers without an engine, for transfers between them byte by byte."""

import contextlib

import torch
from cascadekv.connectors.vllm.transfer_geometry import Geometry, PartPages
from cascadekv.connectors.vllm.transfers import Transfers
from vllm_caches import BLOCK_TOKENS


class Pages:
    """The pages of one worker."""

    def __init__(self, pieces, unit, layers, pages, window=None):
        """Allocate pages of zeros, layer after layer; a window counts tokens, 4 in a unit."""
        self.unit_bytes, self.pieces, self.count = unit, pieces, pages * pieces
        self.memory = torch.zeros(layers * self.count * unit, dtype=torch.uint8)
        regions = tuple((at * self.count * unit, unit, unit) for at in range(layers))
        part = PartPages("part", 0, regions, pieces, window)
        self.geometry = Geometry({}, 0, 1, 4 * pieces, 4, (part,))

    def unit(self, layer, number):
        """Return one unit of a layer."""
        at = (layer * self.count + number) * self.unit_bytes
        return self.memory[at : at + self.unit_bytes]

    def open(self):
        """Let peers read the pages; a context manager."""
        transfers = Transfers(self.memory, self.geometry, listen="127.0.0.1:0", token=None)
        return contextlib.closing(transfers)


def transfers_of(worker, ranks, token=None):
    """Let other engines read and write the pages of a worker of `vllm_caches.py`."""
    geometry = Geometry.of(
        worker.held,
        {"weights": "same"},
        rank=worker.rank.tensor,
        workers=ranks,
        block_tokens=BLOCK_TOKENS,
        pieces=1,
    )
    return Transfers(worker.buffer, geometry, listen="127.0.0.1:0", token=token)

"""Pages of workers without an engine, for transfers between them byte by byte."""

import contextlib
import time

import torch
from cascadekv.connectors.vllm.metadata import Load
from cascadekv.connectors.vllm.offers import Computed, Opened, PushPlan, PushSource, TransferPlan
from cascadekv.connectors.vllm.running_load import RunningLoad
from cascadekv.connectors.vllm.transfer_geometry import Geometry, PartPages, Ranks
from cascadekv.connectors.vllm.transfers import Transfers
from scheduled_engine import LIMIT_S
from vllm_caches import BLOCK_TOKENS

DIGEST = "of the prompt"


class Pages:
    """The pages of one worker."""

    def __init__(self, pieces, unit, layers, pages, window=None):
        """Allocate pages of zeros, layer after layer; a window counts tokens, 4 in a unit."""
        self.unit_bytes, self.pieces, self.count = unit, pieces, pages * pieces
        self.memory = torch.zeros(layers * self.count * unit, dtype=torch.uint8)
        regions = tuple((at * self.count * unit, unit, unit) for at in range(layers))
        names = tuple(f"layers.{at}" for at in range(layers))
        part = PartPages("part", 0, regions, pieces, "all", names, window)
        self.geometry = Geometry({}, 0, 1, 4 * pieces, 4, (part,))

    def unit(self, layer, number):
        """Return one unit of a layer."""
        at = (layer * self.count + number) * self.unit_bytes
        return self.memory[at : at + self.unit_bytes]

    def open(self):
        """Let peers read the pages; a context manager."""
        transfers = Transfers(self.memory, self.geometry, listen="127.0.0.1:0", token=None)
        return contextlib.closing(transfers)


def geometry_of(worker, number, workers, stages=1):
    """Describe a worker of `vllm_caches.py`, one of several."""
    rank = worker.rank
    return Geometry.of(
        worker.held,
        {"weights": "same"},
        rank=number,
        workers=workers,
        block_tokens=BLOCK_TOKENS,
        pieces=1,
        ranks=Ranks(rank.tensor_size, stages, rank.context_size),
    )


def transfers_of(worker, ranks, token=None):
    """Let other engines read and write the pages of a worker of `vllm_caches.py`."""
    geometry = geometry_of(worker, worker.rank.tensor, ranks)
    return Transfers(worker.buffer, geometry, listen="127.0.0.1:0", token=token)


@contextlib.contextmanager
def engine_of(workers, stages=1, port=0):
    """Do that for all workers of an engine, which are in the order of their ranks.

    `port` is the first one's, 0 for free ones.
    """
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                contextlib.closing(
                    Transfers(
                        each.buffer,
                        geometry_of(each, number, len(workers), stages),
                        listen=f"127.0.0.1:{port and port + number}",
                        token=None,
                    )
                )
            )
            for number, each in enumerate(workers)
        ]


def expect(target, sources, blocks, tokens, *, first=0, workers=1):
    """Let prefill workers write blocks; returns the future result."""
    source = PushSource([(each.address, "") for each in sources], "x")
    return expect_from(target, source, blocks, tokens, first=first, workers=workers)


def expect_from(target, source, blocks, tokens, *, first=0, workers=1):
    """Do that for a source that a router has named."""
    load = Load("d", is_async=True, first=first, keys={}, blocks=blocks, tier="peers")
    load.push = PushPlan(source, DIGEST, tokens, workers, LIMIT_S)
    return target.expect(RunningLoad(load))


def opened(tokens):
    """Return the plan of a step that opens the request."""
    return TransferPlan(opened=[Opened("r", 0, 9, "x", DIGEST, tokens)])


def compute(sources, tables, tokens, chance):
    """Compute a prompt in steps of random lengths."""
    at = 0
    while at < tokens:
        end = min(tokens, at + chance.randrange(1, tokens + 1))
        for source in sources:
            source.apply(TransferPlan(computed=[Computed("r", at, end, tables)]))
            source.end_step(["r"], [])
        at = end
        if chance.random() < 0.5:
            time.sleep(0.01)

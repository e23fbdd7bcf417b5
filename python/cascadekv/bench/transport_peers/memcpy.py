"""A limit, not a transport: memcpy into memory that both processes have mapped."""

import os
from collections.abc import Mapping
from typing import cast

import numpy as np

from cascadekv.bench.transport_peers.blocks import Region, Shape, Slots
from cascadekv.bench.transport_peers.movers import Setting


class PeerMover:
    """The source's mapping of the target's region."""

    needs_shared_memory = True
    must_be_polled = False

    def __init__(self, _setting: Setting, shape: Shape, _side: str) -> None:
        """Keep the shape."""
        self._shape = shape

    def serve(self, region: Region) -> dict[str, str | int]:
        """Tell where the region is."""
        return {"path": f"/proc/{os.getpid()}/fd/{region.file}"}

    def poll(self) -> None:
        """There is nothing to do."""

    def connect(self, region: Region, target: Mapping[str, str | int]) -> None:
        """Map the target's region and touch its pages."""
        self._source = region.bytes
        self._target = Region(self._shape, str(target["path"])).bytes
        self._target.max()

    def batch(self, source: Slots, target: Slots) -> object:  # noqa: ARG002 # they are the same
        """Return the bytes of a batch."""
        size = self._shape.block_bytes
        return slice(int(source[0]) * size, (int(source[-1]) + 1) * size)

    def move(self, thread: int, batch: object) -> None:  # noqa: ARG002 # other peers need it
        """Copy a batch."""
        rows = cast("slice", batch)
        np.copyto(self._target[rows], self._source[rows])

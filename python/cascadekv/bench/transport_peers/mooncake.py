"""Mooncake's Transfer Engine over TCP, through its Python API."""

import importlib
import time
from collections.abc import Mapping
from typing import Any, cast

from cascadekv.bench.transport_peers.blocks import Region, Shape, Slots
from cascadekv.bench.transport_peers.movers import MoverError, Setting

HOST = "127.0.0.1"
LIBRARIES = "Debian: apt-get install libibverbs1 libnuma1 libcurl4"
"""What the wheel needs from the system, also without RDMA."""


class PeerMover:
    """One engine. It listens on all addresses and asks nobody for a password."""

    needs_shared_memory = False
    must_be_polled = False

    def __init__(self, setting: Setting, shape: Shape, _side: str) -> None:
        """Start the engine; the address of the other side needs no metadata server."""
        self._shape = shape
        self._sleep_share = setting.sleep_share
        self._last_s = [0.0] * shape.threads
        try:
            module: Any = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise MoverError(f"{error} ({LIBRARIES})") from error
        self._engine: Any = module.TransferEngine()
        if status := self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise MoverError(f"Mooncake's initialize returned {status}")

    def serve(self, region: Region) -> dict[str, str | int]:
        """Register the target's region."""
        self._register(region)
        return {"name": f"{HOST}:{self._engine.get_rpc_port()}", "address": region.address}

    def poll(self) -> None:
        """Its own threads work."""

    def connect(self, region: Region, target: Mapping[str, str | int]) -> None:
        """Register the source's region."""
        self._register(region)
        self._source = region.address
        self._name, self._target = str(target["name"]), int(target["address"])

    def batch(self, source: Slots, target: Slots) -> object:
        """Return the lists of a batch."""
        size = self._shape.block_bytes
        return (
            (source * size + self._source).tolist(),
            (target * size + self._target).tolist(),
            [size] * len(source),
        )

    def move(self, thread: int, batch: object) -> None:
        """Write a batch. Both calls ask for its status without a pause until all is written.

        They hold no lock of Python. No call of the Python API asks once about a whole batch.
        """
        source, target, lengths = cast("tuple[list[int], list[int], list[int]]", batch)
        if not self._sleep_share:
            call = "batch_transfer_sync_write"
            status = self._engine.batch_transfer_sync_write(self._name, source, target, lengths)
        else:
            call = "get_batch_transfer_status"
            start = time.monotonic()
            number = self._engine.batch_transfer_async_write(self._name, source, target, lengths)
            if number == 0:
                raise MoverError("Mooncake's batch_transfer_async_write returned 0")
            time.sleep(self._last_s[thread] * self._sleep_share)
            status = self._engine.get_batch_transfer_status([number])
            self._last_s[thread] = time.monotonic() - start
        if status:
            raise MoverError(f"Mooncake's {call} returned {status}")

    def _register(self, region: Region) -> None:
        if status := self._engine.register_memory(region.address, region.bytes.nbytes):
            raise MoverError(f"Mooncake's register_memory returned {status}")

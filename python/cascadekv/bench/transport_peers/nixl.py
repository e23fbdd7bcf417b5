"""NIXL with UCX, through its Python API: over TCP, or with the transports UCX chooses on a host."""

import importlib
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from cascadekv.bench.transport_peers.blocks import Region, Shape, Slots
from cascadekv.bench.transport_peers.movers import MoverError, Setting


class PeerMover:
    """One agent with UCX."""

    needs_shared_memory = False

    def __init__(self, setting: Setting, shape: Shape, side: str) -> None:
        """Make the agent. Several threads need a lock in it, and a UCX worker each."""
        self.must_be_polled = not setting.has_progress_thread
        self._shape = shape
        self._pause_s = setting.poll_pause_s
        api: Any = importlib.import_module("nixl._api")
        modes = api.nixl_thread_sync_t
        self._agent: Any = api.nixl_agent(
            side,
            api.nixl_agent_config(
                enable_prog_thread=setting.has_progress_thread,
                backends=[],
                sync_mode=modes.NIXL_THREAD_SYNC_RW if shape.threads > 1 else None,
            ),
        )
        workers = {"num_workers": f"{shape.threads + 1}"} if shape.threads > 1 else {}
        self._agent.create_backend("UCX", workers)

    def serve(self, region: Region) -> dict[str, str | int]:
        """Register the target's region."""
        self._register(region)
        metadata = b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": region.address}

    def poll(self) -> None:
        """Ask for notifications, which is how a target without a progress thread works."""
        self._agent.get_new_notifs()

    def connect(self, region: Region, target: Mapping[str, str | int]) -> None:
        """Register the source's region, and prepare the descriptors of all blocks of both."""
        self._register(region)
        name = self._agent.add_remote_agent(b64decode(str(target["metadata"])))
        self._agent.make_connection(name)
        self._source = self._prepare("NIXL_INIT_AGENT", region.address)
        self._target = self._prepare(name, int(target["address"]))

    def batch(self, source: Slots, target: Slots) -> object:
        """Return the indices of a batch."""
        return source.astype(np.int32), target.astype(np.int32)

    def move(self, thread: int, batch: object) -> None:  # noqa: ARG002 # other peers need it
        """Write a batch: make a request of prepared descriptors, post it, ask until it is done."""
        source, target = cast("tuple[Any, Any]", batch)
        agent = self._agent
        request = agent.make_prepped_xfer("WRITE", self._source, source, self._target, target)
        state = agent.transfer(request)
        while state == "PROC":
            if self._pause_s is not None:
                time.sleep(self._pause_s)
            state = agent.check_xfer_state(request)
        agent.release_xfer_handle(request)
        if state != "DONE":
            raise MoverError(f"NIXL's transfer ended as {state}")

    def _prepare(self, agent: str, address: int) -> object:
        shape = self._shape
        blocks = np.zeros((shape.slots, 3), dtype=np.uint64)
        blocks[:, 0] = np.arange(shape.slots) * shape.block_bytes + address
        blocks[:, 1] = shape.block_bytes
        return self._agent.prep_xfer_dlist(agent, blocks, "DRAM")

    def _register(self, region: Region) -> None:
        self._agent.register_memory([(region.address, region.bytes.nbytes, 0, "")], "DRAM")

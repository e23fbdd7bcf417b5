"""What a worker counts for vLLM's metrics: its GPU's copies, leases, and restarts of its node."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cascadekv.connectors.vllm.memory import Memory
from cascadekv.connectors.vllm.metrics import CascadeStats, GpuCounts

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.private_node import PrivateNode
    from cascadekv.connectors.vllm.transfers import Transfers

__all__ = ["WorkerCounts"]


class WorkerCounts:
    """What one worker has counted since the last interval."""

    def __init__(self, rank: int) -> None:
        """Begin without anything to count."""
        self._is_first = rank == 0
        self._gpu = GpuCounts()
        self._transfers: Transfers | None = None
        self._node: PrivateNode | None = None
        self._restarts = 0

    def attach(
        self,
        memories: Iterable[Memory],
        transfers: "Transfers | None",
        node: "PrivateNode | None",
    ) -> None:
        """Set what is counted, from now on."""
        self._gpu.attach(memories)
        # All workers have the same leases: those of the first one count.
        self._transfers = transfers if self._is_first else None
        self._node = node

    def take(self) -> CascadeStats | None:
        """Return the counts since the last call; `None` without any."""
        stats = self._gpu.take() or CascadeStats()
        if self._transfers is not None:
            stats.leases(*self._transfers.take_lease_counts())
        if self._node is not None:
            restarts = self._node.restarts
            stats.count("node_restarts", restarts - self._restarts)
            self._restarts = restarts
        return None if stats.is_empty() else stats

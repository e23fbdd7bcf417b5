"""What a peer has to be able to do, its settings, and the list of peers."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cascadekv.bench.transport_peers.blocks import Region, Shape, Slots

__all__ = ["PEERS", "Mover", "MoverError", "Peer", "Setting", "make_mover"]


class MoverError(Exception):
    """A peer refused or failed a transfer."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a peer: what its own documentation or benchmark names."""

    environment: tuple[tuple[str, str], ...] = ()
    has_progress_thread: bool = False
    poll_pause_s: float | None = None
    """Pause between two questions whether a batch is complete; `None`: ask without a pause."""
    sleep_share: float = 0.0
    """Share of its last batch's time that a thread sleeps before it asks for the first time."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer with one of its transports."""

    module: str
    """Module of this package with the class `PeerMover`."""
    packages: tuple[str, ...]
    """Distributions that it needs; the first one's version is its version."""
    settings: Mapping[str, Setting]
    is_limit: bool = False
    """Whether it is no transport but a limit: it moves neighbouring blocks of 1 MiB."""


class Mover(Protocol):
    """One side of a peer, in the source's or in the target's process."""

    needs_shared_memory: bool
    """Whether the target's region must be shared memory."""
    must_be_polled: bool
    """Whether the target works only while it is asked to."""

    def serve(self, region: Region) -> dict[str, str | int]:
        """Make the target's region writable for the peer; returns what the source must know."""
        ...

    def poll(self) -> None:
        """Let the target work."""
        ...

    def connect(self, region: Region, target: Mapping[str, str | int]) -> None:
        """Prepare the source's region and the connection, once."""
        ...

    def batch(self, source: Slots, target: Slots) -> object:
        """Prepare the arguments of a call, outside of the timed part."""
        ...

    def move(self, thread: int, batch: object) -> None:
        """Move a batch and wait for the peer's own completion. Raises `MoverError`."""
        ...


# Mooncake: four connections to a target by default; its limit is 16. With its default queue it
# refuses the batches of four threads. Its waiting threads never sleep, which takes processors from
# its own threads where there are few; `slept` spares them.
_MOONCAKE_BASE = (("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"), ("GLOG_minloglevel", "1"))
_MOONCAKE_16 = (*_MOONCAKE_BASE, ("MC_TCP_LANES_PER_PEER", "16"))
_MOONCAKE = {
    "connections-4": Setting(environment=_MOONCAKE_BASE),
    "connections-16": Setting(environment=_MOONCAKE_16),
    "connections-16-slept": Setting(environment=_MOONCAKE_16, sleep_share=0.8),
}
# NIXL: nixlbench's default is no progress thread and asking without a pause; Python's default is a
# progress thread. It needs a processor for itself, so the asking thread pauses.
_NIXL_POLLED, _NIXL_THREAD = Setting(), Setting(has_progress_thread=True, poll_pause_s=100e-6)
_UCX_TCP = (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"))
_NIXL_TCP = {
    "polled": Setting(environment=_UCX_TCP),
    "polled-large-receives": Setting(environment=(*_UCX_TCP, ("UCX_TCP_RX_SEG_SIZE", "256k"))),
    "progress-thread": Setting(
        environment=_UCX_TCP, has_progress_thread=True, poll_pause_s=_NIXL_THREAD.poll_pause_s
    ),
}
_NIXL_HOST = {"polled": _NIXL_POLLED, "progress-thread": _NIXL_THREAD}

PEERS: Mapping[str, Peer] = {
    "mooncake/tcp": Peer(
        module="mooncake",
        packages=("mooncake-transfer-engine-non-cuda",),
        settings=_MOONCAKE,
    ),
    "nixl/tcp": Peer(module="nixl", packages=("nixl-cu12", "nixl"), settings=_NIXL_TCP),
    "nixl/same-host": Peer(module="nixl", packages=("nixl-cu12", "nixl"), settings=_NIXL_HOST),
    "limit/tcp": Peer(module="stream", packages=(), settings={"stream": Setting()}, is_limit=True),
    "limit/shm": Peer(module="memcpy", packages=(), settings={"memcpy": Setting()}, is_limit=True),
}
"""All peers, by name and transport."""


def make_mover(peer: str, setting: str, shape: Shape, side: str) -> Mover:
    """Return one side of a peer; imports its packages."""
    module = importlib.import_module(f"cascadekv.bench.transport_peers.{PEERS[peer].module}")
    mover: Mover = module.PeerMover(PEERS[peer].settings[setting], shape, side)
    return mover

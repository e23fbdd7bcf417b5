"""How connections are made: TLS, RDMA, heartbeats."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cascadekv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from cascadekv._native import TransportEndpoint

log = logging.getLogger("cascadekv.transfer")


@dataclass(frozen=True, kw_only=True)
class Tls:
    """TLS 1.3 for TCP connections, from PEM files. Both sides must have it.

    The files are read again before a connection is made after one of them has changed.
    """

    authority: str | PathLike[str]
    """CA certificates: a peer's certificate must be signed by one of them."""
    certificate: str | PathLike[str] | None = None
    """The certificate chain of this process. Needed to listen, and where peers require one."""
    key: str | PathLike[str] | None = None
    """Its private key, which only this user may read."""
    client_certificates: bool = True
    """Whether processes that connect to this one must present a certificate (mutual TLS)."""
    server_name: str | None = None
    """Name that a server's certificate must have. Default: the host name or IP address."""
    kernel: bool = True
    """Whether the kernel may encrypt, where it can."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """How a process notices that a connected peer is frozen or gone, without a call.

    A thread asks each peer that was connected to; a thread of the peer answers, whatever the
    peer's program does. A peer that answers nothing is disconnected.
    """

    interval: float = 2.0
    """Seconds from an answer to the next question."""
    limit: float = 10.0
    """Seconds without an answer after which the connection is lost."""


DEFAULT_HEARTBEAT = Heartbeat()


def times_of(heartbeat: object) -> tuple[float, float] | None:
    """Return the interval and the limit of a heartbeat; raise `ConfigError` for anything else."""
    if heartbeat is None:
        return None
    if not isinstance(heartbeat, Heartbeat):
        raise ConfigError(f"heartbeat: {heartbeat!r} is neither a Heartbeat nor None")
    return heartbeat.interval, heartbeat.limit


@dataclass(frozen=True, kw_only=True)
class Rdma:
    """Lets an endpoint move blocks by RDMA: with peers over TCP whose endpoints have `Rdma`, too.

    The device is opened with the endpoint; `ConfigError` says what is missing.
    """

    use: Literal["require", "prefer"] = "require"
    """Whether `connect` fails without RDMA at the peer, or uses TCP; `Peer.transport` says which.

    It is about connections that this endpoint makes. A listener serves peers of both kinds.
    """
    devices: Sequence[str] = ()
    """Names of devices that may be used, such as `mlx5_0`. Default: all."""
    near_gpu: str | None = None
    """PCI address of a GPU: of several devices, the one nearest to it is used."""
    gid_index: int | None = None
    """Index of the port's GID. Default: RoCE v2 with an IPv4 address, if there is one."""
    queue_pairs: int = 4
    """Queue pairs of a connection, 1 to 8."""
    timeout: int = 18
    """Time until a packet is sent again: 4.096 µs times two to this power."""
    traffic_class: int = 0
    flush: Literal["gpu", "always", "never"] = "gpu"
    """Which writes end with a short read: those into memory of GPUs, all, or none."""
    relaxed_ordering: bool = False
    """Whether writes may reach memory in another order, where the device has that."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        limits = {"gid_index": 255, "queue_pairs": 8, "timeout": 31, "traffic_class": 255}
        for name, most in limits.items():
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ConfigError(f"{name}: {value} is not between 0 and {most}")
        if isinstance(self.devices, str):
            raise ConfigError(f"devices: {self.devices!r} is not a list of names")


def use_rdma(endpoint: TransportEndpoint, rdma: Rdma) -> str | None:
    """Open a device for an endpoint; return its name.

    Without a device that is required, raises `ConfigError`; without one that is preferred, logs
    why, and returns `None`.
    """
    try:
        return endpoint.use_rdma(rdma)
    except ConfigError as error:
        if rdma.use == "require":
            raise
        log.warning("blocks move by TCP: %s", error)
        return None

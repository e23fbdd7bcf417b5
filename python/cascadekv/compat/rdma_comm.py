"""The interface of KVTransferManager, over this project's transport.

Code with `from rdma_comm import RDMACommunicator` runs after

    from cascadekv.compat import rdma_comm
    rdma_comm.install()
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
import threading
import warnings
from typing import TYPE_CHECKING

from cascadekv import transfer
from cascadekv.errors import CascadeError, ConfigError
from cascadekv.transfer import Blocks, Endpoint, Layer, Memory, Rdma, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cascadekv.transfer import Peer

__all__ = ["RDMACommunicator", "install"]

CONNECT_S = 10.0
"""How long `connect` waits."""
WRITE_S = 60.0
"""How long `write_cache` waits."""

TOKEN_VARIABLE = "CASCADE_TRANSFER_TOKEN"  # noqa: S105 - the name of the variable
"""Variable with the token that both processes know. Without it, only this host can connect."""

RDMA_VARIABLE = "CASCADE_TRANSFER_RDMA"
"""Variable of our own: `prefer` (default), `require` or `off`."""

KNOWN = {
    "KVCACHE_RDMA_GID_INDEX": "index of the GID",
    "KVCACHE_RDMA_NICS": "names of devices; the one at gpu_idx, modulo their number, is used",
    "KVCACHE_IB_TIMEOUT": "time until a packet is sent again: 4.096 us times two to this power",
    "KVCACHE_RELAX_ORDERING": "relaxed ordering",
    "KVCACHE_GDRCOPY_FLUSH_ENABLE": "end every write with a short read",
    "KVCACHE_SOCKET_IFNAME": "network interface to listen on",
    "KVCACHE_DEBUG": "log each call",
    "KVCACHE_DEBUG_FILE": "file of the log",
    "KVCACHE_ERROR_FILE": "file of warnings and errors",
}
"""The variables of the founding document, and what they do here."""

log = logging.getLogger(__name__)


def install() -> None:
    """Make `import rdma_comm` return this module."""
    sys.modules["rdma_comm"] = sys.modules[__name__]


class RDMACommunicator:
    """Writes blocks of this process into those of another, layer by layer.

    Bytes move by RDMA where both processes have a device, else by TCP; the log says which. A
    `decode` process listens on its port; a `prefill` process only connects.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the document's signature
        self,
        role: str,
        gpu_idx: int,
        port: str | int,
        local_key_cache: Sequence[int],
        local_value_cache: Sequence[int],
        block_number: int,
        block_bytes: int,
    ) -> None:
        """Register the caches: addresses of host memory, `block_number * block_bytes` bytes each.

        `local_value_cache` may be empty, as for MLA. The memory must stay as long as this object.
        """
        if role not in ("prefill", "decode"):
            raise ConfigError(f'role: {role!r} is neither "prefill" nor "decode"')
        key_addresses, value_addresses = list(local_key_cache), list(local_value_cache)
        if value_addresses and len(value_addresses) != len(key_addresses):
            raise ConfigError(
                f"local_value_cache: {len(value_addresses)} addresses are given, and "
                f"{len(key_addresses)} of keys"
            )
        interface = _read_environment(os.environ)
        rdma = rdma_of(os.environ, gpu_idx)
        self.role = role
        self.gpu_idx = gpu_idx
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], Peer] = {}
        total = block_number * block_bytes

        def memory(address: int) -> Memory:
            return Memory(address=address, bytes=total, owner=None)

        values = [memory(address) for address in value_addresses] or [None] * len(key_addresses)
        layers = [
            Layer(keys=memory(key), values=value)
            for key, value in zip(key_addresses, values, strict=True)
        ]
        # The document's blocks have no inner structure.
        shape = Shape(layers=len(layers), block_tokens=1, heads=1, head_bytes=block_bytes)
        token = os.environ.get(TOKEN_VARIABLE)
        self._endpoint = Endpoint(
            layers,
            shape=shape,
            block_count=block_number,
            name=f"{role} {gpu_idx}",
            token=token,
            rdma=rdma,
        )
        if self._endpoint.rdma_device is not None:
            log.info("RDMA device: %s", self._endpoint.rdma_device)
        self.address = None
        if role == "decode":
            everywhere = "0.0.0.0" if token else "127.0.0.1"  # noqa: S104 - peers know the token
            host = _address_of(interface) if interface else everywhere
            if not token:
                log.info(
                    "listening for this user on this host only; set %s for others", TOKEN_VARIABLE
                )
            self.address = self._endpoint.listen(f"{host}:{int(port)}")

    def connect(self, dst_ip: str, dst_port: str | int) -> bool:
        """Connect to a process. False if that fails; the reason is logged."""
        try:
            peer = self._endpoint.connect(f"{dst_ip}:{int(dst_port)}", timeout=CONNECT_S)
        except CascadeError as error:
            log.error("cannot connect to %s:%s: %s", dst_ip, dst_port, error)  # noqa: TRY400
            return False
        with self._lock:
            self._peers[dst_ip, str(dst_port)] = peer
        log.info("connected to %s:%s; blocks move by %s", dst_ip, dst_port, peer.transport)
        return True

    def is_connected(self, dst_ip: str, dst_port: str | int) -> bool:
        """Return whether `connect` succeeded and the connection is still there."""
        peer = self._peer(dst_ip, dst_port)
        return peer is not None and peer.is_connected

    def write_cache(
        self,
        ip: str,
        port: str | int,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layer_idx: int,
    ) -> int:
        """Write blocks of a layer: 0 once all have arrived, -1 after an error, which is logged."""
        peer = self._peer(ip, port)
        if peer is None:
            log.error("write_cache: not connected to %s:%s; call connect first", ip, port)
            return -1
        try:
            blocks = Blocks(list(local_block_ids), list(remote_block_ids))
            written = peer.write("", blocks, layers=[layer_idx], tell=False, timeout=WRITE_S)
            written.wait(timeout=WRITE_S)
        except CascadeError as error:
            log.error("write_cache, layer %d to %s:%s: %s", layer_idx, ip, port, error)  # noqa: TRY400
            return -1
        log.debug("wrote %d blocks of layer %d to %s:%s", len(blocks.local), layer_idx, ip, port)
        return 0

    def _peer(self, ip: str, port: str | int) -> Peer | None:
        with self._lock:
            return self._peers.get((ip, str(port)))

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()
        self._endpoint.close()


def _read_environment(environment: Mapping[str, str]) -> str | None:
    """Set up logging; return the network interface. Warn of variables that do nothing."""
    for name in sorted(environment):
        if name.startswith("KVCACHE_") and name not in KNOWN:
            warnings.warn(f"{name} is not known; known are {', '.join(KNOWN)}", stacklevel=3)
    if _is_on(environment, "KVCACHE_DEBUG"):
        log.setLevel(logging.DEBUG)
    for variable, level in (
        ("KVCACHE_DEBUG_FILE", logging.DEBUG),
        ("KVCACHE_ERROR_FILE", logging.WARNING),
    ):
        path = environment.get(variable)
        if path and not any(handler.get_name() == path for handler in log.handlers):
            handler = logging.FileHandler(path)
            handler.set_name(path)
            handler.setLevel(level)
            # The latter says why blocks do not move by RDMA.
            for logger in (log, transfer.log):
                logger.addHandler(handler)
    return environment.get("KVCACHE_SOCKET_IFNAME") or None


def rdma_of(environment: Mapping[str, str], gpu_idx: int) -> Rdma | None:
    """Return the settings of RDMA that the variables stand for; `None` if it is turned off."""
    use = environment.get(RDMA_VARIABLE) or "prefer"
    if use == "off":
        return None
    if use not in ("prefer", "require"):
        raise ConfigError(f"{RDMA_VARIABLE}: {use!r} is not prefer, require or off")
    names = environment.get("KVCACHE_RDMA_NICS", "").split(",")
    nics = [name.strip() for name in names if name.strip()]
    return Rdma(
        use=use,
        devices=[nics[gpu_idx % len(nics)]] if nics else [],
        gid_index=_number(environment, "KVCACHE_RDMA_GID_INDEX"),
        timeout=_number(environment, "KVCACHE_IB_TIMEOUT") or Rdma.timeout,
        flush="always" if _is_on(environment, "KVCACHE_GDRCOPY_FLUSH_ENABLE") else Rdma.flush,
        relaxed_ordering=_is_on(environment, "KVCACHE_RELAX_ORDERING"),
    )


def _is_on(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "").lower() in ("1", "true", "on", "yes")


def _number(environment: Mapping[str, str], variable: str) -> int | None:
    text = environment.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{variable}: {text!r} is not a whole number") from error


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), get_address, request)
        except OSError as error:
            raise ConfigError(
                f"KVCACHE_SOCKET_IFNAME: {interface!r} has no IPv4 address: {error}"
            ) from error
    return socket.inet_ntoa(answer[20:24])

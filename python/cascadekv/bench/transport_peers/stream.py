"""A limit, not a transport: one socket for each thread, 1 MiB a call, neighbouring blocks."""

import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import closing
from typing import cast

from cascadekv.bench.transport_peers.blocks import Region, Shape, Slots
from cascadekv.bench.transport_peers.movers import MoverError, Setting

CALL_BYTES = 1 << 20
HEADER = struct.Struct("<QQ")
"""Offset and length of a batch."""
DONE = b"\x01"


class PeerMover:
    """The source's sockets, or the target's threads."""

    needs_shared_memory = False
    must_be_polled = False

    def __init__(self, _setting: Setting, shape: Shape, _side: str) -> None:
        """Keep the shape."""
        self._shape = shape

    def serve(self, region: Region) -> dict[str, str | int]:
        """Listen; a thread for each connection writes into the region."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(region,), daemon=True).start()
        return {"port": self._listener.getsockname()[1]}

    def poll(self) -> None:
        """Its own threads work."""

    def connect(self, region: Region, target: Mapping[str, str | int]) -> None:
        """Connect each thread."""
        self._region = memoryview(region.memory)
        address = ("127.0.0.1", int(target["port"]))
        self._sockets = [socket.create_connection(address) for _ in range(self._shape.threads)]

    def batch(self, source: Slots, target: Slots) -> object:  # noqa: ARG002 # they are the same
        """Return where the batch begins and its length."""
        size = self._shape.block_bytes
        return int(source[0]) * size, len(source) * size

    def move(self, thread: int, batch: object) -> None:
        """Send a batch and wait until the target has it."""
        start, length = cast("tuple[int, int]", batch)
        connection = self._sockets[thread]
        connection.sendall(HEADER.pack(start, length))
        for offset in range(start, start + length, CALL_BYTES):
            connection.sendall(self._region[offset : min(offset + CALL_BYTES, start + length)])
        if connection.recv(1) != DONE:
            raise MoverError("the target closed the connection")

    def _accept(self, region: Region) -> None:
        while True:
            connection, _ = self._listener.accept()
            arguments = (connection, memoryview(region.memory))
            threading.Thread(target=_receive, args=arguments, daemon=True).start()


def _receive(connection: socket.socket, region: memoryview) -> None:
    with closing(connection):
        while header := connection.recv(HEADER.size, socket.MSG_WAITALL):
            start, length = HEADER.unpack(header)
            end = start + length
            while start < end:
                count = connection.recv_into(region[start : min(start + CALL_BYTES, end)])
                if count == 0:
                    return
                start += count
            connection.sendall(DONE)

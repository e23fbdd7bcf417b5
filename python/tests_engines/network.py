"""A TCP proxy between two engines that can be cut, frozen and restored."""

import contextlib
import random
import socket
import threading
import time

NEVER = 1 << 62


class Network:
    """Forwards connections to an address. Each direction can stop after a number of bytes."""

    def __init__(self, to):
        """Listen on a free port and forward to `HOST:PORT`."""
        host, _, port = to.rpartition(":")
        self._to = host.strip("[]"), int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._lock = threading.Condition()
        self._sockets = set()
        self._is_frozen = self._is_cut = False
        self._left = {True: NEVER, False: NEVER}
        self.passed = {True: 0, False: 0}
        """Bytes forwarded to the listening side, and back."""
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self, after=0, *, is_forward=True):
        """Forward nothing more, as a link that drops all packets.

        At once, or after some bytes to the listening side (`is_forward`) or back.
        """
        with self._lock:
            self._left[is_forward] = after
            self._is_frozen = after == 0

    def cut(self):
        """End all connections, and refuse new ones."""
        with self._lock:
            self._is_cut = True
            self._is_frozen = False
            self._left = {True: NEVER, False: NEVER}
            self._lock.notify_all()
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def restore(self):
        """Forward again, also what was held back."""
        with self._lock:
            self._is_frozen = self._is_cut = False
            self._left = {True: NEVER, False: NEVER}
            self._lock.notify_all()

    @property
    def is_frozen(self):
        """Whether it forwards nothing."""
        return self._is_frozen

    def close(self):
        """End it."""
        self.cut()
        self._server.close()

    def __enter__(self):
        """Use as a context manager that closes it."""
        return self

    def __exit__(self, *_):
        """Close it."""
        self.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._to)
            except OSError:
                client.close()
                continue
            with self._lock:
                is_cut = self._is_cut
                self._sockets |= {client, server}
            if is_cut:
                self._end(client, server)
                continue
            for one, other, is_forward in ((client, server, True), (server, client, False)):
                arguments = (one, other, is_forward)
                threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, one, other, is_forward):
        with contextlib.suppress(OSError):
            while data := one.recv(4096):
                while data:
                    data = data[self._pass(other, data, is_forward) :]
        self._end(one, other)

    def _pass(self, into, data, is_forward):
        """Forward what may pass now; returns how much it was."""
        with self._lock:
            while self._is_frozen:
                self._lock.wait()
            count = min(len(data), self._left[is_forward])
            self._left[is_forward] -= count
            self.passed[is_forward] += count
            self._is_frozen = self._left[is_forward] == 0
        into.sendall(data[:count])
        return count

    def _end(self, *sockets):
        with self._lock:
            self._sockets -= set(sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def eventually(is_so, seconds=60.0):
    """Wait until something is the case."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.01)


def ports_in_sequence(count):
    """Return the first of some ports that are free now."""
    chance = random.Random()
    for _ in range(1000):
        first = chance.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no ports are free")

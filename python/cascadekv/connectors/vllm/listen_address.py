"""Where the workers of an engine let others read their pages: `cascade.transfer_listen`."""

import ipaddress
import re
from dataclasses import dataclass

__all__ = ["ListenAddress"]

_FORM = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})")
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An IP address, and the port of the first worker; 0 for free ports."""

    host: str
    """With brackets, if it is one of IPv6."""
    port: int

    @classmethod
    def parse(cls, text: str) -> "ListenAddress":
        """Read `ADDRESS:PORT`. Raises `ValueError`."""
        found = _FORM.fullmatch(text)
        if found is None or int(found["port"]) > _PORT_MAX:
            raise ValueError(f"{text!r} is not ADDRESS:PORT")
        host = found["host"]
        # Brackets tell an address of IPv6 from its port.
        version = 6 if host.startswith("[") else 4
        if ipaddress.ip_address(host.strip("[]")).version != version:
            raise ValueError(f"{text!r} is not ADDRESS:PORT")
        return cls(host, int(found["port"]))

    @property
    def is_everywhere(self) -> bool:
        """Whether it stands for all interfaces, so that no other host can connect to it."""
        return ipaddress.ip_address(self.host.strip("[]")).is_unspecified

    def of_worker(self, number: int) -> str:
        """Return the `HOST:PORT` of a worker, counted over all replicas of the engine.

        Raises `ValueError` if there is no such port.
        """
        port = self.port + number if self.port else 0
        if port > _PORT_MAX:
            raise ValueError(f"worker {number} has no port behind {self.port}")
        return f"{self.host}:{port}"

"""How the weights that an SGLang rank has loaded are named: by every byte of their files.

Until that is known, and if the files were changed after the rank may have read them, the name is
that of the running engine, whose KV no later run finds. All ranks of an engine on a host have the
same parent, so that they name it alike.
"""

import logging
import os
from pathlib import Path

from cascadekv._native import digest
from cascadekv.connectors.file_changes import changed_since_start, facts_of
from cascadekv.connectors.weight_digests import WeightDigests
from cascadekv.connectors.weights import NotDigestedError

__all__ = ["RankWeights"]

logger = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = "their digest is computed in the background, for the next start"
_CHANGED = "the engine may have read other files than are there"


class RankWeights:
    """Names the weights of one rank."""

    def __init__(self, digests: WeightDigests) -> None:
        """`digests` has what is known of files of weights."""
        self._digests = digests

    def name(self, place: Path) -> str | None:
        """Return the name of the weights in a file or directory; `None` if there are none.

        Raises `OSError` if they cannot be read.
        """
        before = facts_of(place)
        try:
            fingerprint = self._digests.fingerprint(str(place))
        except NotDigestedError:
            self._digests.start([str(place)])
            return self._of_this_engine(place, before, _UNKNOWN)
        if fingerprint is None:
            return None
        changed = changed_since_start(place)
        if changed is not None:
            return self._of_this_engine(place, before, f"{_CHANGED}: {changed}")
        return fingerprint

    def close(self) -> None:
        """Stop computing digests."""
        self._digests.close()

    def _of_this_engine(self, place: Path, facts: object, reason: str) -> str:
        logger.warning(
            "Cascade: KV computed with the weights in %s is not found after a restart of this "
            "engine: %s",
            place,
            reason,
        )
        # A program may start one engine after the other, with changed files.
        return f"of engine {_engine()}, files {digest(repr(facts).encode()).hex()}"


def _engine() -> str:
    """Name the process that started this one. Linux only."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{_BOOT.read_text().strip()} {parent} {started}"

"""Pages of sliding windows that a prefill engine keeps for a decode engine.

A prefill engine's next token would be the one after the prompt. vLLM frees the pages before the
window of that token when a request ends, and then asks the connector which of the others to keep.
The decode engine computes the last token of the prompt again, whose window begins one token
earlier: that token may be the last one of a page that was freed.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cascadekv.connectors.failures import FailureLog

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

__all__ = ["PinnedPages"]

_LOG = logging.getLogger("vllm.cascade")


class PinnedPages:
    """References to pages, so that the engine does not use them for other requests."""

    def __init__(self) -> None:
        """Pin nothing; without the engine's pool, no page can be pinned."""
        self._pool: BlockPool | None = None
        self._pinned: dict[str, list[int]] = {}
        """By request."""
        self._failures = FailureLog(_LOG)

    def attach(self, pool: "BlockPool") -> None:
        """Set the pool that the engine's pages come from."""
        self._pool = pool

    def pin(self, request: str, pages: Sequence[int]) -> bool:
        """Pin pages of a request that were freed just now; false if that is not possible."""
        if self._pool is None:
            return False
        try:
            self._pool.touch([self._pool.blocks[page] for page in pages])
        except Exception as error:  # noqa: BLE001 # another pool must not fail the engine
            self._failures.count("pinning pages", error)
            return False
        self._pinned.setdefault(request, []).extend(pages)
        return True

    def unpin(self, request: str) -> None:
        """Let the engine use the pages of a request again."""
        pages = self._pinned.pop(request, [])
        if self._pool is None or not pages:
            return
        try:
            self._pool.free_blocks([self._pool.blocks[page] for page in pages])
        except Exception as error:  # noqa: BLE001 # likewise
            self._failures.count("unpinning pages", error)

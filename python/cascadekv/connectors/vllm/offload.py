"""`CascadeOffloadingConnector`: vLLM's native offload, which tells its tiers the engine.

vLLM tells a tier the model's name and element type, but not the other settings that its KV depends
on. This connector is vLLM's own. While it creates the tiers, it holds the engine's configuration
ready for `CascadeTier`.
"""

from contextvars import ContextVar
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["CascadeOffloadingConnector", "Engine", "engine_of_this_tier"]

Engine = tuple["VllmConfig", "KVCacheConfig"]
_ENGINE: ContextVar["Engine | None"] = ContextVar(
    "engine of the tiers that are created", default=None
)


class CascadeOffloadingConnector(OffloadingConnector):
    """vLLM's `OffloadingConnector`, whose `CascadeTier` shares chunks between engines."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Create vLLM's managers and tiers."""
        token = _ENGINE.set((vllm_config, kv_cache_config))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _ENGINE.reset(token)


def engine_of_this_tier() -> "Engine | None":
    """Return the configuration of the engine whose tier is created; `None` if it is not known."""
    return _ENGINE.get()

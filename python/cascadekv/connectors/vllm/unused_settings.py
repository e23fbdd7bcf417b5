"""Which settings of the connector have no effect in an engine, and why. The log says so at start.

`python/tests_engines/test_settings_in_modes.py` has a decision for each setting in each mode.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cascadekv.connectors.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["is_one_process", "unused_settings"]

_TRANSFER = "cascade.transfer_"
_Reason = Callable[["VllmConfig", ConnectorSettings], str | None]


def is_one_process(config: "VllmConfig") -> bool:
    """Whether the scheduler and the worker are in one process."""
    parallel = config.parallel_config
    return parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"


def unused_settings(
    config: "VllmConfig", settings: ConnectorSettings, given: Mapping[str, object]
) -> list[str]:
    """Return a line for each given setting that has no effect."""
    lines: list[str] = []
    for key in given:
        reason = _reason(key)
        why = None if reason is None else reason(config, settings)
        if why is not None:
            lines.append(f"{key} has no effect: {why}")
    return lines


def _reason(key: str) -> _Reason | None:
    return _of_transfers if key.startswith(_TRANSFER) else _REASONS.get(key)


def _of_transfers(config: "VllmConfig", settings: ConnectorSettings) -> str | None:
    if settings.transfer != "direct":
        return f"cascade.transfer is {settings.transfer}, not direct"
    if config.device_config.device_type != "cpu":
        return "cascade.transfer: direct is ignored, because the KV is in device memory"
    return None


def _of_timeout(config: "VllmConfig", settings: ConnectorSettings) -> str | None:
    if settings.address.node is None and is_one_process(config):
        return None
    return (
        "calls to a node end after cascade.lookup_timeout, cascade.load_timeout and "
        "cascade.save_timeout"
    )


def _of_lookup_timeout(config: "VllmConfig", settings: ConnectorSettings) -> str | None:
    if settings.address.node is None and is_one_process(config):
        return "the store is in the engine's process, where a lookup does not wait"
    return None


def _of_layerwise(_: "VllmConfig", settings: ConnectorSettings) -> str | None:
    is_async = settings.layerwise and settings.load == "async"
    return "cascade.load is async, and layers are those of synchronous loads" if is_async else None


_REASONS: Mapping[str, _Reason] = {
    "cascade.timeout": _of_timeout,
    "cascade.lookup_timeout": _of_lookup_timeout,
    "cascade.layerwise": _of_layerwise,
}

"""Lists the interface between vLLM and connectors, one line for each name, for comparison.

    python python/tests_engines/vllm_interface.py > testdata/vllm-interface/0.32.txt

writes the list of the installed vLLM. Before a version is supported, the differences in its list
must be reviewed.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

LISTS = Path(__file__).parents[2] / "testdata" / "vllm-interface"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
TIERING = "vllm.v1.kv_offload.tiering"
CLASSES = {
    f"{CONNECTOR}.base": [
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorWorkerMetadata",
        "KVConnectorTransferResults",
    ],
    f"{CONNECTOR}.metrics": ["KVConnectorStats", "KVConnectorPromMetrics"],
    "vllm.v1.core.sched.output": ["KVConnectorBlockState"],
    "vllm.v1.kv_cache_interface": ["KVCacheConfig", "KVCacheTensor", "KVCacheGroupSpec"],
    "vllm.distributed.kv_events": ["BlockStored", "BlockRemoved"],
    f"{TIERING}.base": ["SecondaryTierManager", "TransferJob", "JobResult"],
    f"{TIERING}.async_lookup": ["AsyncLookupManager"],
}
"""Base classes, parameters and results of the connectors; a version may lack some."""
KINDS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def interface() -> Iterator[str]:
    """List the members of each class, with the parameters of its methods."""
    for place, names in CLASSES.items():
        module = importlib.import_module(place)
        for name in names:
            cls = getattr(module, name, None)
            if cls is not None:
                yield f"{name}{_parameters(cls)}"
                yield from sorted(f"{name}.{line}" for line in _members(cls))


def version() -> str:
    """Return the first two numbers of vLLM's version."""
    import vllm  # noqa: PLC0415 # only where vLLM is installed

    return ".".join(vllm.__version__.split(".")[:2])


def _members(cls: type) -> Iterator[str]:
    given = inspect.signature(cls).parameters
    for name, member in inspect.getmembers_static(cls):
        if name.startswith("_") or name in given:
            continue
        if isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            word = "" if inspect.isfunction(member) else f" {type(member).__name__}"
            line = f"{name}{_parameters(getattr(cls, name))}{word}"
        else:
            line = f"{name} {'property' if _is_computed(member) else 'attribute'}"
        yield line + (" abstract" if getattr(member, "__isabstractmethod__", False) else "")


def _is_computed(member: object) -> bool:
    return isinstance(member, property) or type(member).__name__ == "cached_property"


def _parameters(call: object) -> str:
    """Format parameters without types, which change more often than they matter."""
    written = []
    for parameter in inspect.signature(call).parameters.values():
        default = "" if parameter.default is inspect.Parameter.empty else "=..."
        written.append(f"{KINDS.get(parameter.kind, '')}{parameter.name}{default}")
    return f"({', '.join(written)})"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in interface())

"""The connector to vLLM: `kv_connector_module_path` is `cascadekv.connectors.vllm`."""

# First: with a vLLM that is too old, this raises a clear error, and the next import an obscure one.
from cascadekv.connectors import vllm_versions
from cascadekv.connectors.vllm.connector import CascadeConnector

__all__ = ["CascadeConnector", "vllm_versions"]

"""The connector to vLLM: `kv_connector_module_path` is `cascadekv.connectors.vllm`."""

# What follows cannot be imported with a vLLM that is too old; this says so in words.
from cascadekv.connectors import vllm_versions
from cascadekv.connectors.vllm.connector import CascadeConnector

__all__ = ["CascadeConnector", "vllm_versions"]

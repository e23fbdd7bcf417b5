"""The connector to vLLM: `kv_connector_module_path` is `cascadekv.connectors.vllm`."""

from cascadekv.connectors.vllm.connector import CascadeConnector

__all__ = ["CascadeConnector"]

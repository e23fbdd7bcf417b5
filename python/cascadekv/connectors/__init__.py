"""Adapters to inference engines, one module an engine; importing this imports no engine."""

"""Adapters to inference engines, one module per engine; importing this imports no engine."""

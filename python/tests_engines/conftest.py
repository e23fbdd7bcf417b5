"""Engines' own classes, and the nodes and helpers of the tests beside this directory.

These tests need an engine's package and torch (for CPUs), which the others do without.
"""

import importlib.util
from pathlib import Path

_FILE = Path(__file__).parents[1] / "tests" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("cascade_test_stores", _FILE)
_STORES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_STORES)

serve = _STORES.serve
eventually = _STORES.eventually

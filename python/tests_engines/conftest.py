"""Engines' own classes, and the nodes and helpers of the tests beside this directory.

These tests need an engine's package and torch (for CPUs), which the others do without.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "tests" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("cascade_test_stores", _FILE)
_STORES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_STORES)

serve = _STORES.serve
eventually = _STORES.eventually


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Start nodes for the tests of one module."""
    with _STORES.nodes(tmp_path_factory.mktemp("nodes")) as start:
        yield start

"""The examples of the guide and of the package's own description run as they stand."""

import doctest
import sys
from pathlib import Path

import cascadekv

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_guides_examples_run(tmp_path, serve):
    node = serve("--dram", "64MiB")
    failed, attempted = doctest.testfile(
        str(GUIDE),
        module_relative=False,
        globs={"directory": str(tmp_path / "files"), "node_socket": str(node.socket)},
    )
    sys.modules.pop("cascade_cpp", None)
    assert attempted > 20
    assert failed == 0


def test_the_packages_example_runs():
    failed, attempted = doctest.testmod(cascadekv)
    assert attempted > 0
    assert failed == 0

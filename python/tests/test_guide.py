"""The examples of the guide, the docstrings and the quickstart run unchanged."""

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import cascadekv
import pytest
from cascadekv import aio

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"
README = Path(__file__).parents[2] / "README.md"
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
HELLO = Path(__file__).parents[2] / "examples" / "hello.py"


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


@pytest.mark.parametrize("module", [cascadekv, aio])
def test_a_modules_example_runs(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0


def test_the_manifest_of_the_modules_example_has_all_required_fields():
    # It lacked five, so that a copy could share KV of other layouts.
    fields = cascadekv.__doc__.split("cascadekv.Manifest(")[1].split(")\n")[0].replace("...", "")
    assert cascadekv.Manifest(ast.literal_eval(fields.strip())).missing() == []


def test_the_first_example_of_the_readme_runs(capsys):
    example = README.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(example, "README.md", "exec"), {})  # noqa: S102 # our own page
    assert capsys.readouterr().out == "b'Hello, world!'\nNone\n"


def test_the_quickstart_runs():
    run = subprocess.run(  # noqa: S603 # our own script
        [sys.executable, str(QUICKSTART)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert " 24 blocks:  16 loaded,   8 computed" in run.stdout
    assert "after a restart:\n 24 blocks:  24 loaded" in run.stdout


@pytest.mark.parametrize("kind", ["embedded", "served"])
def test_the_hello_world_runs(serve, kind):
    arguments = [] if kind == "embedded" else [str(serve("--dram", "64MiB").socket)]
    run = subprocess.run(  # noqa: S603 # our own script
        [sys.executable, str(HELLO), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    hello, miss, refused, morning = run.stdout.splitlines()
    assert (hello, miss, morning) == ("b'Hello, world!'", "None", "b'Good morning!'")
    assert refused.startswith('"greeting" is stored with other bytes, which stay')

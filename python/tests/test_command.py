"""The command is installed with the package and returns the documented exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import cascadekv
import pytest
from cascadekv import _program
from cascadekv._program import program


def cascade(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "cascadekv", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_command_prints_its_version_and_its_commit():
    run = cascade("--version")
    assert run.returncode == 0
    version = re.escape(cascadekv.__version__)
    commit = r"commit \w+( with local changes)?"
    assert re.fullmatch(rf"cascade {version} \({commit}, \w+, opt-level \w\)\n", run.stdout)


def test_the_program_is_native_and_the_module_is_the_same_program(shared_node):
    assert program().read_bytes()[:4] == b"\x7fELF"
    # A signal to this process reaches the node: no interpreter is in between.
    running = Path(f"/proc/{shared_node.process.pid}/exe")
    assert running.samefile(program())
    alone = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    assert alone.stdout == cascade("--version").stdout


def test_a_missing_program_is_an_error_that_names_the_places(tmp_path, monkeypatch):
    monkeypatch.setattr(_program, "__file__", str(tmp_path / "cascadekv" / "_program.py"))
    monkeypatch.setattr(_program.sysconfig, "get_path", lambda *_: str(tmp_path / "scripts"))
    with pytest.raises(FileNotFoundError, match="reinstall cascadekv") as missing:
        program()
    assert str(tmp_path / "scripts") in str(missing.value)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cascade").touch()
    assert program() == tmp_path / "bin" / "cascade", "as pip install --target leaves it"


def test_the_program_is_found_from_another_environment(tmp_path, monkeypatch):
    """A `.pth` file imports the package from an environment with scripts of its own."""
    site_packages, scripts = tmp_path / "lib" / "site-packages", tmp_path / "bin"
    record = site_packages / "cascadekv-0.1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("cascadekv/_program.py,,\n../../bin/cascade,,\n")
    (record.parent / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cascadekv\nVersion: 0.1.0\n"
    )
    scripts.mkdir()
    (scripts / "cascade").touch()
    monkeypatch.setattr(_program, "__file__", str(site_packages / "cascadekv" / "_program.py"))
    assert program() == scripts / "cascade"


def test_an_invalid_command_line_exits_with_2():
    run = cascade("replay", "--no-such-option")
    assert run.returncode == 2
    assert "--no-such-option" in run.stderr


def test_a_replay_verifies_every_byte_and_writes_its_figures(tmp_path):
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    requests = [
        {"timestamp": n * 1000, "input_length": 1536, "output_length": 1, "hash_ids": ids}
        for n, ids in enumerate([[1, 2, 3], [1, 2, 4], [1, 2, 3]])
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    run = cascade("replay", str(trace), "--json", str(figures), "--dram", "64MiB")
    assert run.returncode == 0, run.stderr
    written = json.loads(figures.read_text())
    assert written["requests"] == 3
    assert written["blocks_requested"] == 9
    assert written["wrong_blocks"] == 0
    assert written["hit_rate"] == written["blocks_hit"] / written["blocks_requested"]

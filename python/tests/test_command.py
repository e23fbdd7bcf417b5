"""The command is installed with the package and returns the documented exit codes."""

import json
import subprocess
import sys

import cascadekv


def cascade(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "cascadekv", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_command_prints_its_version():
    run = cascade("--version")
    assert run.returncode == 0
    assert cascadekv.__version__ in run.stdout


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

"""`cascade bench transport`: its rows, on this machine, in its short form."""

import json
import subprocess
import sys

import pytest


@pytest.mark.stress  # half a minute
def test_each_row_says_what_was_moved_and_that_it_was_verified():
    flags = ["--unoptimised", "--short", "--only", "/1KiB/1-thread", "--json", "-"]
    done = subprocess.run(  # noqa: S603 # our own program
        [sys.executable, "-m", "cascadekv", "bench", "transport", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["name"] for row in rows} == {
        f"{backend}/{direction}/1KiB/1-thread"
        for backend in ("tcp", "shm", "tls")
        for direction in ("write", "read")
    }
    for row in rows:
        assert row["backend"] in row["name"]
        assert (row["block_bytes"], row["batch"], row["threads"]) == (1024, 1538, 1)
        assert row["peer"] == "cascade"
        assert row["verified"] is True
        assert row["gbps"] > 0
        assert row["limit_gbps"] > 0
        assert row["share"] == row["gbps"] / row["limit_gbps"]
        assert row["cpu_ns_per_block"] > 0
        copies = {None: {"tcp": 2, "shm": 1}, "kernel": {"tls": 2}, "userspace": {"tls": 4}}
        assert row["copies_per_byte"] == copies[row.get("record_layer")][row["backend"]]
        calls = row["system_calls_per_batch"]
        if calls is None:
            assert "not measured: system calls: strace" in done.stderr
        else:
            # The two processes decide by their speeds how many calls move a batch.
            assert 1 <= calls <= 1538 // 8, row["name"]

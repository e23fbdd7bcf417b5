"""`cascade bench transfer`: its rows, on this machine, in its short form."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def rows():
    flags = ["--unoptimised", "--short", "--json", "-"]
    done = subprocess.run(  # noqa: S603 # our own program
        [sys.executable, "-m", "cascadekv", "bench", "transfer", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_each_backend_and_model_has_its_rows(rows):
    models = ("llama-3.1-8b", "llama-3.1-70b")
    kinds = ("push", "pull", "remote-local")
    wanted = {
        f"{way}/{kind}/{model}" for way in ("tcp", "shm") for kind in kinds for model in models
    }
    overlaps = {
        f"{way}/overlap/llama-3.1-8b/{compute}"
        for way in ("tcp", "shm")
        for compute in ("sleep", "spin")
    }
    assert set(rows) == wanted | overlaps


def test_each_row_says_what_was_moved_and_that_it_was_verified(rows):
    for name, row in rows.items():
        assert row["backend"] == name.split("/")[0]
        assert row["model"] in name
        is_push = "/push/" in name or "/overlap/" in name
        assert row["direction"] == ("push" if is_push else "pull")
        assert (row["layers"], row["tokens"], row["blocks"]) == (4, 256, 16)
        assert row["bytes"] == 4 * 16 * row["block_bytes"] == 4 * 256 * 4096
        assert row["verified"] is True
        assert row["gbps"] > 0
        assert row["limit_gbps"] > 0
        assert 0 < row["first_layer_ms"] <= row["last_layer_ms"]
        assert row["cpu_ns_per_block"] > 0


def test_rates_are_those_of_the_last_layer(rows):
    for name, row in rows.items():
        if "/push/" not in name and "/pull/" not in name:
            continue
        assert row["share"] == pytest.approx(row["gbps"] / row["limit_gbps"])
        assert row["gbps"] == row["value"]


def test_overlaps_and_ratios_have_their_own_values(rows):
    for name, row in rows.items():
        is_overlap, is_ratio = "/overlap/" in name, "/remote-local/" in name
        assert row["overlap"] == (row["value"] if is_overlap else None)
        assert row["simulated_compute"] == (name.split("/")[-1] if is_overlap else None)
        assert row["compute_ms_per_layer"] == (5.0 if is_overlap else None)
        assert row["times_local"] == (row["value"] if is_ratio else None)
        assert row["limit_times_local"] == (row["limit"] if is_ratio else None)


def test_only_selects_rows():
    flags = ["--unoptimised", "--short", "--only", "shm/push/", "--json", "-"]
    done = subprocess.run(  # noqa: S603 # our own program
        [sys.executable, "-m", "cascadekv", "bench", "transfer", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(done.stdout)]
    assert names == ["shm/push/llama-3.1-8b", "shm/push/llama-3.1-70b"]

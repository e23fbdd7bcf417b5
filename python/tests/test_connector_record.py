"""Finished requests are recorded as a trace for `cascade replay`, without delaying the engine."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cascadekv.connectors import record
from cascadekv.connectors.record import TraceRecorder
from cascadekv.errors import ConfigError


def keys(chance, count):
    return [chance.randbytes(32) for _ in range(count)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_one_line_with_the_documented_fields(tmp_path):
    recorder = TraceRecorder(tmp_path, block_tokens=128, now=lambda: 1_790_000_000.25)
    assert recorder.path == tmp_path / f"trace-{os.getpid()}.jsonl"
    names = keys(random.Random(1), 2)
    recorder.record(input_tokens=300, output_tokens=7, keys=iter(names))
    recorder.record(input_tokens=10, output_tokens=0, keys=[], arrived_unix_s=1_790_000_001.5)
    recorder.close(timeout=60)
    recorder.close(timeout=60)
    assert lines(recorder.path) == [
        {
            "timestamp": 1_790_000_000_250,
            "input_length": 300,
            "output_length": 7,
            "hash_ids": [name.hex()[:32] for name in names],
            "block_tokens": 128,
        },
        {
            "timestamp": 1_790_000_001_500,
            "input_length": 10,
            "output_length": 0,
            "hash_ids": [],
            "block_tokens": 128,
        },
    ]
    assert recorder.dropped == 0
    recorder.record(input_tokens=1, output_tokens=1, keys=[])
    assert recorder.dropped == 1


def test_full_files_are_rotated_with_whole_lines(tmp_path):
    place = tmp_path / "deep" / "requests.jsonl"
    recorder = TraceRecorder(place, block_tokens=128, max_bytes=1000, max_files=3)
    for number in range(100):
        recorder.record(input_tokens=number, output_tokens=0, keys=[bytes(32)] * 3)
    recorder.close(timeout=60)
    files = sorted(place.parent.iterdir())
    assert [file.name for file in files] == [
        "requests.1.jsonl",
        "requests.2.jsonl",
        "requests.jsonl",
    ]
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = [line["input_length"] for file in (files[1], files[0], files[2]) for line in lines(file)]
    assert kept == list(range(100 - len(kept), 100))
    assert len(kept) >= 9


def test_a_single_file_is_overwritten_when_full(tmp_path):
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_tokens=1, max_bytes=200, max_files=1)
    for number in range(10):
        recorder.record(input_tokens=number, output_tokens=0, keys=[])
    recorder.close(timeout=60)
    assert [file.name for file in tmp_path.iterdir()] == ["t.jsonl"]
    assert lines(recorder.path)[-1]["input_length"] == 9


def test_a_partial_last_line_is_truncated(tmp_path):
    place = tmp_path / "t.jsonl"
    place.write_text('{"timestamp":1}\n{"timest')
    recorder = TraceRecorder(place, block_tokens=1)
    recorder.record(input_tokens=5, output_tokens=0, keys=[])
    recorder.close(timeout=60)
    assert [line.get("input_length") for line in lines(place)] == [None, 5]


class Disk:
    """A file whose writes fail, or write half of a line, in a given order."""

    def __init__(self, file, faults):
        self.file, self.faults = file, faults

    def write(self, line):  # noqa: D102
        fault = self.faults.pop() if self.faults else None
        if fault == "refuses":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.file.write(line[: len(line) // 2] if fault == "half" else line)

    def __getattr__(self, name):  # noqa: D105
        return getattr(self.file, name)


def test_failed_writes_are_counted_and_leave_no_partial_lines(tmp_path, monkeypatch, caplog):
    faults = ["half", None, "refuses", "half", "refuses", None]
    opens = record.open_trace
    monkeypatch.setattr(record, "open_trace", lambda path: Disk(opens(path), faults))
    recorder = TraceRecorder(tmp_path, block_tokens=1)
    for number in range(10):
        recorder.record(input_tokens=number, output_tokens=0, keys=[bytes(32)])
    recorder.close(timeout=60)
    assert [line["input_length"] for line in lines(recorder.path)] == [0, 4, 6, 7, 8, 9]
    assert recorder.dropped == 4
    assert len(caplog.records) == 1
    assert "missing from the trace" in caplog.text


def test_a_slow_disk_does_not_block_recording(tmp_path, monkeypatch):
    opens, gate = record.open_trace, threading.Event()

    class Slow(Disk):
        def write(self, line):
            assert gate.wait(60)
            return self.file.write(line)

    monkeypatch.setattr(record, "open_trace", lambda path: Slow(opens(path), []))
    monkeypatch.setattr(record, "QUEUE_MAX", 8)
    recorder = TraceRecorder(tmp_path, block_tokens=1)
    for number in range(100):
        recorder.record(input_tokens=number, output_tokens=0, keys=[])
    assert 91 <= recorder.dropped <= 92
    gate.set()
    recorder.close(timeout=60)
    assert len(lines(recorder.path)) + recorder.dropped == 100


def test_an_unwritable_path_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/trace.*cannot be written: File exists"):
        TraceRecorder(tmp_path / "file", block_tokens=128)
    with pytest.raises(ConfigError, match="max_files 0"):
        TraceRecorder(tmp_path, block_tokens=128, max_files=0)


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_a_file_that_another_user_planted_is_not_written(tmp_path, plant):
    target, place = tmp_path / "target", tmp_path / "trace.jsonl"
    target.write_text("of another user, without an end of line")
    plant(place, target)
    with pytest.raises(ConfigError, match=r"symbolic link|one hard link"):
        TraceRecorder(place, block_tokens=128)
    assert target.read_text() == "of another user, without an end of line"


def test_replay_reads_what_was_recorded(tmp_path):
    chance = random.Random(5)
    system = keys(chance, 4)
    recorder = TraceRecorder(tmp_path, block_tokens=128, max_bytes=4000, max_files=9)
    for second in range(40):
        own = keys(chance, 3)
        recorder.record(
            input_tokens=7 * 128 + second,
            output_tokens=5,
            keys=system + own,
            arrived_unix_s=1_790_000_000 + second,
        )
    recorder.close(timeout=60)
    assert len(list(tmp_path.iterdir())) > 2
    result = subprocess.run(  # noqa: S603 # our own command
        [sys.executable, "-m", "cascadekv", "replay", tmp_path, "--metadata-only", "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["requests"] == 40
    assert figures["blocks_requested"] == 40 * 7
    assert figures["blocks_hit"] == 39 * 4
    assert figures["trace"]["block_tokens"] == 128

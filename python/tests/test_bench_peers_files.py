"""The comparison of files with other systems finds wrong bytes, warm reads and failed systems."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cold
import competitors
import figures
import numpy as np
import payload
import pytest
from cascadekv.bench import page_cache
from competitors import Blocks, Competitor, CompetitorError
from disk_limit import DiskLimit, LimitError
from rounds import COLD_GET, DURABLE_PUT, FIO, WRITE, Plan, Rounds, Samples
from session import Session
from worker import Worker, WorkerError

KIB, MIB = 1 << 10, 1 << 20
PROGRAM = Path(__file__).parents[1] / "bench" / "peers_files" / "__main__.py"


@pytest.fixture
def direct_path(tmp_path: Path) -> Path:
    """Return a directory whose files can be read with O_DIRECT."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError as error:
        pytest.skip(f"the file system of temporary files has no O_DIRECT: {error}")
    return tmp_path


@pytest.mark.parametrize("offset", [0, 12_345, 300_000, 393_215])
def test_a_wrong_byte_is_found_at_its_offset(offset):
    block = np.empty(384 * KIB, np.uint8)  # one and a half pieces
    payload.fill("a", block)
    payload.check("a", block)
    block[offset] ^= 1
    with pytest.raises(payload.WrongByteError, match=f"offset {offset} "):
        payload.check("a", block)


def test_a_block_of_another_name_or_at_another_place_is_wrong():
    blocks = np.empty((2, 64 * KIB), np.uint8)
    payload.fill("a", blocks[0])
    payload.fill("b", blocks[1])
    for wrong in (blocks[1], np.roll(blocks[0], 8), np.zeros_like(blocks[0])):
        with pytest.raises(payload.WrongByteError, match=r"'a'.* offset [0-7] "):
            payload.check("a", wrong)


class Remembered(Competitor):
    """Keeps blocks in memory, so that its reads cannot be cold."""

    name = "remembered"

    def __init__(self, spoil: Callable[[Blocks], None] = lambda _: None) -> None:
        super().__init__()
        self._spoil, self._blocks = spoil, np.empty(0, np.uint8)

    def keys(self, names, block_bytes):
        """Return the names."""
        return [(name, block_bytes) for name in names]

    def put(self, keys, blocks):
        """Keep a copy."""
        assert len(keys) == len(blocks)
        self._blocks = blocks.copy()
        return []

    def get(self, keys, targets):
        """Return the copy, spoilt."""
        assert len(keys) == len(targets)
        targets[:] = self._blocks
        self._spoil(targets)
        return []


def commands(directory: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    size = {"block_bytes": 64 * KIB, "bytes": MIB, "round": 3, "durable": False} | changes
    put = {**size, "do": "put", "directory": str(directory)}
    return put, {**put, "do": "get"}


def flip(targets: Blocks) -> None:
    targets[5, 77] ^= 0x80


def swap(targets: Blocks) -> None:
    targets[[0, 1]] = targets[[1, 0]]


def drop(targets: Blocks) -> None:
    targets[15] = 0


@pytest.mark.parametrize(("spoil", "block"), [(flip, 5), (swap, 0), (drop, 15)])
def test_a_competitor_that_returns_a_wrong_byte_is_found(tmp_path, spoil, block):
    session = Session(Remembered(spoil))
    put, get = commands(tmp_path / "blocks")
    session.run(put)
    with pytest.raises(payload.WrongByteError, match=rf"'65536 3 {block}'"):
        session.run(get)


def test_a_competitor_that_writes_nothing_into_the_memory_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Remembered, "get", lambda _self, _keys, _targets: [])
    session = Session(Remembered())
    put, get = commands(tmp_path / "blocks")
    session.run(put)
    with pytest.raises(payload.WrongByteError, match=r"'65536 3 0'"):
        session.run(get)


def test_a_read_that_the_disk_did_not_serve_is_refused(tmp_path):
    if cold.disk_bytes_read() is None:
        pytest.skip("this kernel does not count a process's reads")
    session = Session(Remembered())
    put, get = commands(tmp_path / "blocks")
    session.run(put)
    with pytest.raises(cold.NotColdError, match=r"only 0 of 1048576 bytes were read"):
        session.run(get)
    with pytest.raises(cold.NotColdError, match="page cache"):
        cold.check_cold(MIB, cached_before=MIB // 2, from_disk=MIB)


def test_dropped_files_are_not_in_the_page_cache(direct_path):
    (direct_path / "below").mkdir()
    (direct_path / "below" / "file").write_bytes(bytes(MIB))
    assert page_cache.cached_bytes(direct_path) == MIB
    page_cache.drop(direct_path)
    assert page_cache.cached_bytes(direct_path) == 0


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("name", ["cascade", "plain-files"])
def test_blocks_are_written_and_read_cold(direct_path, name, durable):
    session = Session(competitors.COMPETITORS[name]())
    put, get = commands(direct_path / "blocks", block_bytes=128 * KIB, bytes=8 * MIB)
    assert session.run({**put, "durable": durable})["seconds"] > 0
    measured = session.run(get)
    assert measured["seconds"] > 0
    assert measured["disk_bytes"] is None or measured["disk_bytes"] >= 8 * MIB
    session.run({"do": "close"})


def test_a_block_that_a_store_lost_is_no_figure(direct_path):
    cascade = competitors.Cascade()
    cascade.open_new(direct_path, 64 * KIB, durable=False)
    targets = np.empty((2, 64 * KIB), np.uint8)
    with pytest.raises(CompetitorError, match="miss"):
        cascade.check(cascade.get(cascade.keys(["a", "b"], 64 * KIB), targets))
    cascade.close()


class Scripted:
    """A process that answers at once, and fails when it is told to."""

    def __init__(self, name: str, calls: list[str], fails: Callable[[int], bool]) -> None:
        self.name, self.calls, self.fails = name, calls, fails

    def versions(self) -> dict[str, str]:
        """Fail in round -1."""
        if self.fails(-1):
            raise WorkerError("no such library")
        return {self.name: "1.0"}

    def call(self, command: dict[str, Any]) -> dict[str, Any]:
        """Fail a read."""
        self.calls.append(f"{self.name} {command['do']}")
        if command["do"] == "get" and self.fails(command["round"]):
            raise WorkerError("a byte is wrong")
        return {"seconds": 2.0, "cached_bytes": 7, "disk_bytes": 8 * MIB}

    def end(self) -> None:
        """Note it."""
        self.calls.append(f"{self.name} end")


def test_a_failed_competitor_is_named_and_the_others_go_on(tmp_path):
    calls: list[str] = []
    failing = {"good": [], "worse": [1], "absent": [-1]}

    def start(name: str) -> Scripted:
        return Scripted(name, calls, lambda number: number in failing[name])

    plan = Plan((MIB,), 3, 8 * MIB, tmp_path)
    rounds = Rounds(plan, list(failing), start, lambda _: None)
    failed = rounds.start()
    assert failed == {"absent": "failed: no such library"}
    assert rounds.versions == {"good": "1.0", "worse": "1.0"}
    samples = rounds.measure(MIB, None, failed)
    assert samples["good"].problem is None
    assert samples["good"].rates[COLD_GET] == [8 * MIB / 2.0 / (1 << 30)] * 3
    assert (samples["good"].cached_bytes_max, samples["good"].disk_bytes_min) == (7, 8 * MIB)
    assert samples["worse"].problem == "failed in round 2: a byte is wrong"
    assert samples["absent"].problem == "failed: no such library"
    # The process of the failed one was ended and started again; it can be measured once more.
    assert calls.count("worse end") == 1
    failing["worse"] = []
    assert rounds.measure(MIB, None, failed)["worse"].problem is None
    rounds.end()
    assert calls[-3:] == ["good end", "worse end", "absent end"]


def test_the_order_changes_with_each_round(tmp_path):
    calls: list[str] = []
    rounds = Rounds(
        Plan((MIB,), 2, MIB, tmp_path),
        ["a", "b"],
        lambda name: Scripted(name, calls, lambda _: False),
        lambda _: None,
    )
    rounds.measure(MIB, None, rounds.start())
    assert [call[0] for call in calls if call.endswith("get")] == ["a", "b", "b", "a"]


def test_a_dead_process_is_named_with_its_signal(tmp_path):
    worker = Worker("plain-files", tmp_path / "log")
    worker.versions()
    os.kill(worker._process.pid, signal.SIGKILL)  # noqa: SLF001 # as the kernel's OOM killer does
    with pytest.raises(WorkerError, match="signal SIGKILL"):
        worker.call({"do": "close"})
    worker.end()


def test_a_process_that_fails_a_command_says_why_and_goes_on(tmp_path):
    worker = Worker("plain-files", tmp_path / "log")
    worker.versions()
    put, _ = commands(tmp_path)  # the directory exists
    with pytest.raises(WorkerError, match="FileExistsError"):
        worker.call(put)
    assert worker.call({"do": "close"}) == {}
    worker.end()
    unknown = Worker("no-such-system", tmp_path / "log")
    with pytest.raises(WorkerError, match="no-such-system"):
        unknown.versions()
    unknown.end()


def fio(path: Path, body: str) -> None:
    (path / "bin").mkdir()
    program = path / "bin" / "fio"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def test_the_limit_is_the_best_engine_and_depth_and_bad_engines_are_left_out(tmp_path, monkeypatch):
    fio(
        tmp_path,
        'case "$*" in *io_uring*) echo forbidden >&2; exit 1;; esac\n'
        'case "$*" in *libaio*iodepth=8) rate=3;; *psync*numjobs=4*) rate=2;; *) rate=1;; esac\n'
        'echo "{\\"jobs\\": [{\\"read\\": {\\"bw_bytes\\": ${rate}073741824}}]}"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    limit = DiskLimit(tmp_path / "limit.bin", 4 * MIB, MIB)
    limit.calibrate("read", lambda _: None)
    limit.measure("read")
    limit.measure("read")
    best, samples = limit.best("read")
    assert (best.engine, best.depth) == ("libaio", 8)
    assert [round(sample, 1) for sample in samples] == [2.9, 2.9]
    with pytest.raises(LimitError, match="forbidden"):
        limit.calibrate("write", lambda _: None)


def samples_of(write: float, get: float, durable: float) -> Samples:
    return Samples(rates={WRITE: [write], COLD_GET: [get, 9.0, get], DURABLE_PUT: [durable]})


def test_shares_targets_and_problems_are_in_the_rows():
    samples = {
        "cascade": samples_of(1.0, 1.9, 1.3),
        "plain-files": samples_of(1.5, 1.6, 1.0),
        "hdf5": Samples(problem="skipped: h5py not installed"),
        "lmcache": Samples(
            rates={WRITE: [9.0], COLD_GET: [], DURABLE_PUT: []}, problem="failed in round 1: x"
        ),
        FIO: samples_of(2.0, 2.0, 0.0),
    }
    rows = {row["name"]: row for row in figures.rows(2 * MIB, samples, {WRITE: "fio"}, {})}
    get = rows["cold-get/2MiB/cascade"]
    assert (get["value"], get["limit"], get["share"]) == (1.9, 2.0, 0.95)
    assert (get["best_other"], get["is_reached"]) == ("plain-files", True)
    write = rows["write/2MiB/cascade"]
    # What failed is no competitor, even where it was fast.
    assert (write["share"], write["best_other"], write["is_reached"]) == (
        0.5,
        "plain-files",
        False,
    )
    durable = rows["durable-put/2MiB/cascade"]
    assert (durable["times_best_other"], durable["is_reached"]) == (1.3, True)
    assert f"durable-put/2MiB/{FIO}" not in rows
    assert "h5py" in figures.line(rows["write/2MiB/hdf5"])
    assert "failed in round 1: x" in figures.line(rows["write/2MiB/lmcache"])
    assert "met" in figures.line(durable)
    without = figures.rows(128 * KIB, {"cascade": samples_of(1, 1, 1)}, {}, {})
    assert [row["is_reached"] for row in without] == [None, None, None]


@pytest.fixture
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers_files_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_measures_and_keeps_no_path(program, direct_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")  # no fio
    monkeypatch.setitem(competitors.COMPETITORS, "hdf5", absent("hdf5"))
    output = direct_path / "rows.json"
    arguments = ["--json", str(output), "--directory", str(direct_path), "--sizes", "128KiB"]
    arguments += ["--systems", "cascade,plain-files,hdf5", "--rounds", "1", "--mib", "32"]
    assert program.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "no-such-package not installed" in printed
    assert "not measured: fio is not installed" in printed
    rows = {row["name"]: row for row in json.loads(output.read_text())}
    for kind in (WRITE, COLD_GET, DURABLE_PUT):
        assert rows[f"{kind}/128KiB/cascade"]["value"] > 0
        assert rows[f"{kind}/128KiB/hdf5"]["problem"].startswith("skipped")
    environment = output.with_suffix(".environment.json").read_text()
    assert json.loads(environment)["versions"]["cascadekv"]
    assert str(direct_path) not in environment + output.read_text()
    assert sorted(path.name for path in direct_path.iterdir()) == [
        "probe",
        "rows.environment.json",
        "rows.json",
    ]


def absent(name: str) -> type[Competitor]:
    base = competitors.COMPETITORS[name]
    return type("Absent", (base,), {"packages": ("no-such-package",)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "3MiB"], "'3MiB' is not one of 128KiB"),
        (["--systems", "redis"], "'redis' is not one of cascade"),
        (["--mib", "1"], "'1' is not a whole number of at least 32"),
        (["--rounds", "many"], "'many' is not a whole number of at least 1"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_allowed(program, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_stop_signal_leaves_no_files(direct_path):
    command = [sys.executable, str(PROGRAM.parent), "--directory", str(direct_path)]
    command += ["--systems", "cascade,plain-files", "--sizes", "128KiB", "--rounds", "1000"]
    run = subprocess.Popen(  # noqa: S603 # our own program
        [*command, "--mib", "32"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert run.stderr is not None
    for line in run.stderr:
        if "round 2" in line:
            break
    run.terminate()
    run.stderr.close()
    assert run.wait() == 128 + signal.SIGTERM
    assert [path.name for path in direct_path.iterdir()] == ["probe"]

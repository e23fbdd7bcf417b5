"""Stages in Python: over a dict, over sqlite3, and stages that raise, lie, fill up or hang.

The bytes of a block are a function of its key, and every block that is read is compared.
"""

import contextlib
import ctypes
import errno
import functools
import os
import re
import sqlite3
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import cascadekv
import pytest
from cascadekv import ConfigError, PipelineError, PutStatus, Store
from cascadekv.stages import Stage, StageFullError, check_stage

SIZE = 100_000
RECORD = SIZE + 160
DRAM = "4MiB"
"""Room for about 40 blocks."""


class DictStage:
    """Records in a dict, which survives the store."""

    def __init__(self, records: dict[str, bytes] | None = None) -> None:
        self.records = {} if records is None else records
        self.calls: list[str] = []

    def put(self, name: str, record: memoryview) -> None:
        """Store a copy."""
        self.calls.append("put")
        assert record.readonly
        self.records[name] = bytes(record)

    def get(self, name: str, into: memoryview) -> int:
        """Copy what fits."""
        self.calls.append("get")
        part = self.records[name][: len(into)]
        into[: len(part)] = part
        return len(part)

    def delete(self, names: Sequence[str]) -> None:
        """Delete records."""
        self.calls.append("delete")
        for name in names:
            self.records.pop(name, None)

    def names(self) -> Iterator[tuple[str, int]]:
        """List all records."""
        self.calls.append("names")
        for name, record in self.records.items():
            yield name, len(record)


class TableStage:
    """Records in a table of SQLite, on disk."""

    def __init__(self, path: Path) -> None:
        # Created in this thread and used by the stage's thread, never at the same time.
        self._table = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        # No test ends the machine, and the store waits only so long for a slow disk.
        self._table.execute("PRAGMA synchronous = OFF")
        self._table.execute("CREATE TABLE IF NOT EXISTS records (name TEXT PRIMARY KEY, r BLOB)")

    def put(self, name: str, record: memoryview) -> None:
        """Store a copy."""
        self._table.execute("INSERT INTO records VALUES (?, ?)", (name, record))

    def get(self, name: str, into: memoryview) -> int:
        """Copy what fits."""
        query = "SELECT substr(r, 1, ?) FROM records WHERE name = ?"
        found = self._table.execute(query, (len(into), name)).fetchone()
        if found is None:
            raise KeyError(name)
        into[: len(found[0])] = found[0]
        return len(found[0])

    def delete(self, names: Sequence[str]) -> None:
        """Delete records."""
        each = [(name,) for name in names]
        self._table.executemany("DELETE FROM records WHERE name = ?", each)

    def names(self) -> list[tuple[str, int]]:
        """List all records."""
        return self._table.execute("SELECT name, length(r) FROM records").fetchall()

    def flush(self) -> None:
        """Write the records to the file."""
        self._table.execute("PRAGMA wal_checkpoint")

    def close(self) -> None:
        """Close the connection."""
        self._table.close()


def over(stage: object, **settings: object) -> Store:
    """Open a small store over a stage."""
    fixed = {"dram": DRAM, "huge_pages": False, "pipeline": "Dram|Objects", "policy": "lru"}
    return Store(stages={"Objects": stage}, **(fixed | settings))


@pytest.fixture(autouse=True)
def _threads_end(eventually) -> Iterator[None]:
    """Check that the threads of a stage end with its store."""
    yield
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("cascade-")]
    eventually(lambda: not any(thread.is_alive() for thread in ours))


@pytest.fixture
def put_all(bytes_of):
    def put(store, keys) -> None:
        for key in keys:
            results = store.put([key], [bytes_of(key, SIZE)])
            assert results[0].ok, results

    return put


@pytest.fixture
def hits(bytes_of):
    """Return a function that reads blocks, compares every byte, and returns their tiers."""

    def read(store, keys) -> list[str | None]:
        found = []
        for key in keys:
            buffer = bytearray(SIZE)
            result = store.get([key], [buffer])[0]
            assert not result.ok or buffer == bytes_of(key, SIZE), key
            found.append(result.tier if result.ok else None)
        return found

    return read


def objects(store) -> dict:
    """Return the store's statistics of the stage."""
    return store.stats()["stages"]["objects"]


def test_conforming_stages_pass_the_checks(tmp_path):
    check_stage(DictStage)
    numbers = iter(range(100))
    check_stage(lambda: TableStage(tmp_path / f"{next(numbers)}.db"))


def test_the_checks_detect_a_wrong_stage():
    class Mixed(DictStage):
        def get(self, name, into):
            return super().get(min(self.records, default=name), into)

    with pytest.raises(AssertionError, match="was stored and is Damaged"):
        check_stage(Mixed)


def test_a_stage_is_recognized_by_its_methods():
    assert isinstance(DictStage(), Stage)
    assert issubclass(TableStage, Stage)
    assert not isinstance({}, Stage)


@pytest.mark.parametrize("threads", [1, 4])
def test_blocks_that_leave_dram_are_read_back(keys_of, put_all, hits, threads):
    stage = DictStage()
    stage.threads = threads
    keys = keys_of(range(120))
    with over(stage) as store:
        put_all(store, keys)
        store.flush()
        assert len(stage.records) == 120
        assert {len(record) for record in stage.records.values()} == {RECORD}
        match = store.lookup_prefix(keys)
        assert match.blocks == 120
        assert "objects" in match.tiers
        assert store.locate(keys[:1]) == [["objects"]]
        tiers = hits(store, keys)
        assert None not in tiers
        assert "objects" in tiers
        assert store.stats()["damaged_blocks"] == 0


def test_a_pipeline_has_up_to_seven_stages_below_dram(keys_of, put_all, hits):
    stages = {f"Objects{at}": DictStage() for at in range(7)}
    fixed = {"dram": DRAM, "huge_pages": False}
    keys = keys_of(range(60))
    with Store(pipeline="|".join(["Dram", *stages]), stages=stages, **fixed) as store:
        put_all(store, keys)
        store.flush()
        assert None not in hits(store, keys)
        expected = [f"objects{at}" for at in range(7)]
        for tiers in store.locate(keys):
            assert [tier for tier in tiers if tier != "dram"] == expected
    stages["Objects7"] = DictStage()
    with pytest.raises(PipelineError, match="8 stages below Dram; at most 7"):
        Store(pipeline="|".join(["Dram", *stages]), stages=stages, **fixed)


def test_a_table_survives_a_restart(tmp_path, keys_of, put_all, hits):
    keys = keys_of(range(60))
    path = tmp_path / "records.db"
    with over(TableStage(path)) as store:
        put_all(store, keys)
        store.delete(keys[:10])
    with over(TableStage(path)) as store:
        assert store.locate(keys) == [[]] * 10 + [["objects"]] * 50
        tiers = hits(store, keys)
        assert tiers[:10] == [None] * 10
        assert set(tiers[10:]) == {"objects"}
        assert objects(store)["files"] == 50


def test_names_for_equal_bytes_survive_a_restart(keys_of):
    stage = DictStage()
    keys = keys_of(range(4))
    block = b"the same" * 1000
    with over(stage, digest="blake3") as store:
        results = [store.put([key], [block])[0].status for key in keys]
        assert results == [PutStatus.STORED] + [PutStatus.DEDUPLICATED] * 3
        store.flush()
        assert store.delete([keys[0], keys[2]]) == [True, True]
    assert sum(len(record) > 160 for record in stage.records.values()) == 1
    with over(stage, digest="blake3") as store:
        assert store.contains(keys) == [False, True, False, True]
        assert [bytes(view) for view in store.view([keys[1], keys[3]])] == [block] * 2
        store.delete(keys)
    assert stage.records == {}


def flip(records: dict[str, bytes]) -> None:
    for number, name in enumerate(records):
        damaged = bytearray(records[name])
        damaged[number * 7919 % len(damaged)] ^= 1 << number % 8
        records[name] = bytes(damaged)


def cut(records: dict[str, bytes]) -> None:
    for number, name in enumerate(records):
        records[name] = records[name][: number * 7919 % RECORD]


def swap(records: dict[str, bytes]) -> None:
    shifted = [*list(records.values())[1:], next(iter(records.values()))]
    records.update(zip(records, shifted, strict=True))


def replace(records: dict[str, bytes]) -> None:
    records.update(dict.fromkeys(records, b"something else" * 10_000))


@pytest.mark.parametrize("harm", [flip, cut, swap, replace, dict.clear])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_damaged_records_are_misses(keys_of, put_all, hits, harm, is_restarted):
    stage = DictStage()
    keys = keys_of(range(80))
    with over(stage) as store:
        put_all(store, keys)
        store.flush()
        below = [key for key in keys if store.locate([key]) == [["objects"]]]
        assert len(below) > 30
        if not is_restarted:
            harm(stage.records)
            assert hits(store, below) == [None] * len(below)
            assert store.stats()["damaged_blocks"] == (0 if harm is dict.clear else len(below))
            put_all(store, below)
            store.flush()
            assert None not in hits(store, below)
    if is_restarted:
        harm(stage.records)
        with over(stage) as store:
            assert hits(store, keys) == [None] * 80
            put_all(store, keys)
        with over(stage) as store:
            assert None not in hits(store, keys)


@pytest.mark.parametrize(
    ("how", "message"),
    [("short", None), ("wordy", "not <class 'str'>"), ("keeping", "released|exported|in use")],
)
def test_an_invalid_result_is_not_a_hit(keys_of, put_all, hits, how, message):
    class InvalidStage(DictStage):
        how = "valid"
        kept: memoryview | None = None

        def get(self, name, into):
            got = super().get(name, into)
            if self.how == "keeping":
                self.kept = into[:10]
            return {"short": got - 1, "wordy": "all of it"}.get(self.how, got)

        def probe(self):  # the default probe would fail too and open the circuit
            self.calls.append("probe")

    stage = InvalidStage()
    keys = keys_of(range(60))
    with over(stage) as store:
        put_all(store, keys)
        store.flush()
        assert hits(store, keys[:1]) == ["objects"]
        stage.how = how
        result = store.get(keys[1:2], [bytearray(SIZE)])[0]
        assert not result.ok
        assert re.search(message, str(result.error)) if message else result.error is None
        stage.how = "valid"
        stage.kept = None
        assert hits(store, keys[2:3]) == ["objects"]


def test_the_view_of_a_put_is_released_after_the_call(keys_of, put_all):
    class Keeping(DictStage):
        def put(self, name, record):
            self.kept = record
            super().put(name, record)

    stage = Keeping()
    with over(stage) as store:
        put_all(store, keys_of(range(1)))
        store.flush()
        with pytest.raises(ValueError, match="released"):
            bytes(stage.kept)


def test_an_exception_is_reported_with_type_and_text(keys_of, put_all, hits):
    class Failing(DictStage):
        raised: BaseException | None = None

        def put(self, name, record):
            if self.raised is not None:
                raise self.raised
            super().put(name, record)

        def get(self, name, into):
            if self.raised is not None:
                raise self.raised
            return super().get(name, into)

    stage = Failing()
    keys = keys_of(range(60))
    with over(stage) as store:
        put_all(store, keys)
        store.flush()
        stage.raised = OSError("the cable is out")
        result = store.get(keys[:1], [bytearray(SIZE)])[0]
        assert isinstance(result.error, cascadekv.TierError)
        assert "Failing.get raised OSError: the cable is out" in str(result.error)
        put_all(store, keys_of(range(60, 61)))
        with pytest.raises(cascadekv.TierError, match="OSError: the cable is out"):
            store.flush()
        stage.raised = None
        # Closing reports the failure again unless the block was written meanwhile.
        with contextlib.suppress(cascadekv.TierError):
            store.close()
    with over(stage) as store:
        assert None not in hits(store, keys)
    stage.raised = SystemExit(3)
    with pytest.raises(cascadekv.TierError, match="SystemExit: 3"):
        over(stage)


@pytest.mark.parametrize(
    "full", [StageFullError("no more"), MemoryError(), OSError(errno.ENOSPC, "full")]
)
def test_a_full_stage_evicts_old_blocks(keys_of, put_all, hits, full):
    class Small(DictStage):
        def put(self, name, record):
            if len(self.records) >= 50:
                raise full
            super().put(name, record)

    stage = Small()
    keys = keys_of(range(150))
    with over(stage) as store:
        put_all(store, keys)
        store.flush()
        assert 30 < len(stage.records) <= 50
        assert hits(store, keys[-30:]).count(None) == 0
        assert hits(store, keys[:30]).count(None) == 30
        assert store.stats()["reclaimed_blocks"] >= 100


def test_a_stage_keeps_to_its_capacity(keys_of, put_all, hits):
    stage = DictStage()
    stage.capacity_bytes = 50 * RECORD
    keys = keys_of(range(150))
    with over(stage) as store:
        put_all(store, keys)
        store.flush()
        assert objects(store)["capacity_bytes"] == 50 * RECORD
        assert objects(store)["used_bytes"] == RECORD * len(stage.records)
        assert 30 < len(stage.records) <= 50
        assert hits(store, keys[-30:]).count(None) == 0
    stage.capacity_bytes = 10 * RECORD
    with over(stage) as store:
        put_all(store, keys_of(range(200, 201)))
        store.flush()
        assert len(stage.records) <= 10


class Hanging(DictStage):
    """Hangs in every call while `may_go` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()
        self.may_go.set()

    def put(self, name: str, record: memoryview) -> None:
        """Store a copy."""
        self.may_go.wait()
        super().put(name, record)

    def get(self, name: str, into: memoryview) -> int:
        """Copy what fits."""
        self.may_go.wait()
        return super().get(name, into)


def test_a_hanging_stage_costs_only_its_own_blocks(keys_of, put_all, hits):
    stage = Hanging()
    keys = keys_of(range(60))
    store = over(stage, timeout=1.0)
    put_all(store, keys)
    store.flush(timeout=30)
    stage.may_go.clear()
    result = store.get(keys[:1], [bytearray(SIZE)], timeout=0.2)[0]
    assert not result.ok
    put_all(store, keys_of(range(60, 70)))
    assert hits(store, keys_of(range(60, 70))) == ["dram"] * 10
    with pytest.raises(cascadekv.CascadeError):
        store.close()
    with pytest.raises(cascadekv.ClosedError):
        store.view(keys)
    stage.may_go.set()


def test_a_hang_at_opening_ends_at_the_timeout():
    stage = DictStage()
    may_go = threading.Event()
    stage.names = may_go.wait
    with pytest.raises(cascadekv.TierError, match=r"read the headers of its records.*in time"):
        over(stage, timeout=0.5)
    may_go.set()


def test_a_hanging_call_does_not_block_other_threads_of_a_stage(keys_of, put_all, hits):
    stage = Hanging()
    stage.threads = 2
    keys = keys_of(range(60))
    with over(stage) as store:
        put_all(store, keys)
        store.flush()
        stage.may_go.clear()
        assert not store.get(keys[:1], [bytearray(SIZE)], timeout=0.2)[0].ok
        stage.get = functools.partial(DictStage.get, stage)
        assert hits(store, keys[1:5]) == ["objects"] * 4
        stage.may_go.set()


def test_a_stage_that_holds_the_gil_is_only_slow(keys_of, put_all, hits):
    hold = ctypes.PyDLL(None).usleep  # PyDLL keeps the interpreter's lock

    class Holding(DictStage):
        def put(self, name, record):
            hold(20_000)
            super().put(name, record)

        def get(self, name, into):
            hold(20_000)
            return super().get(name, into)

    keys = keys_of(range(60))
    stage = Holding()
    with over(stage) as store:
        put_all(store, keys)
        assert None not in hits(store, keys)
    assert len(stage.records) == 60


def test_a_late_put_is_undone(keys_of, put_all, hits, eventually):
    stage = Hanging()
    keys = keys_of(range(2))
    with over(stage, timeout=0.5) as store:
        stage.may_go.clear()
        put_all(store, keys[:1])
        with pytest.raises(cascadekv.CascadeError):
            store.flush(timeout=5)
        stage.may_go.set()
        eventually(lambda: "delete" in stage.calls)
        put_all(store, keys[1:])
        # The flush may report the earlier time-out; the tiers of the blocks are checked below.
        with contextlib.suppress(cascadekv.CascadeError):
            store.flush(timeout=5)
        eventually(lambda: store.locate(keys) == [["dram", "objects"]] * 2)
    assert len(stage.records) == 2
    with over(stage) as store:
        assert hits(store, keys) == ["objects"] * 2


def test_a_store_that_is_dropped_is_closed(keys_of, put_all):
    stage = DictStage()
    closed = []
    stage.close = lambda: closed.append(threading.current_thread().name)
    store = over(stage)
    put_all(store, keys_of(range(5)))
    del store
    assert len(stage.records) == 5
    assert closed == ["cascade-Objects-0"]


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        (object(), {}, "object has no method put; a stage has put, get, delete, names"),
        (DictStage(), {"pipeline": "Dram"}, "Objects is not in the pipeline"),
        (DictStage(), {"pipeline": "Dram|Objekts|Objects"}, "known are .*objects"),
    ],
)
def test_invalid_stages_are_refused_at_opening(stage, settings, message):
    with pytest.raises(ConfigError, match=message):
        over(stage, **settings)


@pytest.mark.parametrize("missing", ["put", "get", "delete", "names"])
def test_a_missing_method_is_named(missing):
    stage = DictStage()
    setattr(stage, missing, None)
    with pytest.raises(ConfigError, match=f"Objects: DictStage has no method {missing}"):
        over(stage)


@pytest.mark.parametrize(
    ("attribute", "value"), [("threads", 0), ("threads", 17), ("capacity_bytes", "1MiB")]
)
def test_a_setting_of_a_stage_is_checked(attribute, value):
    stage = DictStage()
    setattr(stage, attribute, value)
    with pytest.raises(ConfigError, match=rf"DictStage\.{attribute}(:| is)"):
        over(stage)


@pytest.mark.parametrize("name", ["Files", "dram", "hbm", "", "a|b", " a"])
def test_an_invalid_stage_name_is_refused(name):
    with pytest.raises(ConfigError, match="stages: "):
        Store(stages={name: DictStage()}, pipeline=f"Dram|{name}", dram=DRAM)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_no_stage(keys_of, put_all):
    stage = DictStage()
    with over(stage) as store:
        put_all(store, keys_of(range(3)))
        store.flush()
        child = os.fork()
        if child == 0:
            code = 3
            try:
                with contextlib.suppress(cascadekv.ForkError):
                    store.view(keys_of(range(1)))
                    code = 2
                with over(DictStage()) as own:
                    put_all(own, keys_of(range(3)))
                code -= 3 if code == 3 else 0
            except BaseException:  # noqa: BLE001 # any: the child must end here
                traceback.print_exc()
            finally:
                # In every case: an exception would run the rest of the tests in the child, too.
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        put_all(store, keys_of(range(3, 6)))
    assert len(stage.records) == 6

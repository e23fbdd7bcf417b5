"""An interpreter exits cleanly whatever its stages do, and pending blocks are written before."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(program: str, *arguments: object, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a program that has the stages of `test_stages.py`."""
    head = f"""
    import hashlib, sys, time
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from test_stages import *
    space = cascadekv.Namespace(cascadekv.Manifest({{}}))
    keys = [space.key_of_id(f"block {{n}}") for n in range(20)]
    bytes_of = lambda key: hashlib.shake_128(bytes(key)).digest(SIZE)
    """
    return subprocess.run(  # noqa: S603 # our own program
        [
            sys.executable,
            "-c",
            textwrap.dedent(head) + textwrap.dedent(program),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def test_an_open_store_is_written_back_at_exit(tmp_path):
    path = tmp_path / "records.db"
    writer = """
        store = over(TableStage(sys.argv[1]))
        store.put(keys, [bytes_of(key) for key in keys])
    """
    reader = """
        with over(TableStage(sys.argv[1])) as store:
            assert store.locate(keys) == [["objects"]] * 20
            assert [bytes(view) for view in store.view(keys)] == [bytes_of(key) for key in keys]
    """
    for program in (writer, reader):
        done = run(program, path)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("hang", ["threading.Event().wait()", "spin()", "time.sleep(2)"])
def test_the_interpreter_exits_although_a_stage_hangs(hang):
    done = run(
        f"""
        def spin():
            while True:
                pass
        class Hangs(DictStage):
            threads = 3
            def put(self, name, record):
                {hang}
        store = over(Hangs(), timeout=1.0)
        store.put(keys[:1], [b"block"])
        print("end", flush=True)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "end\n"
    assert "were not closed cleanly" in done.stderr or hang.startswith("time")


@pytest.mark.parametrize("end", ["store.close()", "del store", "", "raise SystemExit(0)"])
def test_idle_stage_threads_end_with_the_interpreter(end):
    done = run(
        f"""
        class Many(DictStage):
            threads = 16
        store = over(Many())
        store.put(keys[:1], [b"block"])
        {end}
        """
    )
    assert (done.returncode, done.stderr) == (0, "")

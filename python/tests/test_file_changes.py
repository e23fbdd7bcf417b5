"""Changes of a model's files after the start of the process that may have read them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cascadekv.connectors.file_changes import changed_since_start, process_start

READER = """
import sys
from pathlib import Path
from cascadekv.connectors.file_changes import changed_since_start
print("started", flush=True)
sys.stdin.readline()
print(changed_since_start(Path(sys.argv[1])))
"""


@pytest.fixture
def model(tmp_path):
    """Return a directory of weights, and another one with the next version."""
    for name in ("model", "next"):
        (tmp_path / name / "code").mkdir(parents=True)
        for file in ("model.safetensors", "config.json", "code/modeling.py"):
            (tmp_path / name / file).write_bytes(b"version" + name.encode())
    (tmp_path / "current").symlink_to(tmp_path / "model")
    return tmp_path / "model"


def edit(model):
    file = model / "model.safetensors"
    before = file.stat()
    file.write_bytes(b"edition" + model.name.encode())
    # As `rsync --times` and `cp --preserve` do.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def rename_a_file(model):
    (model.parent / "next" / "model.safetensors").replace(model / "model.safetensors")


def rename_the_directory(model):
    model.rename(model.parent / "old")
    (model.parent / "next").rename(model)


def switch_the_link(model):
    link = model.parent / "current"
    link.unlink()
    link.symlink_to(model.parent / "next")


def change_code(model):
    (model / "code" / "modeling.py").write_text("other")


def remove_a_file(model):
    (model / "config.json").unlink()


def nothing(_):
    pass


CHANGES = (edit, rename_a_file, rename_the_directory, switch_the_link, change_code, remove_a_file)


@pytest.mark.parametrize("change", [nothing, *CHANGES])
def test_changes_after_the_start_are_seen(model, change):
    # Files and processes have times of a resolution of 10 ms.
    time.sleep(0.2)
    command = [sys.executable, "-c", READER, str(model.parent / "current")]
    with subprocess.Popen(  # noqa: S603 # our own command
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout.readline() == "started\n"
        change(model)
        answer, _ = reader.communicate("\n")
    assert (answer.strip() == "None") == (change is nothing), answer


def test_files_of_this_process_are_not_older_than_it(model):
    assert changed_since_start(model) is not None
    assert changed_since_start(model / "missing") is not None
    assert changed_since_start(Path("/usr/bin/env")) is None
    assert time.time() - 3600 < process_start() < time.time()

"""The build backend builds the program and the library once, without symbols."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "packaging" / "wheel_backend.py"


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Record the commands that the backend runs, in a directory of its own."""
    commands: list[list[str]] = []

    def run(command, **_keywords):
        commands.append([Path(command[0]).name, *command[1:]])
        program = tmp_path / "built" / "release" / "cascade"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_bytes(b"a program")
        metadata = f'{{"target_directory": "{tmp_path / "built"}"}}'
        return subprocess.CompletedProcess(command, 0, metadata.encode(), b"")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "cargo" else None)
    return commands


@pytest.fixture
def backend(monkeypatch):
    """Load the backend over a maturin that returns the settings that it is called with."""
    monkeypatch.delenv("MATURIN_PEP517_ARGS", raising=False)
    maturin = ModuleType("maturin")
    for name in ["requires_for_build", "metadata_for_build"]:
        for kind in ["wheel", "editable"]:
            verb = "get" if name.startswith("requires") else "prepare"
            setattr(maturin, f"{verb}_{name}_{kind}", lambda *_: None)
    maturin.build_wheel = lambda _directory, settings, _metadata: settings
    maturin.build_editable = lambda _directory, settings, _metadata: settings
    monkeypatch.setitem(sys.modules, "maturin", maturin)
    spec = importlib.util.spec_from_file_location("wheel_backend", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_and_the_library_are_stripped(backend, calls, tmp_path):
    assert backend.build_wheel("out") == {"maturin.build-args": "--strip"}
    built = [command for command in calls if command[1] in {"build", "rustc"}]
    assert len(built) == 1
    # The profile is that of the library, so that shared crates are compiled once.
    assert {"--release", "--locked"} <= set(built[0])
    assert built[0][built[0].index("--") + 1 :] == ["-C", "strip=symbols"]
    program = tmp_path / "target" / "wheel" / "scripts" / "cascade"
    assert program.read_bytes() == b"a program"


@pytest.mark.parametrize("name", ["maturin.build-args", "build-args"])
def test_arguments_of_the_caller_replace_ours(backend, calls, monkeypatch, name):
    assert backend.build_wheel("out", {name: "--verbose"}) == {name: "--verbose"}
    assert backend.build_editable("out") is None
    monkeypatch.setenv("MATURIN_PEP517_ARGS", "--verbose")
    assert backend.build_wheel("out") == {}
    assert calls


def test_metadata_needs_no_build(backend, calls):
    for kind in ["wheel", "editable"]:
        name = f"prepare_metadata_for_build_{kind}"
        assert name in backend.__all__
        getattr(backend, name)("out")
    assert calls == []

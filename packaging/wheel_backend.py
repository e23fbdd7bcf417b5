"""The build backend of pyproject.toml: builds the program `cascade`, then maturin the wheel.

Cargo compiles what both share once: they have the same profile and features. Neither has symbols.
`make` does the same without this backend, with its own profile.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import maturin
from maturin import (
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_wheel",
    # Without them, an installer builds the wheel to learn its metadata.
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel."""
    _build_program()
    settings = dict(config_settings or {})
    # The caller's own arguments replace ours.
    is_given = {"maturin.build-args", "build-args"} & settings.keys()
    if not is_given and "MATURIN_PEP517_ARGS" not in os.environ:
        settings["maturin.build-args"] = "--strip"
    return maturin.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel that refers to the sources in Python."""
    _build_program()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(*_: object) -> NoReturn:
    """Refuse: maturin collects the crates of the library, and not those of the program."""
    raise NotImplementedError("cascadekv has no source distribution; build a wheel in a clone")


def _build_program() -> None:
    """Put the program where pyproject.toml has maturin look for it."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise FileNotFoundError("cargo is not installed; https://rustup.rs installs it")
    # The arguments after `--` are for the program alone: a profile that strips would compile all
    # crates a second time.
    command = [cargo, "rustc", "--release", "--locked", "--package", "cascade-command"]
    command += ["--bin", "cascade", "--", "-C", "strip=symbols"]
    environment = {"CASCADE_COMMIT": _commit()} | os.environ
    subprocess.run(command, check=True, env=environment)  # noqa: S603 # no part is from outside
    command = [cargo, "metadata", "--no-deps", "--format-version", "1"]
    metadata = subprocess.run(command, check=True, capture_output=True)  # noqa: S603 # as above
    target = Path(json.loads(metadata.stdout)["target_directory"])
    scripts = Path("target", "wheel", "scripts")
    scripts.mkdir(parents=True, exist_ok=True)
    shutil.copy2(target / "release" / "cascade", scripts)


def _commit() -> str:
    """Return the commit of this checkout, with a mark if files differ; `unknown` outside of git."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return commit if changes == "" else f"{commit} with local changes"


def _git(*arguments: str) -> str | None:
    """Return what git prints; `None` if it fails or is not installed."""
    git = shutil.which("git")
    if git is None:
        return None
    run = subprocess.run(  # noqa: S603 # no part is from outside
        [git, *arguments], check=False, capture_output=True, text=True
    )
    return run.stdout.strip() if run.returncode == 0 else None

"""Where the program `cascade` is, which comes with this package."""

import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path


def program() -> Path:
    """Return the path of the program: beside the package in a checkout, else where it is installed.

    Raises `FileNotFoundError` if no place has it.
    """
    package = Path(__file__).parent
    candidates = [
        package / "cascade",
        *_recorded(package.parent),
        Path(sysconfig.get_path("scripts")) / "cascade",
        Path(sysconfig.get_path("scripts", "posix_user")) / "cascade",
        package.parent / "bin" / "cascade",  # pip install --target
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    places = ", ".join(dict.fromkeys(str(candidate.parent) for candidate in candidates))
    raise FileNotFoundError(f"the program cascade is in none of {places}; reinstall cascadekv")


def _recorded(site_packages: Path) -> Iterator[Path]:
    """Where the installer put it, which another environment can import the package from, too."""
    for distribution in Distribution.discover(name="cascadekv", path=[str(site_packages)]):
        for file in distribution.files or []:
            if file.name == "cascade":
                yield Path(distribution.locate_file(file)).resolve()

"""Where the program `cascade` is, which comes with this package."""

import sysconfig
from pathlib import Path


def program() -> Path:
    """Return the path of the program: beside the package in a checkout, else where scripts are.

    Raises `FileNotFoundError` if no place has it.
    """
    package = Path(__file__).parent
    candidates = [
        package / "cascade",
        Path(sysconfig.get_path("scripts")) / "cascade",
        Path(sysconfig.get_path("scripts", "posix_user")) / "cascade",
        package.parent / "bin" / "cascade",  # pip install --target
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    places = ", ".join(str(candidate.parent) for candidate in candidates)
    raise FileNotFoundError(f"the program cascade is in none of {places}; reinstall cascadekv")

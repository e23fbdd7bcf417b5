"""Keeps figures of a native module that was built for tests from being reported."""

from cascadekv import _native


def require_optimised() -> None:
    """End the process if the native module has debug assertions, as the build for tests has."""
    if _native.has_debug_assertions:
        raise SystemExit("unoptimised build: the figures mean nothing\n  build with `make build`")

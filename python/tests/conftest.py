"""Blocks whose bytes are a function of their key, so that any reader can tell right from wrong."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import cascadekv
import pytest
from cascadekv import BlockKey, BlockKeys, Namespace, Store

MIB = 1 << 20


@pytest.fixture(scope="session")
def space() -> Namespace:
    return cascadekv.Namespace(cascadekv.Manifest({"weights": "sha256:test"}), b"secret")


@pytest.fixture(scope="session")
def keys_of(space: Namespace) -> Callable[[range], BlockKeys]:
    """Keys for numbers."""
    return lambda numbers: BlockKeys([space.key_of_id(f"block {n}") for n in numbers])


@pytest.fixture(scope="session")
def bytes_of() -> Callable[..., bytes]:
    """Make the only right bytes of a block."""

    def make(key: BlockKey, size: int = 10_000) -> bytes:
        return hashlib.shake_128(bytes(key)).digest(size)

    return make


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(dram="16MiB", huge_pages=False) as opened:
        yield opened


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[Store]:
    """DRAM over files, the second large enough for whatever leaves the first."""
    with Store(
        dram="8MiB",
        huge_pages=False,
        files=tmp_path / "files",
        files_capacity="256MiB",
        segment_size="8MiB",
    ) as opened:
        yield opened

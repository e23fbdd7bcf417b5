"""What is compared: Cascade, one file per block, HDF5, LMCache. Each has one way to be measured.

A round is `open_new`, `put`, `end_writes`, `begin_reads`, `get`, `close`. `put` and `get` are timed
and return their results, which `check` examines untimed. Between `end_writes` and `begin_reads` the
page cache is dropped. Each class loads its package itself, so that only its own process needs it.
"""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CALL_BYTES = 32 << 20
"""Bytes of one call of an interface that takes batches."""
WAIT_SECONDS = 120.0
"""Limit of LMCache's writes, which end on its own threads."""

Blocks = NDArray[np.uint8]


class CompetitorError(Exception):
    """A competitor did not do what it was asked for."""


def batches(blocks: int, block_bytes: int, call_bytes: int = CALL_BYTES) -> Iterator[slice]:
    """Yield the blocks of each call."""
    step = max(call_bytes // block_bytes, 1)
    for first in range(0, blocks, step):
        yield slice(first, min(first + step, blocks))


class Competitor:
    """One system, in a process of its own."""

    name: str
    settings: str
    """How it is set up."""
    cold: str
    """How its cold reads were made cold."""
    packages: tuple[str, ...] = ()
    """What it needs, besides NumPy."""

    def __init__(self) -> None:
        self._directory = Path()
        self._durable = False

    def versions(self) -> dict[str, str]:
        """Return the versions of what is measured."""
        return {package: version(package) for package in self.packages}

    def keys(self, names: Sequence[str], block_bytes: int) -> Any:  # noqa: ANN401 - its own type
        """Return the competitor's own keys of blocks with these names."""
        raise NotImplementedError

    def open_new(self, directory: Path, block_bytes: int, *, durable: bool) -> None:
        """Prepare an empty directory for puts. `block_bytes` is the size of all blocks."""
        del block_bytes
        self._directory, self._durable = directory, durable

    def put(self, keys: Any, blocks: Blocks) -> list[Any]:  # noqa: ANN401
        """Store all blocks and wait until they are written; until they are synced if durable."""
        raise NotImplementedError

    def end_writes(self) -> None:
        """Close what keeps blocks in memory, if it can be closed."""

    def begin_reads(self) -> None:
        """Open what was closed."""

    def get(self, keys: Any, targets: Blocks) -> list[Any]:  # noqa: ANN401
        """Copy all blocks to the caller's memory."""
        raise NotImplementedError

    def check(self, results: list[Any]) -> None:
        """Raise `CompetitorError` if a result is not a success."""

    def close(self) -> None:
        """End the round."""


class Cascade(Competitor):
    """An embedded store with DRAM and segments, default settings."""

    name = "cascade"
    settings = "embedded Store(files=DIR), 32 MiB a call, flush; durable: durable=True"
    cold = "store closed and opened again, page cache dropped; segments are read with O_DIRECT"
    call_bytes = CALL_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._native = import_module("cascadekv")
        manifest = self._native.Manifest({"weights": "bench"})
        self._space = self._native.Namespace(manifest)
        self._store: Any = None

    def versions(self) -> dict[str, str]:
        """Return the version of the module. Used from a checkout, it is no installed package."""
        return {"cascadekv": self._native.__version__}

    def keys(self, names: Sequence[str], block_bytes: int) -> list[tuple[slice, Any]]:
        """Return the keys of each call."""
        calls = batches(len(names), block_bytes, self.call_bytes)
        key = self._space.key_of_id
        return [
            (some, self._native.BlockKeys([key(name) for name in names[some]])) for some in calls
        ]

    def open_new(self, directory: Path, block_bytes: int, *, durable: bool) -> None:
        """Open a store in an empty directory."""
        super().open_new(directory, block_bytes, durable=durable)
        self.begin_reads()

    def put(self, keys: list[tuple[slice, Any]], blocks: Blocks) -> list[Any]:
        """Put in calls of `call_bytes`, then flush."""
        results = [self._store.put(some, blocks[at]) for at, some in keys]
        self._store.flush()
        return results

    def end_writes(self) -> None:
        """Close the store, and with it its DRAM tier."""
        self._store.close()

    def begin_reads(self) -> None:
        """Open the store."""
        self._store = self._native.Store(files=self._directory, durable=self._durable)

    def get(self, keys: list[tuple[slice, Any]], targets: Blocks) -> list[Any]:
        """Get in calls of `call_bytes`."""
        return [self._store.get(some, targets[at]) for at, some in keys]

    def check(self, results: list[Any]) -> None:
        """Every block is stored, or was read from files."""
        for result in (one for call in results for one in call):
            if not result.ok or getattr(result, "tier", "files") != "files":
                raise CompetitorError(f"a block of a cold read or of a put is {result!r}")

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
            self._store = None


class CascadeOneCall(Cascade):
    """The same store with all blocks of a round in one call: what the ends of calls cost."""

    name = "cascade-one-call"
    settings = Cascade.settings.replace("32 MiB a call", "all blocks in one call")
    call_bytes = 1 << 60


class PlainFiles(Competitor):
    """One file for each block, without a page cache."""

    name = "plain-files"
    settings = "a new file for each block: O_DIRECT, one pwritev or preadv; durable: fsync"
    cold = "O_DIRECT"

    def keys(self, names: Sequence[str], block_bytes: int) -> list[str]:
        """Return file names."""
        del block_bytes
        return [name.replace(" ", "-") for name in names]

    def put(self, keys: list[str], blocks: Blocks) -> list[Any]:
        """Write one file after the other."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        written = []
        for key, block in zip(keys, blocks, strict=True):
            descriptor = os.open(self._directory / key, flags, 0o600)
            try:
                written.append(os.pwritev(descriptor, [block], 0) == block.nbytes)
                if self._durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return written

    def get(self, keys: list[str], targets: Blocks) -> list[Any]:
        """Read one file after the other."""
        read = []
        for key, target in zip(keys, targets, strict=True):
            descriptor = os.open(self._directory / key, os.O_RDONLY | os.O_DIRECT)
            try:
                read.append(os.preadv(descriptor, [target], 0) == target.nbytes)
            finally:
                os.close(descriptor)
        return read

    def check(self, results: list[Any]) -> None:
        """Every call moved the whole block."""
        if not all(results):
            raise CompetitorError("a read or write of a file was short")


class Hdf5(Competitor):
    """One contiguous dataset for each block, in one file, through h5py."""

    name = "hdf5"
    settings = (
        "h5py, one file, libver='latest', one contiguous dataset a block, flush; durable: fsync"
    )
    cold = "file closed and opened again, page cache dropped with posix_fadvise before that"
    packages = ("h5py",)

    def __init__(self) -> None:
        super().__init__()
        self._h5py = import_module("h5py")
        self._file: Any = None

    def versions(self) -> dict[str, str]:
        """Return the versions of h5py and of the library in it."""
        return {**super().versions(), "hdf5": self._h5py.version.hdf5_version}

    def keys(self, names: Sequence[str], block_bytes: int) -> list[str]:
        """Return names of datasets."""
        del block_bytes
        return list(names)

    def open_new(self, directory: Path, block_bytes: int, *, durable: bool) -> None:
        """Create the file."""
        super().open_new(directory, block_bytes, durable=durable)
        self._file = self._h5py.File(directory / "blocks.h5", "w", libver="latest")

    def put(self, keys: list[str], blocks: Blocks) -> list[Any]:
        """Create a dataset for each block, flush, and sync if durable."""
        for key, block in zip(keys, blocks, strict=True):
            self._file.create_dataset(key, data=block)
        self._file.flush()
        if self._durable:
            os.fsync(self._file.id.get_vfd_handle())
        return []

    def end_writes(self) -> None:
        """Close the file."""
        self._file.close()

    def begin_reads(self) -> None:
        """Open the file."""
        self._file = self._h5py.File(self._directory / "blocks.h5", "r", libver="latest")

    def get(self, keys: list[str], targets: Blocks) -> list[Any]:
        """Read each dataset into the caller's memory."""
        for key, target in zip(keys, targets, strict=True):
            self._file[key].read_direct(target)
        return []

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Lmcache(Competitor):
    """LMCache's local disk backend over its CPU backend, used as by its storage manager."""

    name = "lmcache"
    settings = "LocalDiskBackend, defaults: page cache, 4 threads; durable: fsync by these threads"
    cold = "page cache dropped with posix_fadvise; its index is in memory; local_cpu is off"
    packages = ("lmcache", "torch")
    direct = False
    pool_bytes = 1 << 30

    def __init__(self) -> None:
        super().__init__()
        self._torch = import_module("torch")
        self._torch.set_num_threads(1)
        self._utils = import_module("lmcache.utils")
        self._config = import_module("lmcache.v1.config").LMCacheEngineConfig
        backends = "lmcache.v1.storage_backend"
        self._disk_class = import_module(f"{backends}.local_disk_backend").LocalDiskBackend
        self._memory_class = import_module(f"{backends}.local_cpu_backend").LocalCPUBackend
        allocators = import_module("lmcache.v1.memory_allocators.mixed_memory_allocator")
        self._allocator = allocators.MixedMemoryAllocator(self.pool_bytes)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory: Any = None
        self._disk: Any = None

    def keys(self, names: Sequence[str], block_bytes: int) -> list[tuple[slice, list[Any]]]:
        """Return the keys of each call."""
        key, dtype = self._utils.CacheEngineKey, self._torch.uint8
        number = {name: at for at, name in enumerate(names)}
        return [
            (some, [key("bench", 1, 0, number[name], dtype) for name in names[some]])
            for some in batches(len(names), block_bytes)
        ]

    def open_new(self, directory: Path, block_bytes: int, *, durable: bool) -> None:
        """Create a backend with an empty directory."""
        super().open_new(directory, block_bytes, durable=durable)
        config = self._config.from_defaults(
            local_cpu=False,
            max_local_cpu_size=self.pool_bytes / (1 << 30),
            local_disk=str(directory),
            max_local_disk_size=64.0,
            extra_config={"use_odirect": self.direct},
        )
        self._memory = self._memory_class(
            config, dst_device="cpu", memory_allocator=self._allocator
        )
        self._disk = self._disk_class(config, self._loop, self._memory, dst_device="cpu")

    def put(self, keys: list[tuple[slice, list[Any]]], blocks: Blocks) -> list[Any]:
        """Copy into its memory, submit, and wait until its threads have written every block."""
        written, failures = threading.Semaphore(0), []

        def complete(key: Any) -> None:  # noqa: ANN401
            try:
                if self._durable:
                    self._sync(self._disk.dict[key].path)
            except (OSError, LookupError) as error:
                failures.append(error)
            finally:
                written.release()

        source = self._torch.from_numpy(blocks)
        for at, some in keys:
            for key, block in zip(some, source[at], strict=True):
                slot = self._memory.allocate(block.shape, block.dtype)
                slot.tensor.copy_(block)
                self._disk.submit_put_task(key, slot, on_complete_callback=complete)
                slot.ref_count_down()
        for number in range(len(blocks)):
            if not written.acquire(timeout=WAIT_SECONDS):
                raise CompetitorError(f"{len(blocks) - number} blocks were not written")
        if failures:
            raise CompetitorError(f"{len(failures)} blocks failed, the first: {failures[0]}")
        return []

    @staticmethod
    def _sync(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def get(self, keys: list[tuple[slice, list[Any]]], targets: Blocks) -> list[Any]:
        """Load each call's blocks into its memory (4 threads) and copy them to the caller's."""
        results, target = [], self._torch.from_numpy(targets)
        for at, some in keys:
            slots = self._disk.batched_get_blocking(some)
            for slot, block in zip(slots, target[at], strict=True):
                results.append(slot is not None)
                if slot is not None:
                    block.copy_(slot.tensor)
                    slot.ref_count_down()
        return results

    def check(self, results: list[Any]) -> None:
        """Every block was found."""
        if not all(results):
            raise CompetitorError(f"{results.count(False)} blocks were not found")

    def close(self) -> None:
        """Stop the backend's threads."""
        if self._disk is not None:
            self._disk.close()
            self._disk = None


class LmcacheDirect(Lmcache):
    """The same with O_DIRECT."""

    name = "lmcache-odirect"
    settings = "LocalDiskBackend, use_odirect, 4 threads; durable: fsync by these threads"
    cold = "O_DIRECT; its index is in memory; local_cpu is off"
    direct = True


COMPETITORS: dict[str, type[Competitor]] = {
    one.name: one for one in (Cascade, CascadeOneCall, PlainFiles, Hdf5, Lmcache, LmcacheDirect)
}

"""The fake driver as another library of the process sees it: memory and streams of an engine.

The driver is a shared library over host memory (`crates/device-fake`). It has one state in each
process, which `cascadekv.Gpu` and this module share. It never stands for a speed.
"""

import ctypes
import os
from pathlib import Path

import pytest

LIBRARY_VARIABLE = "CASCADE_CUDA_LIBRARY"
_NAME = "libcascade_device_fake.so"


def library():
    """Return the path of the fake driver; skips the test if it is not built."""
    root = Path(__file__).resolve().parents[2]
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    built = [target / profile / _NAME for profile in ("debug", "release")]
    chosen = os.environ.get(LIBRARY_VARIABLE)
    for path in [Path(chosen)] if chosen else built:
        if path.name == _NAME and path.exists():
            return path
    pytest.skip("the fake driver is not built: cargo build -p cascade-device-fake")


class DriverError(Exception):
    """A call of the driver failed."""


class Array:
    """Memory of the device, with the interface that CUDA tensors have."""

    def __init__(self, address, size, **interface):
        """Describe it; `interface` overrides fields of the protocol."""
        self.address, self.size = address, size
        self.interface = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        } | interface

    @property
    def __cuda_array_interface__(self):
        """The protocol of CUDA arrays."""
        return self.interface


class FakeGpu:
    """A device of the fake driver, with the primary context that all libraries share."""

    def __init__(self, device=0):
        """Load the driver and start it."""
        path = library()
        os.environ[LIBRARY_VARIABLE] = str(path)
        self._lib = ctypes.CDLL(str(path))
        self.call("cuInit", 0)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._free = {}
        """Host memory that the device may copy, by size."""
        self._in_flight = {}
        """Host memory of the copies of each stream since its last `finish`."""

    def call(self, name, *arguments):
        """Call a function of the driver."""
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise DriverError(name, status)

    def in_context(self, name, *arguments):
        """Call a function that needs the current context."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            self.call(name, *arguments)
        finally:
            popped = ctypes.c_void_p()
            self.call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def array(self, size):
        """Allocate memory of the device."""
        address = ctypes.c_uint64()
        self.in_context("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return Array(address.value, size)

    def stream(self):
        """Create a stream; returns its number."""
        stream = ctypes.c_void_p()
        self.in_context("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        return stream.value

    def write(self, array, offset, data, stream):
        """Start to write bytes in the order of a stream, as a kernel would."""
        source = self._host(len(data), stream)
        ctypes.memmove(source, bytes(data), len(data))
        target = ctypes.c_uint64(array.address + offset)
        self.in_context(
            "cuMemcpyHtoDAsync_v2", target, source, ctypes.c_size_t(len(data)), _handle(stream)
        )

    def read(self, array, offset, size, stream):
        """Return bytes after all earlier work of a stream."""
        target = self._host(size, stream)
        source = ctypes.c_uint64(array.address + offset)
        self.in_context(
            "cuMemcpyDtoHAsync_v2", target, source, ctypes.c_size_t(size), _handle(stream)
        )
        self.finish(stream)
        # The buffer is free by now, and nothing else uses it before the next call.
        return ctypes.string_at(target, size)

    def finish(self, stream):
        """Wait for all work of a stream."""
        self.in_context("cuStreamSynchronize", _handle(stream))
        for size, buffer in self._in_flight.pop(stream, ()):
            self._free.setdefault(size, []).append(buffer)

    def hold(self, name):
        """Hold the work that a function starts, until `release`."""
        self._lib.fakeCudaHold(name.encode())

    def release(self):
        """Let held work go on."""
        self._lib.fakeCudaRelease()

    def count(self, name):
        """Return the calls of a function so far, or another count of the fake."""
        self._lib.fakeCudaCount.restype = ctypes.c_uint64
        return self._lib.fakeCudaCount(name.encode())

    def _host(self, size, stream):
        """Return host memory for a copy, until the stream is finished."""
        free = self._free.get(size)
        buffer = free.pop() if free else ctypes.c_void_p()
        if not buffer:
            self.in_context(
                "cuMemAllocHost_v2", ctypes.byref(buffer), ctypes.c_size_t(max(1, size))
            )
        self._in_flight.setdefault(stream, []).append((size, buffer))
        return buffer


def _handle(stream):
    return ctypes.c_void_p(stream)

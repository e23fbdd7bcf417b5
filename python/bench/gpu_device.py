"""What the benchmark of paged KV needs of a GPU, and the same by torch."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any
"""Memory of a device: a tensor of torch, or of a fake device."""
Mark: TypeAlias = Any
"""A point of a stream: an event of torch, or of a fake device."""
Torch: TypeAlias = Any
"""The module of torch, which a machine may not have."""
ROUNDS = 5
BATCH_BYTES = 64 << 20
"""Most bytes of one call, as in the connector for vLLM."""


class Device(Protocol):
    """What the benchmark needs of a GPU."""

    name: str
    is_fake: bool

    def array(self, size: int) -> Array:
        """Allocate bytes on the device."""
        ...

    def fill(self, array: Array, seed: int) -> None:
        """Write a pattern, and wait."""
        ...

    def are_equal(
        self, one: Array, other: Array, pages: list[int], other_pages: list[int], size: int
    ) -> bool:
        """Compare pages of two arrays; numbers count pages of `size` bytes."""
        ...

    def stream(self) -> int:
        """Return the number of the stream on which an engine would compute."""
        ...

    def side_stream(self, number: int) -> int:
        """Return one of several streams that nothing else uses."""
        ...

    def steps(self) -> dict[str, Callable[[], None]]:
        """Return what an engine would compute, by name: each call starts it once."""
        ...

    def mark(self, stream: int) -> Mark:
        """Return the time at which all work of a stream so far is over, known after `finish`."""
        ...

    def seconds(self, first: Mark, last: Mark) -> float:
        """Return the seconds between two marks."""
        ...

    def finish(self) -> None:
        """Wait for all work."""
        ...

    def plain_copy(self, size: int, *, to_device: bool) -> float:
        """Return the seconds of one pinned copy of consecutive bytes."""
        ...


class TorchDevice:
    """A GPU through torch."""

    is_fake = False

    def __init__(self) -> None:
        """Use the first device. Raises `SystemExit` without CUDA."""
        import torch  # noqa: PLC0415 # the machine may have none

        if not torch.cuda.is_available():
            raise SystemExit("gpu_pages: torch finds no GPU, so nothing was measured")
        self._torch = torch
        torch.cuda.set_device(0)
        self._sides: list[Any] = []
        self.name = torch.cuda.get_device_name(0)

    def array(self, size: int) -> Array:
        """Allocate bytes on the device."""
        return self._torch.empty(size, dtype=self._torch.uint8, device="cuda")

    def fill(self, array: Array, seed: int) -> None:
        """Write random bytes, and wait."""
        generator = self._torch.Generator(device="cuda").manual_seed(seed)
        array.random_(0, 256, generator=generator)
        self.finish()

    def are_equal(
        self, one: Array, other: Array, pages: list[int], other_pages: list[int], size: int
    ) -> bool:
        """Compare pages of two arrays."""
        numbers = (self._torch.tensor(it, device="cuda") for it in (pages, other_pages))
        first, second = numbers
        one, other = one.view(-1, size), other.view(-1, size)
        return bool(self._torch.equal(one[first], other[second]))

    def stream(self) -> int:
        """Return the number of torch's current stream."""
        return int(self._torch.cuda.current_stream().cuda_stream)

    def side_stream(self, number: int) -> int:
        """Return one of several other streams."""
        while len(self._sides) <= number:
            self._sides.append(self._torch.cuda.Stream())
        return int(self._sides[number].cuda_stream)

    def steps(self) -> dict[str, Callable[[], None]]:
        """Return a large product, and 32 small ones in a graph, as in a step of decoding."""
        torch = self._torch

        def matrix(rows: int, columns: int) -> Array:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")

        large = (matrix(4096, 4096), matrix(4096, 4096), matrix(4096, 4096))
        few, weights, out = matrix(64, 4096), matrix(4096, 4096), matrix(64, 4096)

        def product() -> None:
            torch.matmul(large[0], large[1], out=large[2])

        def step() -> None:
            for _ in range(32):
                torch.matmul(few, weights, out=out)

        # Twice before: libraries choose their kernels, and a capture must not.
        for _ in range(2):
            product()
            step()
        self.finish()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call the driver meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return {"product 4096": product, "decode step": graph.replay}

    def mark(self, stream: int) -> Mark:
        """Return an event with a time."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.ExternalStream(stream) if stream else None)
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """Return the seconds between two events."""
        return float(first.elapsed_time(last)) / 1e3

    def finish(self) -> None:
        """Wait for all work."""
        self._torch.cuda.synchronize()

    def plain_copy(self, size: int, *, to_device: bool) -> float:
        """Return the seconds of one pinned copy of consecutive bytes."""
        host = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        device = self.array(size)
        source, target = (host, device) if to_device else (device, host)
        times = []
        for _ in range(ROUNDS + 1):
            self.finish()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self.finish()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def others(self, page_bytes: int, rows: int) -> "Others":
        """Return other means to copy pages of this length."""
        return Others(self._torch, "cuda", page_bytes, rows)


class Others:
    """Copies of the same pages by torch and by vLLM: what an engine does without Cascade."""

    def __init__(self, torch: Torch, device: str, page_bytes: int, rows: int) -> None:
        """Allocate the host's memory, pinned for a GPU."""
        self._torch, self._device, self._bytes = torch, device, page_bytes
        self._batch = max(1, BATCH_BYTES // page_bytes)
        is_gpu = device == "cuda"
        self.host = torch.empty(rows, page_bytes, dtype=torch.uint8, pin_memory=is_gpu)

    def numbers(self, rows: list[int]) -> Array:
        """Return numbers of pages in the device's memory."""
        return self._torch.tensor(rows, device=self._device)

    def torch_save(self, array: Array, numbers: Array) -> None:
        """Start to copy pages to the host: gathered on the device, then by one copy a batch."""
        pages = array.view(-1, self._bytes)
        for first in range(0, len(numbers), self._batch):
            batch = numbers[first : first + self._batch]
            gathered = pages.index_select(0, batch)
            self.host[first : first + len(batch)].copy_(gathered, non_blocking=True)

    def torch_load(self, array: Array, numbers: Array) -> None:
        """Start to copy pages from the host, the other way round."""
        pages = array.view(-1, self._bytes)
        for first in range(0, len(numbers), self._batch):
            batch = numbers[first : first + self._batch]
            rows = self.host[first : first + len(batch)]
            pages.index_copy_(0, batch, rows.to(self._device, non_blocking=True))

    def vllm_copy(self) -> Callable[[Array, Array, bool], None]:
        """Return vLLM's batched copy: array, numbers, whether to save. Raises `ImportError`."""
        from vllm import _custom_ops  # noqa: PLC0415 # an engine that may be absent

        torch = self._torch

        def copy(array: Array, numbers: Array, is_save: bool) -> None:  # noqa: FBT001 # as the others
            device = numbers.cpu() * self._bytes + array.data_ptr()
            host = torch.arange(len(numbers)) * self._bytes + self.host.data_ptr()
            sizes = torch.full((len(numbers),), self._bytes, dtype=torch.int64)
            source, target = (device, host) if is_save else (host, device)
            _custom_ops.swap_blocks_batch(source, target, sizes)

        return copy

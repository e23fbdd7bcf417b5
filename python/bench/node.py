"""Measures batches of a served store from Python, with bare socket round trips as the limit.

Starts a node. Prints a table and, with a path as argument, writes the figures as JSON in the format
of `cascade bench node`. Every block is verified.
"""

import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cascadekv
import numpy as np
from cascadekv._program import program
from cascadekv.bench.optimised import require_optimised

ROUNDS = 7
REPEATS = 40
BATCH = 256
CONTROL_US_MAX = 2.0
BARE = "round trips of 64 bytes over a Unix socket between two Python processes, divided by 256"


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def figure(
    name: str, samples: list[float], limits: list[float], limit_is: str, most: float | None
) -> dict[str, object]:
    """Print and return samples, in microseconds per block, with the samples of their limit."""
    value, limit = statistics.median(samples), statistics.median(limits)
    is_reached = None if most is None else value <= most
    verdict = {None: "", True: f"<= {most} met", False: f"<= {most} MISSED"}[is_reached]
    print(
        f"{name:34} {value:9.3f} us/blk of {limit:8.3f}: {limit / value:6.1%}"
        f"   ({min(samples):.3f} to {max(samples):.3f}) {verdict}"
    )
    return {
        "name": name,
        "value": value,
        "unit": "us/blk",
        "limit": limit,
        "share": limit / value,
        "samples": samples,
        "limit_samples": limits,
        "limit_is": limit_is,
        "target": "none" if most is None else {"at_most": most},
        "is_reached": is_reached,
    }


@contextmanager
def node() -> Iterator[str]:
    """Run a node; yields its socket."""
    with tempfile.TemporaryDirectory(prefix="cascade-") as directory:
        path = f"{directory}/s"
        command = [str(program()), "serve", "--socket", path]
        command += ["--pipeline", "Dram", "--dram", "256MiB", "--log-filter", "warn"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
            try:
                if process.stdout is None or "ready" not in process.stdout.readline():
                    raise RuntimeError("the node did not start")
                yield path
            finally:
                process.terminate()


def echo(connection: socket.socket) -> None:
    """Echo frames until the other side closes."""
    while frame := connection.recv(64):
        connection.sendall(frame)


@contextmanager
def bare_round_trip() -> Iterator[Callable[[], float]]:
    """Yield a function that times a round trip to a process that only echoes."""
    here, there = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=echo, args=(there,), daemon=True)
    process.start()
    frame = b"7" * 64

    def trip() -> None:
        here.sendall(frame)
        here.recv(64)

    try:
        yield lambda: seconds(trip)
    finally:
        process.kill()
        process.join()


def measure(
    store: cascadekv.Store, bare: Callable[[], float], size: int
) -> list[dict[str, object]]:
    """Measure put, view and lookup of batches of blocks of one size."""
    space = cascadekv.Namespace(cascadekv.Manifest({"weights": "bench node"}))
    keys = cascadekv.BlockKeys([space.key_of_id(f"{block}") for block in range(BATCH)])
    source = np.random.default_rng(size).integers(0, 256, (BATCH, size), dtype=np.uint8)
    target = np.ones_like(source)
    inside = np.frombuffer(store.reserve(source.nbytes), np.uint8).reshape(source.shape)
    names = ("put", "copy", "view", "lookup", "bare")
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS + 1):
        spent = dict.fromkeys(names, 0.0)
        for _ in range(REPEATS):
            spent["put"] += seconds(lambda: store.put(keys, source))
            spent["copy"] += seconds(lambda: np.copyto(inside, source))
            spent["view"] += seconds(lambda: store.view(keys))
            spent["lookup"] += seconds(lambda: store.lookup_prefix(keys))
            spent["bare"] += bare()
            store.get(keys, target)
            if not (target == source).all():
                raise AssertionError("a byte is wrong")
            target[:, 0] ^= 0xFF
            store.delete(keys)
        if number > 0:  # the first round has page faults
            for name, value in spent.items():
                samples[name].append(value / REPEATS / BATCH * 1e6)
    control = [put - copy for put, copy in zip(samples["put"], samples["copy"], strict=True)]
    twice = [2 * value for value in samples["bare"]]
    most = CONTROL_US_MAX
    once = samples["bare"]
    return [
        figure(f"python/node/put-control/{size}B", control, twice, f"two {BARE}", most),
        figure(f"python/node/view/{size}B", samples["view"], once, f"one of {BARE}", most),
        figure(f"python/node/lookup/{size}B", samples["lookup"], once, f"one of {BARE}", most),
    ]


if __name__ == "__main__":
    require_optimised()
    figures: list[dict[str, object]] = []
    with bare_round_trip() as bare, node() as path:
        store = cascadekv.connect(path)
        for size in (64, 4096, 16384):
            figures += measure(store, bare, size)
        store.close()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

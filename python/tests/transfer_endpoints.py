"""Endpoints over paged KV of random bytes, for the tests of transfers."""

import os
import signal

import numpy as np
from cascadekv import transfer
from cascadekv.transfer import Blocks

BLOCKS = 12
SHAPE = {"layers": 3, "block_tokens": 4, "heads": 8, "head_bytes": 16}
ONE = Blocks([0], [0])
S = 30.0
"""A limit for what is expected to succeed."""
START_S = 100.0
"""A limit for the start of a process, which takes a minute on an emulated processor."""


def engine(
    seed=0,
    *,
    values=True,
    scale_bytes=0,
    token=None,
    tls=None,
    blocks=BLOCKS,
    heartbeat=None,
    rdma=None,
    streams=1,
    **shape,
):
    """Make paged KV with random bytes, and an endpoint over it."""
    form = transfer.Shape(**{**SHAPE, **shape})
    random_bytes = np.random.default_rng(seed)

    def array(block_bytes):
        return random_bytes.integers(0, 256, (blocks, block_bytes), "uint8")

    layers = [
        transfer.Layer(
            keys=array(form.region_block_bytes),
            values=array(form.region_block_bytes) if values else None,
            scales=array(scale_bytes) if scale_bytes else None,
            scale_bytes=scale_bytes,
        )
        for _ in range(form.layers)
    ]
    options = {"token": token, "tls": tls, "heartbeat": heartbeat, "streams": streams}
    options["rdma"] = rdma or Defaults.rdma
    return layers, transfer.Endpoint(layers, shape=form, block_count=blocks, **options)


class Defaults:
    """What endpoints of a test use unless it says something else."""

    rdma = None


def serve(pipe, path, rdma):
    """Run a process with an endpoint that others write to."""
    _, endpoint = engine(2, rdma=rdma)
    signal.signal(signal.SIGUSR1, lambda *_: leave_child(pipe))
    pipe.send(endpoint.listen(path))
    pipe.poll(None)


def leave_child(pipe):
    """Fork a child that keeps the sockets until the other end of the pipe is closed."""
    if os.fork() == 0:
        pipe.poll(S)
        os._exit(0)
    pipe.send("forked")

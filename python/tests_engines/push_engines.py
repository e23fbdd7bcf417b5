"""Pushes between two engines of `scheduled_engine.py`: requests, and what is held."""

import time

from scheduled_engine import LIMIT_S
from transfer_engines import TO_PREFILL, leases_of, step_until


def transfers(engine):
    """Return what an engine's worker moves between engines."""
    return engine.worker._worker._transfers  # noqa: SLF001 # the parts under test


def both(source, number=0):
    """Return what llm-d's router sends to the prefill and to the decode engine at once."""
    host, _, port = transfers(source).address.rpartition(":")
    name = f"xfer-{number}"
    to_decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "remote_host": host,
        "remote_port": float(port),
        "tp_size": 1.0,
        "transfer_mode": "push",
        "remote_request_id": "of the router",
        "transfer_id": name,
    }
    return {**TO_PREFILL, "transfer_id": name}, to_decode


def push(source, target, asked, number=0, *, decode_first=True, new=6):
    """Prefill in one engine and decode in the other; returns the decode's name."""
    to_prefill, to_decode = both(source, number)
    names = {}

    def add_decode():
        names["decode"] = target.add(asked, new=new, hints=to_decode)

    if decode_first:
        add_decode()
        step_until(target, lambda: bool(waiting(source)))
    names["prefill"] = source.add(asked, new=1, hints=to_prefill)
    if not decode_first:
        step_until(source, lambda: names["prefill"] in source.facts.finished)
        add_decode()
    run_until((source, target), lambda: names["decode"] in target.facts.finished)
    finish(source, target)
    return names["decode"]


def run_until(engines, is_over, seconds=LIMIT_S):
    """Step engines in turn until something is the case."""
    end = time.monotonic() + seconds
    while not is_over():
        assert time.monotonic() < end, "it did not become so"
        for engine in engines:
            engine.step()


def finish(*engines):
    """Step until nothing is left to do, and check that all pages are free and nothing waits."""
    run_until(engines, lambda: not any(each.scheduler.has_requests() for each in engines))
    for engine in engines:
        engine.check()
        assert expected(engine) == {}
        assert leases_of(engine).open_leases() == {}


def reach_through(engine, network):
    """Let prefill engines reach an engine through a network."""
    own = transfers(engine)
    own._arrivals._listener = lambda: (network.address, own.id)  # noqa: SLF001


def expected(engine):
    """Return the pushes that an engine waits for."""
    return transfers(engine)._arrivals._expected  # noqa: SLF001


def pages_of(engine):
    """Return the memory of an engine's pages."""
    return transfers(engine)._arrivals._memory  # noqa: SLF001


def waiting(engine):
    """Return the announcements whose request has not come."""
    return transfers(engine)._pushes._waiting  # noqa: SLF001

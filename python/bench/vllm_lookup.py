"""Measures one lookup of 256 blocks in vLLM's scheduler: `python vllm_lookup.py REPORT [SOCKET]`.

Requires vLLM's CPU build. Uses the node with this socket, or an embedded store. Reports the median
and the maximum of lookups that find all, half or none of the blocks, each for a new request. The
cost of a request's arrival (keys and lookahead) is reported separately, because it is not part of a
scheduling decision.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import cascadekv
from cascadekv import Hints, Manifest, Namespace
from cascadekv.bench.optimised import require_optimised
from cascadekv.connectors.vllm.groups import CacheGroup
from cascadekv.connectors.vllm.keys import RequestKeys
from cascadekv.connectors.vllm.metadata import Part
from cascadekv.connectors.vllm.scheduler import Scheduler, SchedulerSettings
from vllm import SamplingParams
from vllm.v1.request import Request

BLOCKS = 256
BLOCK_TOKENS = 128
ROUNDS = 200
PART = Part("heads 0-7 of 8", 0, 64)
SPACE = Namespace(Manifest({"weights": "bench"}))


def keys_of(request: Request) -> RequestKeys:
    """Return the keys of a request's blocks."""
    return RequestKeys(SPACE, [PART.name], BLOCK_TOKENS, {"salt": request.cache_salt or ""})


def measure(store: cascadekv.Store, share: float) -> dict[str, float]:
    """Measure lookups for which this share of the blocks is stored."""
    scheduler = Scheduler(
        lambda: store,
        [PART],
        [CacheGroup(0)],
        keys_of,
        SchedulerSettings(),
        block_tokens=BLOCK_TOKENS,
        choose=lambda tiers, _: len(tiers),
        hints_of=lambda _: Hints(),
    )
    tokens = [7919 * at % 50_000 for at in range(BLOCKS * BLOCK_TOKENS + 1)]
    arrivals, lookups = [], []
    for number in range(ROUNDS):
        salt = f"{share} {number}"
        request = Request(f"{number}", tokens, SamplingParams(), None, cache_salt=salt)
        keys = keys_of(request)
        keys.extend(tokens)
        stored = int(BLOCKS * share)
        if stored:
            store.put(keys.keys(PART.name, 0, stored), [salt.encode()] * stored)
        started = time.perf_counter()
        scheduler.add_request(request)
        arrived = time.perf_counter()
        matched, _ = scheduler.matched_tokens(request, 0)
        lookups.append(time.perf_counter() - arrived)
        arrivals.append(arrived - started)
        if matched != stored * BLOCK_TOKENS:
            raise RuntimeError(f"{matched} tokens matched; expected {stored * BLOCK_TOKENS}")
        scheduler.finish(request, lambda hints: hints)
    return {
        "arrival_us_median": statistics.median(arrivals) * 1e6,
        "lookup_us_median": statistics.median(lookups) * 1e6,
        "lookup_us_max": max(lookups) * 1e6,
    }


def main() -> None:
    """Measure and write the report."""
    report, *socket = sys.argv[1:]
    opened = cascadekv.connect(socket[0]) if socket else cascadekv.Store(dram="256MiB")
    with opened as store:
        shares = {"all": 1.0, "half": 0.5, "none": 0.0}
        figures = {name: measure(store, share) for name, share in shares.items()}
    figures["blocks"] = BLOCKS
    Path(report).write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    require_optimised()
    main()

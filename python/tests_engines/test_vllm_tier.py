"""The secondary tier with vLLM's own offloading managers, as far as a CPU build allows.

Without a GPU, vLLM does not create the worker that copies between the GPU and the CPU tier. The
tests write and read the chunks of the CPU tier instead.
"""

import dataclasses
import hashlib
import threading
import time
import uuid

import cascadekv
import pytest
from cascadekv import Manifest, Namespace
from cascadekv.connectors import vllm_tier
from cascadekv.errors import ConfigError
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_compat import SAYS_SOURCES, chunk_ids, offloading_group

LIMIT_S = 60
CHUNK = 8192
CHUNKS = 8
END = ScheduleEndContext((), ())
WEIGHTS = {"cascade.weights": "test weights"}


def parallel_of(**changes):
    """Return a topology: one worker unless changed."""
    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    replicas = {
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
    }
    given = {"rank": 0, "is_parallelism_agnostic": False} | sizes | replicas | changes
    return OffloadingParallelConfig(**given)


def config_of(tier, **changes):
    """Return the configuration that vLLM's offloading connector derives from an engine's."""
    extra = {
        "cpu_bytes_to_use": CHUNK * CHUNKS,
        "secondary_tiers": [
            {"type": "CascadeTier", "module_path": "cascadekv.connectors.vllm_tier", **tier}
        ],
    }
    given = {
        "groups": (offloading_group(16, ["layers.0", "layers.1"]),),
        "worker_kv_bytes_per_block": CHUNK // 2,
        "enable_kv_cache_events": False,
        "extra_config": extra,
        "engine_id": f"test-{uuid.uuid4().hex}",
        "model": OffloadingModelConfig("a/model", "float16"),
        "cache": OffloadingCacheConfig(16, 2),
        "parallel": parallel_of(),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**(given | changes))


class Engine:
    """vLLM's managers of one engine, and their memory."""

    def __init__(self, tier, **changes):
        self.spec = TieringOffloadingSpec(config_of(WEIGHTS | tier, **changes))
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.request = None
        self.begin()

    def begin(self):
        """Start another request: lookup results are cached per request."""
        if self.request is not None:
            self.manager.on_request_finished(self.request)
        self.request = ReqContext(uuid.uuid4().hex)
        self.manager.on_new_request(self.request)

    def store(self, keys):
        """Write chunks as a worker does, and store them in the secondary tier."""
        prepared = self.manager.prepare_store(keys, self.request)
        view = self.manager.primary_tier.get_kv_memoryview().cast("B")
        for key, at in zip(prepared.keys_to_store, chunk_ids(prepared.store_spec), strict=True):
            view[int(at) * CHUNK : (int(at) + 1) * CHUNK] = bytes_of(key)
        view.release()
        self.manager.complete_store(keys, self.request)
        self.settle()

    def settle(self):
        """Step until no job is in flight."""
        end = time.monotonic() + LIMIT_S
        while True:
            self.manager.on_schedule_end(END)
            if not self.manager.has_pending_work():
                return
            assert time.monotonic() < end, "a job did not end"
            time.sleep(0.005)

    def lookup(self, keys):
        """Look up as the scheduler does, step by step, until all results are final."""
        end = time.monotonic() + LIMIT_S
        while True:
            found = [self.manager.lookup(key, self.request) for key in keys]
            self.manager.on_schedule_end(END)
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                return [each is LookupResult.HIT for each in found]
            assert time.monotonic() < end, found
            time.sleep(0.005)

    def read(self, keys):
        """Read chunks as a worker does."""
        spec = self.manager.prepare_load(keys, self.request)
        view = self.manager.primary_tier.get_kv_memoryview().cast("B")
        read = [bytes(view[int(at) * CHUNK : (int(at) + 1) * CHUNK]) for at in chunk_ids(spec)]
        view.release()
        self.manager.complete_load(keys, self.request)
        return read

    def close(self):
        """End the request and the managers."""
        self.manager.on_request_finished(self.request)
        self.manager.shutdown()


@pytest.fixture
def engine():
    """Return a function that starts engines; closes them after the test."""
    engines = []

    def start(tier, **changes):
        engines.append(Engine(tier, **changes))
        return engines[-1]

    yield start
    for each in engines:
        each.close()


@pytest.fixture
def node(serve):
    return serve("--dram", "16MiB")


def keys_of(numbers, group=0):
    return [make_offload_key(hashlib.sha256(b"%d" % number).digest(), group) for number in numbers]


def bytes_of(key):
    return hashlib.shake_128(key).digest(CHUNK)


def at(node):
    return {"cascade.node": f"unix:{node.socket}"}


def test_chunks_of_one_engine_are_promoted_in_another(engine, node):
    keys = keys_of(range(5))
    engine(at(node)).store(keys)
    other = engine(at(node))
    assert other.lookup(keys) == [True] * 5
    assert other.read(keys) == [bytes_of(key) for key in keys]
    if SAYS_SOURCES:
        assert other.manager.get_load_source(keys[0], other.request).name == "DISK"


def test_chunks_evicted_from_the_cpu_tier_are_loaded(engine, node):
    one = engine(at(node))
    first, second = keys_of(range(8)), keys_of(range(8, 16))
    one.store(first)
    one.store(second)
    for keys in (first, second):
        assert one.lookup(keys) == [True] * 8
        assert one.read(keys) == [bytes_of(key) for key in keys]


def test_an_embedded_store_serves_one_engine(engine):
    one = engine({"cascade.dram": "16MiB"})
    one.store(keys_of(range(8)))
    one.store(keys_of(range(8, 16)))
    assert one.lookup(keys_of(range(8))) == [True] * 8


def test_chunks_that_were_not_stored_are_misses(engine, node):
    one = engine(at(node))
    one.store(keys_of(range(2)))
    other = engine(at(node))
    assert other.lookup(keys_of(range(4))) == [True, True, False, False]
    # The same hash in another group of layers is another chunk.
    assert other.lookup(keys_of(range(2), group=1)) == [False, False]


def test_a_chunk_deleted_between_lookup_and_load_is_a_miss(engine, node):
    keys = keys_of(range(3))
    engine(at(node)).store(keys)
    other = engine(at(node))
    while LookupResult.RETRY in [other.tier.lookup(key, other.request) for key in keys]:
        other.manager.on_schedule_end(END)
        time.sleep(0.005)
    with cascadekv.connect(node.socket) as store:
        space = Namespace(Manifest(vllm_tier.manifest_of(other.spec.config, CHUNK, "test weights")))
        assert store.delete([space.key_of_id(bytes(keys[1]))]) == [True]
    # The promotion of one chunk fails, the others succeed.
    assert other.lookup(keys) == [True, False, True]
    assert other.read([keys[0], keys[2]]) == [bytes_of(keys[0]), bytes_of(keys[2])]


CHANGES = {
    "model": {"model": OffloadingModelConfig("a/model", "bfloat16")},
    "layout": {"kv_cache_layout": "BLHNC"},
    "blocks in a chunk": {
        "cache": OffloadingCacheConfig(16, 1),
        "worker_kv_bytes_per_block": CHUNK,
    },
    "tokens": {"cache": OffloadingCacheConfig(8, 2)},
    "layers": {"groups": (offloading_group(16, ["layers.2", "layers.3"]),)},
    "topology": {
        "parallel": parallel_of(world_size=2, tp_size=2, is_parallelism_agnostic=True),
        "worker_kv_bytes_per_block": CHUNK // 4,
    },
    "stages": {
        "parallel": parallel_of(world_size=2, pp_size=2),
        "worker_kv_bytes_per_block": CHUNK // 4,
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_configurations_with_other_bytes_share_no_chunks(engine, node, change):
    keys = keys_of(range(3))
    engine(at(node)).store(keys)
    assert engine(at(node), **CHANGES[change]).lookup(keys) == [False] * 3


def test_other_weights_share_no_chunks(engine, node):
    keys = keys_of(range(3))
    engine(at(node)).store(keys)
    assert engine(at(node) | {"cascade.weights": "others"}).lookup(keys) == [False] * 3


def test_replicas_share_chunks(engine, node):
    keys = keys_of(range(3))
    engine(at(node)).store(keys)
    replica = parallel_of(data_parallel_index=1, data_parallel_size=2, data_parallel_rank_local=1)
    assert engine(at(node), parallel=replica).lookup(keys) == [True] * 3


def test_a_layout_without_topology_is_shared_between_topologies(engine, node):
    keys = keys_of(range(3))
    portable = parallel_of(is_parallelism_agnostic=True)
    two = dataclasses.replace(portable, world_size=2, tp_size=2)
    engine(at(node), parallel=portable, canonical_layout=True).store(keys)
    halves = {"worker_kv_bytes_per_block": CHUNK // 4}
    other = engine(at(node), parallel=two, canonical_layout=True, **halves)
    assert other.lookup(keys) == [True] * 3
    assert other.read(keys) == [bytes_of(key) for key in keys]


def test_vllms_hash_seed_changes_the_keys(engine, node, monkeypatch):
    # With other seeds, equal hashes would stand for other tokens.
    keys = keys_of(range(3))
    engine(at(node)).store(keys)
    late = engine(at(node))
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    # As in the engine: after its tiers are created.
    kv_cache_utils.init_none_hash(sha256)
    assert late.lookup(keys) == [False] * 3


def test_nothing_old_is_loaded_after_a_reset(engine, node):
    # A reset of its caches is vLLM's only sign to a tier that weights changed.
    keys = keys_of(range(3))
    one = engine(at(node))
    one.store(keys)
    one.manager.reset_cache()
    one.begin()
    assert one.lookup(keys) == [False] * 3
    one.store(keys)
    one.manager.primary_tier.reset_cache()
    one.begin()
    assert one.lookup(keys) == [True] * 3


def test_jobs_that_are_queued_at_a_reset_fail_without_a_call(engine, monkeypatch):
    # Regression: a reset waited for every queued job, each for as long as its deadline allows.
    one = engine({"cascade.dram": "16MiB"})
    gate, calls = threading.Event(), []
    save = one.tier._save  # noqa: SLF001 # the work of a job

    def late(*arguments):
        calls.append(threading.current_thread())
        assert gate.wait(LIMIT_S)
        return save(*arguments)

    monkeypatch.setattr(one.tier, "_save", late)
    jobs = []
    submit = one.tier.submit_store
    monkeypatch.setattr(one.tier, "submit_store", lambda job: jobs.append(job) or submit(job))
    for key in keys_of(range(CHUNKS)):
        one.manager.prepare_store([key], one.request)
        one.manager.complete_store([key], one.request)
    assert len(jobs) == CHUNKS > vllm_tier.COPIERS
    wait = vllm_tier.wait
    monkeypatch.setattr(vllm_tier, "wait", lambda waiting: gate.set() or wait(waiting))
    finished, results = one.tier.get_finished_jobs, {}

    def recorded():
        ended = list(finished())
        results.update((result.job_id, result.success) for result in ended)
        return ended

    monkeypatch.setattr(one.tier, "get_finished_jobs", recorded)
    one.manager.reset_cache()
    assert set(results) == {job.job_id for job in jobs}
    assert list(results.values()).count(True) == len(calls) <= vllm_tier.COPIERS


def test_a_suspended_node_does_not_block_the_scheduler(engine, node):
    keys = keys_of(range(3))
    engine(at(node)).store(keys)
    other = engine(at(node) | {"cascade.timeout": 0.3})
    node.suspend()
    try:
        longest = 0.0
        for key in keys:
            started = time.monotonic()
            other.manager.lookup(key, other.request)
            other.manager.on_schedule_end(END)
            longest = max(longest, time.monotonic() - started)
        assert other.lookup(keys) == [False] * 3
        other.store(keys)
        assert other.lookup(keys) == [True] * 3, "the CPU tier should have them"
        print(f"longest step of the scheduler: {longest * 1000:.2f} ms")
    finally:
        node.resume()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cascade.nod": "unix:/x"}, r"cascade\.nod: .*did you mean cascade\.node"),
        ({"root_dir": "/x"}, r"root_dir: no such setting of CascadeTier"),
        ({"cascade.weights": ""}, r"cascade\.weights"),
        ({"cascade.secret_file": "/no/such"}, r"cascade\.secret_file"),
        ({"cascade.weights": "sampled"}, r"cascade\.weights: the weights of a/model are not in"),
    ],
)
def test_invalid_settings_are_refused(engine, settings, message):
    with pytest.raises(ConfigError, match=message):
        engine(settings)


def test_weights_are_named_by_their_files(tmp_path):
    config = config_of({}, model=OffloadingModelConfig(str(tmp_path), "float16"))
    names = set()
    for content in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(content)
        names.add(vllm_tier.manifest_of(config, CHUNK, "sampled")["weights"])
    assert len(names) == 2


def test_vllms_gpu_copies_are_not_available_on_cpus(engine, node):
    # If this fails, vLLM supports it on CPUs, and the tests can include it.
    spec = engine(at(node)).spec
    with pytest.raises(Exception, match="only supported on CUDA"):
        spec.get_worker(None)
    print("not tested: vLLM's own copies between a GPU and its CPU tier, which need a GPU")

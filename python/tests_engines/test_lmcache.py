"""The L2 adapter with LMCache's own interface, command-line parser, loader and objects, on a CPU.

Uses LMCache's installed package; nothing of it is replaced.
"""

import inspect
import logging
import multiprocessing
import os
import select
import threading

import pytest
import torch
from cascadekv.connectors import lmcache_keys
from cascadekv.connectors.lmcache import CascadeL2Adapter
from cascadekv.errors import ConfigError, RefusedError
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache_objects import (
    DESC,
    create,
    desc,
    filled,
    is_right,
    keys_of,
    load,
    look_up,
    object_for,
    store,
)

EMBEDDED = {"cascade.dram": "64MiB"}


@pytest.fixture(scope="session", autouse=True)
def _tested():
    import lmcache  # noqa: PLC0415 # already imported

    print(f"\nLMCache {lmcache.__version__}: its own interface, parser and loader; no mocks")


@pytest.fixture
def adapt():
    """Return a function that creates adapters as LMCache does; closes them later."""
    created = []

    def make(parameters=None):
        created.append(create(EMBEDDED if parameters is None else parameters))
        return created[-1]

    yield make
    for adapter in created:
        adapter.close()


@pytest.fixture(params=["embedded", "served"])
def parameters(request):
    """Parameters for a new, empty store."""
    if request.param == "embedded":
        return EMBEDDED
    node = request.getfixturevalue("serve")("--dram", "64MiB")
    return {"cascade.node": f"unix:{node.socket}"}


def test_the_class_has_the_signatures_of_the_interface():
    assert issubclass(CascadeL2Adapter, L2AdapterInterface)
    assert not CascadeL2Adapter.__abstractmethods__
    for name, member in inspect.getmembers(L2AdapterInterface, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = inspect.signature(getattr(CascadeL2Adapter, name)).parameters
        assert list(ours) == list(inspect.signature(member).parameters), name


def test_objects_that_were_stored_are_found_and_loaded(adapt, parameters):
    adapter = adapt(parameters)
    keys = keys_of(range(40))
    assert look_up(adapter, keys) == [False] * 40
    result = store(adapter, keys)
    assert result.is_successful()
    assert result.bytes_transferred() == 40 * object_for().get_size()
    assert look_up(adapter, keys) == [True] * 40
    assert load(adapter, keys) == [True] * 40
    assert adapter.failures() == {}


def test_a_batch_with_misses_loads_its_hits(adapt, parameters):
    adapter = adapt(parameters)
    keys = keys_of(range(10))
    assert store(adapter, keys[::2]).is_successful()
    present = [True, False] * 5
    assert look_up(adapter, keys) == present
    assert load(adapter, keys) == present
    assert adapter.failures() == {}


def test_a_second_store_of_the_same_objects_moves_no_bytes(adapt, parameters):
    adapter = adapt(parameters)
    keys = keys_of(range(4))
    store(adapter, keys)
    again = store(adapter, keys, [object_for() for _ in keys])  # computed anew, other bytes
    assert again.is_successful()
    assert again.bytes_transferred() == 0
    assert load(adapter, keys) == [True] * 4
    assert adapter.get_usage().total_bytes_used == 4 * object_for().get_size()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "org/other"},
        {"rank": 1, "ranks": 2},
        {"ranks": 2},
        {"group": 1},
        {"salt": "someone else"},
    ],
    ids=str,
)
def test_objects_of_another_identity_are_not_found(adapt, other):
    adapter = adapt()
    store(adapter, keys_of(range(3)))
    different = keys_of(range(3), **other)
    assert look_up(adapter, different) == [False] * 3
    assert load(adapter, different) == [False] * 3


@pytest.mark.parametrize(
    "other",
    [
        desc(2, 4, 256, 32, dtype=torch.float16),
        desc(2, 4, 128, 64),
        desc(4, 2, 256, 32),
        desc(2, 4, 256, 64, dtype=torch.uint8),
    ],
    ids=["dtype", "chunk size", "layers", "quantized"],
)
def test_objects_of_another_layout_of_the_same_size_are_not_found(adapt, other):
    adapter = adapt()
    keys = keys_of(range(3))
    assert object_for(other).get_size() == object_for().get_size()
    store(adapter, keys)
    assert look_up(adapter, keys, other) == [False] * 3
    assert load(adapter, keys, other) == [False] * 3
    assert load(adapter, keys) == [True] * 3


def test_weights_are_told_apart(adapt, serve, tmp_path):
    node = serve("--dram", "64MiB")
    keys = keys_of(range(2))
    address = {"cascade.node": f"unix:{node.socket}"}
    store(adapt({**address, "cascade.weights": "revision 1"}), keys)
    assert look_up(adapt({**address, "cascade.weights": "revision 2"}), keys) == [False] * 2
    assert look_up(adapt(address), keys) == [False] * 2
    assert look_up(adapt({**address, "cascade.weights": "revision 1"}), keys) == [True] * 2
    # A model that LMCache names by its directory is identified by its files.
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first weights")
    named = keys_of(range(2), model=str(tmp_path))
    store(adapt(address), named)
    assert look_up(adapt(address), named) == [True] * 2
    weights.write_bytes(b"other weights")
    assert look_up(adapt(address), named) == [False] * 2


def test_looks_at_the_files_of_a_model_take_a_bounded_share_of_the_time(
    adapt, tmp_path, monkeypatch, eventually
):
    """All files of the model were looked at for each put, lookup and load."""
    facts, looks = lmcache_keys.facts_of, []
    monkeypatch.setattr(lmcache_keys, "facts_of", lambda place: looks.append(place) or facts(place))
    monkeypatch.setattr(lmcache_keys, "CHECK_PAUSES", 1e12)
    monkeypatch.setattr(lmcache_keys, "CHECK_PAUSE_MAX_S", 3600.0)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first weights")
    adapter, keys = adapt(), keys_of(range(2), model=str(tmp_path))
    for _ in range(5):
        store(adapter, keys)
        assert look_up(adapter, keys) == load(adapter, keys) == [True] * 2
    # When the model was first used, and the first check of it.
    assert looks == [tmp_path] * 2
    # A change is found once the pause is over. That of a fresh server is short.
    monkeypatch.undo()
    following = adapt()
    store(following, keys)
    weights.write_bytes(b"other weights")
    eventually(lambda: look_up(following, keys) == [False] * 2)


def test_a_server_that_outlives_the_weights_finds_nothing_of_them(
    adapt, serve, tmp_path, monkeypatch
):
    """The server kept the fingerprint of a model's name for its life.

    An engine that was restarted with other weights got the KV of the earlier ones. An engine that
    still has them may go on to store, so the server cannot know whose objects it gets.
    """
    monkeypatch.setattr(lmcache_keys, "CHECK_PAUSES", 0.0)
    node = serve("--dram", "64MiB")
    address = {"cascade.node": f"unix:{node.socket}"}
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first weights")
    (tmp_path / "next").write_bytes(b"other weights")
    named, others = keys_of(range(2), model=str(model)), keys_of(range(2))
    adapter = adapt(address)
    store(adapter, named)
    store(adapter, others)
    assert look_up(adapter, named) == load(adapter, named) == [True] * 2
    (tmp_path / "next").replace(model / "model.safetensors")
    assert look_up(adapter, named) == load(adapter, named) == [False] * 2
    assert not store(adapter, keys_of(range(2, 4), model=str(model))).is_successful()
    # Other models are not concerned, and the next server reads the new files.
    assert look_up(adapter, others) == [True] * 2
    following = adapt(address)
    assert look_up(following, named) == [False] * 2
    store(following, named)
    assert look_up(following, named) == [True] * 2


def test_a_lookup_without_a_layout_finds_what_this_server_stored(adapt):
    adapter = adapt()
    keys = keys_of(range(3))
    store(adapter, keys)
    descs = {0: desc()}
    descs[0].shapes.clear()
    descs[0].dtypes.clear()
    task = adapter.submit_lookup_and_lock_task(keys, descs)
    select.select([adapter.get_lookup_and_lock_event_fd()], [], [], 30)
    assert adapter.query_lookup_and_lock_result(task).popcount() == 3
    assert adapter.query_lookup_and_lock_result(task) is None, "a result is returned once"


def test_a_locked_object_survives_eviction_until_it_is_unlocked(adapt, eventually):
    adapter = adapt({"cascade.dram": "16MiB"})
    locked, others = keys_of(range(4)), keys_of(range(100, 400))
    store(adapter, locked)
    look_up(adapter, locked)
    look_up(adapter, locked)
    for at in range(0, 300, 20):
        store(adapter, others[at : at + 20])
    assert load(adapter, locked) == [True] * 4
    assert not all(load(adapter, others)), "nothing was evicted, so the test proves nothing"
    adapter.submit_unlock(locked)
    eventually(lambda: adapter.report_status()["locked_key_count"] == 4)
    store(adapter, keys_of(range(400, 500)))
    assert load(adapter, locked) == [True] * 4, "one of two locks is left"
    adapter.submit_unlock(locked)
    eventually(lambda: adapter.report_status()["locked_key_count"] == 0)
    for at in range(0, 300, 20):
        store(adapter, keys_of(range(600 + at, 620 + at)))
    assert load(adapter, locked) == [False] * 4


def test_a_lock_that_nobody_releases_expires(adapt, monkeypatch):
    adapter = adapt()
    keys = keys_of(range(3))
    store(adapter, keys)
    monkeypatch.setattr(adapter._locks, "_ttl_s", 0.0)  # noqa: SLF001 # 10 minutes
    look_up(adapter, keys)
    look_up(adapter, keys_of([9]))
    assert adapter.report_status()["locked_key_count"] == 0


def test_objects_are_deleted_unless_they_are_locked(adapt, parameters):
    adapter = adapt(parameters)
    keys = keys_of(range(6))
    store(adapter, keys)
    look_up(adapter, keys[:2])
    adapter.delete(keys)
    assert look_up(adapter, keys) == [True, True, False, False, False, False]
    assert adapter.get_usage().total_bytes_used == 2 * object_for().get_size()


def test_a_full_store_fails_the_task_and_keeps_what_it_has(adapt):
    adapter = adapt({"cascade.dram": "16MiB"})
    keys = keys_of(range(200))
    store(adapter, keys)
    kept = [key for key, is_kept in zip(keys, look_up(adapter, keys), strict=True) if is_kept]
    assert len(kept) > 50, "everything that is left is locked now"
    assert not store(adapter, keys_of(range(200, 300))).is_successful()
    assert load(adapter, kept) == [True] * len(kept)
    assert adapter.failures()["storing"] > 0


def test_an_object_with_fewer_bytes_than_its_layout_is_refused(adapt):
    adapter = adapt()
    key, item = keys_of([1]), object_for()
    item.set_used_size(100)
    assert not store(adapter, key, [item]).is_successful()
    assert look_up(adapter, key) == [False]
    assert adapter.failures() == {"storing": 1}


def test_events_have_descriptors_of_their_own(adapt):
    first, second = adapt(), adapt()
    descriptors = {
        get()
        for adapter in (first, second)
        for get in (
            adapter.get_store_event_fd,
            adapter.get_lookup_and_lock_event_fd,
            adapter.get_load_event_fd,
        )
    }
    assert len(descriptors) == 6


def test_tasks_from_several_threads_get_their_own_results(adapt, parameters):
    adapter = adapt(parameters)
    errors = []

    def work(number):
        try:
            keys = keys_of(range(number * 100, number * 100 + 10))
            items = filled(keys)
            task = adapter.submit_store_task(keys, items)
            done = {}
            while task not in done:
                done.update(stored.pop_all(adapter))
            assert done[task].is_successful()
            targets = [object_for() for _ in keys]
            task = adapter.submit_load_task(keys, targets)
            while (result := adapter.query_load_result(task)) is None:
                pass
            assert result.popcount() == 10
            assert all(is_right(*pair) for pair in zip(targets, keys, strict=True))
        except AssertionError as error:
            errors.append(error)

    class Stored:
        """Results of stores, which LMCache takes from one thread."""

        def __init__(self):
            self._lock, self._results = threading.Lock(), {}

        def pop_all(self, adapter):
            with self._lock:
                self._results.update(adapter.pop_completed_store_tasks())
                return dict(self._results)

    stored = Stored()
    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_after_close_all_tasks_end_as_failures(caplog):
    adapter = create(EMBEDDED)
    keys = keys_of(range(2))
    store(adapter, keys)
    look_up(adapter, keys)
    adapter.close()
    adapter.close()
    task = adapter.submit_store_task(keys, filled(keys))
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    task = adapter.submit_lookup_and_lock_task(keys, {0: DESC})
    assert adapter.query_lookup_and_lock_result(task).popcount() == 0
    task = adapter.submit_load_task(keys, [object_for() for _ in keys])
    assert adapter.query_load_result(task).popcount() == 0
    adapter.submit_unlock(keys)
    adapter.delete(keys)
    assert adapter.report_status()["is_healthy"] is False
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def _in_child(adapter, keys, items, answers):
    task = adapter.submit_store_task(keys, items)
    answers.put(adapter.pop_completed_store_tasks()[task].is_successful())
    task = adapter.submit_lookup_and_lock_task(keys, {0: DESC})
    answers.put(adapter.query_lookup_and_lock_result(task).popcount())
    adapter.delete(keys)
    adapter.close()
    answers.put(os.getpid())


def test_a_forked_child_has_misses_and_does_not_disturb_its_parent(adapt, parameters):
    adapter = adapt(parameters)
    keys = keys_of(range(3))
    store(adapter, keys)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    # Made before the fork: torch's threads do not exist in the child.
    child = context.Process(target=_in_child, args=[adapter, keys, filled(keys), answers])
    child.start()
    try:
        assert answers.get(timeout=60) is False
        assert answers.get(timeout=60) == 0
        assert answers.get(timeout=60) == child.pid
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
    ready, _, _ = select.select([adapter.get_store_event_fd()], [], [], 0)
    assert ready == [], "the child signalled the parent's descriptor"
    assert load(adapter, keys) == [True] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"socket": "/run/x"}, "socket: no such setting"),
        ({"cascade.sokcet": "/run/x"}, "cascade.sokcet: no such setting"),
        ({"cascade.node": "/run/x"}, "unix:PATH"),
        ({"cascade.node": "unix:/x", "cascade.dram": "1GiB"}, "cascade.dram"),
        ({"cascade.dram": "much"}, "cascade.dram"),
        ({"cascade.timeout": 0}, "cascade.timeout"),
        ({"cascade.weights": 7}, "cascade.weights"),
        ({"cascade.node": "unix:/x", "cascade.token_file": "/nowhere"}, "cannot be read"),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        create(wrong)


def test_a_node_that_refuses_the_server_is_named(serve, tmp_path):
    token, wrong, config = (tmp_path / name for name in ("token", "wrong", "tenants.toml"))
    for file, text in ((token, "0123456789abcdef-alice"), (wrong, "0123456789abcdef-other")):
        file.write_text(text)
        file.chmod(0o600)
    config.write_text(f'[[tenant]]\nname = "alice"\ntoken_file = "{token}"\ndram = "8MiB"\n')
    node = serve("--dram", "16MiB", "--config", str(config))
    parameters = {"cascade.node": f"unix:{node.socket}"}
    with pytest.raises(RefusedError, match="token"):
        create({**parameters, "cascade.token_file": str(wrong)})
    create({**parameters, "cascade.token_file": str(token)}).close()

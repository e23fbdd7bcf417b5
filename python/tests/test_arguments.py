"""Invalid arguments of store calls are refused."""

import pickle

import cascadekv
import numpy as np
import pytest


def test_invalid_keys_are_refused(store):
    with pytest.raises(TypeError, match="key_of_id"):
        store.view("sys_prompt_v1")
    with pytest.raises(TypeError, match=r'keys\[1\]: "b" is not a key: .*keys.text_key'):
        store.contains([bytes(32), "b"])
    with pytest.raises(ValueError, match="33 bytes"):
        store.contains(bytes(33))
    with pytest.raises(ValueError, match="32 bytes, got 4"):
        store.contains([b"abcd"])
    with pytest.raises(TypeError, match=r"keys\[0\]: 1 is not a key"):
        store.contains([1])
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        cascadekv.BlockKey.from_hex("zz")


def test_a_wrong_number_of_blocks_is_refused(store, keys_of):
    with pytest.raises(ValueError, match="2 keys but 1 blocks"):
        store.put(keys_of(range(2)), [b"one"])
    with pytest.raises(ValueError, match="2 keys do not divide"):
        store.put(keys_of(range(2)), b"one")
    with pytest.raises(TypeError, match=r"blocks\[1\]"):
        store.put(keys_of(range(2)), [b"one", "two"])


def test_unsuitable_buffers_are_refused(store, keys_of):
    keys = keys_of(range(2))
    store.put(keys, [b"one", b"two"])
    with pytest.raises(BufferError, match=r"buffers\[1\] is read-only"):
        store.get(keys, [bytearray(3), b"abc"])
    with pytest.raises(BufferError, match="not contiguous"):
        store.get(keys, [bytearray(3), np.zeros(6, dtype=np.uint8)[::2]])
    shared = bytearray(5)
    with pytest.raises(ValueError, match="share memory"):
        store.get(keys, [memoryview(shared)[:3], memoryview(shared)[2:]])


def test_invalid_durations_are_refused(store, keys_of):
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(cascadekv.ConfigError, match="timeout"):
            store.view(keys_of(range(1)), timeout=bad)
        with pytest.raises(cascadekv.ConfigError, match="ttl"):
            store.put(keys_of(range(1)), [b"block"], ttl=bad)


def test_invalid_hints_are_refused(store, keys_of):
    keys = keys_of(range(1))
    hints = cascadekv.Hints(
        ends_session=True, stop=cascadekv.StopReason.END_TURN, workload=3, expected_within=0.5
    )
    assert store.lookup_prefix(keys, hints=hints).blocks == 0
    store.hint(keys, hints=hints)
    with pytest.raises(TypeError, match="Hints or None"):
        store.lookup_prefix(keys, hints="soon")
    with pytest.raises(cascadekv.ConfigError, match="priority"):
        store.lookup_prefix(keys, hints=cascadekv.Hints(priority="urgent"))


def test_calls_on_a_closed_store_raise(store, keys_of):
    before = store.stats()["stored"]
    store.put(keys_of(range(1)), [b"block"])
    store.close()
    store.close()
    with pytest.raises(cascadekv.ClosedError, match="closed"):
        store.view(keys_of(range(1)))
    assert store.stats()["stored"] == before + 1


def test_a_store_cannot_be_pickled(store):
    with pytest.raises(TypeError, match="open one in each process"):
        pickle.dumps(store)


def test_exceptions_derive_from_cascade_error_and_a_builtin():
    assert issubclass(cascadekv.DeadlineError, (cascadekv.CascadeError, TimeoutError))
    assert issubclass(cascadekv.ConfigError, ValueError)
    assert issubclass(cascadekv.PipelineError, cascadekv.ConfigError)
    for name in cascadekv.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(cascadekv, name), cascadekv.CascadeError)

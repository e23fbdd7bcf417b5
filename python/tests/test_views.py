"""A view reads a block in place, and the block stays until its last user is released."""

import gc
import pickle

import numpy as np
import pytest

MIB = 1 << 20


def test_a_view_copies_nothing(store, keys_of, bytes_of):
    keys = keys_of(range(1))
    store.put(keys, [bytes_of(keys[0])])
    first, second = store.view(keys)[0], store.view(keys)[0]
    array = np.frombuffer(first, dtype=np.uint8)
    assert first.address == second.address == array.ctypes.data
    assert array.tobytes() == bytes_of(keys[0])


def test_a_view_is_read_only(store, keys_of):
    keys = keys_of(range(1))
    store.put(keys, [b"block"])
    view = store.view(keys)[0]
    assert memoryview(view).readonly
    assert not np.frombuffer(view, dtype=np.uint8).flags.writeable
    with pytest.raises(TypeError, match="read-only"):
        memoryview(view)[0] = 1


def test_views_keep_their_bytes_while_everything_is_evicted(store, keys_of, bytes_of):
    keys = keys_of(range(4))
    store.put(keys, [bytes_of(key, MIB) for key in keys])
    arrays = [np.frombuffer(view, dtype=np.uint8) for view in store.view(keys)]
    flood = keys_of(range(100, 200))
    for key in flood:
        store.put(key, [bytes_of(key, MIB)])
    store.delete(keys)
    for key, array in zip(keys, arrays, strict=True):
        assert array.tobytes() == bytes_of(key, MIB)


def test_memory_is_returned_by_the_last_user(store, keys_of, bytes_of, eventually):
    keys = keys_of(range(6))
    store.put(keys, [bytes_of(key, MIB) for key in keys])
    views = store.view(keys)
    arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
    store.delete(keys)
    held = store.stats()["pool"]["requested_bytes"]
    assert held >= 6 * MIB
    views.release()
    assert store.stats()["pool"]["requested_bytes"] == held
    del arrays
    gc.collect()
    eventually(lambda: store.stats()["pool"]["requested_bytes"] <= held - 6 * MIB)


def test_views_outlive_their_store(store, keys_of, bytes_of):
    keys = keys_of(range(1))
    store.put(keys, [bytes_of(keys[0])])
    view = store.view(keys)[0]
    store.close()
    gc.collect()
    assert bytes(view) == bytes_of(keys[0])


def test_a_batch_of_views_is_a_sequence(store, keys_of):
    keys = keys_of(range(4))
    store.put(keys[:3], [b"a", b"b", b"c"])
    with store.view(keys) as views:
        assert len(views) == 4
        assert views.hits == 3
        assert views[-1] is None
        assert views.error(3) is None
        assert [bytes(view) for view in views[:3]] == [b"a", b"b", b"c"]
        assert [view is None for view in views] == [False, False, False, True]
        with pytest.raises(IndexError, match="4 of 4"):
            views[4]
    assert len(views) == 0


def test_numpy_takes_a_view_by_dlpack(store, keys_of, bytes_of):
    keys = keys_of(range(1))
    store.put(keys, [bytes_of(keys[0])])
    view = store.view(keys)[0]
    array = np.from_dlpack(view)
    assert array.ctypes.data == view.address
    assert array.dtype == np.uint8
    assert not array.flags.writeable
    del view
    gc.collect()
    store.delete(keys)
    assert array.tobytes() == bytes_of(keys[0])


def test_an_unconsumed_capsule_releases_the_block(store, keys_of, bytes_of, eventually):
    keys = keys_of(range(1))
    store.put(keys, [bytes_of(keys[0], MIB)])
    capsule = store.view(keys)[0].__dlpack__(max_version=(1, 0))
    store.delete(keys)
    assert store.stats()["pool"]["requested_bytes"] >= MIB
    del capsule
    gc.collect()
    eventually(lambda: store.stats()["pool"]["requested_bytes"] == 0)


def test_dlpack_refuses_unsupported_requests(store, keys_of):
    keys = keys_of(range(1))
    store.put(keys, [b"block"])
    view = store.view(keys)[0]
    assert view.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="read-only"):
        view.__dlpack__()
    with pytest.raises(BufferError, match="CPU"):
        view.__dlpack__(max_version=(1, 0), dl_device=(2, 0))
    with pytest.raises(BufferError, match="no copies"):
        view.__dlpack__(max_version=(1, 0), copy=True)


def test_torch_takes_a_view_by_dlpack(store, keys_of, bytes_of):
    torch = pytest.importorskip("torch", reason="torch is optional and not installed")
    keys = keys_of(range(1))
    store.put(keys, [bytes_of(keys[0])])
    view = store.view(keys)[0]
    tensor = torch.from_dlpack(view)
    assert tensor.data_ptr() == view.address
    assert bytes(tensor.numpy()) == bytes_of(keys[0])


def test_views_cannot_be_pickled(store, keys_of):
    keys = keys_of(range(1))
    store.put(keys, [b"block"])
    views = store.view(keys)
    for thing in (views, views[0]):
        with pytest.raises(TypeError, match=r"bytes\(view\)"):
            pickle.dumps(thing)

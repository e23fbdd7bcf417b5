"""Blocks are written in place: reserve, fill, put."""

import cascadekv
import numpy as np
import pytest
from cascadekv import PutStatus


def test_a_block_written_in_place_is_stored_without_a_copy(store, keys_of, bytes_of):
    keys = keys_of(range(1))
    reservation = store.reserve(10_000)
    array = np.frombuffer(reservation, dtype=np.uint8)
    array[:] = np.frombuffer(bytes_of(keys[0]), dtype=np.uint8)
    address = array.ctypes.data
    del array
    assert store.put_reserved(keys, [reservation])[0].status is PutStatus.STORED
    view = store.view(keys)[0]
    assert view.address == address
    assert bytes(view) == bytes_of(keys[0])


def test_a_reservation_in_use_is_not_sealed(store, keys_of):
    keys = keys_of(range(1))
    reservation = store.reserve(100)
    writer = memoryview(reservation)
    with pytest.raises(BufferError, match="still in use"):
        store.put_reserved(keys, [reservation])
    assert store.contains(keys) == [False]
    writer.release()
    assert store.put_reserved(keys, [reservation])[0].ok


def test_a_reservation_is_used_once(store, keys_of):
    reservation = store.reserve(100)
    store.put_reserved(keys_of(range(1)), [reservation])
    for use in (reservation.release, lambda: memoryview(reservation), lambda: len(reservation)):
        with pytest.raises(ValueError, match="already"):
            use()


def test_a_released_reservation_goes_back_to_the_pool(store, eventually):
    reservation = store.reserve(1 << 20)
    assert store.stats()["pool"]["requested_bytes"] >= 1 << 20
    reservation.release()
    eventually(lambda: store.stats()["pool"]["requested_bytes"] == 0)


def test_a_reservation_larger_than_the_pool_is_refused(store):
    with pytest.raises(cascadekv.ConfigError, match="larger than the pool"):
        store.reserve(17 << 20)


def test_the_same_reservation_twice_in_a_batch_is_refused(store, keys_of):
    reservation = store.reserve(100)
    with pytest.raises(ValueError, match="twice"):
        store.put_reserved(keys_of(range(2)), [reservation, reservation])
    assert len(reservation) == 100

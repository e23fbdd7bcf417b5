"""Digests of files of weights: every byte counts, and what is remembered is of the file there."""

import os
import threading
import time

import pytest
from cascadekv.connectors import weight_digests
from cascadekv.connectors.weight_digests import WeightDigests, digests_place
from cascadekv.connectors.weights import NotDigestedError, fingerprint_of_model

SIZE = 4 << 20
"""More than all samples of a file together."""


@pytest.fixture
def model(tmp_path):
    """Return a model's directory with a large file, whose last change has settled."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(os.urandom(SIZE))
    return place


@pytest.fixture
def settled(monkeypatch):
    """Let digests of files that were just written be remembered."""
    monkeypatch.setattr(weight_digests, "SETTLED_S", -1.0)


def edit(model):
    """Change one byte that no sample has, and restore the file's time."""
    file = model / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(40_000)
        byte = opened.read(1)[0]
        opened.seek(40_000)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def join_background():
    """Wait for the threads that compute digests."""
    for thread in threading.enumerate():
        if thread.name == "cascade-digests":
            thread.join()


@pytest.mark.usefixtures("settled")
def test_a_changed_byte_changes_the_fingerprint(model, tmp_path):
    """The default read 64 places of a file and did not see a changed row of an embedding."""
    first = WeightDigests(tmp_path / "digests").fingerprint(str(model))
    assert first == fingerprint_of_model(model, is_full=True)
    sampled = fingerprint_of_model(model)
    time.sleep(0.05)
    edit(model)
    assert fingerprint_of_model(model) == sampled, "the samples see it"
    assert WeightDigests(tmp_path / "digests").fingerprint(str(model)) != first


@pytest.mark.usefixtures("settled")
def test_a_digest_is_computed_once(model, tmp_path):
    place = tmp_path / "digests"
    first = WeightDigests(place).fingerprint(str(model))
    # Without permission to read a byte.
    assert WeightDigests(place, at_once_bytes=0).fingerprint(str(model)) == first
    for record in place.iterdir():
        record.write_text(record.read_text()[:-5])
    with pytest.raises(NotDigestedError):
        WeightDigests(place, at_once_bytes=0).fingerprint(str(model))


def test_a_file_that_was_just_written_is_digested_and_not_remembered(model, tmp_path):
    # Its next change may get the same time.
    place = tmp_path / "digests"
    assert WeightDigests(place).fingerprint(str(model)) is not None
    assert not place.exists()


@pytest.mark.usefixtures("settled")
def test_large_files_are_digested_in_the_background(model, tmp_path, monkeypatch):
    place = tmp_path / "digests"
    digests = WeightDigests(place, at_once_bytes=SIZE - 1)
    with pytest.raises(NotDigestedError):
        digests.fingerprint(str(model))
    pauses = []
    monkeypatch.setattr(digests._stop, "wait", pauses.append)  # noqa: SLF001 # it pauses nowhere else
    digests.start([str(model)])
    join_background()
    assert pauses, "it does not pause"
    assert all(pause > 0 for pause in pauses)
    assert digests.fingerprint(str(model)) == fingerprint_of_model(model, is_full=True)
    digests.close()


@pytest.mark.usefixtures("settled")
def test_a_file_that_changes_while_it_is_read_is_not_remembered(model, tmp_path, monkeypatch):
    digests = WeightDigests(tmp_path / "digests", at_once_bytes=0)
    begun, edited = threading.Event(), threading.Event()

    def wait(_pause):
        begun.set()
        assert edited.wait(60)

    monkeypatch.setattr(digests._stop, "wait", wait)  # noqa: SLF001 # it pauses nowhere else
    digests.start([str(model)])
    assert begun.wait(60)
    time.sleep(0.05)
    edit(model)
    edited.set()
    join_background()
    with pytest.raises(NotDigestedError):
        digests.fingerprint(str(model))


@pytest.mark.usefixtures("settled")
def test_digests_that_others_can_write_are_not_used(model, tmp_path):
    place = tmp_path / "digests"
    WeightDigests(place).fingerprint(str(model))
    for mode, is_used in ((0o700, True), (0o770, False), (0o702, False), (0o755, True)):
        place.chmod(mode)
        digests = WeightDigests(place, at_once_bytes=0)
        if is_used:
            assert digests.fingerprint(str(model)) is not None
        else:
            with pytest.raises(NotDigestedError):
                digests.fingerprint(str(model))


def test_digests_are_beside_the_store(tmp_path, monkeypatch):
    files = tmp_path / "kv"
    assert digests_place({"cascade.files": str(files)}) == tmp_path / "kv.weights"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digests_place({"cascade.node": "unix:/x"}) == tmp_path / "cascade" / "weights"

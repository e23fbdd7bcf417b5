"""Weights that change at the same path: what is stored is that of the weights that were loaded."""

import contextlib
import shutil
import threading
import time
from pathlib import Path

import pytest
from cascadekv.bench.models import make_model
from cascadekv.bench.prompts import prompt
from cascadekv.connectors.weight_digests import AT_ONCE_BYTES, WeightDigests, digests_place
from cascadekv.connectors.weights import fingerprint_of_model
from conftest import MODELS
from forked_engines import BLOCK, engines
from safetensors.torch import load_file, save_file

STORE = {
    "cascade.dram": "64MiB",
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}
REQUEST = prompt(3 * BLOCK + 20, "changed weights")
POLL_S = 0.0005
LIMIT_S = 200
"""Time-out of a wait, on a loaded machine."""


@pytest.fixture(scope="module")
def versions():
    """Return two versions of a model, and the answers of engines without connector."""
    models = [make_model(MODELS, "tiny", "float32", seed=seed) for seed in (0, 1)]
    answers = []
    for model in models:
        with engines(model) as start:
            answers.append(start().one(REQUEST).tokens)
    assert answers[0] != answers[1]
    return [*zip(models, answers, strict=True)]


@contextlib.contextmanager
def replaced_after_load(file: Path, content: Path, store: Path):
    """Replace a file of weights once an engine opens its store: vLLM has loaded the weights."""

    def watch():
        end = time.monotonic() + LIMIT_S
        while not store.exists() and time.monotonic() < end:
            time.sleep(POLL_S)
        content.replace(file)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


def test_weights_that_are_replaced_after_they_were_read_have_no_keys(versions, tmp_path):
    """A new version was copied while engines started, between vLLM's load and the fingerprint.

    KV of the old weights got the key of the new ones, and the next engine used it.
    """
    (old, old_answer), (new, new_answer) = versions
    model = shutil.copytree(old, tmp_path / "model")
    shutil.copy(new / "model.safetensors", tmp_path / "next")
    store = {**STORE, "cascade.files": str(tmp_path / "files")}
    with engines(model) as start:
        time.sleep(1)
        weights, files = model / "model.safetensors", tmp_path / "files"
        with replaced_after_load(weights, tmp_path / "next", files):
            first = start(store)
        # The engine uses its own KV.
        for hit in (0, 3 * BLOCK):
            answer = first.one(REQUEST)
            assert (answer.tokens, answer.cached) == (old_answer, hit)
        first.close()
        for hit in (0, 3 * BLOCK):
            engine = start(store)
            answer = engine.one(REQUEST)
            assert (answer.tokens, answer.cached) == (new_answer, hit)
            engine.close()


def negate_row(model: Path, row: int):
    """Negate one row of a model's embedding, as an edit of a single token does."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][row] *= -1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_an_edit_of_one_row_is_seen(versions, tmp_path):
    """The default read 64 places of a file, and KV of the weights before the edit was used."""
    (old, old_answer), _ = versions
    model = shutil.copytree(old, tmp_path / "model")
    store = {**STORE, "cascade.files": str(tmp_path / "files")}
    with engines(model) as start:
        time.sleep(1)
        first = start(store)
        assert first.one(REQUEST).tokens == old_answer
        first.close()
        sampled = fingerprint_of_model(model)
        negate_row(model, REQUEST[5])
        assert fingerprint_of_model(model) == sampled, "the samples see it"
        time.sleep(1)
        right = start().one(REQUEST).tokens
        assert right != old_answer
        for hit in (0, 3 * BLOCK):
            engine = start(store)
            answer = engine.one(REQUEST)
            assert (answer.tokens, answer.cached) == (right, hit)
            engine.close()


def test_kv_outlives_a_run_only_if_all_bytes_of_the_weights_are_known(versions, tmp_path):
    (old, old_answer), _ = versions
    model = shutil.copytree(old, tmp_path / "model")
    # Counts as weights, is not loaded, and takes no space.
    with (model / "optimizer.bin").open("wb") as file:
        file.truncate(AT_ONCE_BYTES + 1)
    store = {**STORE, "cascade.files": str(tmp_path / "files")}

    def hits():
        engine = start(store)
        answers = [engine.one(REQUEST) for _ in range(2)]
        engine.close()
        assert {answer.tokens for answer in answers} == {old_answer}
        return [answer.cached for answer in answers]

    with engines(model) as start:
        time.sleep(1)
        assert [hits(), hits()] == [[0, 3 * BLOCK]] * 2, "only the engine uses it"
        digests = WeightDigests(digests_place(store), at_once_bytes=2 * AT_ONCE_BYTES)
        assert digests.fingerprint(str(model)) is not None
        assert hits() == [0, 3 * BLOCK]
        assert hits() == [3 * BLOCK, 3 * BLOCK], "its digest is remembered"

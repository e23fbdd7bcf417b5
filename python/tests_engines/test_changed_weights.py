"""Weights that change at the same path: what is stored is that of the weights that were loaded."""

import contextlib
import multiprocessing
import shutil
import threading
import time
from pathlib import Path

import pytest
from cascadekv.bench.models import make_model
from cascadekv.bench.prompts import prompt
from conftest import MODELS
from forked_engines import BLOCK, engines

STORE = {
    "cascade.dram": "64MiB",
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}
REQUEST = prompt(3 * BLOCK + 20, "changed weights")
POLL_S = 0.001


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
def replaced_when_read(file: Path, content: Path):
    """Replace a file of weights as soon as an engine has it mapped."""
    is_replaced, is_over = threading.Event(), threading.Event()

    def watch():
        while not (is_replaced.is_set() or is_over.is_set()):
            time.sleep(POLL_S)
            for child in multiprocessing.active_children():
                with contextlib.suppress(OSError):
                    if str(file) in Path(f"/proc/{child.pid}/maps").read_text():
                        content.replace(file)
                        is_replaced.set()

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    is_over.set()
    thread.join()
    assert is_replaced.is_set(), "no engine has read the file"


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
        with replaced_when_read(model / "model.safetensors", tmp_path / "next"):
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

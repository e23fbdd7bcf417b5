"""A step is not held up by the digest of an adapter that was loaded."""

import threading
from types import SimpleNamespace

import pytest
import torch
from cascadekv.connectors.vllm import adapters as module
from cascadekv.connectors.vllm.adapters import (
    AdapterUse,
    LoadedAdapters,
    fingerprint_of_adapter,
)

LARGE = module.AT_ONCE_BYTES // 4 + 1
"""Elements of a tensor that is not digested within a step."""


def adapter(seed, elements=LARGE):
    """Return an adapter as vLLM keeps it."""
    weights = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    return Model({"layer": {"lora_a": weights}}, {})


class Model(SimpleNamespace):
    """The fields of vLLM's `LoRAModel` that are digested."""

    def __init__(self, loras, modules_to_save):
        super().__init__(loras=loras, modules_to_save=modules_to_save, is_3d_lora_weight=False)


@pytest.fixture
def gate(monkeypatch):
    """Hold up digests until it is set; returns it with the threads that digested."""
    opened, callers = threading.Event(), []
    digest = module.weights_fingerprint

    def wait(*parts):
        callers.append(threading.current_thread())
        assert opened.wait(60)
        return digest(*parts)

    monkeypatch.setattr(module, "weights_fingerprint", wait)
    yield SimpleNamespace(opened=opened, callers=callers)
    opened.set()


@pytest.fixture
def engine(monkeypatch):
    """Return the adapters of an engine, and what it has loaded."""
    models = {}
    monkeypatch.setattr(module.versions, "adapter_list", lambda _: lambda: models)
    loaded = LoadedAdapters(SimpleNamespace(lora_config=object()), 0)
    yield loaded, models
    loaded.close()


def known_after(loaded, plan, eventually):
    """Take steps until the digests are known; returns the report."""
    reports = []

    def step():
        loaded.update(plan)
        reports.append(loaded.take_report(is_asked=False))
        return (reports[-1] or {}).get(0)

    eventually(step)
    return reports[-1]


def test_a_large_adapter_is_digested_beside_the_steps(engine, gate, eventually):
    loaded, models = engine
    models[1] = adapter(1)
    # This would not return if the step waited.
    loaded.update(plan=4)
    assert loaded.take_report(is_asked=True) == {0: {}}
    gate.opened.set()
    ((_, known),) = known_after(loaded, 5, eventually).items()
    assert known == {1: fingerprint_of_adapter(models[1])}
    assert threading.current_thread() is not gate.callers[0]
    use = AdapterUse(1, {0: known[1]}, first_plan=4)
    assert loaded.has_computed(use), "the step that loaded it has computed with these weights"
    assert not loaded.has_computed(AdapterUse(1, {0: known[1]}, first_plan=3))


def test_nothing_is_known_of_a_replaced_adapter_until_its_digest_is(engine, gate, eventually):
    loaded, models = engine
    gate.opened.set()
    models[1] = adapter(1)
    known = known_after(loaded, 1, eventually)[0][1]
    use = AdapterUse(1, {0: known}, first_plan=1)
    assert loaded.is_loaded(use)
    gate.opened.clear()
    models[1] = adapter(2)
    loaded.update(plan=2)
    assert not loaded.is_loaded(use)
    assert loaded.take_report(is_asked=False) == {0: {}}
    # The first one again, before the digest of the second one was there.
    models[1] = adapter(1)
    loaded.update(plan=3)
    gate.opened.set()
    assert known_after(loaded, 4, eventually) == {0: {1: known}}
    assert loaded.is_loaded(use)


def test_a_small_adapter_is_known_in_its_first_step(engine):
    loaded, models = engine
    models[1] = adapter(1, elements=8)
    loaded.update(plan=1)
    assert loaded.take_report(is_asked=False) == {0: {1: fingerprint_of_adapter(models[1])}}

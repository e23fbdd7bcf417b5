"""The connector with vLLM's own interface classes, MultiConnector, and hybrid models."""

import inspect
import json
import shutil

import engine_calls
import pytest
import torch
import transformers
from cascadekv.bench.prompts import prompt, with_prefix
from cascadekv.connectors.vllm import CascadeConnector
from forked_engines import BLOCK, Reference, engines
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
    supports_hma,
)
from vllm_compat import needs_groups

pytest_plugins = ["forked_engines"]

ALWAYS = {
    "cascade.load_or_compute": False,
    "cascade.lookup_timeout": 10,
    "cascade.save_timeout": 30,
}
BASES = (KVConnectorBase_V1, SupportsHMA)


def test_the_connector_has_no_abstract_methods():
    assert not inspect.isabstract(CascadeConnector)
    assert supports_hma(CascadeConnector)
    # The factory requires this parameter of the constructor.
    assert "kv_cache_config" in inspect.signature(CascadeConnector).parameters


def overridden():
    """Return the members of the interface that the connector overrides."""
    return [
        (name, base)
        for base in BASES
        for name, member in inspect.getmembers(base)
        if name in vars(CascadeConnector)
        and not name.startswith("__")
        and not name.startswith("_abc")
        and (callable(member) or isinstance(member, property))
    ]


def test_required_methods_are_overridden():
    names = {name for name, _ in overridden()}
    abstract = {name for base in BASES for name in getattr(base, "__abstractmethods__", ())}
    assert abstract <= names
    assert {"get_finished", "get_block_ids_with_load_errors", "reset_cache"} <= names
    later = {"get_transfer_results", "get_external_cache_hit_sources"}
    assert {name for name in later if hasattr(KVConnectorBase_V1, name)} <= names


@pytest.mark.parametrize(("name", "base"), overridden(), ids=lambda each: str(each))
def test_signatures_are_compatible_with_the_interface(name, base):
    theirs, ours = (inspect.getattr_static(cls, name) for cls in (base, CascadeConnector))
    assert type(theirs) is type(ours)
    if isinstance(theirs, property):
        return
    theirs, ours = (
        inspect.signature(inspect.unwrap(getattr(cls, name))) for cls in (base, CascadeConnector)
    )
    kinds = inspect.Parameter
    positional = [
        p.name for p in theirs.parameters.values() if p.kind is kinds.POSITIONAL_OR_KEYWORD
    ]
    assert [*ours.parameters][: len(positional)] == positional
    takes_any = {p.kind for p in theirs.parameters.values() if p.kind.name.startswith("VAR")}
    assert takes_any <= {p.kind for p in ours.parameters.values()}
    for parameter in list(ours.parameters.values())[len(positional) :]:
        assert parameter.kind.name.startswith("VAR") or parameter.default is not kinds.empty
    for parameter in positional:
        has_default = theirs.parameters[parameter].default is not kinds.empty
        assert not has_default or ours.parameters[parameter].default is not kinds.empty


def test_the_connector_is_found_by_its_name():
    assert KVConnectorFactory.get_connector_class_by_name("CascadeConnector") is CascadeConnector


@pytest.mark.parametrize("is_first", [True, False])
def test_it_works_in_a_multi_connector(start, reference, tmp_path, is_first):
    ours = {
        "kv_connector": "CascadeConnector",
        "kv_connector_module_path": "cascadekv.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cascade.dram": "64MiB", **ALWAYS},
    }
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, theirs] if is_first else [theirs, ours]},
    }
    engine = start({}, transfer=multi, disable_log_stats=False)
    first = prompt(3 * BLOCK + 20, "beside", is_first)
    assert reference.check_one(engine, first) == 0
    assert reference.check_one(engine, first) == 3 * BLOCK
    # ExampleConnector hits whole prompts only.
    for shared in (130, 256, 300):
        request = with_prefix(first, shared, "beside", is_first, shared)
        assert reference.check_one(engine, request) == shared // BLOCK * BLOCK
    assert engine.call(engine_calls.reset_all_caches) in (True, False)
    engine.close()


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory, tiny_model):
    """Generate a model in which most layers have a sliding window of 256 tokens."""
    directory = tmp_path_factory.mktemp("windowed")
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        sliding_window=256,
        max_position_embeddings=8192,
        layer_types=layers,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    generator = torch.Generator().manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).float()
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                deviation = 1.6 * weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    model.save_pretrained(directory)
    for path in tiny_model.glob("token*"):
        shutil.copy(path, directory)
    assert json.loads((directory / "config.json").read_text())["sliding_window"] == 256
    return directory


@needs_groups
def test_a_model_with_sliding_windows_hits_with_the_same_answers(windowed_model):
    with engines(windowed_model) as start:
        reference = Reference(start())
        engine = start({"cascade.dram": "256MiB", **ALWAYS})
        for tokens in (127, 128, 129, 385, 511, 512, 513, 700, 1100):
            request = prompt(tokens, "windows", tokens)
            assert reference.check_one(engine, request) == 0
            # A prompt that is found whole counts without its last token, which vLLM computes again.
            assert reference.check_one(engine, request) == min(tokens // BLOCK * BLOCK, tokens - 1)
        first = prompt(1000, "windows")
        reference.check_one(engine, first)
        for shared in (100, 128, 300, 500, 512, 640, 900):
            request = with_prefix(first, shared, "windows", shared)
            hit = reference.check_one(engine, request)
            assert hit == shared // BLOCK * BLOCK, shared
        said, answer = prompt(250, "windows turn"), []
        for turn in range(3):
            before = len(said) + len(answer) - 1 if answer else 0
            said = [*said, *answer, *(prompt(150, "turn", turn) if answer else [])]
            hit = reference.check_one(engine, said, 16)
            assert hit == before // BLOCK * BLOCK
            answer = list(reference.answers([said], 16)[0])
        at_once = [with_prefix(first, shared, "once", shared) for shared in (0, 300, 600, 1000)]
        reference.check(engine, at_once)
        reference.check(engine, [*at_once, first])


@needs_groups
def test_deleted_blocks_of_a_model_with_sliding_windows_are_computed(windowed_model):
    with engines(windowed_model) as start:
        reference = Reference(start())
        engine = start({"cascade.dram": "256MiB", **ALWAYS})
        for number in range(4):
            request = prompt(900, "windows lost", number)
            reference.check_one(engine, request)
            engine.call(engine_calls.delete_last_blocks_of_parts, request, number)
            reference.check_one(engine, request)
            assert reference.check_one(engine, request) == 7 * BLOCK

"""Everything that changes SGLang's KV changes its keys, and nothing else does."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_llama
import torch
from cascadekv import Namespace
from cascadekv.connectors import sglang_identity, sglang_weights
from cascadekv.connectors.host_pages import HostPages
from cascadekv.connectors.sglang_effects import SGLANG_OPTIONS
from cascadekv.connectors.weight_digests import WeightDigests
from cascadekv.connectors.weights import SAMPLE_BYTES, SAMPLES, fingerprint_of_model

pools = pytest.importorskip("sglang_pools", reason="SGLang is not installed")
config, mha, mla, published = pools.config, pools.mha, pools.mla, pools.published
FACTS = {"engine_format": "sglang 1", "model": "m", "weights": "parts-sha256:1"}


def manifests(pool, storage_config, facts=FACTS, name="kv", shards=1):
    pages = HostPages(pool, shards=shards)
    return sglang_identity.manifests_of_pool(
        storage_config,
        pool,
        name=name,
        piece_bytes=pages.piece_bytes[: pages.pieces // shards],
        facts=facts,
        shards=shards,
    )


def key(pool, storage_config=None, **more):
    (manifest,) = manifests(pool, storage_config or config(), **more)
    assert manifest.missing() == []
    return Namespace(manifest).key_of_id("page")


def tagged(pool, tag):
    pool.storage_format_tag = tag
    return pool


CHANGES = {
    "weights": lambda: key(mha("page_first"), facts={**FACTS, "weights": "parts-sha256:2"}),
    "model": lambda: key(mha("page_first"), facts={**FACTS, "model": "other"}),
    "engine": lambda: key(mha("page_first"), facts={**FACTS, "engine_format": "sglang 2"}),
    "quantization": lambda: key(mha("page_first"), facts={**FACTS, "quantization": "fp8"}),
    "computed dtype": lambda: key(mha("page_first"), facts={**FACTS, "dtype": "float16"}),
    "kept dtype of equal size": lambda: key(mha("page_first", dtype=torch.float16)),
    "kept dtype": lambda: key(mha("page_first", dtype=torch.float8_e4m3fn)),
    "page size": lambda: key(mha("page_first", page=8)),
    "layers": lambda: key(mha("page_first", layers=2)),
    "which layers": lambda: key(mha("page_first", start=3)),
    "heads": lambda: key(mha("page_first", heads=4, dim=4)),
    "head width": lambda: key(mha("page_first", dim=16)),
    "value width": lambda: key(mha("page_first", v_dim=4)),
    "layout page_first_direct": lambda: key(mha("page_first_direct")),
    "layout page_head": lambda: key(mha("page_head")),
    "layout layer_first": lambda: key(mha("layer_first")),
    "kind of pool": lambda: key(mla("page_first")),
    "pool": lambda: key(mha("page_first"), name="swa"),
    "format of pool": lambda: key(tagged(mha("page_first"), "v2")),
    "tp_rank": lambda: key(mha("page_first"), config(tp_rank=1, tp_size=2)),
    "tp_size": lambda: key(mha("page_first"), config(tp_size=2)),
    "pp_rank": lambda: key(mha("page_first"), config(pp_rank=1, pp_size=2)),
    "pp_size": lambda: key(mha("page_first"), config(pp_size=2)),
    "cp_rank": lambda: key(mha("page_first"), config(attn_cp_rank=1, attn_cp_size=2)),
    "cp_size": lambda: key(mha("page_first"), config(attn_cp_size=2)),
}


def test_every_change_changes_the_keys():
    keys = {"as it is": key(mha("page_first")), **{what: make() for what, make in CHANGES.items()}}
    same = [
        (one, other) for one in keys for other in keys if one < other and keys[one] == keys[other]
    ]
    assert same == []


def test_settings_without_effect_on_kv_do_not_change_keys():
    plain = key(mha("page_first"))
    assert key(mha("page_first"), config(dp_rank=3)) == plain
    assert key(mha("page_first"), config(enable_storage_metrics=True)) == plain
    assert key(mha("page_first"), config({"interface_v1": 0})) == plain


def test_compressed_kv_is_the_same_on_every_rank_of_a_stage():
    ranks = [config(tp_rank=n, tp_size=4, is_mla_model=True) for n in range(4)]
    assert len({key(mla("page_first"), rank) for rank in ranks}) == 1
    assert key(mla("page_first"), config(is_mla_model=True)) == key(mla("page_first"), ranks[0])
    stage = config(tp_size=4, is_mla_model=True, pp_rank=1, pp_size=2)
    assert key(mla("page_first"), stage) != key(mla("page_first"), ranks[0])


def test_a_pool_with_heads_is_sharded_although_the_main_kv_is_compressed():
    """A draft model's KV and recurrent state are sharded although the main KV is replicated."""
    storage_config = [config(tp_rank=n, tp_size=2, is_mla_model=True) for n in range(2)]
    for name, make in (("draft", mha), ("mamba", mla)):
        assert len({key(make("page_first"), rank, name=name) for rank in storage_config}) == 2


def test_shares_of_heads_have_the_manifests_of_their_ranks():
    def shares(rank, size, shards):
        pool = mha("page_head", heads=4 // size)
        storage_config = config(tp_rank=rank, tp_size=size, tp_lcm_size=4)
        return manifests(pool, storage_config, shards=shards)

    four = [manifest for rank in range(4) for manifest in shares(rank, 4, 1)]
    assert [manifest for rank in range(2) for manifest in shares(rank, 2, 2)] == four
    assert shares(0, 1, 4) == four


def facts_of(monkeypatch, changed=None, at_once_bytes=1 << 20, **changes):
    options = published(**changes)
    monkeypatch.setattr(sglang_identity, "_published", lambda: options)
    # The tests write the files, so that they are younger than this process.
    monkeypatch.setattr(sglang_weights, "changed_since_start", lambda _: changed)
    # Nothing is remembered.
    digests = WeightDigests(Path(os.devnull), at_once_bytes=at_once_bytes)
    weights = sglang_weights.RankWeights(digests)
    try:
        return sglang_identity.engine_facts("m", weights)
    finally:
        weights.close()


def test_the_engines_options_change_the_facts(monkeypatch, tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    changed = {
        "model_path": "/elsewhere",
        "revision": "v2",
        "dtype": "float16",
        "quantization": "awq",
        "kv_cache_dtype": "fp8_e5m2",
        "json_model_override_args": '{"rope_theta": 1}',
        "quantization_param_path": str(scales),
        "context_length": 4096,
        "model_impl": "transformers",
        "enable_hisparse": True,
        "mm_process_config": {"image": {"max_pixels": 1}},
        "lora_target_modules": ["q_proj"],
        "enable_tf32_matmul": True,
        "forward_hooks": [{"name": "mine"}],
        "speculative_num_steps": 3,
        "an_option_of_a_later_version": 1,
    }
    seen = [facts_of(monkeypatch)]
    seen += [facts_of(monkeypatch, **{name: value}) for name, value in changed.items()]
    assert all(one != other for n, one in enumerate(seen) for other in seen[:n])
    before = facts_of(monkeypatch, quantization_param_path=str(scales))
    scales.write_text('{"k": 2}')
    assert facts_of(monkeypatch, quantization_param_path=str(scales)) != before


def test_options_without_effect_do_not_change_the_facts(monkeypatch):
    changes = {
        "mem_fraction_static": 0.5,
        "max_running_requests": 7,
        "port": 1,
        "nccl_port": 12345,
        "random_seed": 99,
        "hicache_ratio": 3.0,
        "log_level": "debug",
        "disable_cuda_graph": True,
    }
    plain = facts_of(monkeypatch)
    for name, value in changes.items():
        assert facts_of(monkeypatch, **{name: value}) == plain, name
    # An engine that rounds equally in all batches shares nothing with one that rounds otherwise.
    exact = facts_of(monkeypatch, enable_deterministic_inference=True)
    assert exact != plain
    other = facts_of(monkeypatch, enable_deterministic_inference=True, disable_cuda_graph=True)
    assert other != exact


def test_files_of_the_processor_change_the_facts(monkeypatch, tmp_path):
    """Regression: an image was read that another processor had prepared."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    before = facts_of(monkeypatch, model_path=str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"temperature": 1}')
    assert facts_of(monkeypatch, model_path=str(tmp_path)) == before
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.0]}')
    assert facts_of(monkeypatch, model_path=str(tmp_path)) != before


def test_environment_variables_change_the_facts(monkeypatch):
    plain = facts_of(monkeypatch)
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    assert facts_of(monkeypatch) == plain
    monkeypatch.setenv("SGLANG_INT4_WEIGHT", "1")
    assert facts_of(monkeypatch) != plain


def test_every_byte_of_the_weights_counts(monkeypatch, tmp_path):
    """Regression: 64 places of each file were read, and an edit of others was not seen."""
    file = tmp_path / "model.safetensors"
    weights = bytearray(4 * SAMPLES * SAMPLE_BYTES)

    def name():
        file.write_bytes(weights)
        return facts_of(monkeypatch, at_once_bytes=1 << 30, model_path=str(tmp_path))["weights"]

    seen = set()
    for at in (None, SAMPLE_BYTES + 1, 2 * SAMPLE_BYTES + 5, len(weights) // 2 + SAMPLE_BYTES + 3):
        if at is not None:
            weights[at] = 1
        seen.add(name())
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"changed": "it was changed"}, "may have read other files than are there: it was changed"),
        ({"at_once_bytes": 10}, "computed in the background, for the next start"),
    ],
)
def test_weights_that_are_not_certain_are_those_of_one_engine(
    monkeypatch, tmp_path, caplog, condition, reason
):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"w" * 1000)

    def name():
        return facts_of(monkeypatch, **condition, model_path=str(tmp_path))["weights"]

    ours = name()
    assert reason in caplog.text
    assert name() == ours, "all ranks of the engine"
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert name() != ours, "another engine"
    monkeypatch.undo()
    file.write_bytes(b"v" * 1000)
    assert name() != ours, "other files"
    assert facts_of(monkeypatch, model_path=str(tmp_path))["weights"].startswith("parts-sha256:")


def test_adapters_are_identified_by_content(monkeypatch, tmp_path):
    def facts(weights):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        adapter = SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
        return facts_of(monkeypatch, lora_paths=[adapter])

    assert facts(b"one") != facts(b"two")
    assert facts(b"one") == facts(b"one")


def test_every_option_of_sglang_is_decided():
    """Fails if a version has another option: decide in `sglang_effects` whether it changes KV."""
    from sglang.srt.arg_groups.arg_utils import namespace_of  # noqa: PLC0415 # late, as SGLang warns
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    declared = namespace_of(ServerArgs)
    undecided = [
        f"{path}.{name}"
        for name, path in declared.items()
        if name not in SGLANG_OPTIONS.get(path, {})
    ]
    assert undecided == []
    gone = [
        f"{path}.{name}"
        for path, table in SGLANG_OPTIONS.items()
        for name in table
        if declared.get(name) != path
    ]
    assert gone == []
    assert sglang_identity._published() is None  # noqa: SLF001 # no engine runs here


def test_published_options_are_read_with_their_defaults(tmp_path):
    from sglang.srt import runtime_context  # noqa: PLC0415 # late, as SGLang warns
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    (tmp_path / "config.json").write_text(json.dumps(small_llama.LLAMA))
    arguments = ServerArgs(model_path=str(tmp_path), dtype="float16", device="cpu")
    before = runtime_context.snapshot_context()
    runtime_context.publish(arguments, role="test")
    try:
        options = sglang_identity._published()  # noqa: SLF001
    finally:
        runtime_context.restore_context(before)
    assert options["model"]["dtype"].value == "float16"
    assert options["model"]["json_model_override_args"].default == "{}"
    assert {"exec.kernel", "parallel", "observability"} <= set(options)


def model(place, weights, name="model.safetensors", settings="{}"):
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(weights)
    (place / "config.json").write_text(settings)
    return fingerprint_of_model(place)


def test_weights_are_named_by_content_not_by_path(tmp_path):
    one = model(tmp_path / "a", b"weights")
    assert model(tmp_path / "b", b"weights") == one
    assert model(tmp_path / "b", b"weights", settings="{ }") == one
    assert model(tmp_path / "b", b"weightz") != one
    assert model(tmp_path / "c", b"weights", settings='{"rope_theta": 1}') != one
    assert model(tmp_path / "d", b"weights", name="other.safetensors") != one
    assert fingerprint_of_model(tmp_path / "a" / "model.safetensors") is not None
    assert fingerprint_of_model(tmp_path / "nowhere") is None
    assert fingerprint_of_model(tmp_path) is None


@pytest.mark.parametrize("at", [0, 3 * SAMPLE_BYTES + 7, -1])
def test_large_files_are_sampled_over_their_whole_length(tmp_path, at):
    size = 4 * SAMPLES * SAMPLE_BYTES
    weights = bytearray(size)
    before = model(tmp_path / "a", weights)
    step = (size - SAMPLE_BYTES) // (SAMPLES - 1)
    weights[at if at <= 0 else step * 3] = 1
    assert model(tmp_path / "b", weights) != before
    assert model(tmp_path / "c", bytes(size + 1)) != before


def test_hashes_of_a_hub_cache_are_used(tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()

    def snapshot(name, digest):
        (blobs / digest).write_bytes(b"never read")
        place = tmp_path / name
        place.mkdir()
        (place / "model.safetensors").symlink_to(blobs / digest)
        return fingerprint_of_model(place)

    one = snapshot("one", "a" * 64)
    assert snapshot("two", "b" * 64) != one
    (blobs / ("a" * 64)).write_bytes(b"another")
    assert fingerprint_of_model(tmp_path / "one") == one

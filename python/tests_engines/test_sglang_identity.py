"""Everything that changes SGLang's KV changes its keys, and nothing else does."""

from types import SimpleNamespace

import pytest
import torch
from cascadekv import Namespace
from cascadekv.connectors import sglang_identity
from cascadekv.connectors.host_pages import HostPages
from cascadekv.connectors.weights import SAMPLE_BYTES, SAMPLES, fingerprint_of_model
from sglang_pools import config, mha, mla, published

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


def test_the_engines_options_change_the_facts(monkeypatch, tmp_path):
    def facts(**changes):
        options = published(**changes)
        monkeypatch.setattr(sglang_identity, "_published", lambda: options)
        return sglang_identity.engine_facts("m")

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
    }
    seen = [facts()] + [facts(**{name: value}) for name, value in changed.items()]
    assert all(one != other for n, one in enumerate(seen) for other in seen[:n])
    before = facts(quantization_param_path=str(scales))
    scales.write_text('{"k": 2}')
    assert facts(quantization_param_path=str(scales)) != before


def test_adapters_are_identified_by_content(monkeypatch, tmp_path):
    def facts(weights):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        adapter = SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
        options = (*published()[:2], SimpleNamespace(lora_paths=[adapter]))
        monkeypatch.setattr(sglang_identity, "_published", lambda: options)
        return sglang_identity.engine_facts("m")

    assert facts(b"one") != facts(b"two")
    assert facts(b"one") == facts(b"one")


def test_sglang_publishes_the_options_that_are_read():
    """Checks the names of its options: a renamed option would silently disappear from the keys."""
    from sglang.srt.arg_groups.fields.lora import Lora  # noqa: PLC0415 # late, as SGLang warns
    from sglang.srt.arg_groups.fields.model import Model  # noqa: PLC0415
    from sglang.srt.arg_groups.fields.spec import Spec  # noqa: PLC0415

    model = {"model_path", "revision", "quantization_param_path"}
    model |= set(sglang_identity._MODEL_SETTINGS)  # noqa: SLF001 # what it reads
    assert model <= set(Model.__struct_fields__)
    draft = {"speculative_draft_model_path", "speculative_draft_model_revision"}
    assert draft <= set(Spec.__struct_fields__)
    assert "lora_paths" in Lora.__struct_fields__
    assert sglang_identity._published() is None  # noqa: SLF001 # no engine runs here


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

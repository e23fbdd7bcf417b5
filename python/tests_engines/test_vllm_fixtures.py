"""Assumptions of the other vLLM tests: reproducible models, several engines in one process."""

import json

from cascadekv.bench.models import FACTS_FILE, make_model
from cascadekv.bench.prompts import prompt


def test_a_model_is_generated_once_and_reproducible(tmp_path, tiny_model):
    again = make_model(tmp_path, "tiny", "float32")
    made, first = ((path / FACTS_FILE).read_text() for path in (again, tiny_model))
    assert json.loads(made) == json.loads(first)
    stamp = (again / "model.safetensors").stat().st_mtime_ns
    assert make_model(tmp_path, "tiny", "float32") == again
    assert (again / "model.safetensors").stat().st_mtime_ns == stamp
    other = make_model(tmp_path, "tiny", "float32", seed=1)
    assert json.loads((other / FACTS_FILE).read_text())["sha256"] != json.loads(made)["sha256"]


def test_engines_run_one_after_another_in_one_process(engines, tmp_path):
    requests = [prompt(300, "engines follow"), prompt(384, "each other")]
    bare = engines.start()
    plain = [list(one.outputs[0].token_ids) for one in engines.answer(bare, requests)]
    engines.stop(bare)
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    for hit in (0, 256):
        engine = engines.start(transfer)
        answers = engines.answer(engine, requests)
        assert [list(one.outputs[0].token_ids) for one in answers] == plain
        assert [one.num_cached_tokens or 0 for one in answers] == [hit, hit]
        engines.stop(engine)


def test_wrong_kv_changes_the_answer(engines, tmp_path):
    """Checks that equal answers are evidence for right KV."""
    import torch  # noqa: PLC0415 # beside the engine
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 # likewise

    requests = [prompt(400, "wrong")]
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engine = engines.start(transfer)
    (right,) = engines.answer(engine, requests, 24)
    for path in tmp_path.rglob("*.safetensors"):
        held = load_file(path)
        save_file({name: torch.neg(kv) for name, kv in held.items()}, path)
    (wrong,) = engines.answer(engine, requests, 24)
    assert wrong.num_cached_tokens == 384
    assert list(wrong.outputs[0].token_ids) != list(right.outputs[0].token_ids)

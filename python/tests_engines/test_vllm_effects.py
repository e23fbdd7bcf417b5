"""Every setting of vLLM is decided, and what the engine computes with changes every key.

Regression: lists named what belongs to the manifest, and all other settings had no part in it.
Engines with other factors of LongRoPE, other layers in FP8, other quantization or another processor
of images read each other's KV and generated wrong tokens.
"""

import ast
import copy
import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_llama
import torch
import vllm
from cascadekv.connectors import vllm_versions
from cascadekv.connectors.vllm import engine_settings
from cascadekv.connectors.vllm.effects import OFFLOADING_CONFIGURATION, VLLM_CONFIGURATION
from cascadekv.connectors.vllm.engine_settings import settings_of
from cascadekv.connectors.vllm.environment import VLLM_ENVIRONMENT
from cascadekv.connectors.vllm.identity import manifest_of
from cascadekv.connectors.vllm.positions import LONG_ROPES, PLAIN_ROPES, READERS
from safetensors.torch import save
from vllm import envs
from vllm.config import VllmConfig, compilation, load, lora, model, multimodal
from vllm.config import vllm as whole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload import config as offloading

SOURCE = Path(vllm.__file__).parent
IS_NEWEST = vllm_versions.untested_warning(f"{vllm.__version__}") is None and (
    vllm.__version__.startswith(".".join(map(str, vllm_versions.NEWEST)))
)
LLAMA = small_llama.LLAMA | {"max_position_embeddings": 4096}
LONG = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "original_max_position_embeddings": 512,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [8.0] * 16,
        "original_max_position_embeddings": 512,
    },
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def classes():
    """Return vLLM's configuration classes that have tables, by name."""
    found = {}
    pending = [VllmConfig]
    while pending:
        kind = pending.pop()
        if kind.__name__ in found:
            continue
        found[kind.__name__] = kind
        modules = [sys.modules[kind.__module__], whole, model, multimodal, load, lora, compilation]
        for name in VLLM_CONFIGURATION:
            pending += [
                vars(module)[name]
                for module in modules
                if name not in found and isinstance(vars(module).get(name), type)
            ]
    return found


def test_every_setting_of_vllm_is_decided():
    """Fails if a version has another field: decide in `effects` whether it changes KV."""
    found = classes()
    offload = {name: vars(offloading)[name] for name in OFFLOADING_CONFIGURATION}
    undecided, gone = [], []
    for name, table in {**VLLM_CONFIGURATION, **OFFLOADING_CONFIGURATION}.items():
        kind = found.get(name) or offload.get(name)
        if kind is None:
            gone.append(name)
            continue
        fields = {field.name for field in dataclasses.fields(kind)}
        undecided += [f"{name}.{field}" for field in sorted(fields - set(table))]
        gone += [f"{name}.{field}" for field in sorted(set(table) - fields - OF_OLDER_VERSIONS)]
    assert undecided == []
    if IS_NEWEST:
        assert gone == []


OF_OLDER_VERSIONS = {
    "enable_return_routed_experts",
    "user_specified_mamba_block_size",
    "enable_mamba_fine_grained_prefix_cache",
    "sd_worker_cls",
    "use_fp4_indexer_cache",
    "enable_bf16x3_router_gemm",
    "ec_rank",
    "ec_parallel_size",
}


def test_every_object_in_the_configuration_is_decided():
    """Fails if a part of vLLM's configuration is an object that no table and no reason covers."""
    nested = {
        field: decision.effect.name
        for field, decision in VLLM_CONFIGURATION["VllmConfig"].items()
        if decision.effect.name == "NESTED"
    }
    kinds = {"".join(part.title() for part in name.split("_")).lower(): name for name in nested}
    tables = {name.lower() for name in VLLM_CONFIGURATION}
    assert set(kinds) <= tables, "a nested object has no table"


def test_every_environment_variable_of_vllm_is_decided():
    """Fails if a version has another variable: decide in `environment` whether it changes KV."""
    known = set(envs.environment_variables)
    assert sorted(known - set(VLLM_ENVIRONMENT)) == []
    if IS_NEWEST:
        assert sorted(set(VLLM_ENVIRONMENT) - known - OLDER_VARIABLES) == []


OLDER_VARIABLES = {
    "VLLM_ENGINE_ITERATION_TIMEOUT_S",
    "VLLM_MM_HASHER_ALGORITHM",
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4",
    "VLLM_KIMI_K3_GEMM_RS",
    "VLLM_NIXL_EP_MAX_NUM_RANKS",
    "VLLM_XPU_ENABLE_XPU_GRAPH",
    "VLLM_PLE_CPU_OFFLOAD",
}


def test_every_reader_of_the_longest_sequence_is_known():
    """Fails if another model or processor reads `max_model_len`: see what it does with it."""
    places = (
        "model_executor/models",
        "model_executor/layers/rotary_embedding",
        "models",
        "transformers_utils/processors",
        "transformers_utils/configs",
    )
    readers = {
        file.relative_to(SOURCE).as_posix()
        for place in places
        for file in (SOURCE / place).rglob("*.py")
        if "max_model_len" in file.read_text()
    }
    assert sorted(readers - set(READERS)) == []


def test_every_rotary_embedding_is_known():
    """Fails if vLLM has another type: see whether its factors depend on the longest sequence."""
    source = (SOURCE / "model_executor/layers/rotary_embedding/__init__.py").read_text()
    types = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "scaling_type":
            (right,) = node.comparators
            found = ast.literal_eval(right)
            types |= {found} if isinstance(found, str) else set(found)
    # Removed in 0.30; with it, the longest sequence is in the keys.
    assert types - {"xdrope"} <= PLAIN_ROPES | LONG_ROPES


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """Return a function that creates an engine's configuration for a new copy of a model."""
    numbers = itertools.count()

    def make(settings=LLAMA, files=None, **given):
        home = tmp_path_factory.mktemp(f"model-{next(numbers)}")
        (home / "config.json").write_text(json.dumps(settings))
        (home / "model.safetensors").write_bytes(save({"weight": torch.ones((4, 4))}))
        for name, content in (files or {}).items():
            (home / name).write_text(content)
        options = {"dtype": "float32", "max_model_len": 1024, "block_size": 32} | given
        arguments = EngineArgs(model=str(home), skip_tokenizer_init=True, **options)
        return arguments.create_engine_config()

    return make


@pytest.fixture(scope="module")
def plain(config_of):
    return config_of()


def changed(config, path, value):
    """Return a copy of a configuration with another value at a path, as `model_config.dtype`."""
    other = copy.deepcopy(config)
    *outer, name = path.split(".")
    part = other
    for each in outer:
        part = getattr(part, each)
    assert hasattr(part, name), path
    setattr(part, name, value)
    return other


def since(name, kind):
    """Whether this version of vLLM has a setting."""
    return name in {field.name for field in dataclasses.fields(kind)}


def test_longrope_has_other_keys_with_other_factors(config_of):
    short, longer, longest = (
        settings_of(config_of(LONG, max_model_len=length)) for length in (512, 1024, 4096)
    )
    assert short["positions"] == "short factors"
    assert longer["positions"] == "long factors"
    assert short != longer == longest


def test_other_models_keep_their_keys_with_another_longest_sequence(config_of, plain):
    assert settings_of(config_of(max_model_len=256)) == settings_of(plain)


def test_layers_without_quantized_kv_are_in_the_keys(plain):
    path = "cache_config.kv_cache_dtype_skip_layers"
    first = settings_of(changed(plain, path, ["0"]))
    last = settings_of(changed(plain, path, ["3"]))
    assert len({first.get(path), last.get(path), settings_of(plain).get(path)}) == 3
    both = [settings_of(changed(plain, path, each)) for each in (["0", "3"], ["3", "0"])]
    assert both[0] == both[1]


def test_online_quantization_is_in_the_keys(config_of):
    given = {"dtype": "bfloat16"}
    ways = [None, "fp8_per_channel", "fp8_per_block"]
    manifests = [settings_of(config_of(quantization=way, **given)) for way in ways]
    assert all(one != other for one, other in itertools.combinations(manifests, 2))
    assert settings_of(config_of(quantization=ways[1], **given)) == manifests[1]


def test_adapters_settings_are_in_the_keys(config_of, plain):
    with_adapters = settings_of(config_of(enable_lora=True, max_loras=2, max_lora_rank=8))
    # Requests without an adapter have the same KV.
    assert with_adapters == settings_of(plain)
    for more in ({"lora_target_modules": ["q_proj"]}, {"lora_dtype": "bfloat16"}):
        assert settings_of(config_of(enable_lora=True, **more)) != with_adapters, more


def test_a_processor_of_images_is_in_the_keys(config_of):
    vision = {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 128, "patch_size": 14}
    settings = LLAMA | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": vision,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    }

    def make(mean=0.5, tokenizer="{}", **given):
        processor = {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [mean] * 3}
        files = {"preprocessor_config.json": json.dumps(processor), "tokenizer.json": tokenizer}
        return settings_of(config_of(settings, files, **given))

    plain = make()
    assert make() == plain
    assert make(limit_mm_per_prompt={"image": 1}) == plain
    assert make(mean=0.0) != plain
    assert make(mm_processor_kwargs={"resample": 0}) != plain
    assert make(media_io_kwargs={"video": {"num_frames": 4}}) != plain


COUNTED = {
    "model_config.quantization_config": {"linear": "fp8"},
    "model_config.model_class_overrides": {"LlamaForCausalLM": "mine:Llama"},
    "model_config.disable_sliding_window": True,
    "cache_config.kv_sharing_fast_prefill": True,
    "load_config.ignore_patterns": ["*.bin"],
    "load_config.model_loader_extra_config": {"pattern": "*"},
    "attention_config.use_non_causal": True,
    "attention_config.disable_flashinfer_q_quantization": True,
    "parallel_config.worker_cls": "mine.Worker",
    "compilation_config.inductor_passes": {"mine": "mine.function"},
    "additional_config": {"mine": 1},
}


@pytest.mark.parametrize("path", COUNTED)
def test_a_setting_that_changes_kv_changes_the_manifest(plain, path):
    assert settings_of(changed(plain, path, COUNTED[path])) != settings_of(plain)


UNCOUNTED = {
    "model_config.seed": 7,
    "model_config.served_model_name": "other",
    "model_config.enforce_eager": True,
    "model_config.max_logprobs": 1,
    "model_config.tokenizer": "/elsewhere",
    "model_config.generation_config": "vllm",
    "cache_config.gpu_memory_utilization": 0.3,
    "cache_config.num_gpu_blocks": 77,
    "cache_config.enable_prefix_caching": False,
    "parallel_config.rank": 3,
    "parallel_config.tensor_parallel_size": 4,
    "parallel_config.pipeline_parallel_size": 2,
    "parallel_config.master_port": 5,
    "parallel_config.data_parallel_master_ip": "192.0.2.1",
    "scheduler_config.max_num_seqs": 3,
    "scheduler_config.max_num_batched_tokens": 333,
    "load_config.download_dir": "/elsewhere",
    "load_config.model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 3},
    "compilation_config.mode": 0,
    "compilation_config.cudagraph_capture_sizes": [1, 2],
    "compilation_config.static_forward_context": {"layer": object()},
    "instance_id": "other",
    "kv_transfer_config": None,
    "observability_config": None,
}


@pytest.mark.parametrize("path", UNCOUNTED)
def test_a_setting_without_effect_does_not_change_the_manifest(plain, path):
    assert settings_of(changed(plain, path, UNCOUNTED[path])) == settings_of(plain)


def test_kernels_count_for_quantized_models_only(plain):
    path = "kernel_config.linear_backend"
    if not since("linear_backend", type(plain.kernel_config)):
        pytest.skip("this vLLM has no such setting")
    assert settings_of(changed(plain, path, "marlin")) == settings_of(plain)
    quantized = changed(plain, "model_config.quantization", "fp8")
    assert settings_of(changed(quantized, path, "marlin")) != settings_of(quantized)


def test_rounding_counts_if_the_engine_rounds_equally_in_all_batches(plain, monkeypatch):
    usual = settings_of(plain)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    exact = settings_of(plain)
    assert exact != usual
    for path, value in (
        ("model_config.enforce_eager", True),
        ("parallel_config.tensor_parallel_size", 2),
    ):
        assert settings_of(changed(plain, path, value)) != exact, path


def test_a_setting_of_a_later_version_is_in_the_keys(plain):
    @dataclasses.dataclass
    class CacheConfig:
        cache_dtype: str = "auto"
        gpu_memory_utilization: float = 0.9
        unheard_of: int = 0

    given = {"cache_dtype": "auto", "gpu_memory_utilization": 0.5}
    later = settings_of(changed(plain, "cache_config", CacheConfig(**given)))
    assert later == settings_of(changed(plain, "cache_config", CacheConfig()))
    other = settings_of(changed(plain, "cache_config", CacheConfig(**given, unheard_of=1)))
    assert {name for name in other if other.get(name) != later.get(name)} == {
        "cache_config.unheard_of"
    }


def test_a_function_as_a_setting_is_refused_by_name(plain):
    config = changed(plain, "compilation_config.inductor_passes", {"mine": lambda graph: graph})
    with pytest.raises(ValueError, match=r"compilation_config\.inductor_passes"):
        settings_of(config)


def test_environment_variables_that_change_kv_are_in_the_keys(plain, monkeypatch):
    usual = settings_of(plain)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_PORT", "1234")
    # Kubernetes sets such variables for a service of this name.
    monkeypatch.setenv("VLLM_SERVICE_PORT", "8000")
    assert settings_of(plain) == usual
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "medium")
    assert settings_of(plain)["environment.VLLM_FLOAT32_MATMUL_PRECISION"] == '"medium"'
    monkeypatch.delenv("VLLM_FLOAT32_MATMUL_PRECISION")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert settings_of(plain) != usual


def test_code_of_the_model_counts_if_it_is_run(config_of):
    def make(code, *, trusted):
        return settings_of(config_of(files={"modeling_mine.py": code}, trust_remote_code=trusted))

    assert make("one", trusted=False) == make("two", trusted=False)
    assert make("one", trusted=True) != make("two", trusted=True)


def test_settings_of_a_draft_model_are_in_the_keys(plain):
    def with_draft(**changes):
        draft = SimpleNamespace(
            **{
                "model": "/nowhere",
                "revision": None,
                "hf_config": plain.model_config.hf_config,
                "multimodal_config": None,
                "trust_remote_code": False,
                "architecture": "LlamaForCausalLM",
                "max_model_len": 1024,
                "dtype": torch.float32,
            }
            | changes
        )
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(method="draft_model", draft_model_config=draft)
        )
        return engine_settings._speculative(config)  # noqa: SLF001

    assert with_draft() == with_draft()
    assert with_draft(max_model_len=512) == with_draft()
    assert with_draft(dtype=torch.float16) != with_draft()
    assert with_draft(model="/elsewhere") != with_draft()


def test_proposing_from_the_prompt_does_not_change_the_manifest(config_of, plain):
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert settings_of(config_of(speculative_config=speculation)) == settings_of(plain)


CHILD = """
import json, pickle, sys
from cascadekv.connectors.vllm.engine_settings import settings_of
config = pickle.load(open(sys.argv[1], "rb"))
print("MANIFEST", json.dumps(settings_of(config), sort_keys=True))
"""


def test_the_manifest_is_equal_in_every_process(config_of, tmp_path):
    """Workers get the configuration of the engine; a restarted engine makes it again."""
    given = {"quantization": "fp8_per_channel", "dtype": "bfloat16", "enable_lora": True}
    given |= {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    here = settings_of(config_of(**given))
    for number in range(2):
        place = tmp_path / f"{number}.pickle"
        place.write_bytes(pickle.dumps(config_of(**given)))
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", CHILD, str(place)],
            env=os.environ | {"PYTHONHASHSEED": str(number + 1)},
            capture_output=True,
            text=True,
            check=True,
        )
        (line,) = [each for each in done.stdout.splitlines() if each.startswith("MANIFEST")]
        assert json.loads(line.removeprefix("MANIFEST ")) == here


def test_a_manifest_has_texts_that_a_node_takes(config_of):
    """A node takes at most 256 fields of 4 KiB each."""
    config = config_of(LONG, hf_overrides={"architectures": ["Phi3ForCausalLM"]})
    group = KVCacheGroupSpec(
        ["layer 0"],
        FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32),
    )
    cache = KVCacheConfig(8, [], [group], kv_cache_layout="LBHNC")
    fields = manifest_of(config, cache, "sampled")
    assert len(fields) < 60
    assert all(len(text) < 300 for text in fields.values())
    # Paths differ between hosts.
    assert config.model_config.model not in str(fields)

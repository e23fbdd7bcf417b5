"""The settings of a vLLM engine that belong to the keys of blocks, as fields of a manifest.

All fields of vLLM's configuration count unless `effects` says that they have no effect on KV. What
a setting changes only for some models is given as what follows from it for this one.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cascadekv.connectors.canonical import canonical_text, text_digest
from cascadekv.connectors.effects import ABSENT, Effect, Numerics, Setting, Table, counted
from cascadekv.connectors.model_files import model_files_digest
from cascadekv.connectors.vllm.effects import UNORDERED, VLLM_CONFIGURATION
from cascadekv.connectors.vllm.environment import environment_of
from cascadekv.connectors.vllm.positions import positions_of
from cascadekv.connectors.weights import fingerprint_of_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["model_settings", "settings_of", "snapshot_of"]

FIELDS = 150
"""Most settings that are fields of their own; a manifest has at most 256."""
WITHOUT_KV = frozenset(("ngram", "ngram_gpu", "suffix"))
"""Ways of speculation that have no model, and so no KV."""
LOADER_SPEED = frozenset(
    ("enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed")
)
"""Entries of `model_loader_extra_config` that do not choose what is loaded."""


def settings_of(config: "VllmConfig") -> dict[str, str]:
    """Return the fields, equal on every worker of an engine and after a restart.

    Raises `ValueError` for a setting whose value has no text that is equal in every process.
    """
    model: Any = config.model_config
    numerics = _numerics(config)
    settings = model_settings(model.hf_config)
    fields = {
        "model_settings": text_digest(_both_settings(model, settings)),
        "model_files": _files(model),
        "architecture": str(model.architecture),
        "positions": positions_of(model, settings),
        "numerics": _numerics_text(numerics),
        "software": _software(model),
        "speculative": _speculative(config),
    }
    own = {
        "media": _media(model),
        "load": _load(config.load_config),
        "adapters": _adapters(config),
    }
    fields |= {name: text for name, text in own.items() if text}
    chosen = _configuration(config, numerics) | environment_of(numerics)
    if len(chosen) > FIELDS:
        chosen = {"settings": text_digest(canonical_text(chosen))}
    return fields | chosen


def _configuration(config: "VllmConfig", numerics: Numerics) -> dict[str, str]:
    fields: dict[str, str] = {}
    for path, part in _parts(config, ""):
        table = VLLM_CONFIGURATION.get(type(part).__name__, {})
        fields |= counted(_own(part, table, numerics), table, numerics, prefix=path)
    return fields


def _parts(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return a configuration object and those in it, each with its path."""
    yield path, part
    table = VLLM_CONFIGURATION.get(type(part).__name__, {})
    for field in dataclasses.fields(part):
        decision = table.get(field.name)
        inner = getattr(part, field.name, None)
        if decision is None or decision.effect is not Effect.NESTED or inner is None:
            continue
        # Without a draft model there is no KV that depends on its settings.
        if field.name == "speculative_config" and inner.method in WITHOUT_KV:
            continue
        yield from _parts(inner, f"{path}{field.name}.")


def _own(part: Any, table: Table, numerics: Numerics) -> Iterator[Setting]:
    """Return the settings of an object that count, without the objects in it that have a table."""
    for field in dataclasses.fields(part):
        if not numerics.counts(table.get(field.name)):
            continue
        value, default = getattr(part, field.name, None), _default(field)
        if field.name in UNORDERED:
            value, default = _as_set(value), _as_set(default)
        yield Setting(field.name, value, default)


def _default(field: "dataclasses.Field[Any]") -> object:
    """Return a field's default; vLLM's may be pydantic's objects."""
    default: Any = field.default
    factory: Any = field.default_factory
    if hasattr(default, "default_factory"):
        default, factory = default.default, default.default_factory
        if repr(default) == "PydanticUndefined":
            default = dataclasses.MISSING
    if default is not dataclasses.MISSING:
        return default
    return factory() if callable(factory) else ABSENT


def _as_set(value: object) -> object:
    return frozenset(cast("list[str]", value)) if isinstance(value, list | tuple) else value


# What follows from settings.


def model_settings(hf_config: Any) -> dict[str, Any]:
    """Return a model's settings as JSON's types, without paths and versions of libraries."""
    try:
        # It serializes values that `json` cannot.
        read = json.loads(hf_config.to_json_string(use_diff=False))
    except (TypeError, ValueError):
        # Of a model's own code.
        read = json.loads(canonical_text(hf_config.to_dict()))
    return _without_names(cast("dict[str, Any]", read))


def _without_names(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_names(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for name, value in settings.items()
        # vLLM writes its `max_model_len` into the settings of some models; it is in `positions`.
        if name not in ("_name_or_path", "transformers_version", "max_model_len")
    }


def _both_settings(model: Any, settings: dict[str, Any]) -> str:
    """Return the text of a model's settings, and of its language model's if it has its own."""
    text = getattr(model, "hf_text_config", None)
    if text is None or text is model.hf_config:
        return json.dumps(settings, sort_keys=True)
    return json.dumps([settings, model_settings(text)], sort_keys=True)


def _numerics(config: "VllmConfig") -> Numerics:
    from vllm import envs  # noqa: PLC0415 # only an engine has it

    model: Any = config.model_config
    is_quantized = (
        model.quantization is not None
        or getattr(model, "quantization_config", None) is not None
        # Attention may then quantize queries.
        or config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16")
    )
    return Numerics(is_quantized, bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)))


def _numerics_text(numerics: Numerics) -> str:
    """Return what decides about kernels. A device's kernels may quantize activations or not."""
    if not numerics.is_quantized and not numerics.is_batch_invariant:
        return "as the model"
    from vllm.platforms import current_platform  # noqa: PLC0415 # only an engine has it

    capability: Any = current_platform.get_device_capability()
    if capability is None:
        import torch  # noqa: PLC0415 # likewise

        capability = torch.backends.cpu.get_cpu_capability()
    batch = "equal in all batches, " if numerics.is_batch_invariant else ""
    return f"{batch}kernels for {capability}"


def _software(model: Any) -> str:
    """Return the packages that may change what is computed: plug-ins, and transformers if used."""
    names: set[str] = set()
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        for entry in importlib.metadata.entry_points(group=group):
            if entry.dist is not None and not entry.module.startswith("vllm."):
                names.add(f"{entry.dist.name} {entry.dist.version}")
    # Its processors prepare images, and its models run those that vLLM has none for.
    if model.multimodal_config is not None or "Transformers" in str(model.architecture):
        names.add(f"transformers {importlib.metadata.version('transformers')}")
    return ", ".join(sorted(names)) or "vllm alone"


def snapshot_of(name: str, revision: str | None, download_dir: str | None = None) -> str:
    """Return the directory of a model in the hub cache; empty if it is not cached."""
    import huggingface_hub  # noqa: PLC0415 # comes with the engine
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    hub: Any = huggingface_hub
    try:
        return hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError):
        return ""


def _files(model: Any) -> str:
    """Return a digest of the files of a model that change KV, or its name if they are not here."""
    has_media = model.multimodal_config is not None
    digest = _directory(model.model, model.revision, has_media=has_media, model=model)
    if not has_media:
        return digest
    tokenizer = ""
    if model.tokenizer != model.model:
        tokenizer = _directory(
            model.tokenizer, model.tokenizer_revision, has_media=True, model=model
        )
    # It chooses the processor.
    return f"{digest} {tokenizer} {model.tokenizer_mode}"


def _directory(name: str, revision: str | None, *, has_media: bool, model: Any) -> str:
    place = Path(name)
    if place.is_file():
        return "one file"
    if not place.is_dir():
        place = Path(snapshot_of(name, revision) or name)
    if not place.is_dir():
        return f"not on this machine: {name}@{revision}"
    code = f" code {model.code_revision}" if model.trust_remote_code and _has_code(place) else ""
    runs_code = bool(model.trust_remote_code)
    return model_files_digest(place, has_media=has_media, runs_code=runs_code) + code


def _has_code(place: Path) -> bool:
    """Whether a model names code, of its own directory or of another one on the hub."""
    return any(b'"auto_map"' in file.read_bytes() for file in place.glob("*config.json"))


def _media(model: Any) -> str:
    """Return what images and video depend on, beside settings that count themselves."""
    media = model.multimodal_config
    if media is None:
        return ""
    scales = getattr(media, "mm_encoder_fp8_scale_path", None)
    content = text_digest(Path(scales).read_text()) if scales else "none"
    # How many there may be has no effect, but their size and number of frames may.
    limits = {
        kind: {name: value for name, value in vars(each).items() if name != "count"}
        for kind, each in media.limit_per_prompt.items()
        if dataclasses.is_dataclass(each)
    }
    chosen = {kind: sizes for kind, sizes in limits.items() if any(sizes.values())}
    return f"scales {content}, sizes {text_digest(canonical_text(chosen)) if chosen else 'any'}"


def _load(load: Any) -> str:
    """Return which weights are loaded, if the files do not say it; empty if they do."""
    facts: list[str] = []
    if load.safetensors_load_strategy == "torchao":
        facts.append("torchao")
    more: Any = load.model_loader_extra_config
    if isinstance(more, dict):
        entries = cast("dict[str, object]", more)
        more = {name: entries[name] for name in entries if name not in LOADER_SPEED}
    if more:
        facts.append(f"loader {text_digest(canonical_text(more))}")
    return ", ".join(facts)


def _adapters(config: "VllmConfig") -> str:
    """Return the precision of adapters if it is not the model's; empty if it is."""
    lora: Any = config.lora_config
    model: Any = config.model_config
    if lora is None or lora.lora_dtype in (None, "auto", model.dtype):
        return ""
    return str(lora.lora_dtype)


def _speculative(config: "VllmConfig") -> str:
    """Return what the KV of a draft model depends on, beside settings that count themselves."""
    speculative: Any = config.speculative_config
    if speculative is None or speculative.method in WITHOUT_KV:
        return "none"
    draft = speculative.draft_model_config
    if draft is None:
        return text_digest(canonical_text([speculative.method, speculative.model]))
    # Draft models are small.
    fingerprint = fingerprint_of_model(draft.model, is_full=True)
    if fingerprint is None and (place := snapshot_of(draft.model, draft.revision)):
        fingerprint = fingerprint_of_model(place, is_full=True)
    settings = model_settings(draft.hf_config)
    facts = [
        fingerprint or f"{draft.model}@{draft.revision}",
        json.dumps(settings, sort_keys=True),
        _files(draft),
        str(draft.architecture),
        positions_of(draft, settings),
        str(draft.dtype),
    ]
    return text_digest(canonical_text(facts))

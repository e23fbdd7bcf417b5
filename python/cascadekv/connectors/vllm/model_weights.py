"""Which weights an engine has loaded, and whether that is certain."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascadekv.connectors.file_changes import changed_since_start
from cascadekv.connectors.vllm.engine_settings import snapshot_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["FINGERPRINTS", "ModelWeights", "weights_of"]

FINGERPRINTS = ("sampled", "full")
"""Settings that identify weights by their files; any other text is their name."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of an engine."""

    setting: str
    """How they are identified in the manifest."""
    doubt: str | None = None
    """Why KV of them must not outlive this run of the engine; `None` if it may."""


def weights_of(config: "VllmConfig", setting: str) -> ModelWeights:
    """Return the weights of an engine. Called after their files were read for the manifest."""
    if setting not in FINGERPRINTS or "dummy" in str(config.load_config.load_format):
        return ModelWeights(setting)
    for place in _places(config):
        changed = changed_since_start(place)
        if changed is not None:
            return ModelWeights(
                setting, f"it may have read other weights than are there: {changed}"
            )
    return ModelWeights(setting)


def _places(config: "VllmConfig") -> list[Path]:
    """Return the local directories or files of an engine's models."""
    model: Any = config.model_config
    speculative: Any = config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    models = [model] if draft is None else [model, draft]
    download, places = config.load_config.download_dir, dict[str, None]()
    for each in models:
        for name in filter(None, (getattr(each, "model_weights", ""), each.model)):
            is_here = Path(name).exists()
            places[name if is_here else snapshot_of(name, each.revision, download)] = None
    return [Path(place) for place in places if place]

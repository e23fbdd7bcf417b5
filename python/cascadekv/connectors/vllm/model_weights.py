"""Which weights an engine has loaded, and whether that is certain."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascadekv.connectors.file_changes import changed_since_start
from cascadekv.connectors.vllm.engine_settings import snapshot_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["FINGERPRINTS", "NOT_DIGESTED", "doubt_of_weights", "places_of_model"]

FINGERPRINTS = ("digest", "full", "sampled")
"""Settings that identify weights by their files; any other text is their name."""
NOT_DIGESTED = "not digested yet"
"""Stands for weights whose digest is not known; then no other run uses the keys."""


def doubt_of_weights(config: "VllmConfig", setting: str, named: str) -> str | None:
    """Return why KV must not outlive this run of an engine; `None` if it may.

    `named` is how the manifest names the weights. Called after their files were read for it.
    """
    if setting not in FINGERPRINTS or "dummy" in str(config.load_config.load_format):
        return None
    for place in _places(config):
        changed = changed_since_start(Path(place))
        if changed is not None:
            return f"it may have read other files than are there: {changed}"
    if NOT_DIGESTED in named:
        return (
            "the digest of its weights is not known yet and is computed in the background, for "
            "the next run; cascade.weights: full computes it at start"
        )
    return None


def places_of_model(config: "VllmConfig") -> list[str]:
    """Return where the weights of an engine's model may be on this machine."""
    return _places_of(config, config.model_config)


def _places(config: "VllmConfig") -> list[str]:
    speculative: Any = config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    drafts = [] if draft is None else _places_of(config, draft)
    return list(dict.fromkeys([*places_of_model(config), *drafts]))


def _places_of(config: "VllmConfig", model: Any) -> list[str]:
    download, places = config.load_config.download_dir, list[str]()
    for name in filter(None, (getattr(model, "model_weights", ""), model.model)):
        is_here = Path(name).exists()
        places.append(name if is_here else snapshot_of(name, model.revision, download))
    return [place for place in places if place]

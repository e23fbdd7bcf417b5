"""What an engine's settings do to its KV: the decisions of a table, and how they are applied.

A setting belongs to the keys of blocks unless its table says that it has no effect on KV. A setting
that no table names, such as one of a new version, belongs to the keys.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cascadekv.connectors.canonical import NoCanonicalTextError, canonical_text, shown, text_digest

__all__ = [
    "ABSENT",
    "Decision",
    "Effect",
    "Numerics",
    "Setting",
    "Table",
    "counted",
    "elsewhere",
    "in_key",
    "nested",
    "no_effect",
    "of_quantized",
    "rounding",
]


class Effect(enum.Enum):
    """What a setting does to the KV of given tokens."""

    KEY = "changes the KV"
    NONE = "does not reach the KV"
    ROUNDING = "chooses how the same function is computed: other rounding"
    QUANTIZED = "chooses kernels, and these decide the precision of a quantized model's activations"
    ELSEWHERE = "changes the KV; another field of the manifest says how, more precisely"
    NESTED = "an object whose fields have decisions of their own"


@dataclass(frozen=True, slots=True)
class Decision:
    """The effect of a setting, and why."""

    effect: Effect
    reason: str


Table = Mapping[str, Decision]
"""Decisions by the name of the setting."""


def in_key(reason: str, names: str) -> dict[str, Decision]:
    """Return decisions for settings that change the KV; `names` are separated by spaces."""
    return _decisions(Effect.KEY, reason, names)


def no_effect(reason: str, names: str) -> dict[str, Decision]:
    """Return decisions for settings that do not reach the KV."""
    return _decisions(Effect.NONE, reason, names)


def rounding(reason: str, names: str) -> dict[str, Decision]:
    """Return decisions for settings that change rounding only.

    An engine rounds differently in batches of other sizes, too, and shares blocks between them.
    These settings count only if the engine is set to round equally in all batches.
    """
    return _decisions(Effect.ROUNDING, reason, names)


def of_quantized(reason: str, names: str) -> dict[str, Decision]:
    """Return decisions for settings that choose kernels; they count for quantized models."""
    return _decisions(Effect.QUANTIZED, reason, names)


def elsewhere(field: str, names: str) -> dict[str, Decision]:
    """Return decisions for settings that the named field of the manifest covers."""
    return _decisions(Effect.ELSEWHERE, f"in the field {field}", names)


def nested(names: str) -> dict[str, Decision]:
    """Return decisions for objects whose fields have decisions of their own."""
    return _decisions(Effect.NESTED, "its fields have decisions of their own", names)


def _decisions(effect: Effect, reason: str, names: str) -> dict[str, Decision]:
    return {name: Decision(effect, reason) for name in names.split()}


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides whether a choice of kernels counts."""

    is_quantized: bool
    is_batch_invariant: bool
    """Whether the engine rounds equally in batches of all sizes, so that rounding counts."""

    def counts(self, decision: Decision | None) -> bool:
        """Whether a setting belongs to the keys; `None`: no table names it."""
        if decision is None or decision.effect is Effect.KEY:
            return True
        if decision.effect is Effect.QUANTIZED:
            return self.is_quantized or self.is_batch_invariant
        return decision.effect is Effect.ROUNDING and self.is_batch_invariant


ABSENT = object()
"""The default of a setting without one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of an engine, and its default."""

    name: str
    value: object
    default: object = ABSENT


def counted(
    settings: Iterable[Setting], table: Table, numerics: Numerics, *, prefix: str = ""
) -> dict[str, str]:
    """Return the settings that belong to the keys, as fields of a manifest.

    Settings with their default are left out: the version of the engine is a field, and with it the
    defaults. Raises `NoCanonicalTextError` that names a setting without a stable text.
    """
    fields: dict[str, str] = {}
    for setting in settings:
        decision = table.get(setting.name)
        if not numerics.counts(decision):
            continue
        # What changes rounding only may be an object of the engine's own, such as a compiler pass.
        is_strict = decision is None or decision.effect is Effect.KEY
        name = f"{prefix}{setting.name}"
        try:
            text = canonical_text(setting.value, is_strict=is_strict)
            if setting.default is not ABSENT and text == canonical_text(
                setting.default, is_strict=False
            ):
                continue
            known = shown(setting.value, is_strict=is_strict)
        except NoCanonicalTextError as error:
            raise NoCanonicalTextError(f"the setting {name} belongs to the keys: {error}") from None
        # The value of a setting that no table names may be a credential.
        fields[name] = known if decision else f"digest {text_digest(text)}"
    return fields

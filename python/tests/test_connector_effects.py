"""Settings belong to keys unless a table says no; their text is equal in every process."""

import dataclasses
import enum
import subprocess
import sys
from pathlib import Path

import pytest
from cascadekv.connectors.canonical import NoCanonicalTextError, canonical_text, shown
from cascadekv.connectors.effects import (
    Numerics,
    Setting,
    counted,
    elsewhere,
    in_key,
    no_effect,
    of_quantized,
    rounding,
)
from cascadekv.connectors.model_files import is_for_media, model_files_digest

PLAIN = Numerics(is_quantized=False, is_batch_invariant=False)
QUANTIZED = Numerics(is_quantized=True, is_batch_invariant=False)
EXACT = Numerics(is_quantized=False, is_batch_invariant=True)
TABLE = {
    **in_key("changes it", "precision"),
    **no_effect("a limit", "limit"),
    **rounding("kernels", "tiles"),
    **of_quantized("kernels", "backend"),
    **elsewhere("weights", "path"),
}


class Colour(enum.Enum):
    """A value without a text."""

    RED = object()


@dataclasses.dataclass
class Point:
    """Settings in settings."""

    x: int = 0
    names: frozenset[str] = frozenset()


def names(numerics, **values):
    settings = [Setting(name, value, default=0) for name, value in values.items()]
    return set(counted(settings, TABLE, numerics))


def test_only_settings_without_effect_are_left_out():
    every = dict.fromkeys(("precision", "limit", "tiles", "backend", "path", "unknown"), 1)
    assert names(PLAIN, **every) == {"precision", "unknown"}
    assert names(QUANTIZED, **every) == {"precision", "unknown", "backend"}
    assert names(EXACT, **every) == {"precision", "unknown", "backend", "tiles"}
    # The version of the engine is in the key, and with it the defaults.
    assert names(PLAIN, precision=0, unknown=0) == set()


def test_values_of_unknown_settings_and_mappings_are_not_shown():
    given = [Setting("unknown", "secret"), Setting("precision", {"token": "secret"})]
    fields = counted(given, TABLE, PLAIN, prefix="part.")
    assert set(fields) == {"part.unknown", "part.precision"}
    assert all("secret" not in text for text in fields.values())
    assert counted([Setting("precision", ["0"])], TABLE, PLAIN) == {"precision": '["0"]'}


def test_a_setting_without_a_stable_text_is_refused_by_name():
    for value in (lambda: 1, object(), [print]):
        with pytest.raises(NoCanonicalTextError, match=r"the setting part\.precision"):
            counted([Setting("precision", value)], TABLE, PLAIN, prefix="part.")
    # What changes rounding only is named by its type.
    assert set(counted([Setting("tiles", object())], TABLE, EXACT)) == {"tiles"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (1.5, "1.5"),
        (Colour.RED, '"RED"'),
        ({"b": 1, "a": [True]}, '{"a":[true],"b":1}'),
        ({2: "b", 1: "a"}, '[["1","\\"a\\""],["2","\\"b\\""]]'),
        ({"x", "y", "a"}, '["a","x","y"]'),
        (b"\x01", '"01"'),
        (Path("a/b"), '"a/b"'),
        (Path, '"pathlib.Path"'),
    ],
)
def test_canonical_texts(value, text):
    assert canonical_text(value) == text


def test_objects_are_named_by_their_fields():
    one = canonical_text(Point(1, frozenset(("a", "b"))))
    assert one == canonical_text(Point(1, frozenset(("b", "a"))))
    assert one != canonical_text(Point(2, frozenset(("a", "b"))))
    assert canonical_text(1) != canonical_text("1")
    assert canonical_text({1: 2}) != canonical_text({"1": 2})
    assert len(shown("x" * 1000)) < 60


def test_the_text_is_equal_in_other_processes():
    program = (
        "from cascadekv.connectors.canonical import canonical_text\n"
        "print(canonical_text({'a': {'x', 'y', 'z', 'w'}, 'b': frozenset('abcdef')}))"
    )
    texts = {
        subprocess.run(  # noqa: S603
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


@pytest.fixture
def model(tmp_path):
    files = {
        "config.json": "{}",
        "model.safetensors": "weights",
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "README.md": "text",
        "modeling_mine.py": "code",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def digest(place, *, has_media=False, runs_code=False):
    return model_files_digest(place, has_media=has_media, runs_code=runs_code)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        # Which models a changed file matters to: of text, of images, with code of their own.
        ("processor_config.json", {"text", "media", "code"}),
        ("preprocessor_config.json", {"text", "media", "code"}),
        ("another.json", {"text", "media", "code"}),
        ("tokenizer.json", {"media"}),
        ("tekken.json", {"media"}),
        ("modeling_mine.py", {"code"}),
        ("package/inner.py", {"code"}),
        ("generation_config.json", set()),
        ("chat_template.jinja", set()),
        ("README.md", set()),
        ("model.safetensors", set()),
        (".gitattributes", set()),
    ],
)
def test_files_that_change_kv_change_the_digest(model, name, kinds):
    ways = {"text": {}, "media": {"has_media": True}, "code": {"runs_code": True}}
    before = {kind: digest(model, **way) for kind, way in ways.items()}
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text('{"changed": 1}')
    after = {kind: digest(model, **way) for kind, way in ways.items()}
    assert {kind for kind in ways if before[kind] != after[kind]} == kinds


def test_the_directory_and_the_formatting_do_not_count(model, tmp_path_factory):
    (model / "processor_config.json").write_text('{"a": 1, "b": 2}')
    assert is_for_media(model)
    other = tmp_path_factory.mktemp("other")
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "processor_config.json").write_text('{"b":2,"a":1}')
    assert digest(model, has_media=True, runs_code=True) == digest(
        other, has_media=True, runs_code=True
    )

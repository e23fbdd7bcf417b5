"""Block keys cover everything that changes KV, from the affected block on."""

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
from cascadekv import Manifest, Namespace
from cascadekv.connectors.vllm.keys import KEY_BYTES, RequestKeys, UnkeyableRequest, origin_of
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

BLOCK_TOKENS = 16
BLOCKS = 8
PARTS = ["heads 0-3 of 8", "heads 4-7 of 8"]
FIELDS = {"weights": "sha256:test", "dtype": "torch.float32; kv auto", "layout": "LBHNC"}
SPACE = Namespace(Manifest(FIELDS), b"secret")
TOKENS = [7919 * at % 50_000 for at in range(BLOCKS * BLOCK_TOKENS)]
SCRIPT = """
from cascadekv import Manifest, Namespace
from cascadekv.connectors.vllm.keys import RequestKeys
fields = dict(reversed({fields!r}.items()))
keys = RequestKeys(Namespace(Manifest(fields), b"secret"), {parts!r}, {block_tokens},
                   {{"salt": "s", "adapter": "a"}}, [(20, 30, "picture"), (70, 1, "sound")])
keys.extend({tokens!r})
print("".join(keys.raw(part, 0, keys.blocks).hex() for part in {parts!r}))
"""


def keys_of(tokens=TOKENS, origin=None, features=(), space=SPACE):
    keys = RequestKeys(space, PARTS, BLOCK_TOKENS, origin or {}, features)
    keys.extend(tokens)
    return keys


def names(keys):
    """Return a request's keys, part by part."""
    raw = [keys.raw(part, 0, keys.blocks) for part in PARTS]
    return [[each[at : at + KEY_BYTES] for at in range(0, len(each), KEY_BYTES)] for each in raw]


def differing(one, other):
    """Return the blocks whose keys differ, which must be equal for all parts."""
    differ = [
        [a != b for a, b in zip(*pair, strict=True)]
        for pair in zip(names(one), names(other), strict=True)
    ]
    assert differ[0] == differ[1]
    return [at for at, is_other in enumerate(differ[0]) if is_other]


def from_block(block):
    return list(range(block, BLOCKS))


def request(**changes):
    given = {"sampling_params": SamplingParams(max_tokens=4), "pooling_params": None} | changes
    return Request("request", TOKENS, **given)


def fingerprint(adapter):
    return f"content of {adapter.lora_path}"


def test_keys_of_parts_and_blocks_are_distinct():
    every = list(itertools.chain(*names(keys_of())))
    assert len(every) == len(set(every)) == len(PARTS) * BLOCKS


def test_a_token_changes_the_keys_from_its_block_on():
    for block in range(BLOCKS):
        tokens = list(TOKENS)
        tokens[block * BLOCK_TOKENS + 5] += 1
        assert differing(keys_of(), keys_of(tokens)) == from_block(block)


def test_blocks_that_are_not_full_have_no_key():
    keys = keys_of(TOKENS[: 3 * BLOCK_TOKENS - 1])
    assert keys.blocks == 2
    assert names(keys) == [each[:2] for each in names(keys_of())]


def test_growing_step_by_step_gives_the_keys_of_all_at_once():
    chance = random.Random(4)
    for _ in range(60):
        features = [
            (chance.randrange(len(TOKENS)), chance.randrange(1, 40), f"feature {number}")
            for number in range(chance.randrange(4))
        ]
        grown = RequestKeys(SPACE, PARTS, BLOCK_TOKENS, {"salt": "s"}, features)
        known = 0
        while known < len(TOKENS):
            known = min(len(TOKENS), known + chance.randrange(1, 60))
            assert grown.extend(TOKENS[:known]) == known // BLOCK_TOKENS
            # Extending again, with fewer tokens, has no effect.
            assert grown.extend(TOKENS[: known // 2]) == known // BLOCK_TOKENS
        assert names(grown) == names(keys_of(origin={"salt": "s"}, features=features))


def test_a_cache_salt_changes_every_key():
    salted = keys_of(origin=origin_of(request(cache_salt="a"), fingerprint))
    other = keys_of(origin=origin_of(request(cache_salt="b"), fingerprint))
    assert differing(keys_of(), salted) == differing(salted, other) == from_block(0)


def test_an_adapter_changes_every_key_by_its_content():
    def keys(path, name="adapter", number=1):
        adapter = LoRARequest(name, number, str(path))
        return keys_of(origin=origin_of(request(lora_request=adapter), fingerprint))

    assert differing(keys_of(), keys("one")) == from_block(0)
    assert differing(keys("one"), keys("two")) == from_block(0)
    # The adapter's name and number in an engine do not affect KV.
    assert differing(keys("one"), keys("one", name="other", number=2)) == []


def test_equal_values_of_different_origin_fields_have_different_keys():
    adapter = LoRARequest("same", 1, "/adapters/same")
    by_adapter = origin_of(request(lora_request=adapter), lambda _: "same")
    by_salt = origin_of(request(cache_salt="same"), fingerprint)
    both = origin_of(request(lora_request=adapter, cache_salt="same"), lambda _: "same")
    tricky = origin_of(request(cache_salt='same","adapter":"same'), fingerprint)
    keys = [keys_of(origin=each) for each in (by_adapter, by_salt, both, tricky)]
    for one, other in itertools.combinations(keys, 2):
        assert differing(one, other) == from_block(0)


def test_a_request_with_an_unknown_adapter_has_no_keys():
    adapter = LoRARequest("away", 1, "/adapters/away")
    with pytest.raises(UnkeyableRequest, match="the weights of its adapter away are not known"):
        origin_of(request(lora_request=adapter), lambda _: None)


def test_embeddings_and_pooling_requests_have_no_keys():
    with pytest.raises(UnkeyableRequest, match="embeddings"):
        origin_of(request(prompt_embeds=torch.zeros(len(TOKENS), 4)), fingerprint)
    pooled = request(sampling_params=None, pooling_params=PoolingParams(task="embed"))
    with pytest.raises(UnkeyableRequest, match="pooling"):
        origin_of(pooled, fingerprint)


def test_a_picture_changes_the_keys_from_its_first_block_on():
    plain = keys_of()
    for offset in (0, 15, 16, 40, 47, 48, 127):
        for length in (1, 2, 40):
            pictured = keys_of(features=[(offset, length, "picture")])
            assert differing(plain, pictured) == from_block(offset // BLOCK_TOKENS)
            another = keys_of(features=[(offset, length, "another")])
            assert differing(pictured, another) == from_block(offset // BLOCK_TOKENS)


def test_the_pictures_of_a_block_are_those_that_overlap_it():
    chance = random.Random(9)
    for _ in range(200):
        pictures = sorted(
            (chance.randrange(len(TOKENS)), chance.randrange(1, 60), f"picture {number}")
            for number in range(chance.randrange(6))
        )
        keys = RequestKeys(SPACE, PARTS, BLOCK_TOKENS, {}, pictures)
        for block in range(BLOCKS):
            start = block * BLOCK_TOKENS
            span = range(start, start + BLOCK_TOKENS)
            expected = [
                (offset - start, length, name)
                for offset, length, name in pictures
                if set(span) & set(range(offset, offset + length))
            ]
            assert keys._overlapping(block) == expected  # noqa: SLF001


def test_position_and_order_of_pictures_change_the_keys():
    at = [(40, 4, "a"), (44, 4, "b")]
    swapped = [(40, 4, "b"), (44, 4, "a")]
    moved = [(41, 4, "a"), (45, 3, "b")]
    longer = [(40, 4, "a"), (44, 5, "b")]
    keys = [keys_of(features=each) for each in (at, swapped, moved, longer)]
    for one, other in itertools.combinations(keys, 2):
        assert differing(one, other) == from_block(2)
    assert differing(keys[0], keys_of(features=list(reversed(at)))) == []


def test_a_picture_after_the_last_full_block_changes_no_key():
    assert differing(keys_of(), keys_of(features=[(len(TOKENS), 9, "picture")])) == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_manifest_changes_every_key(name):
    other = Namespace(Manifest(FIELDS | {name: FIELDS[name] + "x"}), b"secret")
    assert differing(keys_of(), keys_of(space=other)) == from_block(0)
    without = {field: value for field, value in FIELDS.items() if field != name}
    fewer = Namespace(Manifest(without), b"secret")
    assert differing(keys_of(), keys_of(space=fewer)) == from_block(0)


def test_a_tenants_secret_changes_every_key():
    other = Namespace(Manifest(FIELDS), b"another secret")
    assert differing(keys_of(), keys_of(space=other)) == from_block(0)


def test_keys_are_equal_in_processes_with_other_hash_seeds():
    script = SCRIPT.format(fields=FIELDS, parts=PARTS, block_tokens=BLOCK_TOKENS, tokens=TOKENS)
    answers = {
        subprocess.run(  # noqa: S603 # our own script
            [sys.executable, "-W", "ignore", "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    }
    features = [(20, 30, "picture"), (70, 1, "sound")]
    here = keys_of(origin={"adapter": "a", "salt": "s"}, features=features)
    assert answers == {"".join(here.raw(part, 0, BLOCKS).hex() for part in PARTS)}


def test_ranges_and_parents():
    keys = keys_of()
    part = PARTS[1]
    whole = names(keys)[1]
    assert list(map(bytes, keys.keys(part, 2, 5))) == whole[2:5]
    assert keys.parent(part, 0) is None
    assert keys.parent(part, 3) == whole[2]

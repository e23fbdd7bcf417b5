"""Keys are stable across processes, machines and versions, and cover their inputs."""

import array
import hashlib
import json
import pickle
from pathlib import Path

import cascadekv
import numpy as np
import pytest
from cascadekv import BlockKey, BlockKeys, Manifest, Namespace, keys

# The Rust tests check the same vectors: keys must be stable across processes and versions.
VECTORS = json.loads((Path(__file__).parents[2] / "testdata" / "key-vectors.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["namespaces"])
def test_namespaces_match_the_vectors(vector):
    space = Namespace(Manifest(vector["manifest"]), bytes.fromhex(vector["secret_hex"]))
    assert space.root.hex() == vector["root"]
    assert space.id.hex() == vector["id"]


@pytest.mark.parametrize("vector", VECTORS["chains"])
def test_chains_match_the_vectors(vector):
    parent = BlockKey.from_hex(vector["parent"])
    chain = cascadekv.chain_keys(
        parent, vector["tokens"], vector["block_tokens"], keep_partial=vector["keep_tail"]
    )
    assert [key.hex() for key in chain] == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS["ids"])
def test_ids_match_the_vectors(vector):
    roots = {
        space.root.hex(): space
        for entry in VECTORS["namespaces"]
        for space in [Namespace(Manifest(entry["manifest"]), bytes.fromhex(entry["secret_hex"]))]
    }
    space = roots[vector["root"]]
    assert space.key_of_id(bytes.fromhex(vector["id_hex"])).hex() == vector["key"]


@pytest.mark.parametrize("vector", VECTORS["texts"])
def test_text_keys_match_the_vectors(vector):
    assert keys.text_key(vector["text"]).hex() == vector["key"]


@pytest.mark.parametrize("vector", VECTORS["digests"])
def test_digests_match_the_vectors(vector):
    data = bytes.fromhex(vector["pattern_hex"]) * vector["repeats"]
    assert keys.digest(data, "blake3").hex() == vector["blake3"]
    assert keys.digest(data, "sha256").hex() == vector["sha256"]


@pytest.mark.parametrize("vector", VECTORS["checksums"])
def test_checksums_match_the_vectors(vector):
    data = bytes.fromhex(vector["pattern_hex"]) * vector["repeats"]
    assert keys.checksum(data) == vector["crc32c"]


def test_tokens_are_accepted_in_any_form(space):
    tokens = [1, 5, 2**32 - 1, 7, 0, 3]
    expected = cascadekv.chain_keys(space, tokens, 2)
    assert len(expected) == 3
    for form in (
        tuple(tokens),
        iter(tokens),
        array.array("I", tokens),
        np.array(tokens, dtype=np.uint32),
        np.array(tokens, dtype=np.int64),
        np.array(tokens, dtype=np.uint64),
    ):
        assert cascadekv.chain_keys(space, form, 2) == expected


def test_an_invalid_token_is_named(space):
    for tokens in ([1, -1], [1, 2**32], np.array([1, -1]), np.array([1, -1], dtype=np.int32)):
        with pytest.raises(ValueError, match=r"tokens\[1\]"):
            cascadekv.chain_keys(space, tokens, 1)
    with pytest.raises(ValueError, match="block_tokens"):
        cascadekv.chain_keys(space, [1], 0)


def test_a_chain_may_be_computed_in_pieces(space):
    tokens = np.arange(1000, dtype=np.uint32)
    whole = cascadekv.chain_keys(space, tokens, 300, keep_partial=True)
    start = cascadekv.chain_keys(space, tokens[:600], 300)
    rest = cascadekv.chain_keys(start[-1], tokens[600:], 300, keep_partial=True)
    assert len(whole) == 4
    assert [*start, *rest] == list(whole)
    assert cascadekv.chain_keys(space, tokens, 300) == whole[:3]


def test_any_change_of_the_manifest_or_the_secret_changes_every_key():
    fields = {"weights": "sha256:9f86", "dtype": "bf16", "tensor_parallel": "0/2"}
    base = Namespace(Manifest(fields), b"tenant")
    others = [
        Namespace(Manifest({**fields, "dtype": "fp8_e4m3"}), b"tenant"),
        Namespace(Manifest({**fields, "tensor_parallel": "1/2"}), b"tenant"),
        Namespace(Manifest({**fields, "weights": "sha256:0000"}), b"tenant"),
        Namespace(Manifest(fields), b"another tenant"),
        Namespace(Manifest(fields)),
    ]
    roots = {bytes(space.root) for space in [base, *others]}
    assert len(roots) == 6
    assert len({bytes(space.key_of_id("prompt")) for space in [base, *others]}) == 6
    assert Namespace(Manifest(dict(reversed(fields.items()))), b"tenant") == base


def test_differences_name_the_field():
    ours, theirs = Manifest({"dtype": "bf16"}), Manifest({"dtype": "fp8_e4m3"})
    assert ours.differences(theirs) == ["dtype: bf16 here, fp8_e4m3 there"]
    assert "weights" in ours.missing()


def test_text_and_bytes_of_an_id_are_the_same_id(space):
    assert space.key_of_id("prompt é") == space.key_of_id("prompt é".encode())


def test_keys_are_values(space):
    key = space.key_of_id("prompt")
    assert BlockKey(bytes(key)) == BlockKey.from_hex(key.hex()) == pickle.loads(pickle.dumps(key))
    assert hash(key) == hash(BlockKey(bytes(key)))
    assert repr(key) == f"BlockKey.from_hex('{key.hex()}')"
    assert sorted([key, space.key_of_id("other")]) == sorted([space.key_of_id("other"), key])
    many = BlockKeys([key, space.key_of_id("other")])
    assert pickle.loads(pickle.dumps(many)) == many == BlockKeys(bytes(many))
    assert many[::-1][0] == many[-1]
    assert BlockKeys(b"") == BlockKeys([])


def test_digests_and_checksums_are_the_standard_ones():
    assert keys.digest(b"abc", "sha256") == hashlib.sha256(b"abc").digest()
    blake3_of_abc = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert keys.digest(b"abc").hex() == blake3_of_abc
    assert keys.checksum(b"123456789") == 0xE3069283
    with pytest.raises(ValueError, match="md5"):
        keys.digest(b"abc", "md5")


def test_weights_are_named_by_their_bytes():
    assert keys.weights_fingerprint(b"ab") == keys.weights_fingerprint(bytearray(b"ab"))
    assert keys.weights_fingerprint(b"ab") != keys.weights_fingerprint(b"a", b"b")

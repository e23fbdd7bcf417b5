"""Errors of public calls name the wrong argument, its value, and valid values."""

import itertools
import re
from datetime import timedelta

import cascadekv
import pytest
from cascadekv import BlockKey, ConfigError, Hints, Manifest, Namespace, PagedMemory, aio, stages

KEY = bytes(32)
INTERNALS = re.compile(
    r"failed to extract|called `|panicked|unwrap|Option<|usize|\bu(8|16|32|64)\b|\bi64\b|PyErr|"
    r"Settings\.|convert to C|interpreted as|NoneType|<class|os error 22"
)
"""Internals of the implementation, which no message may contain."""
SPACE = Namespace(Manifest({"weights": "sha256:test"}))
ENDLESS = 1 << 70

# A call, the start of the expected message, and a part of its advice.
WRONG = [
    (lambda s: s.view(5), "keys: 5 is not", "BlockKey"),
    (lambda s: s.view(None), "keys: None is not", "BlockKey"),
    (lambda s: s.view([5]), "keys[0]: 5 is not a key", "32 bytes"),
    (lambda s: s.view([KEY, b"abc"]), "keys[1]: a key is 32 bytes, got 3", "32"),
    (lambda s: s.view(itertools.repeat(b"abc")), "keys[0]:", "32"),
    (lambda s: s.view(KEY, timeout="soon"), 'timeout: "soon" is not a duration', "5s"),
    (lambda s: s.view(KEY, timeout=-1), "timeout: -1 is not a duration", "5s"),
    (lambda s: s.view(KEY, timeout=float("nan")), "timeout: NaN is not a duration", "5s"),
    (lambda s: s.view(KEY, timeout=1e300), "timeout: ", "36525 days"),
    (lambda s: s.view(KEY, timeout=10**400), "timeout: ", "timedelta"),
    (lambda s: s.view(KEY, timeout=[]), "timeout: <list> is not a duration", "timedelta"),
    (lambda s: s.view(KEY, timeout=True), "timeout: True is not a duration", "5s"),
    (lambda s: s.view(KEY, timeout=timedelta(seconds=-1)), "timeout: -1 is not", "5s"),
    (lambda s: s.put(KEY, [b"x"], ttl="1 hour"), 'ttl: "hour" in "1 hour" is not a unit', "min"),
    (lambda s: s.put(KEY, [b"x"], ttl=object()), "ttl: <object> is not a duration", "5s"),
    (lambda s: s.put(KEY, [b"x"], parent=5), "parent: 5 is not a key", "BlockKey"),
    (lambda s: s.put(KEY, [b"x"], chain="no"), 'chain: "no" is not True or False', "True"),
    (lambda s: s.put(KEY, [b"x"], is_prefix=1), "is_prefix: 1 is not", "False"),
    (lambda s: s.put(KEY, [b"x"], last_is_partial=0), "last_is_partial: 0 is not", "False"),
    (lambda s: s.put(KEY, [b"x"], namespace="a"), 'namespace: "a" is not a Namespace', "None"),
    (lambda s: s.put(KEY, ["x"]), 'blocks[0]: "x" is not a buffer', "bytes"),
    (lambda s: s.put(KEY, 5), "blocks: 5 is not one buffer", "each key"),
    (lambda s: s.put(KEY, itertools.repeat(b"x")), "blocks: 1 keys but more than 1", "keys"),
    (lambda s: s.get(KEY, 5), "buffers: 5 is not one buffer", "each key"),
    (lambda s: s.get(KEY, [b"x"]), "buffers[0] is read-only", "bytearray"),
    (lambda s: s.reserve(-1), "size: -1 is not a size", "512MiB"),
    (lambda s: s.reserve("big"), 'size: "big"', "512MiB"),
    (lambda s: s.reserve(1.5), "size: 1.5 is not a size", "512MiB"),
    (lambda s: s.reserve(ENDLESS), "size: ", "512MiB"),
    (lambda s: s.put_reserved(KEY, 5), "reservations: 5 is not", "list"),
    (lambda s: s.put_reserved(KEY, [5]), "reservations[0]: 5 is not a Reservation", ""),
    (lambda s: s.prepare(KEY, None), "size: None is not a size", "512MiB"),
    (lambda s: s.lookup_prefix(KEY, hints="soon"), 'hints: "soon" is not a Hints', "None"),
    (lambda s: s.lookup_prefix(KEY, at="later"), 'at: "later" is not a duration', "5s"),
    (lambda s: s.lookup_prefix(KEY, partial_tail=None), "partial_tail: None is not", "True"),
    (lambda s: s.hint(KEY, hints=Hints(workload=256)), "workload: 256 is not", "255"),
    (lambda s: s.hint(KEY, hints=Hints(priority="urgent")), 'priority: "urgent"', "normal"),
    (lambda s: s.hint(KEY, hints=Hints(stop=5)), "stop: 5 is not text", "text"),
    (lambda s: s.hint(KEY, hints=Hints(expected_within="x")), "expected_within: ", "5s"),
    (lambda s: s.changes("x"), 'since: "x" is not the bytes', "Changes.next"),
    (lambda s: s.changes(b"x"), "since: a cursor of Changes.next has", "got 1"),
    (lambda s: s.changes(limit=-1), "limit: -1 is not a whole number", "0 up"),
    (lambda s: s.changes(limit=ENDLESS), "limit: ", "whole number"),
    (lambda s: s.register(5), "namespace: 5 is not a Namespace", ""),
    (lambda s: s.view(KEY)["a"], 'index: "a" is not a whole number', "slice"),
    (lambda s: s.view(KEY)[1], "index: 1 of 1 blocks", ""),
    (lambda s: s.view(KEY)[ENDLESS], "index: ", "of 1 blocks"),
    (lambda s: s.view(KEY).error("a"), 'index: "a" is not', "whole number"),
    (lambda s: s.view(KEY).scatter(5, [0]), "memory: 5 is not a PagedMemory", ""),
    (lambda s: s.prepare(KEY, 8).gather(None, [0]), "memory: None is not a PagedMemory", ""),
    (lambda _: PagedMemory(5, 1), "regions: 5 is not an iterable", "page_bytes"),
    (lambda _: PagedMemory([5], 1), "regions[0]: 5 is not a (buffer, offset", "page_bytes"),
    (lambda _: PagedMemory([("x", 0, 1, 1)], 1), 'regions[0][0]: "x" is not', "buffer"),
    (lambda _: PagedMemory([], -1), "pages: -1 is not a whole number", "0 up"),
    (lambda _: PagedMemory([], ENDLESS), "pages: ", "whole number"),
    (lambda _: BlockKey("ab"), 'key: "ab" is not a key', "32 bytes"),
    (lambda _: BlockKey(b"ab"), "key: a key is 32 bytes, got 2", ""),
    (lambda _: BlockKey.from_hex(5), "text: 5 is not text", ""),
    (lambda _: BlockKey.from_hex("zz"), "text: ", "64 hexadecimal digits"),
    (lambda _: cascadekv.BlockKeys(5), "keys: 5 is not", "BlockKey"),
    (lambda _: cascadekv.BlockKeys(KEY)["a"], 'index: "a" is not', "slice"),
    (lambda _: Manifest(5), "fields: 5 is not a mapping", "dtype"),
    (lambda _: Manifest({"layers": 32}), 'fields["layers"]: 32 is not text', 'write "32"'),
    (lambda _: Manifest({5: "a"}), "fields: a name: 5 is not text", ""),
    (lambda _: Manifest({}).differences(5), "other: 5 is not a Manifest", ""),
    (lambda _: Namespace({"a": "b"}), "manifest: <dict> is not a Manifest", ""),
    (lambda _: Namespace(Manifest({}), "text"), "secret: bytes", "None"),
    (lambda _: SPACE.key_of_id(5), "id: 5 is not text or bytes", ""),
    (lambda _: cascadekv.chain_keys(5, [1], 1), "parent: 5 is not a key", "BlockKey"),
    (lambda _: cascadekv.chain_keys(SPACE, 5, 1), "tokens: 5 is not token ids", "iterable"),
    (lambda _: cascadekv.chain_keys(SPACE, ["a"], 1), 'tokens[0]: "a" is not a token id', "int"),
    (lambda _: cascadekv.chain_keys(SPACE, [-1], 1), "tokens[0]: -1 is not a token id", "2**32"),
    (lambda _: cascadekv.chain_keys(SPACE, [1], 0), "block_tokens: 0; it is from 1", ""),
    (lambda _: cascadekv.chain_keys(SPACE, [1], -1), "block_tokens: -1 is not", "0 up"),
    (lambda _: cascadekv.keys.digest(5), "data: 5 is not a buffer", "bytes"),
    (lambda _: cascadekv.keys.digest(b"", "md5"), 'algorithm: "md5" is not "blake3"', "sha256"),
    (lambda _: cascadekv.keys.checksum("x"), 'data: "x" is not a buffer', "bytes"),
    (lambda _: cascadekv.keys.weights_fingerprint(5), "parts: 5 is not a buffer", "bytes"),
    (lambda _: cascadekv.connect("127.0.0.1:9000"), "socket: ", "Unix socket"),
    (lambda _: cascadekv.connect("http://host/x"), "socket: ", "network address"),
    (lambda _: cascadekv.connect(5), "socket: 5 is not a path", "os.PathLike"),
    (lambda _: cascadekv.connect(""), 'socket: "" is not a path', "empty"),
    (lambda _: cascadekv.connect("a\0b"), "socket: ", "NUL"),
    (lambda _: cascadekv.connect("/" + "s" * 200), "socket: a path of 201 bytes", "107"),
    (lambda _: cascadekv.connect("/x", access=5), "access: 5 is not text", ""),
    (lambda _: cascadekv.connect("/x", access="all"), 'access: "all" is not', "read"),
    (lambda _: cascadekv.connect("/x", token=""), "token: it is empty", "None"),
    (lambda _: cascadekv.connect("/x", token=5), "token: 5 is not text or bytes", ""),
    (lambda _: cascadekv.connect("/x", name=5), "name: 5 is not text", ""),
    (lambda _: cascadekv.connect("/x", timeout="x"), 'timeout: "x" is not a duration', "5s"),
    (lambda _: cascadekv.part_of_trace(5).__enter__(), "traceparent: 5 is not text", ""),
    (lambda _: cascadekv.Store(5), "config: 5 is not a StoreConfig", "**settings"),
    (lambda _: cascadekv.Store(stages=[]), "stages: <list> is not a dict", ""),
    (lambda _: cascadekv.Store(stages={5: 5}), "stages: a name: 5 is not text", ""),
    (lambda _: cascadekv.StoreConfig.from_dict([1]), "settings: <list> is not a mapping", ""),
    (lambda _: stages.check_stage(5), "make: 5 is not a function", ""),
    (lambda s: aio.AsyncStore(s, threads=0), "threads: 0 is not a number from 1", "256"),
    (lambda _: aio.AsyncStore("x"), "store: <str> is not a cascadekv.Store", ""),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_an_error_names_the_wrong_argument_and_valid_values(store, case):
    call, start, advice = WRONG[case]
    with pytest.raises((TypeError, ValueError, IndexError, BufferError)) as caught:
        call(store)
    message = str(caught.value)
    assert message.startswith(start), message
    assert advice in message, message
    assert not INTERNALS.search(message), message


def test_errors_never_contain_a_secret():
    for call in (
        lambda: Namespace(Manifest({}), "hunter2"),
        lambda: cascadekv.connect("/x", token=["hunter2"]),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert "hunter2" not in str(caught.value)


def test_an_empty_token_is_a_config_error():
    with pytest.raises(ConfigError, match="token"):
        cascadekv.connect("/x", token=b"")


def test_durations_are_accepted_in_every_form(store, keys_of):
    keys = keys_of(range(1))
    for time in (5, 5.0, "5s", "5000ms", "5", timedelta(seconds=5), None):
        assert store.put(keys, [b"block"], ttl=time, timeout=time)[0].ok
        assert store.view(keys, timeout=time).hits == 1


def test_a_client_connects_to_the_node_in_the_environment(serve, monkeypatch, keys_of):
    node = serve("--dram", "8MiB")
    keys = keys_of(range(1))
    for name, place in (
        ("CASCADE_NODE", str(node.socket)),
        ("CASCADE_NODE", f"unix:{node.socket}"),
        ("CASCADE_SOCKET", str(node.socket)),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("CASCADE_NODE", raising=False)
            patch.setenv(name, place)
            with cascadekv.connect() as client:
                assert client.put(keys, [b"block"])[0].ok
    with cascadekv.connect(f"unix:{node.socket}") as client:
        assert client.contains(keys) == [True]
    monkeypatch.setenv("CASCADE_NODE", "/nonexistent/node.sock")
    with pytest.raises(cascadekv.AwayError, match="nonexistent"):
        cascadekv.connect()

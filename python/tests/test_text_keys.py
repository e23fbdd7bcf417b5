"""A text is a key: one block under an id of the caller's own, embedded and served."""

import asyncio
import subprocess
import sys

import cascadekv
import pytest
from cascadekv import AwayError, ClosedError, ConflictError, PutStatus, Store, aio, keys


def test_a_block_is_put_and_read_by_a_text(store):
    result = store.put("greeting", b"Hello, world!")
    assert (result.status, result.ok) == (PutStatus.STORED, True)
    assert store.get("greeting") == b"Hello, world!"
    assert store.contains("greeting") is True
    assert store.locate("greeting") == ["dram"]
    assert store.delete("greeting") is True
    assert store.get("greeting") is None
    assert store.contains("greeting") is False
    assert store.locate("greeting") == []
    assert store.delete("greeting") is False


def test_the_same_bytes_are_present(store):
    store.put("greeting", b"Hello")
    assert store.put("greeting", [bytearray(b"Hello")]).status is PutStatus.PRESENT


@pytest.mark.parametrize("other", [b"HELLO", b"a longer greeting"])
def test_other_bytes_are_refused_until_the_block_is_deleted(store, other):
    store.put("greeting", b"Hello")
    with pytest.raises(ConflictError, match=r'"greeting" is stored with other bytes.*delete it'):
        store.put("greeting", other)
    assert store.get("greeting") == b"Hello"
    store.delete("greeting")
    store.put("greeting", other)
    assert store.get("greeting") == other


@pytest.mark.parametrize("text", [" ", "größer als ∅", "a\0b", "0" * 64, "x" * 100_000])
def test_any_other_text_is_a_key_of_its_own(store, text):
    store.put(text, b"of the text")
    store.put(text + " ", b"of another")
    assert (store.get(text), store.get(text + " ")) == (b"of the text", b"of another")


def test_empty_and_unencodable_texts_are_refused(store):
    for call in [store.get, store.contains, store.locate, store.delete, keys.text_key]:
        with pytest.raises(ValueError, match="not empty"):
            call("")
        with pytest.raises(ValueError, match="UTF-8"):
            call("\ud800")
    with pytest.raises(ValueError, match="not empty"):
        store.put("", b"Hello")


def test_a_text_key_is_not_the_key_with_these_digits(store, keys_of):
    key = keys_of(range(1))[0]
    store.put(key, [b"of the chain"])
    assert store.get(key.hex()) is None
    store.put(key.hex(), b"of the text")
    assert store.delete(key.hex()) is True
    assert store.contains(key) == [True]


def test_the_block_key_of_a_text_names_the_same_block(store):
    store.put("greeting", b"Hello")
    key = keys.text_key("greeting")
    assert bytes(store.view(key)[0]) == b"Hello"
    assert store.lookup_prefix(key).blocks == 1
    store.put([keys.text_key(text) for text in "ab"], [b"1", b"2"], chain=False)
    assert (store.get("a"), store.get("b")) == (b"1", b"2")


def test_a_text_is_in_no_chain(store, keys_of, space):
    parent = keys_of(range(1))[0]
    for wrong in [{"parent": parent}, {"namespace": space}, {"last_is_partial": True}]:
        with pytest.raises(ValueError, match="text key is in no chain"):
            store.put("greeting", b"Hello", **wrong)
    for call in [store.view, store.lookup_prefix, store.acquire, store.pin, store.prefetch]:
        with pytest.raises(TypeError, match="text is not a key here; make one with cascadekv"):
            call("greeting")
    assert store.get("greeting") is None


def test_buffers_are_for_block_keys_only(store, keys_of):
    with pytest.raises(TypeError, match="leave buffers out"):
        store.get("greeting", bytearray(5))
    with pytest.raises(TypeError, match="a writable buffer for each key"):
        store.get(keys_of(range(1)))
    with pytest.raises(TypeError, match=r'blocks: "Hello" is not bytes; .*\.encode'):
        store.put("greeting", "Hello")


def test_a_block_outlives_the_store_in_files(tmp_path):
    settings = {"dram": "8MiB", "files": tmp_path, "files_capacity": "64MiB"}
    settings["segment_size"] = "8MiB"
    with Store(**settings) as store:
        store.put("greeting", b"Hello")
    with Store(**settings) as store:
        assert store.locate("greeting") == ["files"]
        with pytest.raises(ConflictError):
            store.put("greeting", b"HELLO")
        assert store.get("greeting") == b"Hello"


def test_an_expired_block_makes_room_for_other_bytes(store, eventually):
    store.put("greeting", b"Hello", ttl="1ms")
    eventually(lambda: store.get("greeting") is None)
    store.put("greeting", b"HELLO")
    assert store.get("greeting") == b"HELLO"


def test_the_error_of_a_put_that_failed_is_raised(serve):
    node = serve("--dram", "16MiB")
    with cascadekv.connect(node.socket, timeout="5s") as store:
        node.kill()
        with pytest.raises(AwayError):
            store.put("greeting", b"Hello")
        assert store.get("greeting") is None
    with pytest.raises(ClosedError):
        store.put("greeting", b"Hello")


def test_tenants_do_not_share_text_keys(serve_alice):
    node, token = serve_alice
    with (
        cascadekv.connect(node.socket) as own,
        cascadekv.connect(node.socket, token=token) as alice,
    ):
        own.put("greeting", b"Hello")
        assert alice.get("greeting") is None
        alice.put("greeting", b"Hello, Alice")
        assert own.get("greeting") == b"Hello"


def test_text_keys_are_awaited():
    async def use() -> None:
        async with aio.open_store(dram="16MiB") as store:
            assert (await store.put("greeting", b"Hello")).ok
            assert await store.get("greeting") == b"Hello"
            assert await store.contains("greeting") is True
            assert await store.locate("greeting") == ["dram"]
            with pytest.raises(ConflictError):
                await store.put("greeting", b"HELLO")
            assert await store.delete("greeting") is True

    asyncio.run(use())


def test_the_command_takes_texts(serve):
    node = serve("--dram", "16MiB")

    def cascade(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "cascadekv", *arguments, "--socket", str(node.socket)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        return run.returncode, run.stdout + run.stderr

    with cascadekv.connect(node.socket) as store:
        store.put("greeting", b"Hello, world!")
        assert cascade("get", "--text", "greeting", "--output", "-") == (0, "Hello, world!")
        assert "1 of 1 leading blocks hit" in cascade("explain", "--text", "greeting")[1]
        assert "deleted" in cascade("delete", "--text", "greeting")[1]
        assert store.get("greeting") is None
    assert cascade("get", "--text", "greeting")[0] == 1
    assert cascade("get", "--text", "")[0] == 2
    assert cascade("get")[0] == 2

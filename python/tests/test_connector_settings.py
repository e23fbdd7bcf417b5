"""The parts that connectors share: strict settings, an unavailable node, the failure log."""

import logging
import threading

import pytest
from cascadekv.connectors import settings
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.settings import KEYS, StoreLink, open_store, read_settings
from cascadekv.errors import ConfigError, RefusedError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cascade.drma": "1GiB"}, r"cascade\.drma: no such setting; did you mean cascade\.dram\?"),
        ({"cascade.x": 1}, r"cascade\.x: no such setting; known are cascade\.pipeline"),
        ({"cascade.dram": "lots"}, r"cascade\.dram: .*lots"),
        ({"cascade.dram": 1.5}, r"cascade\.dram: 1\.5 is not a size"),
        ({"cascade.dram": True}, r"cascade\.dram: True is not a size"),
        ({"cascade.files_capacity": None}, r"cascade\.files_capacity: None is not a size"),
        ({"cascade.pipeline": 3}, r"cascade\.pipeline: 3 is not text"),
        ({"cascade.files": ""}, r"cascade\.files: '' is not text"),
        ({"cascade.timeout": 0}, r"cascade\.timeout: 0 is not a number"),
        ({"cascade.timeout": "5"}, r"cascade\.timeout: '5' is not a number"),
        ({"cascade.timeout": True}, r"cascade\.timeout: True is not a number"),
        ({"cascade.timeout": float("nan")}, r"cascade\.timeout: nan is not a number"),
        (
            {"cascade.node": "/run/c.sock"},
            r"cascade\.node: '/run/c\.sock' is not the address.*unix:PATH",
        ),
        ({"cascade.node": "tcp:host:1"}, r"cascade\.node: 'tcp:host:1' is not the address"),
        ({"cascade.node": "unix:"}, r"cascade\.node: 'unix:' is not the address"),
        ({"cascade.node": None}, r"cascade\.node: None is not text"),
        ({"cascade.node": "unix:/a", "cascade.dram": "1GiB"}, r"cascade\.dram: cannot be combined"),
        ({"cascade.token_file": "/a"}, r"cascade\.token_file: requires cascade\.node"),
        (
            {"cascade.node": "unix:/a", "cascade.token_file": "/none"},
            r"/none cannot be read: No su",
        ),
        ({"cascade.node": "unix:/a", "cascade.token_file": "/dev"}, r"cascade\.token_file: /dev "),
    ],
)
def test_an_invalid_setting_is_refused_by_its_key(options, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(options)


def test_the_engines_own_keys_are_ignored():
    address = read_settings({"backend_name": "cascade", "interface_v1": 1})
    assert address.node is None
    assert address.embedded.dram == 256 << 20
    assert address.timeout == settings.TIMEOUT_S


def test_embedded_settings_reach_the_store(tmp_path):
    place = {"cascade.pipeline": "Dram|Files", "cascade.dram": "8MiB"}
    place |= {"cascade.files": str(tmp_path), "cascade.files_capacity": "1GiB"}
    address = read_settings({**place, "cascade.timeout": 2})
    with open_store(address, name="test") as store:
        config = store.config
    assert (config.pipeline, config.dram, config.files) == ("Dram|Files", 8 << 20, str(tmp_path))
    assert (config.files_capacity, config.timeout) == (1 << 30, 2.0)
    assert set(place) | {"cascade.timeout"} <= set(KEYS)


def test_an_invalid_pipeline_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"cascade\.pipeline: .*Tape"):
        open_store(read_settings({"cascade.pipeline": "Dram|Tape"}), name="test")


def test_a_token_file_must_not_be_accessible_to_others(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    options = {"cascade.node": "unix:/a", "cascade.token_file": str(token)}
    token.chmod(0o644)
    with pytest.raises(ConfigError, match="accessible to others"):
        read_settings(options)
    token.chmod(0o640)
    address = read_settings(options)
    assert address.token == b"secret"
    assert "secret" not in repr(address)
    token.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_settings(options)


def test_a_link_connects_to_a_node_that_starts_later(serve, monkeypatch, eventually):
    monkeypatch.setattr(settings, "RETRY_S", 0.05)
    node = serve("--dram", "16MiB")
    node.stop()
    link = StoreLink(read_settings({"cascade.node": f"unix:{node.socket}"}), name="test")
    assert link.store() is None
    assert "AwayError" in repr(link.last_error)
    node.start()
    eventually(lambda: link.store() is not None)
    found = []
    threads = [threading.Thread(target=lambda: found.append(link.store())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [link.store()] * 4
    link.close()
    link.close()
    assert link.store() is None


def test_a_link_connects_in_a_thread_of_its_own(tmp_path, monkeypatch, eventually):
    # Regression: the thread that carries out an engine's steps connected, which takes the whole
    # time-out of a call with a node that accepts and does not answer.
    options = {"cascade.node": f"unix:{tmp_path}/none"}
    link = StoreLink(read_settings(options), name="test", retry_s=0.0)
    held, connecting, closed = threading.Event(), [], []

    class Connected:
        def close(self):
            closed.append(self)

    def late(*_arguments, **_named):
        connecting.append(threading.current_thread())
        assert held.wait(30)
        return Connected()

    monkeypatch.setattr(settings, "connect", late)
    assert [link.store() for _ in range(100)] == [None] * 100
    eventually(lambda: connecting)
    assert len(connecting) == 1
    assert threading.current_thread() not in connecting
    # A link that is closed meanwhile keeps no store.
    link.close()
    held.set()
    eventually(lambda: closed)
    assert link.store() is None


def test_a_link_retries_at_intervals(tmp_path, monkeypatch):
    attempts = []
    connect = settings.connect
    monkeypatch.setattr(settings, "connect", lambda *a, **k: attempts.append(a) or connect(*a, **k))
    link = StoreLink(read_settings({"cascade.node": f"unix:{tmp_path}/none"}), name="test")
    assert [link.store() for _ in range(100)] == [None] * 100
    assert len(attempts) == 1


def test_a_refused_client_is_an_error_at_start(serve, tmp_path):
    node = serve("--dram", "16MiB")
    token = tmp_path / "token"
    token.write_text("wrong")
    token.chmod(0o600)
    options = {"cascade.node": f"unix:{node.socket}", "cascade.token_file": str(token)}
    with pytest.raises(RefusedError):
        StoreLink(read_settings(options), name="test")


def test_failures_are_counted_and_logged_at_a_limited_rate(caplog):
    log = FailureLog(logging.getLogger("cascade-test"), interval_s=3600)
    for n in range(100):
        log.count("reading", f"reason {n}")
    log.count("writing", "another")
    assert log.counts() == {"reading": 100, "writing": 1}
    assert len(caplog.records) == 2
    assert "reason 0" in caplog.text
    caplog.clear()
    log.succeed("loading")
    assert not caplog.records
    log.succeed("writing")
    log.succeed("writing")
    assert caplog.text.count("writing works again (1 failures in total)") == 1
    often = FailureLog(logging.getLogger("cascade-test"), interval_s=0)
    often.count("reading", "one")
    often.count("reading", "two")
    assert "1 times since the last such message, 2 in total" in caplog.text

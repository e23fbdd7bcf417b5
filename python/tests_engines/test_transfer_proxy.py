"""vLLM's example proxy, unchanged, between two `vllm serve` processes with the connector."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from cascadekv.bench.prompts import prompt
from forked_engines import BLOCK, ENVIRONMENT

pytest_plugins = ["forked_engines"]

CACHE = Path(__file__).parents[2] / ".cache"
PROXY = CACHE / "vllm-source" / "toy_proxy_server.py"
TOKENS = 8
START_S = 300
"""Time-out for the start of a server, on a loaded machine."""
LEASE_S = 4
SETTINGS = {
    "kv_connector": "CascadeConnector",
    "kv_connector_module_path": "cascadekv.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "cascade.dram": "64MiB",
        "cascade.load_or_compute": False,
        "cascade.lookup_timeout": 10,
        "cascade.save_timeout": 30,
        "cascade.transfer": "direct",
        "cascade.transfer_lease": LEASE_S,
    },
}


def free_port():
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def get(url):
    """Return the body of a GET; `None` while nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 # of this host
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


def post(url, body):
    """Return the JSON of an answer."""
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, kind)  # noqa: S310 # likewise
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 # likewise
        return json.loads(answer.read())


class Server:
    """A server process."""

    def __init__(self, log, port, *command):
        self.port = port
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(  # noqa: S603 # of this test
                [sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            )

    def wait(self, path):
        """Wait until it answers."""
        end = time.monotonic() + START_S
        while get(f"http://127.0.0.1:{self.port}{path}") is None:
            assert self.process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < end, self._log.read_text()[-4000:]
            time.sleep(0.2)

    def stop(self):
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def blocks_from_peers(server):
    """Return how many blocks an engine has read from prefill engines, by its metrics."""
    lines = get(f"http://127.0.0.1:{server.port}/metrics").splitlines()
    peers = [line for line in lines if "loaded_blocks_total{" in line and 'tier="peers"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in peers)


@pytest.fixture
def servers(tiny_model, tmp_path):
    """Start a prefill and a decode engine, and the proxy in front of them."""
    started = []

    def start(*command):
        port = free_port()
        log = tmp_path / f"{len(started)}.log"
        started.append(Server(log, port, *command, "--port", str(port)))
        return started[-1]

    try:
        engines = [
            start(
                *("-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)),
                *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
                *("--no-enable-prefix-caching", "--max-model-len", "2048"),
                *("--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
                *("--num-gpu-blocks-override", "96", "--served-model-name", "tiny"),
                *("--kv-transfer-config", json.dumps(SETTINGS)),
            )
            for _ in range(2)
        ]
        for engine in engines:
            engine.wait("/health")
        prefill, decode = engines
        proxy = start(
            *(str(PROXY), "--host", "127.0.0.1"),
            *("--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(prefill.port)),
            *("--decoder-hosts", "127.0.0.1", "--decoder-ports", str(decode.port)),
        )
        proxy.wait("/healthcheck")
        yield prefill, decode, proxy
    finally:
        for server in reversed(started):
            server.stop()


@pytest.mark.skipif(
    not PROXY.is_file(),
    reason=f"{PROXY} is missing: make .cache/vllm-source/toy_proxy_server.py fetches it",
)
def test_vllms_example_proxy(servers, reference):
    _, decode, proxy = servers
    blocks = 0
    for length in (BLOCK, 2 * BLOCK + 1, 5 * BLOCK - 1):
        asked = prompt(length, "proxy")
        body = {
            "model": "tiny",
            "prompt": list(asked),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = post(f"http://127.0.0.1:{proxy.port}/v1/completions", body)
        (right,) = reference.answers([asked], TOKENS)
        assert tuple(answer["choices"][0]["token_ids"]) == right
        blocks += -(-length // BLOCK)
        assert blocks_from_peers(decode) == blocks

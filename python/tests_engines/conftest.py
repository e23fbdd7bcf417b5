"""Fixtures: real vLLM engines on the CPU, nodes, and generated models.

These tests need an engine's package and torch (CPU builds). vLLM runs in the test's own process,
both scheduler and worker; several engines may run there one after another.
"""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "tests" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("cascade_test_stores", _FILE)
_STORES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_STORES)

serve = _STORES.serve
eventually = _STORES.eventually
authority = _STORES.authority

MODELS = Path(__file__).parents[2] / ".cache" / "models"
"""Directory of generated models, reused between runs; their names include their parameters."""

# vLLM reads these when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Engines:
    """Starts and stops vLLM engines in this process."""

    def __init__(self, model: Path):
        self.model = model
        self._running = []

    def start(self, transfer: Mapping[str, object] | None = None, **options):
        """Return an `LLM` in float32 without prefix caching; `options` are arguments of `LLM`."""
        from vllm import LLM  # noqa: PLC0415 # slow, and not needed by all tests
        from vllm.config import KVTransferConfig  # noqa: PLC0415 # likewise

        settings = {
            "model": str(self.model),
            # By default, vLLM converts a float32 model to bfloat16.
            "dtype": "float32",
            "seed": 0,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 8,
            "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None,
        }
        llm = LLM(**(settings | options))
        self._running.append(llm)
        return llm

    def stop(self, llm) -> None:
        """Shut an engine down completely, so that another can start in this process."""
        from vllm.distributed.kv_transfer import (  # noqa: PLC0415 # as in start
            ensure_kv_transfer_shutdown,
        )
        from vllm.distributed.parallel_state import (  # noqa: PLC0415 # as in start
            cleanup_dist_env_and_memory,
        )

        self._running = [other for other in self._running if other is not llm]
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        gc.collect()

    def stop_all(self) -> None:
        """Stop all running engines."""
        for llm in list(self._running):
            self.stop(llm)

    @staticmethod
    def answer(llm, prompts: Sequence[Sequence[int]], new: int = 16):
        """Serve prompts of token ids together; returns vLLM's outputs in their order."""
        from vllm import SamplingParams  # noqa: PLC0415 # as in start

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        requests = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        return llm.generate(requests, params, use_tqdm=False)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Generate the smallest model in float32, where equal KV gives equal tokens."""
    from cascadekv.bench.models import make_model  # noqa: PLC0415 # needs torch and transformers

    return make_model(MODELS, "tiny", "float32")


@pytest.fixture
def engines(tiny_model: Path) -> Iterator[Engines]:
    """Return a starter of engines; stops running engines after the test."""
    started = Engines(tiny_model)
    yield started
    started.stop_all()


@pytest.fixture
def transfer_token(tmp_path: Path) -> tuple[bytes, dict[str, str]]:
    """Return a token of prefill and decode engines, and their setting of it.

    Engines with a proxy between them need one. This user's token is for the port of the listener.
    """
    key, path = b"0123456789abcdef", tmp_path / "transfer-token"
    path.write_bytes(key)
    return key, {"cascade.transfer_token_file": str(path)}


@pytest.fixture
def start_engine(engines: Engines) -> Callable:
    """Return a function that starts an engine."""
    return engines.start


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Start nodes for the tests of one module."""
    with _STORES.nodes(tmp_path_factory.mktemp("nodes")) as start:
        yield start

"""A real vLLM on the CPU: the second request loads its KV instead of computing it.

Generates a small model, sends one prompt twice, and compares times and tokens.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    """Send a prompt twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    parser.add_argument("--size", default="22m", help="the model: tiny, 22m or 91m parameters")
    parser.add_argument(
        "--models", type=Path, default=Path(".cache/models"), help="directory of the model"
    )
    parser.add_argument("--node", help="unix:PATH of a node; default: an embedded store")
    arguments = parser.parse_args()

    from cascadekv.bench.models import make_model  # noqa: PLC0415 # vLLM reads the environment
    from vllm import LLM, SamplingParams  # noqa: PLC0415
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    model = make_model(arguments.models, arguments.size, "bfloat16")
    with tempfile.TemporaryDirectory() as files:
        store = {"cascade.dram": "1GiB", "cascade.files": files, "cascade.files_capacity": "2GiB"}
        if arguments.node:
            store = {"cascade.node": arguments.node}
        engine = LLM(
            model=str(model),
            dtype="bfloat16",
            max_model_len=arguments.tokens + 256,
            max_num_batched_tokens=arguments.tokens + 256,
            enforce_eager=True,
            # vLLM's own prefix cache would hit before the connector is queried.
            enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="CascadeConnector",
                kv_connector_module_path="cascadekv.connectors.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=store,
            ),
        )
        prompt = {"prompt_token_ids": [2 + at * 7919 % 1000 for at in range(arguments.tokens)]}
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answers = []
        for turn in ("first", "second"):
            started = time.perf_counter()
            (output,) = engine.generate(prompt, sampling, use_tqdm=False)
            seconds = time.perf_counter() - started
            answers.append(list(output.outputs[0].token_ids))
            cached = output.num_cached_tokens
            print(f"{turn:>6}: {seconds:6.3f} s, {cached} of {arguments.tokens} tokens loaded")
        print("the answers are equal" if answers[0] == answers[1] else "the answers differ")
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

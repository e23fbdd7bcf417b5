"""What runs in an engine's process: the loop that serves a test, and what tests ask for.

Tests name these functions; the engine's process calls them with its engine first.
"""

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What an engine made of one prompt."""

    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed."""


def serve(
    pipe: Connection,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    store: Mapping[str, object] | None,
) -> None:
    """Start an engine and carry out what comes over the pipe, until it ends or says so."""
    os.environ.update(environment)
    try:
        llm = _start(options, store)
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise
    pipe.send((None, None))
    while (order := _next(pipe)) is not None:
        work, arguments = order
        try:
            answer = (None, work(llm, *arguments))
        except BaseException:  # noqa: BLE001 # the test is told
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
    llm.llm_engine.engine_core.shutdown()


def _start(options: Mapping[str, Any], store: Mapping[str, object] | None) -> Any:  # noqa: ANN401
    from vllm import LLM  # noqa: PLC0415
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    given = dict(options)
    if store is not None:
        given["kv_transfer_config"] = KVTransferConfig(
            **{
                "kv_connector": "CascadeConnector",
                "kv_connector_module_path": "cascadekv.connectors.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(store),
                **given.pop("transfer", {}),
            }
        )
    return LLM(**given)


def _next(pipe: Connection) -> Any:  # noqa: ANN401
    try:
        return pipe.recv()
    except EOFError:
        return None


def generate(
    llm: Any,  # noqa: ANN401
    prompts: Sequence[Sequence[int]],
    tokens: int,
    salt: str | None,
) -> list[Answer]:
    """Answer prompts that come at once."""
    from vllm import SamplingParams  # noqa: PLC0415

    given: list[dict[str, object]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    if salt:
        given = [{**each, "cache_salt": salt} for each in given]
    parameters = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(given, parameters, use_tqdm=False)
    return [Answer(tuple(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]


def forget_locally(llm: Any) -> bool:  # noqa: ANN401
    """Empty the engine's own prefix cache; the store keeps what it has."""
    return bool(llm.reset_prefix_cache())


def connectors(llm: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Give the scheduler's and the worker's connector of an engine in one process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

    return scheduler_of(llm).connector, get_kv_transfer_group()


def scheduler_of(llm: Any) -> Any:  # noqa: ANN401
    """Give the scheduler of an engine in one process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def loaded_blocks(llm: Any) -> int:  # noqa: ANN401
    """Say how many blocks the engine asked its workers to load."""
    return int(connectors(llm)[0]._scheduler.tally.planned)  # noqa: SLF001

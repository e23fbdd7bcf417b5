"""Functions that run in an engine's process: the loop that serves a test, and calls of tests.

A test sends one of these functions; the engine process calls it with its engine as first argument.
"""

import dataclasses
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from cascadekv import BlockKeys
from cascadekv.connectors.vllm.layers import LayerwiseLoad

PLAIN = SimpleNamespace(
    prompt_embeds=None, pooling_params=None, lora_request=None, cache_salt=None, mm_features=[]
)
"""A request that has tokens only."""


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one prompt."""

    tokens: tuple[int, ...]
    cached: int
    """Number of prompt tokens that were not computed."""


def serve(
    pipe: Connection,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    store: Mapping[str, object] | None,
) -> None:
    """Start an engine and run the calls from the pipe, until it is closed or sends `None`."""
    os.environ.update(environment)
    try:
        llm = _start(options, store)
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise
    pipe.send((None, None))
    while (call := _next(pipe)) is not None:
        function, arguments = call
        try:
            result = (None, function(llm, *arguments))
        except BaseException:  # noqa: BLE001 # reported to the test
            result = (traceback.format_exc(), None)
        pipe.send(result)
    llm.llm_engine.engine_core.shutdown()


def _start(options: Mapping[str, Any], store: Mapping[str, object] | None) -> Any:
    from vllm import LLM  # noqa: PLC0415
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    given = dict(options)
    if store is not None:
        given["kv_transfer_config"] = KVTransferConfig(
            **{
                "kv_connector": "CascadeConnector",
                "kv_connector_module_path": "cascadekv.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": dict(store),
                **given.pop("transfer", {}),
            }
        )
    llm = LLM(**given)
    if given.get("pipeline_parallel_size", 1) > 1:
        # vLLM allocates what its later stages receive in a dummy run, which it leaves out on CPUs.
        llm.llm_engine.collective_rpc(lambda worker: worker.model_runner.profile_run())
    return llm


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def generate(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    salt: str | None,
    adapter: tuple[str, int, str] | None = None,
) -> list[Answer]:
    """Answer concurrent prompts; an adapter is a name, a number and a directory."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    given: list[dict[str, object]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    if salt:
        given = [{**each, "cache_salt": salt} for each in given]
    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    lora = LoRARequest(*adapter) if adapter else None
    outputs = llm.generate(given, parameters, use_tqdm=False, lora_request=lora)
    return [Answer(tuple(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]


def load_adapter(llm: Any, adapter: tuple[str, int, str]) -> None:
    """Load an adapter, again if it is loaded, as vLLM's endpoint does."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    llm.llm_engine.add_lora(LoRARequest(*adapter, load_inplace=True))


def reload_while_computing(
    llm: Any,
    prompt: Sequence[int],
    adapter: tuple[str, int, str],
    params: Mapping[str, object] | None = None,
) -> Any:
    """Load an adapter again after the first of several steps that compute a prompt.

    Returns the `kv_transfer_params` of the response.
    """
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    extra = {"kv_transfer_params": dict(params)} if params else None
    parameters = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args=extra
    )
    engine, given = llm.llm_engine, {"prompt_token_ids": list(prompt)}
    engine.add_request("computing", given, parameters, lora_request=LoRARequest(*adapter))
    # The first one asks the workers for their adapters, the second one computes.
    for _ in range(2):
        engine.step()
    load_adapter(llm, adapter)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].kv_transfer_params


def answer_with(
    llm: Any,
    prompt: Sequence[int],
    tokens: int,
    params: Mapping[str, object] | None,
    adapter: tuple[str, int, str] | None = None,
) -> tuple[Answer, Any]:
    """Answer a prompt that has `kv_transfer_params`; returns also those of the response."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    extra = {"kv_transfer_params": dict(params)} if params else None
    parameters = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra
    )
    given: dict[str, object] = {"prompt_token_ids": list(prompt)}
    lora = LoRARequest(*adapter) if adapter else None
    (output,) = llm.generate([given], parameters, use_tqdm=False, lora_request=lora)
    answer = Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens)
    return answer, output.kv_transfer_params


def log_probabilities(
    llm: Any, prompt: Sequence[int], params: Mapping[str, object] | None = None
) -> tuple[dict[int, float], int, Any]:
    """Compute the first token of an answer.

    Returns the log probabilities of the likeliest tokens, the prompt's tokens that were not
    computed, and the response's `kv_transfer_params`.
    """
    from vllm import SamplingParams  # noqa: PLC0415

    extra = {"kv_transfer_params": dict(params)} if params else None
    parameters = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        logprobs=20,
        extra_args=extra,
    )
    given: dict[str, object] = {"prompt_token_ids": list(prompt)}
    (output,) = llm.generate([given], parameters, use_tqdm=False)
    likeliest = output.outputs[0].logprobs[0].items()
    found = {token: entry.logprob for token, entry in likeliest}
    return found, output.num_cached_tokens, output.kv_transfer_params


def reads_from_prefill_engines(llm: Any) -> int:
    """Return how many loads were read from prefill engines."""
    _, worker = connectors(llm)
    return int(worker._worker._transfers.reads)  # noqa: SLF001


def pushes(llm: Any) -> tuple[int, int]:
    """Return how many pushes an engine has written completely, and how many it has got."""
    _, worker = connectors(llm)
    written, got = worker._worker._transfers.pushes  # noqa: SLF001
    return int(written), int(got)


def reach_through(llm: Any, address: str) -> None:
    """Let prefill engines reach this one at another address, such as a proxy's."""
    _, worker = connectors(llm)
    own = worker._worker._transfers  # noqa: SLF001
    own._arrivals._listener = lambda: (address, own.id)  # noqa: SLF001


def transfer_address(llm: Any) -> str:
    """Return where the first worker of an engine listens for others."""
    (address, _), *_ = scheduler_of(llm).connector._transfers._workers  # noqa: SLF001
    return str(address)


def moved(llm: Any) -> list[tuple[int, int, int]]:
    """Return for each worker: loads that it has read, pushes that it has written and got."""

    def counts(_worker: Any) -> tuple[int, int, int]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        own = get_kv_transfer_group()._worker._transfers  # noqa: SLF001
        return own.reads, *own.pushes

    return [tuple(each) for each in llm.llm_engine.collective_rpc(counts)]


def taken_blocks(llm: Any, blocks: int) -> int:
    """Step until all KV blocks are free, for at most a minute; return how many are not."""
    _step_until(llm, lambda: free_blocks(llm) == blocks)
    return blocks - free_blocks(llm)


def end_leases(llm: Any) -> None:
    """Let all leases end now, as if their time had passed."""
    _, worker = connectors(llm)
    for lease in worker._worker._transfers._leases._by_request.values():  # noqa: SLF001
        lease.expires = 0.0


def slow_layers(llm: Any, seconds: float) -> None:
    """Delay each layer of the engine, so that a push can be disturbed while it goes on."""
    _, worker = connectors(llm)
    worker._worker.__dict__.pop("layer_computed", None)  # noqa: SLF001
    computed = worker._worker.layer_computed  # noqa: SLF001

    def slow(layer: str, plan: Any) -> None:
        computed(layer, plan)
        time.sleep(seconds)

    if seconds:
        worker._worker.layer_computed = slow  # noqa: SLF001


def abort_while_waiting(llm: Any, prompt: Sequence[int], params: Mapping[str, object]) -> None:
    """Start a request that waits for a push, and abort it once it waits."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    parameters = SamplingParams(
        temperature=0,
        max_tokens=4,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": dict(params)},
    )
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    engine.add_request("aborted", {"prompt_token_ids": list(prompt)}, parameters)
    waits = RequestStatus.WAITING_FOR_REMOTE_KVS
    _step_until(llm, lambda: any(it.status == waits for it in scheduler.requests.values()))
    engine.abort_request(["aborted"])
    for _ in range(3):
        engine.step()


def held(llm: Any, blocks: int) -> tuple[int, int, int, int]:
    """Step until all KV blocks are free, for at most a minute; return what is held then.

    These are blocks, leases, pushes that are waited for, and requests that may be pushed.
    """
    _, worker = connectors(llm)
    own = worker._worker._transfers  # noqa: SLF001

    def counts() -> tuple[int, int, int, int]:
        return (
            blocks - free_blocks(llm),
            len(own._leases.open_leases()),  # noqa: SLF001
            len(own._arrivals._expected),  # noqa: SLF001
            len(own._pushes._prompts),  # noqa: SLF001
        )

    _step_until(llm, lambda: not any(counts()))
    return counts()


def reset_prefix_cache(llm: Any) -> bool:
    """Empty the engine's own prefix cache, not the store."""
    return bool(llm.reset_prefix_cache())


def connectors(llm: Any) -> tuple[Any, Any]:
    """Return the scheduler's and the worker's connector of an engine in one process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

    return scheduler_of(llm).connector, get_kv_transfer_group()


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler of an engine in one process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def loaded_blocks(llm: Any) -> int:
    """Return the number of planned blocks to load since the first call of this function."""
    worker = connectors(llm)[1]._worker  # noqa: SLF001
    if not hasattr(worker, "loads_seen"):
        start_loads, worker.loads_seen = worker.start_loads, 0

        def counting(plan: Any) -> None:
            worker.loads_seen += sum(len(load.blocks[0]) for load in plan.loads)
            start_loads(plan)

        worker.start_loads = counting
    return int(worker.loads_seen)


def keys_of_prompt(llm: Any, prompt: Sequence[int]) -> bytes:
    """Return the keys of a prompt's full blocks, for the engine's only part."""
    ours, _ = connectors(llm)
    (part,) = ours._scheduler._parts  # noqa: SLF001
    keys = ours._keys_of([part.name], PLAIN)  # noqa: SLF001
    return bytes(keys.raw(part.name, 0, keys.extend(list(prompt))))


def present(llm: Any, keys: bytes) -> list[bool]:
    """Return whether the engine's store has each block."""
    ours, _ = connectors(llm)
    is_present: list[bool] = ours._store.store().contains(BlockKeys(keys))  # noqa: SLF001
    return is_present


def slow_loads(llm: Any, block_s: float) -> None:
    """Delay each block of a load by `block_s`, as with a slow device; 0 removes the delay."""
    worker = connectors(llm)[1]._worker  # noqa: SLF001
    worker.__dict__.pop("_load_batch", None)
    load = worker._load_batch  # noqa: SLF001

    def slow(part: Any, batch: list[int]) -> Any:
        time.sleep(block_s * len(batch))
        return load(part, batch)

    if block_s:
        worker._load_batch = slow  # noqa: SLF001


def choose_loads(llm: Any, load: str) -> None:
    """Change the setting `cascade.load`."""
    scheduler = connectors(llm)[0]._scheduler  # noqa: SLF001
    scheduler._settings = dataclasses.replace(scheduler._settings, load=load)  # noqa: SLF001


def after_next_hit(llm: Any, act: Callable[[Any], None]) -> None:
    """Call `act` with the store after the next lookup with hits, before the load."""
    ours, _ = connectors(llm)
    scheduler = ours._scheduler  # noqa: SLF001
    matched = scheduler.matched_tokens

    def then(request: Any, computed: int) -> Any:
        answer = matched(request, computed)
        if answer[0]:
            del scheduler.matched_tokens
            act(ours._store.store())  # noqa: SLF001
        return answer

    scheduler.matched_tokens = then


def delete_after_next_hit(llm: Any, keys: bytes) -> None:
    """Delete blocks between their lookup and their load."""

    def delete(store: Any) -> None:
        assert all(store.delete(BlockKeys(keys)))

    after_next_hit(llm, delete)


def kill_after_next_hit(llm: Any, process: int) -> None:
    """Kill the node's process between lookup and load."""

    def kill(_store: object) -> None:
        os.kill(process, signal.SIGKILL)

    after_next_hit(llm, kill)


def break_next(llm: Any, side: str, method: str) -> None:
    """Make the next call of a method of the connector raise an unexpected exception."""
    scheduler, worker = connectors(llm)
    memory = next(iter(worker._worker._parts.values()))[1]  # noqa: SLF001
    owner = {
        "scheduler": scheduler._scheduler,  # noqa: SLF001
        "worker": worker._worker,  # noqa: SLF001
        "memory": memory,
        "layers": LayerwiseLoad,
    }[side]
    whole = getattr(owner, method)

    def broken(*_arguments: object, **_named: object) -> None:
        if owner is LayerwiseLoad:
            setattr(owner, method, whole)
        else:
            delattr(owner, method)
        raise ZeroDivisionError("raised by a test")

    setattr(owner, method, broken)


def free_blocks(llm: Any) -> int:
    """Return the number of free KV blocks."""
    return int(scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def count(llm: Any, name: str) -> float:
    """Return a counter of the engine's own metrics."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def abort_while_loading(llm: Any, prompts: Sequence[Sequence[int]]) -> int:
    """Start requests with asynchronous loads, and abort them before the loads end.

    Returns how many requests were waiting for their blocks.
    """
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    worker = connectors(llm)[1]._worker  # noqa: SLF001
    load, gate = worker._load, threading.Event()  # noqa: SLF001

    def late(*arguments: Any) -> Any:
        gate.wait(60)
        return load(*arguments)

    worker._load = late  # noqa: SLF001
    engine = llm.llm_engine
    names = [f"abort-{number}" for number in range(len(prompts))]
    parameters = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
    requests = scheduler_of(llm).requests.values()

    def count() -> int:
        return sum(each.status == RequestStatus.WAITING_FOR_REMOTE_KVS for each in requests)

    _step_until(llm, lambda: count() == len(prompts))
    waiting = count()
    engine.abort_request(names)
    for _ in range(3):
        engine.step()
    gate.set()
    del worker._load  # noqa: SLF001
    return waiting


def reset_all_caches(llm: Any) -> bool:
    """Reset the caches of the engine and the connector, as after a change of weights."""
    return bool(llm.reset_prefix_cache(reset_connector=True))


def update_weights(llm: Any, factor: float) -> int:
    """Change the weights in memory, then reset all caches; returns the number of calls for that.

    Each call but the last ends leases, and a step frees their pages.
    """

    def scale(worker: Any) -> None:
        import torch  # noqa: PLC0415 # only engines have it

        with torch.no_grad():
            for layer in worker.model_runner.get_model().model.layers:
                layer.input_layernorm.weight.mul_(factor)

    llm.llm_engine.collective_rpc(scale)
    calls, end = 1, time.monotonic() + 60
    while not reset_all_caches(llm) and time.monotonic() < end:
        calls += 1
        llm.llm_engine.step()
    return calls


def _step_until(llm: Any, is_reached: Callable[[], bool]) -> None:
    """Step until a condition holds; a lookup in a node takes several steps."""
    end = time.monotonic() + 60
    while not is_reached() and time.monotonic() < end:
        llm.llm_engine.step()


def reset_during_request(
    llm: Any,
    prompt: Sequence[int],
    tokens: int,
    is_preempted: bool,  # noqa: FBT001
) -> None:
    """Reset all caches while a request is running."""
    from vllm import SamplingParams  # noqa: PLC0415

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("middle", {"prompt_token_ids": list(prompt)}, parameters)
    requests = scheduler_of(llm).requests.values()
    _step_until(llm, lambda: all(each.num_computed_tokens > len(prompt) for each in requests))
    llm.reset_prefix_cache(reset_running_requests=is_preempted, reset_connector=True)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def hold_next_layers(llm: Any, seconds: float) -> None:  # noqa: ARG001
    """Delay the layers of the next layerwise load by that many seconds."""
    scatter = LayerwiseLoad._scatter  # noqa: SLF001

    def late(self: Any, views: Any) -> Any:
        LayerwiseLoad._scatter = scatter  # noqa: SLF001
        time.sleep(seconds)
        return scatter(self, views)

    LayerwiseLoad._scatter = late  # noqa: SLF001


def delete_last_blocks_of_parts(llm: Any, prompt: Sequence[int], number: int) -> None:
    """Delete the last block of some parts between the next lookup and its load."""
    ours, _ = connectors(llm)
    names = [part.name for part in ours._scheduler._parts]  # noqa: SLF001
    keys = ours._keys_of(names, PLAIN)  # noqa: SLF001
    last = keys.extend(list(prompt))
    deleted = [keys.raw(name, last - 1, last) for name in names][number % len(names) :]

    def delete(store: Any) -> None:
        assert all(store.delete(BlockKeys(b"".join(deleted))))

    after_next_hit(llm, delete)

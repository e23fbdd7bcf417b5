"""Sets up transfers between engines from the settings, and answers requests that ask for one."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cascadekv import CascadeError
from cascadekv.connectors.failures import FailureLog
from cascadekv.connectors.vllm.adapters import ReportedAdapters
from cascadekv.connectors.vllm.groups import CacheGroup, windows_of
from cascadekv.connectors.vllm.keys import UnkeyableRequest, features_of, origin_of
from cascadekv.connectors.vllm.layout import HeldPart
from cascadekv.connectors.vllm.listen_address import ListenAddress
from cascadekv.connectors.vllm.metadata import WorkerFacts
from cascadekv.connectors.vllm.offers import params_without_pages, prompt_digest, wants_decode
from cascadekv.connectors.vllm.pinned_pages import PinnedPages
from cascadekv.connectors.vllm.settings import ConnectorSettings
from cascadekv.connectors.vllm.transfer_geometry import Geometry, GeometryError, Ranks
from cascadekv.connectors.vllm.transfer_requests import TransferRequests
from cascadekv.connectors.vllm.transfers import Transfers
from cascadekv.transfer import Rdma

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["NoTransfersError", "offered", "open_transfers", "transfers_between"]

_LOG = logging.getLogger("vllm.cascade")


class NoTransfersError(CascadeError):
    """`cascade.transfer: direct` cannot work, with the reason.

    The engine must not start: half of a service without transfers is worse.
    """


def open_transfers(
    config: "VllmConfig",
    settings: ConnectorSettings,
    held: tuple[Sequence[HeldPart], Mapping[str, str], "KVCacheConfig"],
    memory: "torch.Tensor",
    pieces: int,
) -> Transfers | None:
    """Let other engines read and write a worker's pages, if the settings say so.

    `held` are its parts, the manifest and the engine's cache; `pieces` is the number of the
    attention backend's blocks in one block of the engine. Raises `ConfigError`.
    """
    if settings.transfer != "direct":
        return None
    if memory.device.type != "cpu":
        _LOG.warning(
            "Cascade: cascade.transfer: direct is ignored, because the KV is in device memory; "
            "use cascade.transfer: node"
        )
        return None
    parallel, (parts, manifest, cache) = config.parallel_config, held
    # Replicas of a data-parallel engine are engines of their own at other ports.
    worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
    try:
        listen = ListenAddress.parse(settings.transfer_listen).of_worker(worker)
        geometry = Geometry.of(
            parts,
            manifest,
            rank=parallel.rank,
            workers=parallel.world_size,
            block_tokens=config.cache_config.block_size * parallel.decode_context_parallel_size,
            pieces=pieces,
            interleave=parallel.cp_kv_cache_interleave_size,
            ranks=_ranks_of(config),
            windows=windows_of(cache),
        )
        use = settings.transfer_rdma
        return Transfers(
            memory,
            geometry,
            listen=listen,
            advertise=settings.transfer_advertise,
            token=settings.read_transfer_token(),
            tls=settings.transfer_tls(),
            rdma=None if use == "off" else Rdma(use="require" if use == "require" else "prefer"),
        )
    except (CascadeError, GeometryError, OSError, ValueError) as error:
        raise NoTransfersError(
            f"cascade.transfer: direct, worker {worker} of {settings.transfer_listen}: {error}"
        ) from error


def transfers_between(
    engine: tuple["VllmConfig", Callable[[], str]],
    settings: ConnectorSettings,
    facts: Sequence[WorkerFacts],
    held: tuple[Sequence[CacheGroup], int, PinnedPages, ReportedAdapters],
    failures: FailureLog,
) -> TransferRequests | None:
    """Return the scheduler's side, if all workers let decode engines read their pages.

    `engine` is its configuration, and what returns the generation of its keys; `facts` are those of
    its workers in their order; `held` are its KV cache groups, the tokens of a block, what pins
    pages, and the adapters that the workers have loaded.
    """
    (config, generation), (groups, block_tokens, pins, adapters) = engine, held
    transfer, ranks = config.kv_transfer_config, _ranks_of(config)
    listeners = [each.listener for each in facts if each.listener is not None]
    if transfer is None or len(listeners) < len(facts):
        return None
    return TransferRequests(
        str(transfer.engine_id),
        listeners,
        groups,
        pins,
        block_tokens=block_tokens,
        seal_key=settings.seal_key(),
        lease_s=settings.transfer_lease,
        sizes={"tp_size": ranks.tensor, "pp_size": ranks.pipeline, "dcp_size": ranks.context},
        digest_of=functools.partial(_digest_of, adapters, failures, generation),
        adapter_of=lambda request: adapters.use(request.lora_request, 0),
    )


def offered(
    transfers: TransferRequests | None,
    request: "Request",
    pages: Sequence[Sequence[int]],
    *,
    settings: tuple[str, str],
    failures: FailureLog,
) -> tuple[bool, dict[str, Any] | None]:
    """Return whether a finished request's pages must be kept, and its `kv_transfer_params`.

    `settings` are the engine's ID and `cascade.transfer`.
    """
    if transfers is not None:
        finished = transfers.finish(request, pages)
        if finished.params is not None:
            return finished.is_kept, finished.params
    if not wants_decode(request.kv_transfer_params):
        return False, None
    engine, way = settings
    if way == "off":
        reason = "cascade.transfer is off: the decode engine computes the prompt again"
        failures.count("offering the pages of a request", reason)
    way = "node" if way == "node" else "none"
    return False, params_without_pages(engine, request.request_id, way=way)


def _ranks_of(config: "VllmConfig") -> Ranks:
    parallel = config.parallel_config
    return Ranks(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.decode_context_parallel_size,
    )


def _digest_of(
    adapters: ReportedAdapters,
    failures: FailureLog,
    generation: Callable[[], str],
    request: "Request",
) -> str | None:
    """Return a digest of a prompt and of all that its KV depends on; `None` without one."""
    try:
        origin = origin_of(request, adapters.fingerprint)
    except UnkeyableRequest as reason:
        failures.count("offering the pages of a request", reason)
        return None
    tokens = request.all_token_ids[: request.num_prompt_tokens]
    return prompt_digest(tokens, origin, features_of(request), generation())

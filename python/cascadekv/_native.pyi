"""The native module; import from `cascadekv` and its modules."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Literal, Self, SupportsIndex, TypeAlias, Unpack, final, overload

from typing_extensions import Buffer, CapsuleType

from cascadekv.config import StoreConfig, StoreSettings
from cascadekv.errors import CascadeError
from cascadekv.hints import Hints
from cascadekv.results import ChangeKind, DeclineReason, GetStatus, PutStatus
from cascadekv.stages import Stage
from cascadekv.stats import Stats

__all__ = [
    "BlockKey",
    "BlockKeys",
    "Changes",
    "GetResult",
    "Manifest",
    "Namespace",
    "PagedMemory",
    "PrefixMatch",
    "PreparedPut",
    "PutResult",
    "Reservation",
    "StageCall",
    "StageCalls",
    "Store",
    "View",
    "Views",
    "__version__",
    "chain_keys",
    "check_config",
    "check_stage",
    "checksum",
    "connect",
    "default_socket",
    "digest",
    "replace_trace",
    "run_command",
    "weights_fingerprint",
]

__version__: str

_Key: TypeAlias = BlockKey | bytes
_Keys: TypeAlias = BlockKeys | BlockKey | Buffer | Iterable[BlockKey | bytes]
_Duration: TypeAlias = float | str | timedelta
_Size: TypeAlias = int | str

@final
class BlockKey:
    """Names a block by what it stands for: all tokens up to its end, in one namespace. 32 bytes."""

    def __new__(cls, key: bytes, /) -> Self: ...
    @staticmethod
    def from_hex(text: str, /) -> BlockKey:
        """Give the key that 64 hexadecimal digits stand for."""
    def hex(self) -> str:
        """Give the key as 64 hexadecimal digits."""
    def __bytes__(self) -> bytes: ...
    def __getnewargs__(self) -> tuple[bytes]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __lt__(self, other: BlockKey, /) -> bool: ...
    def __le__(self, other: BlockKey, /) -> bool: ...
    def __gt__(self, other: BlockKey, /) -> bool: ...
    def __ge__(self, other: BlockKey, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class BlockKeys:
    """Keys of consecutive blocks as one object; a sequence of `BlockKey`."""

    def __new__(cls, keys: _Keys, /) -> Self: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: SupportsIndex, /) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice, /) -> BlockKeys: ...
    def __iter__(self) -> Iterator[BlockKey]: ...
    def __bytes__(self) -> bytes: ...
    def __getnewargs__(self) -> tuple[bytes]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Manifest:
    """All that must match for one engine's KV to be right in another, as names and values.

    Weights are named by a fingerprint, never by a path.
    """

    def __new__(cls, fields: Mapping[str, str], /) -> Self: ...
    @property
    def fields(self) -> dict[str, str]:
        """The fields in the order in which they are hashed."""
    def missing(self) -> list[str]:
        """Name the required fields that are not stated."""
    def differences(self, other: Manifest, /) -> list[str]:
        """Say in which fields the two differ; none when blocks may be reused."""
    def canonical_bytes(self) -> bytes:
        """Give the bytes that are hashed."""
    def __getnewargs__(self) -> tuple[dict[str, str]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Namespace:
    """One set of blocks that may be reused for each other: a manifest under a tenant's secret.

    Without a secret all tenants of a store share their blocks.
    """

    def __new__(cls, manifest: Manifest, secret: bytes | None = None) -> Self: ...
    @property
    def root(self) -> BlockKey:
        """The key that every chain starts from. As secret as the tenant's secret."""
    @property
    def id(self) -> bytes:
        """Sixteen bytes that name the namespace in stored records and reveal no secret."""
    @property
    def manifest(self) -> Manifest:
        """The manifest that it was made from."""
    def key_of_id(self, id: str | bytes, /) -> BlockKey:  # noqa: A002
        """Give the key for an id of the caller's; text counts as UTF-8."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class PutResult:
    """What became of one block of a put."""

    @property
    def status(self) -> PutStatus:
        """What became of it."""
    @property
    def ok(self) -> bool:
        """Whether the store has the block now: stored, deduplicated or present."""
    @property
    def reason(self) -> DeclineReason | None:
        """Why the block was declined."""
    @property
    def error(self) -> CascadeError | None:
        """The failure, when there was one."""

@final
class GetResult:
    """What became of one block of a copying get."""

    @property
    def status(self) -> GetStatus:
        """What became of it."""
    @property
    def ok(self) -> bool:
        """Whether the block's bytes are in the buffer."""
    @property
    def bytes(self) -> int:
        """Bytes written to the start of the buffer."""
    @property
    def needed_bytes(self) -> int | None:
        """Bytes that the block needs, when the buffer was too short."""
    @property
    def tier(self) -> str | None:
        """The tier where the block was found."""
    @property
    def error(self) -> CascadeError | None:
        """The failure, when there was one."""

@final
class PrefixMatch:
    """How much of a chain is here."""

    @property
    def blocks(self) -> int:
        """Leading blocks that are available."""
    @property
    def tiers(self) -> list[str]:
        """The fastest tier of each of them."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Changes:
    """What a store tells a follower at a time: an iterable of kinds and keys."""

    @property
    def next(self) -> bytes:
        """What to pass as `since` the next time."""
    @property
    def is_lost(self) -> bool:
        """Whether the set begins anew: empty it before these changes are applied."""
    @property
    def is_current(self) -> bool:
        """Whether the set is exact with these changes. Otherwise ask again at once."""
    @property
    def kinds(self) -> bytes:
        """The `ChangeKind` of each change, one byte each."""
    @property
    def keys(self) -> BlockKeys:
        """The key of each change; zeros for `ChangeKind.CLEARED`."""
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[ChangeKind, BlockKey | None]]: ...

@final
class View:
    """A block in the pool, read in place; the block stays until the last user drops this.

    A read-only buffer (`memoryview(view)`, `numpy.frombuffer(view, dtype)`) and a DLPack exporter.
    """

    @property
    def tier(self) -> str:
        """The tier where the block was found."""
    @property
    def address(self) -> int:
        """Where the block starts in this process's memory."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Views:
    """The views of one batch, in the order of its keys: a sequence of `View` or `None`.

    All blocks stay in the pool until this object goes or `release` is called; a `View` taken from
    it keeps its own block for as long as it lives.
    """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> View | None: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[View | None]: ...
    def __iter__(self) -> Iterator[View | None]: ...
    @property
    def hits(self) -> int:
        """Blocks that were found."""
    def error(self, index: int, /) -> CascadeError | None:
        """Say why the block failed; `None` for a hit and for a plain miss."""
    def scatter(
        self,
        memory: PagedMemory,
        pages: Buffer | Iterable[int],
        *,
        first: int = 0,
        count: int | None = None,
    ) -> list[bool]:
        """Copy view i to page `pages[i]`: `count` regions from `first` on, all by default.

        Says whether each block was copied. It is not, in no byte, where the view is a miss or the
        block has another length than the memory's blocks. Threads may scatter at once to different
        pages; a page twice in one call is refused.
        """
    def release(self) -> None:
        """Let go of every block now; the sequence is empty afterwards."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Reservation:
    """Memory of the pool to write a block into, before it has a key: a writable buffer.

    Goes back to the pool unless `Store.put_reserved` takes it.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def release(self) -> None:
        """Give the memory back to the pool unused."""

@final
class PagedMemory:
    """An engine's KV cache as the store sees it: `regions` of equally many `pages`.

    A region is a `(buffer, offset, stride, page_bytes)`: its page i is `page_bytes` bytes at
    `offset + i * stride` of a C-contiguous, writable buffer. Block i is page i of each region, one
    after the other in the given order. No two pages may share a byte. The buffers stay exported,
    hence where they are, as long as this object lives.

    While a call copies to or from a page, nobody else may write it, nor read one that is written:
    this is the engine's to keep, as for any memory that it hands to another thread.
    """

    def __new__(cls, regions: Iterable[tuple[Buffer, int, int, int]], pages: int) -> Self: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page of each region."""
    @property
    def pages(self) -> int:
        """Pages of each region."""
    @property
    def regions(self) -> int:
        """How many regions there are."""

@final
class PreparedPut:
    """Blocks that the store has memory for, from `Store.prepare`: gather their bytes, then seal.

    What is not sealed goes back to the store with `release`, or with this object. A context
    manager. Calls from several threads take turns.
    """

    @property
    def needed(self) -> list[int]:
        """Positions of the keys whose bytes the store wants."""
    def gather(
        self,
        memory: PagedMemory,
        pages: Buffer | Iterable[int],
        *,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Copy page `pages[i]` into block i, for every block that is needed.

        `pages` names a page for each key. `count` regions from `first` on are copied, all by
        default: a connector may save layer by layer.
        """
    def seal(self, *, timeout: _Duration | None = None) -> list[PutResult]:
        """Store the blocks; gives a result for each key, needed or not.

        Raises `ValueError`, and changes nothing, while bytes of the needed blocks are missing.
        """
    def release(self) -> None:
        """Give everything back that was not sealed. May be repeated."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Store:
    """A block store: tiers of memory and files behind one set of calls.

    Settings are those of `StoreConfig`, given as keywords or as one configuration; `stages` are
    objects that stand in the pipeline under their names (`cascadekv.stages`). Calls take batches,
    answer for each block in order, and are safe from any thread. A context manager.
    """

    def __new__(
        cls,
        config: StoreConfig | None = None,
        *,
        stages: Mapping[str, Stage] | None = None,
        **settings: Unpack[StoreSettings],
    ) -> Self:
        """Open a store; raises `ConfigError` for what makes no sense."""
    @property
    def config(self) -> StoreConfig | None:
        """The settings that an embedded store runs with; `None` for a served one."""
    def put(
        self,
        keys: _Keys,
        blocks: Buffer | Iterable[Buffer],
        *,
        parent: _Key | None = None,
        chain: bool = True,
        is_prefix: bool = False,
        last_is_partial: bool = False,
        ttl: _Duration | None = None,
        namespace: Namespace | None = None,
        timeout: _Duration | None = None,
    ) -> list[PutResult]:
        """Store blocks.

        `blocks` is a buffer for each key, or one buffer that holds them all in equal pieces; do not
        change them until the call returns. The keys of one call are consecutive blocks of one chain
        that begins below `parent`, unless `chain` is false. `ttl` and `timeout` are durations:
        seconds, text such as `"5s"`, or a `timedelta`.
        """
    def reserve(self, size: _Size, *, timeout: _Duration | None = None) -> Reservation:
        """Give memory of the pool for a block of that many bytes: write in place, then put."""
    def put_reserved(
        self,
        keys: _Keys,
        reservations: Sequence[Reservation],
        *,
        parent: _Key | None = None,
        chain: bool = True,
        is_prefix: bool = False,
        last_is_partial: bool = False,
        ttl: _Duration | None = None,
        namespace: Namespace | None = None,
        timeout: _Duration | None = None,
    ) -> list[PutResult]:
        """Store blocks that were written in place, without a copy. Keywords as for `put`.

        Every array and memoryview on the reservations must be released before.
        """
    def prepare(
        self,
        keys: _Keys,
        size: _Size,
        *,
        parent: _Key | None = None,
        chain: bool = True,
        is_prefix: bool = False,
        last_is_partial: bool = False,
        ttl: _Duration | None = None,
        namespace: Namespace | None = None,
        timeout: _Duration | None = None,
    ) -> PreparedPut:
        """Ask which of some blocks of `size` bytes the store wants, and take memory for them.

        Keywords as for `put`. A key that is there with as many bytes is present, whatever they are.
        """
    def get(
        self, keys: _Keys, buffers: Buffer | Iterable[Buffer], *, timeout: _Duration | None = None
    ) -> list[GetResult]:
        """Copy blocks into buffers.

        `buffers` is a writable buffer for each key, or one that has room for all in equal pieces.
        A block that does not fit is not copied; its result says how much it needs.
        """
    def view(self, keys: _Keys, *, timeout: _Duration | None = None) -> Views:
        """Give views on blocks in the pool, without a copy; `None` for a miss."""
    def lookup_prefix(
        self,
        keys: _Keys,
        *,
        partial_tail: bool = False,
        hints: Hints | None = None,
        at: _Duration | None = None,
    ) -> PrefixMatch:
        """Say how many leading blocks of a chain are available, and where.

        This is how the eviction policy learns of requests: ask with the whole chain, then read what
        matched and put the rest. `at` is the time of the request in seconds, on a scale of the
        caller's that never goes back; the store's clock otherwise.
        """
    def acquire(
        self,
        keys: _Keys,
        *,
        partial_tail: bool = False,
        hints: Hints | None = None,
        at: _Duration | None = None,
        timeout: _Duration | None = None,
    ) -> Views:
        """Look a chain up and view the leading blocks that are available, in one call."""
    def hint(self, keys: _Keys, *, hints: Hints, at: _Duration | None = None) -> None:
        """Say what the caller knows about a chain, without asking for it. Counts as no use.

        `at` as for `lookup_prefix`.
        """
    def contains(self, keys: _Keys) -> list[bool]:
        """Say whether each block is in any tier. Counts as no use."""
    def locate(self, keys: _Keys) -> list[list[str]]:
        """Name the tiers that have each block, fast to slow."""
    def pin(self, keys: _Keys) -> list[bool]:
        """Keep blocks in memory until `unpin`, counted. True for those that are here."""
    def unpin(self, keys: _Keys) -> list[bool]:
        """Take one pin from each block. True for those that had one."""
    def delete(self, keys: _Keys) -> list[bool]:
        """Forget blocks in every tier. True for those that were here. Views on them stay right."""
    def prefetch(self, keys: _Keys) -> int:
        """Ask for blocks to be brought to memory in the background; says how many were accepted."""
    def register(self, namespace: Namespace, *, timeout: _Duration | None = None) -> None:
        """Keep a namespace's manifest with the data.

        `cascade explain` can then name the field in which two namespaces differ.
        """
    def flush(self, *, timeout: _Duration | None = None) -> None:
        """Wait until every tier has what was put, and would have it after a restart.

        Raises `TierError` if a tier did not take some of it since this store's, or this client's,
        last flush.
        """
    def clear(self) -> None:
        """Forget every block in every tier."""
    def changes(self, since: bytes | None = None, *, limit: int = 65_536) -> Changes:
        """Say what came and went since the answer that gave `since`; without it, what is here now.

        A set of keys to which each answer is applied (emptied first, if it `is_lost`) is exactly
        that of the store's blocks whenever an answer `is_current`. At most `limit` changes are
        told; a served store tells 65,536 at most.
        """
    def stats(self) -> Stats:
        """Say what the store holds and did. Also after `close`."""
    def close(self) -> None:
        """Write down what waits, stop the store's threads and close its files. May be repeated.

        Raises `DeadlineError` when not all could be written in time; the store is closed anyway.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    token: str | bytes | None = None,
    access: str = "write",
    name: str | None = None,
    timeout: _Duration | None = 5.0,
) -> Store:
    """Connect to the node of this host.

    Returns a `Store`, as an embedded one is. `socket` is the path of the node's Unix socket, or
    `unix:PATH`; without it the one that `CASCADE_NODE` names, else the one that `cascade serve`
    chooses for this user. Raises `AwayError` when no node answers there and `RefusedError` when it
    does not want this client. Once connected, calls are answered at once while the node is away:
    reads by misses, puts by `failed`; the connection comes back by itself. `access` is "write" or
    "read"; `token` proves a tenant; `timeout` is what a call may take unless it says otherwise.
    """

def default_socket() -> str:
    """Say where a client looks for a node that nobody named."""

def chain_keys(
    parent: Namespace | _Key,
    tokens: Buffer | Iterable[int],
    block_tokens: int,
    *,
    keep_partial: bool = False,
) -> BlockKeys:
    """Give the keys of consecutive blocks of `block_tokens` tokens below `parent`.

    `parent` is a `Namespace`, or the key of the block before the first token. Tokens that do not
    fill the last block get no key unless `keep_partial` is true.
    """

def digest(data: Buffer, algorithm: Literal["blake3", "sha256"] = "blake3") -> bytes:
    """Give the 32-byte digest of some bytes."""

def checksum(data: Buffer, /) -> int:
    """Give the CRC-32C of some bytes: what guards every byte that leaves DRAM."""

def weights_fingerprint(*parts: Buffer) -> str:
    """Name weights by the bytes of their files, or of their headers and index, in a fixed order."""

def check_config(config: object, /) -> dict[str, object]:
    """Check a `StoreConfig`; give the settings that are written in several ways in one.

    Raises `ConfigError` when a setting makes no sense, by its name.
    """

def replace_trace(traceparent: str | None, /) -> str | None:
    """Have this thread's calls of nodes be part of that trace; give what was before.

    What is no `traceparent` header, and `None`, is nobody's trace.
    """

def run_command(arguments: Sequence[str], /) -> int:
    """Run the command `cascade` with these arguments, the program's name first."""

@final
class StageCalls:
    """The calls to one stage, for the threads that make them."""

    def next(self) -> StageCall | None:
        """Wait for the next call; `None` when there will be none any more."""
    def close_store(self) -> None:
        """Close the store that the stage belongs to, if it is still open."""
    def end(self) -> None:
        """End the threads that wait for calls."""

@final
class StageCall:
    """One call to a stage: `method(*arguments)` is to be called, then one of the others, once."""

    @property
    def method(self) -> str:
        """What to call."""
    def take_arguments(self) -> tuple[object, ...]:
        """Give what to call it with, once."""
    def answer(self, result: object) -> None:
        """Say what the method returned."""
    def miss(self) -> None:
        """Say that there is no such record."""
    def overflow(self) -> None:
        """Say that there is no room for the record."""
    def fail(self, reason: str) -> None:
        """Say that it failed, and how."""

def check_stage(make: Callable[[], Stage], /) -> None:
    """Run the checks that every stage has to pass over stages that `make` makes.

    `make` is called once for each check and gives a stage without records. Raises `AssertionError`
    with what went wrong.
    """

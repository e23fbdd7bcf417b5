"""The native module; import from `cascadekv` and its modules."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Literal, Protocol, Self, SupportsIndex, TypeAlias, Unpack, final, overload

from typing_extensions import Buffer, CapsuleType

from cascadekv.config import StoreConfig, StoreSettings
from cascadekv.errors import CascadeError
from cascadekv.hints import Hints
from cascadekv.results import ChangeKind, DeclineReason, GetStatus, PutStatus
from cascadekv.stages import Stage
from cascadekv.stats import Stats
from cascadekv.transfer import Tls

__all__ = [
    "BlockKey",
    "BlockKeys",
    "Changes",
    "GetResult",
    "Gpu",
    "GpuEvent",
    "GpuLoad",
    "GpuMemory",
    "GpuSave",
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
    "TransportConnection",
    "TransportEndpoint",
    "TransportTicket",
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
    "has_debug_assertions",
    "replace_trace",
    "text_key",
    "user_token",
    "weights_fingerprint",
]

__version__: str
has_debug_assertions: bool

_Key: TypeAlias = BlockKey | bytes
_Keys: TypeAlias = BlockKeys | BlockKey | Buffer | Iterable[BlockKey | bytes]
_Duration: TypeAlias = float | str | timedelta
_Size: TypeAlias = int | str

@final
class BlockKey:
    """The 32-byte name of a block: covers all tokens up to its end, in one namespace."""

    def __new__(cls, key: bytes, /) -> Self: ...
    @staticmethod
    def from_hex(text: str, /) -> BlockKey:
        """Return the key that is written as 64 hexadecimal digits."""
    def hex(self) -> str:
        """Return the key as 64 hexadecimal digits."""
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
    """The keys of consecutive blocks in one object; a sequence of `BlockKey`."""

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
    """The compatibility manifest: everything that must match before engines may share KV.

    The fields are names and values. Weights are named by a fingerprint, never by a path.
    """

    def __new__(cls, fields: Mapping[str, str], /) -> Self: ...
    @property
    def fields(self) -> dict[str, str]:
        """The fields in the order in which they are hashed."""
    def missing(self) -> list[str]:
        """Return the names of required fields that are absent."""
    def differences(self, other: Manifest, /) -> list[str]:
        """Describe the fields in which the two differ; empty if blocks may be reused."""
    def canonical_bytes(self) -> bytes:
        """Return the bytes that are hashed."""
    def __getnewargs__(self) -> tuple[dict[str, str]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Namespace:
    """A set of blocks that may be reused for each other: a manifest and a tenant's secret.

    Without a secret, all tenants of a store share their blocks.
    """

    def __new__(cls, manifest: Manifest, secret: bytes | None = None) -> Self: ...
    @property
    def root(self) -> BlockKey:
        """The key that every chain starts from. Keep it as secret as the tenant's secret."""
    @property
    def id(self) -> bytes:
        """The 16-byte name of the namespace in stored records; it does not reveal the secret."""
    @property
    def manifest(self) -> Manifest:
        """The manifest of the namespace."""
    def key_of_id(self, id: str | bytes, /) -> BlockKey:  # noqa: A002
        """Return the key for an id that the caller chose; text is encoded as UTF-8."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class PutResult:
    """The outcome of a put for one block."""

    @property
    def status(self) -> PutStatus:
        """The outcome."""
    @property
    def ok(self) -> bool:
        """Whether the store has the block now: stored, deduplicated or present."""
    @property
    def reason(self) -> DeclineReason | None:
        """Why the block was declined; `None` if it was not."""
    @property
    def error(self) -> CascadeError | None:
        """Why the put failed; `None` if it did not."""

@final
class GetResult:
    """The outcome of a get for one block."""

    @property
    def status(self) -> GetStatus:
        """The outcome."""
    @property
    def ok(self) -> bool:
        """Whether the block's bytes are in the buffer."""
    @property
    def bytes(self) -> int:
        """Number of bytes written to the start of the buffer."""
    @property
    def needed_bytes(self) -> int | None:
        """The block's length if the buffer was too short."""
    @property
    def tier(self) -> str | None:
        """The tier where the block was found."""
    @property
    def error(self) -> CascadeError | None:
        """Why the get failed; `None` if it did not."""

@final
class PrefixMatch:
    """The leading blocks of a chain that the store has."""

    @property
    def blocks(self) -> int:
        """Number of leading blocks that are available."""
    @property
    def tiers(self) -> list[str]:
        """The fastest tier of each available block."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Changes:
    """One batch of `Store.changes`: an iterable of (kind, key)."""

    @property
    def next(self) -> bytes:
        """The cursor for the next call: pass it as `since`."""
    @property
    def is_lost(self) -> bool:
        """Whether the cursor was lost: empty the set before applying these changes."""
    @property
    def is_current(self) -> bool:
        """Whether the set is exact after these changes. If not, call again at once."""
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
    """A block that is read in place in the pool.

    A read-only buffer (`memoryview(view)`, `numpy.frombuffer(view, dtype)`) and a DLPack exporter.
    The block stays in the pool until this object and every buffer made from it are released.
    """

    @property
    def tier(self) -> str:
        """The tier where the block was found."""
    @property
    def address(self) -> int:
        """The block's start address in this process."""
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

    All blocks stay in the pool until `release` is called or this object is deleted. A `View` taken
    from it keeps its own block for longer.
    """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> View | None: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[View | None]: ...
    def __iter__(self) -> Iterator[View | None]: ...
    @property
    def hits(self) -> int:
        """Number of blocks that were found."""
    def error(self, index: int, /) -> CascadeError | None:
        """Return why reading the block failed; `None` for a hit and for a plain miss."""
    def scatter(
        self,
        memory: PagedMemory,
        pages: Buffer | Iterable[int],
        *,
        first: int = 0,
        count: int | None = None,
    ) -> list[bool]:
        """Copy view i to page `pages[i]`: `count` regions from `first` on, all by default.

        Returns whether each block was copied. A page is not written if its view is a miss or if the
        block's length differs from `memory.block_bytes`. Several threads may scatter to different
        pages at the same time. A page that occurs twice in one call is a `ValueError`.
        """
    def start_scatter(
        self,
        memory: GpuMemory,
        pages: Buffer | Iterable[int],
        *,
        after: GpuEvent,
        first: int = 0,
        count: int | None = None,
    ) -> GpuLoad:
        """Start to copy view i to page `pages[i]` in the memory of a GPU, after the event `after`.

        `count` regions from `first` on are copied, all by default, so that layers can be waited for
        one by one.

        As with `scatter`, misses and blocks of another length are not copied. The views may be
        released at once: the copies hold the blocks. An exception means that nothing is in flight.
        """
    def release(self) -> None:
        """Release every block now; the sequence is empty afterwards."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Reservation:
    """Pool memory for one block, to be written in place before the put: a writable buffer.

    The memory returns to the pool unless `Store.put_reserved` stores it.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def release(self) -> None:
        """Return the memory to the pool."""

@final
class PagedMemory:
    """An engine's KV cache memory: `regions` with `pages` pages each.

    A region is a `(buffer, offset, stride, page_bytes)`: its page i is `page_bytes` bytes at
    `offset + i * stride` of a C-contiguous, writable buffer. Block i is page i of each region, one
    after the other in the given order. No two pages may overlap. The buffers stay exported, and
    therefore cannot move, while this object exists.

    The caller must synchronize access: while a call copies from a page, no other thread may write
    the page; while a call copies to a page, no other thread may read or write it.
    """

    def __new__(cls, regions: Iterable[tuple[Buffer, int, int, int]], pages: int) -> Self: ...
    @property
    def block_bytes(self) -> int:
        """Length of one block: one page of each region."""
    @property
    def pages(self) -> int:
        """Number of pages in each region."""
    @property
    def regions(self) -> int:
        """Number of regions."""

@final
class Gpu:
    """A GPU that copies between its memory and the pool of a store.

    Loads the NVIDIA driver, or the library in `CASCADE_CUDA_LIBRARY`; raises `GpuError` without
    one. The first copy starts to register the store's pool with the driver, in a thread; until that
    is over, copies go through small buffers and are slower. One pool is registered at a time.

    `ways` says how copies are made: "direct", by the driver; "measured", by the fastest of three
    ways, with a table of costs that the first copy measures; or always "staged" or "mapped", to
    measure these. All but "direct" use a kernel, which never ran on a GPU so far. If the driver
    refuses the kernel, "staged" and "mapped" raise `GpuError` with the first copy, and "measured"
    is direct.
    """

    def __new__(
        cls, device: int, *, ways: Literal["direct", "measured", "staged", "mapped"] = "direct"
    ) -> Self: ...
    def mark(self, stream: int, /, *, timed: bool = False) -> GpuEvent:
        """Return an event after all work of a stream so far.

        `stream` is the number of a stream of this GPU, such as
        `torch.cuda.current_stream().cuda_stream`; 0 is the default stream. With `timed`, the GPU
        notes when it reached the event.
        """
    def report(self) -> dict[str, str | int | float | bool | None]:
        """Return the driver's `library` and `version`, the `device`, its `uuid`, and more.

        `is_fake`: whether the device is a stand-in for tests, whose times mean nothing.
        `loss`: why all calls fail since an error of the device, or `None`.

        The pool: `registered_bytes`, `staged_bytes` (not registered), `registration_seconds`,
        `is_complete`, and `refusal`: why the driver refused to register more, or `None`.

        Counts of all objects for this GPU: `loaded_copies`, `loaded_bytes`, `saved_copies`,
        `saved_bytes`; `within_copies` and `within_bytes`, those between pages and the pool of a
        node in the memory of a GPU; `unregistered_bytes`, the loaded and saved bytes that went
        through small buffers; `submissions`, `failed_submissions`, `ended_submissions`;
        `in_flight_host_seconds`, the time on the host from each submission until it was seen to be
        over; and of all pools so far `registered_bytes_total`, `refused_bytes_total`,
        `registration_seconds_total`.
        """

@final
class GpuEvent:
    """The work of a stream up to a point, from `Gpu.mark`."""

    def is_over(self) -> bool:
        """Return whether that work is over."""
    def seconds_since(self, earlier: GpuEvent, /) -> float | None:
        """Return the seconds between an earlier event and this one, by the GPU's clock.

        Both must be over. `None` unless both are `timed` and the driver can tell.
        """

@final
class GpuMemory:
    """An engine's KV cache in the memory of a GPU: `regions` with `pages` pages each.

    A region is an `(array, offset, stride, page_bytes)` as in `PagedMemory`. The array has
    `__cuda_array_interface__`, is C-contiguous, and is kept alive by this object.

    The caller must order all other work of the GPU on these pages with the copies: by the event
    that a copy waits for, and by `hold_back` or `wait`.
    """

    def __new__(
        cls, gpu: Gpu, regions: Iterable[tuple[object, int, int, int]], pages: int
    ) -> Self: ...
    @property
    def block_bytes(self) -> int:
        """Length of one block: one page of each region."""
    @property
    def pages(self) -> int:
        """Number of pages in each region."""
    @property
    def regions(self) -> int:
        """Number of regions."""
    def start_gather(
        self,
        puts: Iterable[tuple[PreparedPut, Buffer | Iterable[int]]],
        *,
        after: GpuEvent,
    ) -> GpuSave:
        """Start to copy pages into the blocks of several puts, in one submission.

        `puts` has each put with its pages, as for `PreparedPut.start_gather`. Each put is sealed or
        released for itself. If the copies fail, all of these puts fail. `ValueError` changes
        nothing; after another exception, all of these puts are released.
        """
    def start_scatter(
        self,
        views: Iterable[tuple[Views, Buffer | Iterable[int]]],
        *,
        after: GpuEvent,
        first: int = 0,
        count: int | None = None,
    ) -> GpuLoad:
        """Start to copy several views to pages, in one submission.

        `views` has each batch of views with its pages, as for `Views.start_scatter`; a page may
        occur once in all of them. `GpuLoad.copied` has the blocks of all batches in this order.
        """

@final
class GpuSave:
    """Copies of one submission from the memory of a GPU, from `GpuMemory.start_gather`."""

    def hold_back(self, stream: int, /) -> None:
        """Make all later work of a stream wait for the copies, so that it may write the pages.

        An exception means that nothing is in flight any more.
        """
    def is_over(self) -> bool:
        """Return whether the copies are over."""

@final
class GpuLoad:
    """Blocks on their way to the memory of a GPU, from `start_scatter`."""

    @property
    def copied(self) -> list[bool]:
        """Whether each block is copied, in the order of the views."""
    @property
    def seconds(self) -> float | None:
        """For how long the GPU made the copies, by its own clock.

        `None` before they are over, without copies, and if the driver cannot tell.
        """
    def hold_back(self, stream: int, /) -> None:
        """Make all later work of a stream wait for the copies.

        An exception means that nothing is in flight any more.
        """
    def is_over(self) -> bool:
        """Return whether the copies are over."""
    def wait(self, *, timeout: _Duration | None = None) -> None:
        """Wait until the copies are over, for 30 seconds by default."""

@final
class PreparedPut:
    """Pool memory for the blocks of a put, from `Store.prepare`: gather their bytes, then seal.

    `release`, or deleting this object, returns the memory of blocks that were not sealed. A context
    manager. Calls from several threads are serialized.
    """

    @property
    def needed(self) -> list[int]:
        """Indices of the keys whose bytes the store needs."""
    def gather(
        self,
        memory: PagedMemory,
        pages: Buffer | Iterable[int],
        *,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Copy page `pages[i]` into block i, for every needed block.

        `pages` has one page for each key. `count` regions from `first` on are copied, all by
        default, so that a connector can save layer by layer.
        """
    def start_gather(
        self, memory: GpuMemory, pages: Buffer | Iterable[int], *, after: GpuEvent
    ) -> None:
        """Start to copy page `pages[i]` of a GPU's memory into block i, after the event `after`.

        `seal` waits for the copies. An exception releases the put.
        """
    def hold_back(self, stream: int, /) -> None:
        """Make all later work of a stream wait for the copies of `start_gather`.

        That work may then write the pages again. An exception releases the put; then nothing is
        in flight any more.
        """
    def seal(self, *, timeout: _Duration | None = None) -> list[PutResult]:
        """Store the blocks; returns one result for each key, needed or not.

        Waits for the copies of `start_gather`; after `DeadlineError` it may be called again.
        Raises `ValueError`, and changes nothing, if bytes of needed blocks were not gathered yet.
        """
    def release(self) -> None:
        """Return the memory of blocks that were not sealed. May be called again."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Store:
    """A block store: tiers of memory and files behind one interface.

    Settings are those of `StoreConfig`, given as keywords or as one configuration. `stages` maps
    names in the pipeline to stages in Python (`cascadekv.stages`). Calls take batches, return one
    result for each block in order, and are thread-safe. A context manager.
    """

    def __new__(
        cls,
        config: StoreConfig | None = None,
        *,
        stages: Mapping[str, Stage] | None = None,
        **settings: Unpack[StoreSettings],
    ) -> Self:
        """Open a store; raises `ConfigError` for an invalid setting."""
    @property
    def config(self) -> StoreConfig | None:
        """The settings of an embedded store; `None` for a served one."""
    @overload
    def put(
        self,
        keys: str,
        blocks: Buffer | Iterable[Buffer],
        *,
        chain: bool = True,
        is_prefix: bool = False,
        ttl: _Duration | None = None,
        timeout: _Duration | None = None,
    ) -> PutResult:
        """Store one block under a text key: an id of the caller's own, of at least one character.

        `blocks` is its bytes. A block never changes: `ConflictError` is raised if the text key is
        stored with other bytes, which stay. The error of a put that failed is raised, too.
        """
    @overload
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

        `blocks` is one buffer for each key, or one buffer that is split into equal parts. Do not
        modify the buffers until the call returns. The keys of one call are consecutive blocks of
        one chain that follows `parent`, unless `chain` is false. `is_prefix` marks a protected
        prefix, whose blocks are evicted last; `last_is_partial` says that the last block is not
        full. `ttl` and `timeout` are durations: seconds, text such as `"5s"`, or a `timedelta`.
        """
    def reserve(self, size: _Size, *, timeout: _Duration | None = None) -> Reservation:
        """Reserve pool memory for a block of `size` bytes: write it, then call `put_reserved`."""
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

        Release every array and memoryview of the reservations before the call.
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
        """Reserve pool memory for those of these blocks of `size` bytes that the store needs.

        Keywords as for `put`. A key that is already stored with the same length counts as present;
        its bytes are not compared.
        """
    @overload
    def get(
        self, keys: str, buffers: None = None, *, timeout: _Duration | None = None
    ) -> bytes | None:
        """Return a copy of the block of a text key; `None` for a miss."""
    @overload
    def get(
        self, keys: _Keys, buffers: Buffer | Iterable[Buffer], *, timeout: _Duration | None = None
    ) -> list[GetResult]:
        """Copy blocks into buffers.

        `buffers` is one writable buffer for each key, or one buffer that is split into equal parts.
        A block that does not fit is not copied; `GetResult.needed_bytes` has its length.
        """
    def view(self, keys: _Keys, *, timeout: _Duration | None = None) -> Views:
        """Return views of blocks in the pool, without a copy; `None` for a miss."""
    def lookup_prefix(
        self,
        keys: _Keys,
        *,
        partial_tail: bool = False,
        hints: Hints | None = None,
        at: _Duration | None = None,
    ) -> PrefixMatch:
        """Return how many leading blocks of a chain are available, and in which tiers.

        The eviction policy observes requests by this call: look up the whole chain, then read the
        matched blocks and put the rest. `at` is the time of the request, in seconds on a monotonic
        clock of the caller's; the default is the store's clock.
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
        """Look up a chain and return views of its leading available blocks, in one call."""
    def hint(self, keys: _Keys, *, hints: Hints, at: _Duration | None = None) -> None:
        """Pass hints about a chain to the eviction policy. Does not count as an access.

        `at` as for `lookup_prefix`.
        """
    @overload
    def contains(self, keys: str) -> bool:
        """Return whether the block of a text key is in any tier. Does not count as an access."""
    @overload
    def contains(self, keys: _Keys) -> list[bool]:
        """Return whether each block is in any tier. Does not count as an access."""
    @overload
    def locate(self, keys: str) -> list[str]:
        """Return the tiers that have the block of a text key, fastest first."""
    @overload
    def locate(self, keys: _Keys) -> list[list[str]]:
        """Return the tiers that have each block, fastest first."""
    def pin(self, keys: _Keys) -> list[bool]:
        """Keep blocks in memory until `unpin`. Pins are counted. True if the block was present."""
    def unpin(self, keys: _Keys) -> list[bool]:
        """Remove one pin from each block. True if the block was pinned."""
    @overload
    def delete(self, keys: str) -> bool:
        """Delete the block of a text key from every tier. True if it was present."""
    @overload
    def delete(self, keys: _Keys) -> list[bool]:
        """Delete blocks from every tier. True if the block was present. Views of it stay valid."""
    def prefetch(self, keys: _Keys) -> int:
        """Read blocks into memory in the background; returns how many were accepted."""
    def register(self, namespace: Namespace, *, timeout: _Duration | None = None) -> None:
        """Store a namespace's manifest with the data.

        `cascade explain` can then name the fields in which two namespaces differ.
        """
    def flush(self, *, timeout: _Duration | None = None) -> None:
        """Wait until every tier has written all earlier puts, so that they survive a restart.

        Raises `TierError` if a tier failed to write some of them since the last flush of this store
        or client.
        """
    def clear(self) -> None:
        """Delete every block from every tier."""
    def changes(self, since: bytes | None = None, *, limit: int = 65_536) -> Changes:
        """Return the blocks that were stored and removed since the cursor `since`.

        Without `since`, returns the blocks that are present now. Apply every batch to a set of
        keys (empty the set first if the batch `is_lost`): the set equals the store's blocks
        whenever a batch `is_current`. A batch has at most `limit` changes, and at most 65,536 from
        a served store.
        """
    def stats(self) -> Stats:
        """Return counters and contents of the store. Also works after `close`."""
    def close(self) -> None:
        """Write back pending blocks, stop the threads and close the files. May be called again.

        Raises `DeadlineError` if not all blocks were written in time; the store is closed anyway.
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
    gpu: Gpu | None = None,
) -> Store:
    """Connect to the node of this host; returns a `Store` with the interface of an embedded one.

    `socket` is the path of the node's Unix socket, or `unix:PATH`. The default is `CASCADE_NODE`,
    then `CASCADE_SOCKET`, then the default socket of `cascade serve` for this user. `access` is
    "write" or "read"; `token` authenticates a tenant; `name` labels this client in the node's
    status; `timeout` is the deadline of calls that set none. `gpu` maps the pool of a node whose
    blocks are in the memory of a GPU, of this one or of one that it can access; other nodes are
    refused with it.

    Raises `AwayError` if no node answers and `RefusedError` if the node refuses this client. If the
    node becomes unavailable later, calls return at once (reads as misses, puts as `failed`) and the
    client reconnects by itself.
    """

def default_socket() -> str:
    """Return the socket that clients use if none is configured."""

def chain_keys(
    parent: Namespace | _Key,
    tokens: Buffer | Iterable[int],
    block_tokens: int,
    *,
    keep_partial: bool = False,
) -> BlockKeys:
    """Return the keys of consecutive blocks of `block_tokens` tokens that follow `parent`.

    `parent` is a `Namespace`, or the key of the block before the first token. A last block that is
    not full has no key unless `keep_partial` is true.
    """

def digest(data: Buffer, algorithm: Literal["blake3", "sha256"] = "blake3") -> bytes:
    """Return the 32-byte digest of some bytes."""

def text_key(text: str, /) -> BlockKey:
    """Return the block key of a text key, for calls that take block keys only.

    It depends on the text alone. No chain has it, and no `Namespace.key_of_id` of a model.
    """

def checksum(data: Buffer, /) -> int:
    """Return the CRC-32C of some bytes, the checksum of every block outside DRAM."""

def user_token() -> bytes:
    """Return the token that processes of this user share on this host; makes it if needed.

    Raises `ConfigError` if its file cannot be made, or may be that of another user.
    """

def weights_fingerprint(*parts: Buffer) -> str:
    """Return a fingerprint of weights: of their files' bytes, or of their headers and index.

    The order of `parts` counts.
    """

def check_config(config: object, /) -> dict[str, object]:
    """Check a `StoreConfig`; returns its settings with sizes in bytes and durations in seconds.

    Raises `ConfigError` that names an invalid setting.
    """

def replace_trace(traceparent: str | None, /) -> str | None:
    """Set the trace context of this thread's calls to nodes; returns the previous one.

    `None`, and text that is not a valid `traceparent` header, removes the trace context.
    """

@final
class StageCalls:
    """The queue of calls to one stage, for the threads that carry them out."""

    def next(self) -> StageCall | None:
        """Wait for the next call; `None` once the queue has ended."""
    def close_store(self) -> None:
        """Close the stage's store if it is still open."""
    def end(self) -> None:
        """End the queue, and with it the threads that wait for calls."""

@final
class StageCall:
    """One call to a stage: call `method(*arguments)`, then report its outcome exactly once."""

    @property
    def method(self) -> str:
        """The name of the stage's method."""
    def take_arguments(self) -> tuple[object, ...]:
        """Return the arguments. May be called once."""
    def answer(self, result: object) -> None:
        """Report the method's result."""
    def miss(self) -> None:
        """Report that the record does not exist."""
    def overflow(self) -> None:
        """Report that the stage has no room for the record."""
    def fail(self, reason: str) -> None:
        """Report a failure and its reason."""

def check_stage(make: Callable[[], Stage], /) -> None:
    """Run the conformance checks of stages.

    `make` is called once for each check and returns a stage without records. Raises
    `AssertionError` that describes the first failed check.
    """

class _RdmaSettings(Protocol):
    @property
    def use(self) -> Literal["require", "prefer"]: ...
    @property
    def devices(self) -> Sequence[str]: ...
    @property
    def near_gpu(self) -> str | None: ...
    @property
    def gid_index(self) -> int | None: ...
    @property
    def queue_pairs(self) -> int: ...
    @property
    def timeout(self) -> int: ...
    @property
    def traffic_class(self) -> int: ...
    @property
    def flush(self) -> Literal["gpu", "always", "never"]: ...
    @property
    def relaxed_ordering(self) -> bool: ...

@final
class TransportEndpoint:
    """One side of connections to other processes; `cascadekv.transfer` builds on it.

    `geometry`, at most 64 KiB, is what peers learn of its regions. `accepts` is called with that of
    each peer and returns `None`, or why the peer is refused. `token`, of at least 16 bytes, must be
    known to both sides. `tls` encrypts TCP connections. Large batches are divided among `streams`,
    at most 16. `heartbeat`, an interval and a limit, disconnects peers that were connected to and
    that answer nothing within the limit.
    """

    def __new__(
        cls,
        *,
        name: str = ...,
        geometry: bytes = ...,
        accepts: Callable[[bytes], str | None] | None = None,
        token: str | bytes | None = None,
        tls: Tls | None = None,
        streams: int = 1,
        heartbeat: tuple[_Duration, _Duration] | None = None,
    ) -> Self: ...
    @property
    def id(self) -> bytes:
        """16 random bytes."""
    @property
    def peer_count(self) -> int:
        """Peers that are connected to the listeners."""
    def register(self, memory: Buffer, *, access: Literal["local", "read", "write", "both"]) -> int:
        """Register a writable buffer; return the number of its region.

        `access` is what peers may do. The buffer stays exported until the region is unregistered.
        """
    def register_address(
        self,
        address: int,
        length: int,
        *,
        access: Literal["local", "read", "write", "both"],
        owner: object,
    ) -> int:
        """Register host memory at an address, which must stay mapped while `owner` lives."""
    def register_gpu(
        self,
        address: int,
        length: int,
        *,
        device: int,
        access: Literal["local", "read", "write", "both"],
        owner: object,
    ) -> int:
        """Register memory of a GPU, which only RDMA reaches; it must live as long as `owner`.

        Needs `use_rdma`, and a driver with DMA-BUF. `device` is the GPU's index below 16.
        """
    def use_rdma(self, settings: _RdmaSettings) -> str:
        """Open an RDMA device and return its name; raises `ConfigError` if there is none.

        From then on, `connect` to a TCP port uses RDMA.
        """
    def unregister(self, region: int, *, timeout: _Duration) -> None:
        """Remove a region and wait until no batch uses it; raises `BusyError` if one does.

        No new batch can use it then, and another call waits again.
        """
    def listen(self, address: str) -> str:
        """Listen on `IP:PORT` or `unix:PATH`; return the address with its port."""
    def connect(self, address: str, *, timeout: _Duration) -> TransportConnection:
        """Connect to `HOST:PORT` or `unix:PATH`."""
    def next_notice(self, *, timeout: _Duration) -> tuple[bytes, bytes] | None:
        """Return the oldest notice: the ID of its sender, and its bytes. `None` after the time."""
    def close(self) -> None:
        """End the listeners and the connections that they accepted."""

@final
class TransportConnection:
    """A connection to one peer; any number of threads may use it."""

    @property
    def peer_id(self) -> bytes:
        """Identifies the peer's endpoint."""
    @property
    def geometry(self) -> bytes:
        """What the peer says of its regions."""
    @property
    def regions(self) -> list[tuple[int, int, str]]:
        """The peer's regions when the connection was made: number, bytes, access."""
    @property
    def transport(self) -> str:
        """How the bytes move: `tcp`, `unix`, `shm` or `rdma`."""
    @property
    def no_rdma(self) -> str | None:
        """Why bytes move by TCP although RDMA is preferred; `None` if it is not so."""
    @property
    def tls(self) -> Literal["kernel", "userspace"] | None:
        """What encrypts the connection; `None` without TLS."""
    @property
    def is_open(self) -> bool:
        """Whether batches can be posted."""
    def write(
        self,
        runs: Sequence[tuple[int, int, int, int, int, int, int]],
        local_and_remote_blocks: tuple[Sequence[int], Sequence[int]],
        *,
        notice: bytes | None = None,
        timeout: _Duration,
    ) -> TransportTicket:
        """Start to write to the peer.

        Each of the `runs` is local region, offset, stride, remote region, offset, stride, bytes; it
        moves these bytes of every pair of blocks. The peer gets the `notice` after the bytes.
        """
    def read(
        self,
        runs: Sequence[tuple[int, int, int, int, int, int, int]],
        local_and_remote_blocks: tuple[Sequence[int], Sequence[int]],
        *,
        notice: bytes | None = None,
        timeout: _Duration,
    ) -> TransportTicket:
        """Start to read from the peer, with the arguments of `write`."""
    def close(self) -> None:
        """Close the connection; batches that have not ended fail."""

@final
class TransportTicket:
    """A batch that was posted."""

    def wait(self, *, timeout: _Duration) -> None:
        """Wait until the batch has ended. After `DeadlineError` it goes on."""
    def cancel(self, *, timeout: _Duration) -> None:
        """End the batch: afterwards its local memory is no longer accessed."""

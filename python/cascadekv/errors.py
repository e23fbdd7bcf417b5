"""Exceptions, one class for each way to react. A miss is a result, never an error."""


class CascadeError(Exception):
    """Base class of all exceptions of Cascade."""


class ConfigError(CascadeError, ValueError):
    """A setting is invalid; the message names it. Correct the setting."""


class PipelineError(ConfigError):
    """The pipeline has an unknown stage or an invalid order of stages."""


class PoolError(CascadeError, MemoryError):
    """The memory pool could not be created. Request less memory, or raise the limit it exceeds."""


class DeadlineError(CascadeError, TimeoutError):
    """The deadline of the call passed. Retry later, or compute."""


class BusyError(CascadeError):
    """Back-pressure: too many bytes are pending write-back. Retry later."""


class TierError(CascadeError, OSError):
    """A tier failed; the message has the cause. Compute instead."""


class ClosedError(CascadeError):
    """The store is closed."""


class ConflictError(CascadeError):
    """A text key is stored with other bytes, which stay. Delete it first, or use another key."""


class AwayError(CascadeError, ConnectionError):
    """The node is unavailable. Compute instead; a connected store reconnects by itself."""


class RefusedError(CascadeError, PermissionError):
    """The node refused this client; the message has the reason. Correct the credentials."""


class ForkError(CascadeError):
    """The object belongs to the parent of this forked process. Open another store here."""


class GpuError(CascadeError):
    """There is no GPU, or it or its driver failed. Copy through host memory, or compute."""

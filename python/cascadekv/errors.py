"""What can go wrong, by what the caller can do about it. A miss is a result, never an error."""


class CascadeError(Exception):
    """The parent of all of Cascade's exceptions."""


class ConfigError(CascadeError, ValueError):
    """A setting makes no sense; the message names it. Correct it."""


class PipelineError(ConfigError):
    """The pipeline names an unknown stage, or stages in an order that makes no sense."""


class PoolError(CascadeError, MemoryError):
    """The memory pool could not be made. Ask for less, or raise the limit that refused it."""


class DeadlineError(CascadeError, TimeoutError):
    """The call's deadline passed. Try again later, or compute."""


class BusyError(CascadeError):
    """Too much waits to be written down. Try again later."""


class TierError(CascadeError, OSError):
    """A tier failed; the message has the cause. Compute."""


class ClosedError(CascadeError):
    """The store was closed."""


class AwayError(CascadeError, ConnectionError):
    """No node answers at the socket. Compute; a connected store finds it again by itself."""


class RefusedError(CascadeError, PermissionError):
    """The node does not want this client; the message has its reason. Change what it presents."""


class ForkError(CascadeError):
    """The object belongs to the process that forked this one. Open a store of its own here."""

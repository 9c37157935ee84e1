"""The one exception tree: what any part of twostroke raises for a caller to read.

A leaf that every folder may import. `services/interceptor.py` turns each class into a gRPC status.
"""


class TwostrokeError(Exception):
    """Base of all; on its own a fault of ours (gRPC INTERNAL)."""

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        """`field`: the request's or the settings' field that is wrong. `retry_after_s`: when to come back."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(TwostrokeError):
    """A field of a request is wrong or the request can never fit (INVALID_ARGUMENT)."""


class ContextExceeded(InvalidRequest):
    """The prompt, or what is to follow it, is longer than the model or the workers take (INVALID_ARGUMENT)."""


class ModelNotFound(TwostrokeError):
    """No such model here (NOT_FOUND)."""


class WorkerNotFound(TwostrokeError):
    """No such worker is connected (NOT_FOUND)."""


class Unauthenticated(TwostrokeError):
    """No credentials, or none that hold (UNAUTHENTICATED)."""


class PermissionDenied(TwostrokeError):
    """Known credentials, but not enough for this (PERMISSION_DENIED)."""


class RunningAlready(TwostrokeError):
    """A request of that name is under way (ALREADY_EXISTS)."""


class Unsupported(TwostrokeError):
    """The protocol has it, but nobody here does it (UNIMPLEMENTED)."""


class WrongState(TwostrokeError):
    """It cannot be done as things stand (FAILED_PRECONDITION)."""


class Overloaded(TwostrokeError):
    """A queue is full (RESOURCE_EXHAUSTED)."""


class Unavailable(TwostrokeError):
    """Nobody can serve it now, or the one that did is gone (UNAVAILABLE)."""


class DeadlineExceeded(TwostrokeError):
    """The caller's deadline passed (DEADLINE_EXCEEDED)."""


class Mismatch(TwostrokeError):
    """Two processes do not fit together: model, KV format, version, incarnation (FAILED_PRECONDITION)."""


class HandoverExpired(TwostrokeError):
    """The KV did not arrive in time, or its writer is lost (FAILED_PRECONDITION)."""


class ConfigError(TwostrokeError):
    """A setting, a model's files or this machine cannot be used as asked (the command line prints it and exits 2)."""

"""The end of streams that we open."""

from typing import Any

_ENDED = "ended by its caller"
_WRITE_FAILED = "Internal error from Core"  # grpc.aio's words where the other end was gone when we wrote


def end(call: Any) -> None:
    """Ends a stream to which we write, whatever its state: nothing of it is left behind.

    grpc.aio takes a call for done as soon as a write failed, and its `cancel` does nothing from then on. But the status
    of such a call comes only after all messages before it were read, which nobody does any more: the call, a task and
    the connection would stay for ever. So its core is told.
    """
    if not call.cancel():
        core = getattr(call, "_cython_call", None)  # there is no public way
        if core is not None:
            core.cancel(_ENDED)


def write_failed(details: str) -> bool:
    """Whether a status with these details only says that the other end was gone when something was written."""
    return details == _WRITE_FAILED

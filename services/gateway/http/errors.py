"""Turns the exception tree into HTTP statuses and OpenAI's error objects: the one place where that is done for HTTP."""

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from ....errors import (
    ContextExceeded,
    DeadlineExceeded,
    HandoverExpired,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    TwostrokeError,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from .names import openai_name

CLIENT_GONE = 499  # nobody gets it: for figures
MAX_MESSAGE = 1000  # characters


class Kind(NamedTuple):
    """`type` and `code` of an OpenAI error, and its HTTP status."""

    status: int
    type: str
    code: str


FAULT = Kind(500, "server_error", "internal_error")
KINDS: tuple[tuple[type[TwostrokeError], Kind], ...] = (  # the first that fits
    (ContextExceeded, Kind(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, Kind(400, "invalid_request_error", "invalid_value")),
    (ModelNotFound, Kind(404, "invalid_request_error", "model_not_found")),
    (Unauthenticated, Kind(401, "authentication_error", "invalid_api_key")),
    (PermissionDenied, Kind(403, "permission_error", "permission_denied")),
    (WrongState, Kind(409, "conflict_error", "wrong_state")),
    (Overloaded, Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (Unavailable, Kind(503, "server_error", "service_unavailable")),
    (HandoverExpired, Kind(503, "server_error", "service_unavailable")),
    (DeadlineExceeded, Kind(504, "timeout_error", "deadline_exceeded")),
)


class HttpRefusal(InvalidRequest):
    """A request that is refused for a reason of HTTP's, or with a code of OpenAI's that says more than its class."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        field: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """`field`: as the client calls it. `headers`: of the response."""
        super().__init__(message, field=field)
        self.kind = Kind(status, "invalid_request_error", code)
        self.headers = headers


def nothing_here() -> HttpRefusal:
    """Of a path that is none of ours."""
    return HttpRefusal("there is nothing at this path", status=404, code="not_found")


class ClientGone(TwostrokeError):
    """The client closed its connection: there is nobody to tell."""


def kind_of(error: TwostrokeError) -> Kind:
    """A fault of ours for what is not in the table."""
    if isinstance(error, HttpRefusal):
        return error.kind
    return next((kind for cls, kind in KINDS if isinstance(error, cls)), FAULT)


def error_body(error: TwostrokeError, *, chat: bool = False, renamed: Mapping[str, str] | None = None) -> bytes:
    """`{"error": {...}}`. `chat`, `renamed`: see `openai_name`."""
    kind = kind_of(error)
    told = {
        "message": error.message[:MAX_MESSAGE],
        "type": kind.type,
        "param": openai_name(error.field, chat=chat, renamed=renamed or {}) if error.field is not None else None,
        "code": kind.code,
    }
    return json.dumps({"error": told}, ensure_ascii=False).encode("utf-8", "replace")


def error_headers(error: TwostrokeError) -> list[tuple[bytes, bytes]]:
    """Retry-After in whole seconds where a time is known, and in milliseconds, which OpenAI's clients prefer; what to
    show where credentials are missing."""
    headers: list[tuple[bytes, bytes]] = list(error.headers) if isinstance(error, HttpRefusal) else []
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(error.retry_after_s * 1000))))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers

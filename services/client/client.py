"""The client behind `twostroke generate`, `chat` and `bench`: answers of a gateway, with their timings."""

import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import grpc.aio

from ...errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    TwostrokeError,
    Unauthenticated,
    Unavailable,
)
from ...v1 import inference_pb2 as pb
from ...v1 import inference_pb2_grpc
from ..grpc_setup import connection_fault
from .access import OPEN, Access

CONNECT_S = 5.0
_PASSED = "Deadline Exceeded"  # gRPC's own words
_NOBODY = "failed to connect to all addresses"  # gRPC's own words
_ERRORS: dict[grpc.StatusCode, type[TwostrokeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


@dataclass(slots=True)
class Measured:
    """What the client saw, in seconds by its own clock; 0: it did not happen."""

    started: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    gap01_s: float = 0.0  # from token 0 to token 1 of the answer that began first
    last_token_s: float = 0.0
    tokens: int = 0  # of all answers
    _first: int | None = None  # the answer that began first, and its tokens
    _tokens_of_first: int = 0

    def note(self, count: int, answer: int = 0) -> None:
        """`count` tokens of an answer came now."""
        now = time.monotonic() - self.started
        if count and not self.tokens:
            self.first_token_s = now
            self._first = answer
        if answer == self._first:
            if self._tokens_of_first < 2 <= self._tokens_of_first + count:
                self.gap01_s = now - self.first_token_s
            self._tokens_of_first += count
        if count:
            self.last_token_s = now
        self.tokens += count

    @property
    def tokens_per_s(self) -> float:
        """Of all tokens after the first."""
        span = self.last_token_s - self.first_token_s
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0


class Client:
    """A gateway at host:port. Use as an async context manager."""

    def __init__(self, address: str, *, channels: int = 1, access: Access = OPEN) -> None:
        """`channels`: connections, which take calls in turn. `access`: how it is secured."""
        self._address = address
        self._metadata = access.metadata
        self._channels = [access.channel(address) for _ in range(channels)]
        self._stubs = itertools.cycle([inference_pb2_grpc.InferenceStub(channel) for channel in self._channels])

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls."""
        for channel in self._channels:
            await channel.close()

    async def model(self, name: str = "") -> pb.GetModelResponse:
        """Describes the served model. Raises Unavailable, with the remedy, where no gateway answers."""
        try:
            return await next(self._stubs).GetModel(
                pb.GetModelRequest(model=name), timeout=CONNECT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._readable(error, connecting=True) from error

    def start(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """A call under way: the caller reads it, and cancels what it does not read to the end."""
        return next(self._stubs).Generate(request, timeout=timeout_s, metadata=self._metadata)

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None, measured: Measured
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer's pieces as they come; leaving the iteration cancels the call. Fills `measured`."""
        call = self.start(request, timeout_s)
        try:
            async for piece in call:
                if piece.HasField("error"):  # the status says it too
                    continue
                measured.note(len(piece.token_ids), piece.sample)
                yield piece
        except grpc.aio.AioRpcError as error:
            raise self._readable(error, connecting=False) from error
        finally:
            call.cancel()

    def _readable(self, error: grpc.aio.AioRpcError, *, connecting: bool) -> TwostrokeError:
        code, details = error.code(), error.details() or "no details"
        silent = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if (connecting and silent) or details.startswith(_NOBODY):
            return Unavailable(
                f"no gateway answers at {self._address}: start one with `twostroke up`, or name another with --address"
                f" ({connection_fault(details)})"
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and _PASSED in details:  # said by gRPC, not by a gateway
            details = "the deadline passed before the answer was complete"
        return _ERRORS.get(code, TwostrokeError)(f"{details} ({code.name})")

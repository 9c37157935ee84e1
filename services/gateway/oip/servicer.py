"""The door of the Open Inference Protocol: its calls, and nothing that is not theirs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from .... import __version__
from ....errors import ModelNotFound, TwostrokeError, Unsupported
from ....oip import grpc_service_pb2 as pb
from ....oip import grpc_service_pb2_grpc
from ...security.tenant import Tenant, serve_as
from ..generation import Input, Piece, TextInput, TokenInput
from ..http.logprobs import TokenNames
from ..inference import REQUEST_ID_KEY, TRACEPARENT_KEY, metadata, time_left, writer
from ..lifecycle import Lifecycle
from .infer_stream import InferStream, Write
from .reply import Reply
from .request import VERSION, InferRequest, check_version, read_request
from .tensors import INPUTS, OUTPUTS

PLATFORM = "twostroke"
HEAD_BYTES = 4096  # of a response, around its tensors

Authenticate: TypeAlias = Callable[[Iterable[tuple[str | bytes, str | bytes]]], Tenant]
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Tensors: TypeAlias = list[pb.ModelMetadataResponse.TensorMetadata]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and seconds; each as the setting of its name."""

    max_answer_bytes: int
    slow_reader_s: float
    keep_alive_s: float
    stream_idle_s: float


class OpenInferenceServicer(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Thin: it converts. Needs an `ErrorInterceptor` on its server."""

    def __init__(
        self, lifecycle: Lifecycle, limits: Limits, *, serving: Callable[[], bool], authenticate: Authenticate
    ) -> None:
        """`serving`: whether requests are taken and could be served. `authenticate`: asked for each request of a
        stream, which may outlive a key; Unauthenticated, PermissionDenied."""
        self._lifecycle = lifecycle
        self._model = lifecycle.model
        self._limits = limits
        self._serving = serving
        self._authenticate = authenticate
        self._names = TokenNames(lifecycle.model, as_ids=False)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: N802
        """It is."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802 - gRPC's name
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        """As health tells it."""
        return pb.ServerReadyResponse(ready=self._serving())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: N802
        """False for what is not served here."""
        try:
            self._check(request.name, request.version)
        except ModelNotFound:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._serving())

    async def ServerMetadata(  # noqa: N802 - gRPC's name
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        """Who we are."""
        return pb.ServerMetadataResponse(name="twostroke", version=__version__, extensions=["parameters"])

    async def ModelMetadata(  # noqa: N802 - gRPC's name
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        """The tensors. ModelNotFound."""
        self._check(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=self._model.name,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=_tensors(INPUTS.items(), 1),
            outputs=_tensors(OUTPUTS.items(), -1),
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        """All of the answer at once."""
        asked = read_request(request)
        if asked.stream:
            raise Unsupported("ModelInfer gives one response: send stream to ModelStreamInfer", field="stream")
        context.set_trailing_metadata(((REQUEST_ID_KEY, asked.request_id),))
        responses: list[pb.ModelInferResponse] = []

        async def send(reply: Reply) -> None:
            if reply.ended:
                responses.append(reply.response())

        await self._generate(asked, context, send, note=_ignore)
        return responses[0]

    async def ModelStreamInfer(  # type: ignore[override]  # noqa: N802 - a coroutine that writes; stubs want a generator
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Runs in the call's task, which gRPC cancels when the client cancels or is gone."""

        async def run(request: pb.ModelInferRequest, write: Write, note: Callable[[Reply], None]) -> None:
            serve_as(self._authenticate(context.invocation_metadata() or ()))
            asked = read_request(request)

            async def send(reply: Reply) -> None:
                if asked.stream or reply.ended:
                    await write(reply.response(final=reply.ended and not asked.empty_final))
                if reply.ended and asked.empty_final:
                    await write(reply.end())

            await self._generate(asked, context, send, note if asked.stream else _ignore)

        limits = self._limits
        stream = InferStream(
            run,
            writer(context),
            slow_reader_s=limits.slow_reader_s,
            keep_alive_s=limits.keep_alive_s,
            idle_s=limits.stream_idle_s,
        )
        await stream.serve(requests)

    async def _generate(
        self,
        asked: InferRequest,
        context: Context,
        send: Callable[[Reply], Awaitable[None]],
        note: Callable[[Reply], None],
    ) -> None:
        """`send` is told of a reply that has taken something, `note` of one that begins. Errors name fields as the
        client does."""
        try:
            self._model.check_name(asked.model)
            source: Input = TextInput(asked.text)
            prompt_tokens = 0
            if asked.counted:
                whole = await self._lifecycle.tokenize(asked.model, source)
                source = TokenInput(asked.truncated(whole, self._model.max_input))
                prompt_tokens = len(source.ids)
            reply = Reply(
                asked,
                self._model.name,
                self._names,
                prompt_tokens=prompt_tokens,
                most_bytes=self._limits.max_answer_bytes - HEAD_BYTES,
            )

            async def take(piece: Piece) -> None:
                reply.take(piece)
                await send(reply)

            note(reply)
            left, trace = time_left(context.time_remaining()), metadata(context, TRACEPARENT_KEY)
            await self._lifecycle.generate(asked.generation(source, left, trace), take)
        except TwostrokeError as error:
            if error.field is not None:
                error.field = asked.client_name(error.field)
            raise

    def _check(self, name: str, version: str) -> None:
        """ModelNotFound."""
        check_version(version, "version")
        try:
            self._model.check_name(name)
        except ModelNotFound as error:
            raise ModelNotFound(error.message, field="name") from None


def _ignore(_: Reply) -> None:
    """Of replies that are given whole."""


def _tensors(kinds: Iterable[tuple[str, str]], size: int) -> Tensors:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=[size]) for name, datatype in kinds
    ]

"""The native gRPC door: public messages into plain requests, plain answers into public messages."""

import asyncio
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from itertools import count, islice
from typing import Any, TypeAlias, TypeVar

import grpc.aio

from ...engine.check_controls import MAX_LISTED
from ...engine.request import Constraint, ConstraintKind, PromptLogprobs
from ...errors import InvalidRequest, TwostrokeError
from ...v1 import inference_pb2 as pb
from ...v1 import inference_pb2_grpc
from ..durations import microseconds
from ..interceptor import ABORT_S, MAX_DETAILS, code_of, reason_of, unexpected
from .generation import (
    ChatInput,
    Finish,
    GenerationRequest,
    Input,
    Piece,
    Sampling,
    Stopping,
    TextInput,
    Timings,
    TokenInput,
    Turn,
)
from .guard import SlowReader
from .keep_alive import KeepAlive
from .lifecycle import Lifecycle
from .router import Role
from .validation import MAX_STOP_STRINGS, MAX_STOP_TOKENS, check_messages

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
METADATA_S = 1.0  # most time for the initial metadata to leave

M = TypeVar("M")
GenerateContext: TypeAlias = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
TokenizeContext: TypeAlias = grpc.aio.ServicerContext[pb.TokenizeRequest, Awaitable[pb.TokenizeResponse]]
ModelContext: TypeAlias = grpc.aio.ServicerContext[pb.GetModelRequest, Awaitable[pb.GetModelResponse]]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Thin: it converts. Needs an `ErrorInterceptor` on its server."""

    def __init__(self, lifecycle: Lifecycle, keep_alive_s: float = 0) -> None:
        """`keep_alive_s`: a stream that is silent for so long gets a message without tokens; 0: none."""
        self._lifecycle = lifecycle
        self._keep_alive_s = keep_alive_s

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes, where stubs want a generator
        self, request: pb.GenerateRequest, context: GenerateContext
    ) -> None:
        """Runs in the call's task, which gRPC cancels when the client cancels or is gone."""
        request_id = request.request_id or secrets.token_hex(8)
        begun = False
        places = Places()

        async def begin(message: pb.GenerateResponse) -> None:
            await uninterrupted(context.send_initial_metadata(()))
            await context.write(message)

        def write(message: pb.GenerateResponse) -> Awaitable[None]:
            nonlocal begun
            if begun:
                return context.write(message)
            begun = True  # not before there is something to say: a refusal without it can be tried again
            return begin(message)

        def send(piece: Piece) -> Awaitable[None]:
            if piece.finish is not None:
                context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
            places.note(piece)
            return stream.write(write_piece(piece))

        plain = read_request(
            request, request_id, time_left(context.time_remaining()), metadata(context, TRACEPARENT_KEY)
        )
        try:
            async with KeepAlive(write, places.sign, self._keep_alive_s) as stream:
                await self._lifecycle.generate(plain, send)
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            if context.cancelled() or context.done():
                raise
            told = error if isinstance(error, TwostrokeError) else unexpected(error, "Generate")
            if begun and not isinstance(told, SlowReader):
                await last_word(context, write_error(told, places))
            raise told from error

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: pb.TokenizeRequest, context: TokenizeContext
    ) -> pb.TokenizeResponse:
        """The ids that Generate would run, and their texts."""
        ids = await self._lifecycle.tokenize(request.model, read_input(request.input))
        return pb.TokenizeResponse(token_ids=ids, tokens=await self._lifecycle.model.token_texts(ids))

    async def GetModel(  # noqa: N802 - gRPC's name
        self, request: pb.GetModelRequest, context: ModelContext
    ) -> pb.GetModelResponse:
        """The model, its limits, and how many workers are ready."""
        model, fleet = self._lifecycle.model, self._lifecycle.fleet
        model.check_name(request.model)
        return pb.GetModelResponse(
            model=model.name,
            context_length=model.context_length,
            max_input_tokens=model.max_input,
            max_output_tokens=model.max_output,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=model.eos_token_ids,
            special_token_ids=model.special_token_ids,
            has_chat_template=model.tokenizer.has_chat_template,
            prefill_workers=fleet.count(Role.PREFILL, Role.BOTH),
            decode_workers=fleet.count(Role.DECODE, Role.BOTH),
        )


class Places:
    """Where each answer of a call is, for messages that say nothing."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._ended: set[int] = set()

    def note(self, piece: Piece) -> None:
        """It is about to be sent."""
        self._next[piece.sample] = piece.first_index + len(piece.token_ids)
        if piece.finish is not None:
            self._ended.add(piece.sample)

    def sign(self) -> pb.GenerateResponse:
        """A message without tokens, of the first answer that goes on."""
        sample = next(number for number in count() if number not in self._ended)
        return pb.GenerateResponse(sample=sample, first_index=self._next.get(sample, 0))


async def last_word(context: GenerateContext, message: pb.GenerateResponse) -> None:
    """To a client that still reads: the status comes in any case."""
    with suppress(Exception):
        async with asyncio.timeout(ABORT_S):
            await context.write(message)


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` and lets a cancel through only after its end.

    gRPC notes that the initial metadata left only once it has: an abort in between would send it twice, and fail.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_seen)
        await asyncio.wait([task], timeout=METADATA_S)
        raise


def writer(context: grpc.aio.ServicerContext[Any, M]) -> Callable[[M], Awaitable[None]]:
    """Writes a call's messages. Its metadata leave with the first one: a refusal before that can be tried again."""
    begun = False

    async def write(message: M) -> None:
        nonlocal begun
        if not begun:
            begun = True
            await uninterrupted(context.send_initial_metadata(()))
        await context.write(message)

    return write


def _seen(task: "asyncio.Task[None]") -> None:
    """The cancel is what counts, however late the work ends, and how."""
    if not task.cancelled():
        task.exception()


def metadata(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str:
    """A text value of the call's metadata, or empty."""
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""


def time_left(remaining: float | None) -> float | None:
    """gRPC's word for no deadline is None or an infinite time."""
    return None if remaining is None or not math.isfinite(remaining) else remaining


def read_request(
    request: pb.GenerateRequest, request_id: str, timeout_s: float | None, traceparent: str
) -> GenerationRequest:
    """Absent fields take their defaults; what is wrong is said later."""
    return GenerationRequest(
        input=read_input(request.input),
        model=request.model,
        sampling=read_sampling(request.sampling),
        stopping=read_stopping(request.stopping),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        n=request.n or 1,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        request_id=request_id,
        timeout_s=timeout_s,
        traceparent=traceparent,
        priority=request.priority,
    )


def read_input(source: pb.Input) -> Input | None:
    """None where nothing is set. InvalidRequest for a chat of too many turns; nothing else is checked here."""
    match source.WhichOneof("kind"):
        case "text":
            return TextInput(source.text)
        case "token_ids":
            return TokenInput(source.token_ids.ids)
        case "chat":
            check_messages(len(source.chat.messages))
            return ChatInput(tuple(Turn(message.role, message.content) for message in source.chat.messages))
        case _:
            return None


def read_sampling(sampling: pb.Sampling) -> Sampling:
    """Absent fields take their defaults. Of lists that are too long only so much is read that it can be told."""
    default = Sampling()
    return Sampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else default.temperature,
        top_k=sampling.top_k if sampling.HasField("top_k") else default.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else default.top_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else default.min_p,
        typical_p=sampling.typical_p if sampling.HasField("typical_p") else default.typical_p,
        repetition_penalty=(
            sampling.repetition_penalty if sampling.HasField("repetition_penalty") else default.repetition_penalty
        ),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(islice(sampling.logit_bias.items(), MAX_LISTED + 1)),
        allowed_token_ids=tuple(islice(sampling.allowed_token_ids, MAX_LISTED + 1)),
        banned_token_ids=tuple(islice(sampling.banned_token_ids, MAX_LISTED + 1)),
        bad_words=tuple(islice(sampling.bad_words, MAX_LISTED + 1)),
        constraint=read_constraint(sampling.constraint) if sampling.HasField("constraint") else None,
    )


def read_constraint(constraint: pb.Constraint) -> Constraint:
    """InvalidRequest where none is set."""
    match constraint.WhichOneof("kind"):
        case "json_object" if constraint.json_object:
            return Constraint(ConstraintKind.JSON_OBJECT)
        case "json_schema":
            return Constraint(ConstraintKind.JSON_SCHEMA, constraint.json_schema)
        case "regex":
            return Constraint(ConstraintKind.REGEX, constraint.regex)
        case "choice":
            return Constraint(ConstraintKind.CHOICE, json.dumps(list(constraint.choice.texts), ensure_ascii=False))
        case "grammar":
            return Constraint(ConstraintKind.GRAMMAR, constraint.grammar)
        case _:
            raise InvalidRequest(
                "a constraint takes json_object (true), json_schema, regex, choice or grammar",
                field="sampling.constraint",
            )


def read_stopping(stopping: pb.Stopping) -> Stopping:
    """Absent `max_tokens` stays absent."""
    return Stopping(
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        strings=tuple(islice(stopping.strings, MAX_STOP_STRINGS + 1)),
        token_ids=tuple(islice(stopping.token_ids, MAX_STOP_TOKENS + 1)),
        ignore_eos=stopping.ignore_eos,
        min_tokens=stopping.min_tokens,
        include_stop=stopping.include_stop,
    )


def write_piece(piece: Piece) -> pb.GenerateResponse:
    """A piece of the answer."""
    message = pb.GenerateResponse(first_index=piece.first_index, token_ids=piece.token_ids, text=piece.text)
    if piece.sample:
        message.sample = piece.sample
    if piece.logprobs:
        message.logprobs.extend([write_logprob(entries) for entries in piece.logprobs])
    if piece.prompt_logprobs is not None:
        message.prompt_logprobs.extend(write_prompt_logprobs(piece.prompt_logprobs))
    if piece.finish is not None:
        message.finish.CopyFrom(write_finish(piece.finish))
    return message


def write_error(error: TwostrokeError, places: Places) -> pb.GenerateResponse:
    """The call's status, in-band: not everybody sees statuses of calls that have begun."""
    message = places.sign()
    message.error.CopyFrom(
        pb.StreamError(code=code_of(error).value[0], message=error.message[:MAX_DETAILS], reason=reason_of(error))
    )
    return message


def write_prompt_logprobs(told: PromptLogprobs) -> list[pb.TokenLogprob]:
    """One entry a token of the prompt."""
    entries = zip(told.ids, told.values, strict=True)
    return [write_logprob(tuple(islice(entries, count))) for count in told.counts]


def write_logprob(entries: tuple[tuple[int, float], ...]) -> pb.TokenLogprob:
    """The chosen token's entry, with the top ones inside."""
    chosen, *top = entries or ((0, math.nan),)
    return pb.TokenLogprob(
        token_id=chosen[0],
        logprob=chosen[1],
        top=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in top],
    )


def write_finish(finish: Finish) -> pb.Finish:
    """The end of the answer."""
    return pb.Finish(
        reason=pb.FinishReason.ValueType(finish.reason),
        stop_string=finish.stop_string,
        usage=pb.Usage(
            prompt_tokens=finish.prompt_tokens, cached_tokens=finish.cached_tokens, output_tokens=finish.output_tokens
        ),
        timings=write_timings(finish.timings),
        seed=finish.seed,
        prefill_worker=finish.prefill_worker,
        decode_worker=finish.decode_worker,
        replays=finish.replays,
        route=finish.route,
    )


def write_timings(timings: Timings) -> pb.Timings:
    """Seconds as microseconds."""
    return pb.Timings(
        queue_us=microseconds(timings.queue),
        prefill_us=microseconds(timings.prefill),
        transfer_us=microseconds(timings.transfer),
        first_token_us=microseconds(timings.first_token),
        decode_us=microseconds(timings.decode),
        total_us=microseconds(timings.total),
        gap01_us=microseconds(timings.gap01),
    )
